"""Runs the test suite of another project with and without engines, and reports differences: see README.md."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tests.upstream import stand_ins
from tests.zoo.families import shrink

HERE = Path(__file__).parent
SUITES = {  # files with training
    "transformers": "tests/trainer/test_trainer*.py",
    "trl": "tests/test_*_trainer.py",
    "peft": "tests/test_*.py",
    "accelerate": "tests/test_*.py",
    "": "**/test_*.py",
}
CLASSES = ("equal", "trains nothing", "refused", "different", "fails over the engine", "fails plain too", "no time")
NEAR = 1e-3
"""Allowed differences in weights (relative to the largest change by training) and logged numbers.

torch's AdamW and the engine kernel differ by up to this much. Tests with larger differences must be bit-equal to the
twin.
"""
REASONS = {
    "GPU only": r"cuda|gpu|accelerator|xpu|bitsandbytes|multi.?device|flash|fp16|bf16|deepspeed|tpu",
    "slow": r"test is slow",
    "missing package": r"No module named|FixtureLookup|requires? |not installed|ImportError|not available",
    "hub access": r"offline|LocalEntry|ConnectionError|couldn't connect|Can't load|not the path to a directory|hub|"
    r"does not appear to have|is not a (valid|local)|cached|cannot find",
    "too long": r"TimeoutError",
    "skipped by the suite": r"^Skipped",
}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a test in one mode."""

    is_passed: bool
    said: str = ""
    refused: str = ""
    file: str = ""


@dataclass(frozen=True)
class Verdict:
    """The class of a test, and the reason."""

    test: str
    kind: str
    why: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.upstream", description=__doc__)
    parser.add_argument("folder", type=Path, help="a checkout of the project, or its tests folder")
    parser.add_argument("--suite", choices=list(SUITES)[:-1], default="", help="default: every test file")
    parser.add_argument("--files", default="", help="regular expression for the files' names")
    parser.add_argument("--only", default="", help="as pytest's -k")
    parser.add_argument("--file-seconds", type=float, default=600, help="time for one file in one mode")
    parser.add_argument("--test-seconds", type=int, default=60, help="time for one test")
    parser.add_argument("--json", type=Path, help="where all verdicts go")
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder = folder.parent if folder.name == "tests" else folder
    files = [f for f in sorted(folder.glob(SUITES[given.suite])) if re.search(given.files, f.name)]
    if not files:
        parser.error(f"{folder} has no file {SUITES[given.suite]} with {given.files!r} in its name")
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, why in stand_ins.fill_cache(Path(scratch) / "home", folder, shrink).items():
            print(f"no stand-in for {name}: {why}", file=sys.stderr)
        for number, file in enumerate(files):
            begin = time.monotonic()
            its = compared(Path(scratch), number, folder, file, given)
            verdicts += its
            counted = Counter(v.kind for v in its)
            shown = ", ".join(f"{counted[kind]} {kind}" for kind in CLASSES if counted[kind])
            print(f"{file.relative_to(folder)}: {shown or 'no tests'} ({time.monotonic() - begin:.0f} s)", flush=True)
    print(report(verdicts))
    if given.json:
        given.json.write_text(json.dumps([asdict(v) for v in verdicts], indent=1))
    return int(any(v.kind in ("different", "fails over the engine") for v in verdicts))


def compared(scratch: Path, number: int, folder: Path, file: Path, given: argparse.Namespace) -> list[Verdict]:
    """Run a file in all necessary modes. Return the verdicts."""

    def run(mode: str, tests: Iterable[str]) -> tuple[Path, dict[str, Outcome]]:
        out = scratch / f"{number}-{mode}"
        out.mkdir()
        return out, run_tests(mode, out, scratch / "home", folder, [str(t) for t in tests], given)

    at, plain = run("plain", [file])
    verdicts = [Verdict(t, "fails plain too", reason(o.said)) for t, o in plain.items() if not o.is_passed]
    passed = [test for test, outcome in plain.items() if outcome.is_passed]
    trains = [test for test in passed if plain[test].file]
    verdicts += [Verdict(test, "trains nothing") for test in passed if test not in trains]
    if not trains:
        return verdicts
    there, engine = run("engine", trains)
    far: dict[str, Verdict] = {}
    for test in trains:
        found = verdict(test, plain[test], engine.get(test), at, there)
        if found.kind == "different" and not found.why.startswith("it trains"):
            far[test] = found
        else:
            verdicts.append(found)
    if far:
        here, twin = run("twin", far)
        for test, found in far.items():
            its = twin.get(test)
            same = its and its.file and not difference(load(here, its.file), load(there, engine[test].file), near=0.0)
            verdicts.append(found if not same else Verdict(test, "equal", "to the bit, with the engine's AdamW kernel"))
    return verdicts


def run_tests(
    mode: str, out: Path, home: Path, folder: Path, tests: list[str], given: argparse.Namespace
) -> dict[str, Outcome]:
    """Run tests in a separate process with a time limit. Return the outcome per test."""
    environment = os.environ | {
        "UPSTREAM_MODE": mode,
        "UPSTREAM_OUT": str(out),
        "UPSTREAM_SUITE": given.suite,
        "UPSTREAM_TEST_SECONDS": str(given.test_seconds),
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent / "integrations")]),
    }
    command = [sys.executable, "-m", "pytest", "-p", "upstream_plugin", "-p", "no:cacheprovider", "-q", "--no-header"]
    command += ["-c", os.devnull, "--rootdir", str(folder), "--tb", "short", "-m", "not slow"]
    command += (["-k", given.only] if given.only and mode == "plain" else []) + tests
    with (
        (out / "log.txt").open("w") as log,
        subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        try:
            process.wait(given.file_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
    noted = out / "outcomes.jsonl"
    lines = [json.loads(line) for line in noted.read_text().splitlines()] if noted.exists() else []
    if not lines:
        print((out / "log.txt").read_text()[-3000:], file=sys.stderr)
    found: dict[str, Outcome] = {}
    for line in lines:
        old = found.get(line["test"], Outcome(is_passed=True))
        bad = "" if line["outcome"] == "passed" else f"{line['said']} ({line['place']})"
        found[line["test"]] = Outcome(
            old.is_passed and not bad, old.said or bad, old.refused or line["refused"], old.file or line["file"]
        )
    ended = {line["test"] for line in lines if line["when"] == "teardown"}  # the process can end during a test
    return {test: outcome for test, outcome in found.items() if test in ended}


def load(folder: Path, file: str) -> list[dict[str, Any]]:
    return torch.load(folder / file, weights_only=True) if file else []


def verdict(test: str, plain: Outcome, engine: Outcome | None, at: Path, there: Path) -> Verdict:
    if engine is None:
        return Verdict(test, "no time", "the process ended before")
    ours, theirs = load(there, engine.file), load(at, plain.file)
    if engine.refused and not engine.is_passed:
        return Verdict(test, "refused", engine.refused)
    why = difference(theirs, ours, NEAR)
    if not engine.is_passed:
        return Verdict(test, "fails over the engine", f"{engine.said}{'; values: ' + why if why else '; equal values'}")
    if why:
        return Verdict(test, "different", why)
    return Verdict(test, "equal" if any(each["engine"] for each in ours) else "trains nothing")


def difference(theirs: list[dict[str, Any]], ours: list[dict[str, Any]], near: float) -> str:
    """Return the first difference above `near` between two runs of a test, or an empty text."""
    if len(theirs) != len(ours):
        return f"it trains {len(ours)} times, not {len(theirs)}"
    for plain, engine in zip(theirs, ours, strict=True):
        if engine["engine"] and set(plain["weights"]) != set(engine["weights"]):
            missing = set(plain["weights"]) ^ set(engine["weights"])
            return f"{len(missing)} weights are there in one only: {', '.join(sorted(missing)[:2])}"
        for name in plain["weights"].keys() & engine["weights"].keys():
            a, b = (each["weights"][name].double() for each in (plain, engine))
            start = plain["before"].get(name)
            if a.shape != b.shape:
                return f"{name} has shape {list(b.shape)}, not {list(a.shape)}"
            moved = (a - start).abs().max().item() if start is not None and a.numel() else 0.0
            off = (a - b).abs().max().item() if a.numel() else 0.0
            if off > near * (moved + 1e-4) or (math.isnan(off) and not torch.equal(a.isnan(), b.isnan())):
                return f"{name} is off by {off:.2g}, and training moved it by {moved:.2g}"
        if len(plain["logs"]) != len(engine["logs"]):
            return f"{len(engine['logs'])} lines are logged, not {len(plain['logs'])}"
        for row, (a, b) in enumerate(zip(plain["logs"], engine["logs"], strict=True)):
            for key in (a.keys() | b.keys()) - ({"grad_norm"} if not near else set()):
                if key not in a or key not in b or not _alike(a[key], b[key], near):
                    return f"line {row} logs {key} {b.get(key)}, not {a.get(key)}"
    return ""


def _alike(a: float, b: float, near: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= near * max(abs(a), 0.01)


def reason(said: str) -> str:
    """Return the reason against a comparison: the class, and for unclear classes the error."""
    kind = next((name for name, found in REASONS.items() if re.search(found, said, re.IGNORECASE)), "other")
    return f"{kind}: {said}" if kind in ("other", "hub access") else kind


def report(verdicts: list[Verdict]) -> str:
    """Return a table with files and classes, followed by every reason with the tests."""
    files = sorted({v.test.split("::")[0] for v in verdicts})
    rows = [["file", "tests", *CLASSES]]
    for file in [*files, "all"]:
        counted = Counter(v.kind for v in verdicts if file in ("all", v.test.split("::")[0]))
        rows.append([file, str(counted.total()), *(str(counted[kind]) for kind in CLASSES)])
    lines = ["", *("| " + " | ".join(row) + " |" for row in rows)]
    lines.insert(2, "|---" * len(rows[0]) + "|")
    for kind in CLASSES[2:]:
        why: dict[str, list[str]] = {}
        for v in verdicts:
            if v.kind == kind:
                why.setdefault(re.sub(r"0x[0-9a-f]+", "0x", v.why), []).append(v.test.split("::", 1)[-1])
        lines += ["", f"{kind}:"] if why else []
        for text, tests in sorted(why.items(), key=lambda item: -len(item[1])):
            lines.append(f"- {len(tests)} x {text[:400]} [{', '.join(tests[:3])}{', ...' if len(tests) > 3 else ''}]")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
