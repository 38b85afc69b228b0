"""Checks that need a real GPU, in parts of at most nine minutes each; no network is needed.

python -m benchmarks.gpu_check [PART ...]      # `make gpu-check PART="tests copies"`; all of them without a name
python -m benchmarks.gpu_check lease           # `make lease`: the first half of a quarter of an hour
python -m benchmarks.gpu_check lease-steps     # `make lease-steps`: the second half
python -m benchmarks.gpu_check lease-compared  # `make lease-compared`: DeepSpeed and FSDP2 beside the engine

Each part is a separate process with a time limit, and a failed part does not end the others. Results go part by part
into benchmarks/results/gpu-NAME.json, with the device name. Without a GPU all parts run on the simulated accelerator
with tiny shapes, into build/gpu-check.json. Where the variable OUT names a folder, both go there. A dry run tests the
check itself; the figures mean nothing. The exit code is 0 if no part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from benchmarks import harness
from offload.errors import OffloadError, describe
from offload.extras.tools.benches.report import Result

FIRST = (
    "build",
    "copies",
    "updates",
    "tests",
    "sync",
    "cudnn-attention",
    "run-ahead",
    "profiled-3b",
    "8b",
    "compiled-block",
)
OWN = (*FIRST, "3b", "small", "1b", "14b", "sanitizer")
"""The most useful parts first, because a machine may be lent for only half an hour."""
UNSEEN_LIMITS_S = {
    "probe": 20,
    "cores": 8,
    "addresses": 8,
    "masked-attention": 15,
    "attention-bits": 10,
    "decoding": 15,
    "casts": 10,
    "updates": 20,
    "grouped-products": 10,
    "sinks": 12,
    "compiled-loss": 20,
    "padded-batch": 15,
    "park": 15,
    "documents": 10,
    "fp8-recipes": 12,
}
"""Checks of what no card has shown, a process each: an illegal access ends one. The likely ones come last."""
LEASE_LIMITS_S = UNSEEN_LIMITS_S | {"kernels": 60, "steady-8b-compiled": 170}
"""Parts of `make lease` and seconds of each, with their starts: one command on a lent machine."""
STEPS_LIMITS_S = {"steady-8b": 290, "steady-3b": 100, "host": 60}
"""Parts of `make lease-steps`: the next command of the same quarter of an hour."""
COMPARED_LIMITS_S = {"compared-3b": 320, "compared-8b": 380}
"""Parts of `make lease-compared`."""
GROUPS = {"lease": LEASE_LIMITS_S, "lease-steps": STEPS_LIMITS_S, "lease-compared": COMPARED_LIMITS_S}
NAMED = {"default": OWN, "unseen": UNSEEN_LIMITS_S, **GROUPS}
LIMITS_S = LEASE_LIMITS_S | STEPS_LIMITS_S | COMPARED_LIMITS_S
PARTS = tuple(dict.fromkeys((*OWN, *LIMITS_S)))
SKIPPED = 77
LIMIT_S, DRY_LIMIT_S = 530, 120
MARGIN_S = 60
"""Reserved time at the end of a part, to finish started work."""
TENTH = 0.1
MOST_SHOWN = 160
"""Characters of a note in the table; the file has the full text."""


def main(words: list[str]) -> int:
    """Run the named parts, and print the outcome of each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help="; ".join(f"{name}: {', '.join(own)}" for name, own in NAMED.items()),
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="on the simulated accelerator, also where there is a GPU"
    )
    parser.add_argument(
        "--limit", type=float, help=f"seconds of a part (default {LIMIT_S}, of a dry run {DRY_LIMIT_S})"
    )
    parser.add_argument("--out", type=Path, help="the file of the results")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # the process of one part
    arguments = parser.parse_args(words)
    parts = [part for name in arguments.parts for part in NAMED.get(name, [name])]
    for name in parts:
        if name not in PARTS:
            parser.error(f"there is no part {name}; the parts are {', '.join(PARTS)}")
    if arguments.dry_run:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    device = gpu_name()
    is_dry = arguments.dry_run or device is None
    own_out = harness.ROOT / "build" / "gpu-check.json" if is_dry else harness.RESULTS / f"gpu-{slug(device)}.json"
    out = arguments.out or Path(os.environ.get("OUT") or own_out.parent) / own_out.name
    if arguments.inside:
        return run_inside(parts[0], is_dry, arguments.limit, out)
    print(
        f"{torch_found()}: every part runs on the simulated accelerator, tiny." if is_dry else f"on {device}",
        flush=True,
    )
    outcomes = {}
    for name in parts or OWN:
        print(f"\n-- {name}", flush=True)
        limit_s = arguments.limit or (DRY_LIMIT_S if is_dry else LIMITS_S.get(name, LIMIT_S))
        words = [sys.executable, "-m", "benchmarks.gpu_check", name, "--inside", "--limit", str(limit_s)]
        words += ["--out", str(out), *(["--dry-run"] if is_dry else [])]
        outcomes[name] = run_part(name, words, limit_s, out)
    print(f"\nresults: {out}")
    for name, (outcome, seconds, note) in outcomes.items():
        print(f"{name:18} {outcome:8} {seconds:5.0f} s  {note[:MOST_SHOWN]}")
    return int(any(outcome not in ("passed", "skipped") for outcome, *_ in outcomes.values()))


def gpu_name() -> str | None:
    """Return torch's name of the GPU; None without one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def torch_found() -> str:
    """Return the sentence for a dry run."""
    import torch

    return f"torch {torch.__version__} finds no GPU" if gpu_name() is None else "a dry run was asked for"


def slug(name: str) -> str:
    """Return a file name: NVIDIA H200 is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


# -- a part from outside -------------------------------------------------------------------------------------


def run_part(name: str, words: list[str], limit_s: float, out: Path) -> tuple[str, float, str]:
    """Run a part in a separate process group; return outcome, seconds and one line."""
    begin = time.monotonic()
    process = subprocess.Popen(words, cwd=harness.ROOT, start_new_session=True)
    try:
        code: int | None = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        end_group(process)
    seconds = time.monotonic() - begin
    note = stored(out)["parts"].get(name, {}).get("note", "")
    outcome = {0: "passed", SKIPPED: "skipped", None: "too long"}.get(code, "failed")
    if outcome == "too long":
        note = f"killed after {limit_s:.0f} s; what it had measured is kept"
    elif outcome == "failed":
        note = note or f"exit code {code}"
    store(out, name, outcome=outcome, seconds=round(seconds, 1), note=note)
    return outcome, seconds, note


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the rest of a part, child processes included."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


# -- the file ------------------------------------------------------------------------------------------------


def stored(out: Path) -> dict[str, Any]:
    """Return the contents of a result file, or an empty result."""
    if out.exists():
        return json.loads(out.read_text())
    return {"machine": {}, "versions": {}, "parts": {}, "results": []}


def store(out: Path, part: str, results: list[Result] | None = None, **outcome: Any) -> None:
    """Replace the stored results of a part; other parts stay."""
    found = stored(out)
    found["parts"][part] = found["parts"].get(part, {}) | outcome
    if results is not None:
        found |= this_machine()
        others = [result for result in found["results"] if result["part"] != part]
        found["results"] = others + [result.fields() | {"part": part} for result in results]
    harness.write(out, found)


@cache
def this_machine() -> dict[str, Any]:
    """Return what the file says about the last run, with the GPU."""
    of_run = harness.head("make gpu-check")
    return of_run | {"machine": of_run["machine"] | {"gpu": gpu_name()}}


# -- a part from inside --------------------------------------------------------------------------------------


def run_inside(name: str, is_dry: bool, limit_s: float, out: Path) -> int:
    """Run a part in this process; return its exit code."""
    results: list[Result] = []

    def add(result: Result) -> None:
        results.append(result)
        print(f"{result.name}: {result.value:.4g} {result.unit}", flush=True)
        store(out, name, results)

    store(out, name, [], note="")
    try:
        from benchmarks import gpu_parts, lease, lease_compared, lease_unseen
        from benchmarks.gpu_parts import Check, SkippedPart
    except ImportError as error:
        store(out, name, note=f"{error}: bring wheels of what is missing, and give WHEELS=FOLDER")
        return 1
    try:
        check = Check(is_dry, time.monotonic() + limit_s - min(MARGIN_S, limit_s * TENTH), add)
        note, code = (gpu_parts.RUN | lease.RUN | lease_unseen.RUN | lease_compared.RUN)[name](check), 0
    except SkippedPart as skipped:
        note, code = str(skipped), SKIPPED
    except Exception as error:
        if not isinstance(error, OffloadError):
            traceback.print_exc()
        note, code = describe(error), 1
    print(note, flush=True)
    store(out, name, note=note)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
