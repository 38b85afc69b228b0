"""Models of 3 to 120 G parameters, trained on a machine with few cores and no GPU, beside the plans of the runs.

make real-size PART="3b 8b" FOLDER=/data     # all parts without PART; hours

Each run is a process of `python -m offload.train`. The weights are random; nothing is downloaded. A part adds its runs
to benchmarks/results/real_size.json, where the last two of each kind stay.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks import harness
from benchmarks.real_size_folders import write_mxfp4, write_nf4
from offload.app.config.command_line import say
from offload.app.config.presets import PRESETS
from offload.errors import ConfigError, format_bytes
from tests.run_folder import lines_of

SUMMARY = "models of 3 to 120 G parameters on few cores, beside the plans of the runs"
RESULT = harness.RESULTS / "real_size.json"
RUNS_KEPT = 2
SILENCE_S = 10.0
"""The longest time without output that counts as none."""
OPENING, STEPS = "opening", "step "
PHASES = (
    "reading the weights",
    "making room for the weights",
    "recording the model",
    "comparing the engine",
    "running the first pass",
    STEPS,
    "saving the states",
    "exporting",
)
"""Phases of a run, by the begin of the first line of each."""
LANES = {"h2d": "h2d_bytes", "d2h": "d2h_bytes", "nvme_read": "nvme_read_bytes", "nvme_write": "nvme_write_bytes"}
"""Counters of a step in metrics.jsonl, by lane."""
ON_DISK = {
    "offload.parameters": "nvme",
    "offload.optimizer": "nvme",
    "offload.gradients": "nvme",
}
COMMON = {
    "train.batch_size": 1,
    "train.precision": "bf16",
    "checkpoint.every": "none",
    "checkpoint.export": "false",
    "data.eval_share": 0,
}


# -- one run -------------------------------------------------------------------------------------------------


@dataclass
class Watch:
    """Samples a process with output and files, twice a second."""

    process: subprocess.Popen[str]
    nvme: Path
    kill_at: str = ""
    """Kill the process when a line of output contains this text. Empty: never."""
    lines: list[tuple[float, str]] = field(default_factory=list)
    private_bytes: dict[str, int] = field(default_factory=dict)
    """Most private memory, pages that no file has, by phase of the run."""
    phase: str = OPENING
    """The current phase."""
    program_bytes: int = 0
    """Private memory before the first weight, as the first phase begins: PyTorch, the program, data and plan."""
    disk_bytes: int = 0
    """Most bytes on disk for states."""

    def run(self) -> float:
        """Wait for the end, and return the seconds."""
        begin = time.monotonic()
        sampler = threading.Thread(target=self._sample, daemon=True)
        sampler.start()
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic() - begin, line.rstrip()))
            self.phase = next((text for text in PHASES if line.startswith(text)), self.phase)
            if self.phase != OPENING and not self.program_bytes:
                with contextlib.suppress(OSError):  # it has ended
                    self.program_bytes = self._private_bytes()
            say(f"  {self.lines[-1][0]:7.1f} s  {self.lines[-1][1]}")
            if self.kill_at and self.kill_at in line:
                self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        sampler.join()
        return time.monotonic() - begin

    def _private_bytes(self) -> int:
        """Return the private memory of the process now. Raises OSError after the end."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"RssAnon:\s+(\d+) kB[\s\S]*RssShmem:\s+(\d+) kB", status)
        return 1024 * (int(found[1]) + int(found[2])) if found else 0

    def _sample(self) -> None:
        while self.process.poll() is None:
            with contextlib.suppress(OSError):  # it has ended
                self.private_bytes[self.phase] = max(self.private_bytes.get(self.phase, 0), self._private_bytes())
                if self.phase != OPENING:  # the rates of the disk are measured with a file too
                    self.disk_bytes = max(self.disk_bytes, sum(map(size_of, self._state_files())))
            time.sleep(0.5)

    def _state_files(self) -> list[Path]:
        """Return open state files. They have no names, so a crash leaves nothing on disk."""
        found = []
        for link in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(link.readlink()).startswith(str(self.nvme)):
                    found.append(link)
        return found

    def second_of(self, text: str, *, last: bool = False) -> float:
        """Return when the first (or last) line with a text came; NaN: there is none."""
        times = [second for second, line in self.lines if text in line]
        return times[-1 if last else 0] if times else float("nan")

    @property
    def phases(self) -> dict[str, float]:
        """Seconds in each phase before the first step ends, from one first line to the next."""
        begins: dict[str, float] = {}
        for second, line in self.lines:
            for text in PHASES[: PHASES.index(STEPS) + 1]:
                if line.startswith(text):
                    begins.setdefault(text.strip(), second)
        pairs = itertools.pairwise(begins.items())
        return {text: round(after - second, 1) for (text, second), (_, after) in pairs}

    @property
    def longest_silence(self) -> tuple[float, str]:
        """The longest time without a line, and the line before."""
        pairs = zip(self.lines, self.lines[1:], strict=False)
        return max(((after[0] - before[0], before[1]) for before, after in pairs), default=(0.0, ""))


def size_of(path: Path) -> int:
    """Return the file size, all reserved on disk; 0 if the file has gone."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def train(folder: Path, name: str, settings: Mapping[str, Any], *, kill_at: str = "") -> dict[str, Any]:
    """Train in an own process. Return measured figures beside planned figures."""
    run, nvme = folder / name, folder / "nvme"
    nvme.mkdir(parents=True, exist_ok=True)
    words = {**COMMON, "data.source": folder / "text.txt", "offload.nvme_dir": nvme, "run.dir": run} | dict(settings)
    command = [sys.executable, "-m", "offload.train"]
    for key, value in words.items():
        command += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
    say(f"{name}: {' '.join(command[1:])}")
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    watch = Watch(subprocess.Popen(command, env=environment, **output), nvme, kill_at)  # type: ignore[call-overload]
    seconds = watch.run()
    if watch.process.returncode and not kill_at:
        raise SystemExit(f"{name} ended with {watch.process.returncode}: {watch.lines[-1][1]}")
    return {"command": " ".join(command[1:]), **figures(run, watch, seconds)}


def figures(run: Path, watch: Watch, seconds: float) -> dict[str, Any]:
    """Return measured figures, with planned figures under `plan`."""
    steps = lines_of(run)
    plan = json.loads((run / "plan.json").read_text())
    silence, before = watch.longest_silence
    ends = [second for second, line in watch.lines if re.match(r"step \d+/", line)]
    return {
        "steps": len(steps),
        "losses": [step["loss"] for step in steps],
        "seconds": {
            "whole": round(seconds, 1),
            "opening": round(watch.second_of("recording the model"), 1),
            "first step": round(ends[0] - watch.second_of("recording the model"), 1) if ends else None,
            "steady step": round(statistics.median([step["step_seconds"] for step in steps[1:]] or [0]), 2),
            "longest silence": round(silence, 1),
            "phases": watch.phases,
        },
        "longest silence after": before if silence > SILENCE_S else "",
        "program bytes": watch.program_bytes,
        "private bytes": {phase.strip(): num_bytes for phase, num_bytes in watch.private_bytes.items()},
        "device bytes": max(step["peak_device_bytes"] for step in steps),
        "host bytes": max(step["peak_host_bytes"] for step in steps),
        "disk bytes": watch.disk_bytes,
        "reload": next((line for _, line in watch.lines if line.startswith("reloaded: ")), ""),
        "lane bytes": {lane: steps[-1][counter] for lane, counter in LANES.items()},
        "experts fetched": steps[-1].get("experts_fetched", 0),
        "plan": {
            "device bytes": plan["tiers"]["device"]["bytes"],
            "host bytes": plan["tiers"].get("cpu", {}).get("bytes", 0),
            "disk bytes": plan["tiers"].get("nvme", {}).get("bytes", 0),
            "operation bytes": plan["operations_bytes"],
            "loading bytes": plan["loading_bytes"],
            "lent bytes": plan["lent_bytes"],
            "copy bytes": plan["copy_bytes"],
            "steady step": plan["step_seconds"],
            "lane bytes": plan.get("lane_bytes"),
        },
    }


# -- parts ---------------------------------------------------------------------------------------------------


def whole_life(preset: str, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Full training on disk: with fp32 moments; with two budgets of the device; killed, resumed and exported.

    A checkpoint beside states with fp32 moments would need 24 bytes a parameter on disk, so the moments are int8 there.
    """
    full = {**ON_DISK, "model.preset": preset, "data.sequence_length": 256, "offload.host_memory": "6GiB"}
    fp32 = train(folder, "fp32", {**full, "offload.device_memory": "4GiB", "train.steps": 6})
    yield f"{preset}, fp32 moments, device 4GiB", fp32
    full |= {"optimizer.states": "int8", "train.steps": 4}
    full |= {"checkpoint.every": 2, "checkpoint.keep": 1, "checkpoint.export": "true"}
    whole: dict[str, Any] = {}
    for budget in ("4GiB", "2GiB"):
        name = f"whole-{budget}"
        whole = train(folder, name, {**full, "offload.device_memory": budget})
        whole["export"] = digest(folder / name / "hf")
        shutil.rmtree(folder / name)
        yield f"{preset}, int8 moments, device {budget}", whole
    killed = {**full, "offload.device_memory": "2GiB"}
    train(folder, "killed", killed, kill_at="step 2  saved")
    resumed = train(folder, "killed", killed)
    resumed["export"] = digest(folder / "killed" / "hf")
    resumed["equal to the run that was never killed"] = resumed["export"] == whole["export"]
    yield f"{preset}, killed after a checkpoint and resumed", resumed


def steps_of_8b(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Full training of Llama 3.1 8B with int8 moments."""
    settings = {**ON_DISK, "model.preset": "8b", "optimizer.states": "int8", "data.sequence_length": 256}
    settings |= {"offload.device_memory": "4GiB", "offload.host_memory": "2GiB", "train.steps": 2}
    yield "8b, int8 moments", train(folder, "8b", settings)


def adapter_over(
    write: Callable[[Path, Mapping[str, Any]], None], preset: str, words: Mapping[str, Any], folder: Path
) -> Iterator[tuple[str, dict[str, Any]]]:
    """An adapter over a base in quantized files, which `write` makes first, with a device of 4 GiB."""
    base = folder / preset
    write(base, PRESETS[preset])
    settings = {**words, "lora.rank": 8, "model.path": base, "offload.parameters": "files", "train.steps": 2}
    settings |= {"data.sequence_length": 512, "offload.device_memory": "4GiB"}
    yield f"{preset}, adapter over files", train(folder, "adapter", settings)


EXPERTS = {"offload.experts": "streamed", "lora.target_parameters": "mlp.experts.gate_up_proj"}
LAYERS = {"lora.target_modules": "all-linear"}
ATTENTION = {"offload.experts": "streamed", "lora.target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
GIB = 1 << 30


class Part(NamedTuple):
    """A part of the benchmark."""

    disk_bytes: int
    memory_bytes: int
    runs: Callable[[Path], Iterator[tuple[str, dict[str, Any]]]]
    """Makes the runs in a folder: titles and figures."""


PARTS = {
    "3b": Part(60 * GIB, 10 * GIB, partial(whole_life, "3b")),
    "8b": Part(64 * GIB, 10 * GIB, steps_of_8b),
    "14b": Part(10 * GIB, 8 * GIB, partial(adapter_over, write_nf4, "qwen3-14b", LAYERS)),
    "20b": Part(15 * GIB, 8 * GIB, partial(adapter_over, write_mxfp4, "gpt-oss-20b", EXPERTS)),
    "30b": Part(18 * GIB, 8 * GIB, partial(adapter_over, write_nf4, "qwen3-30b-a3b", EXPERTS)),
    "120b": Part(65 * GIB, 8 * GIB, partial(adapter_over, write_mxfp4, "gpt-oss-120b", ATTENTION)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/real-size"), help="for bases, states and runs")


def run(arguments: argparse.Namespace) -> harness.Page:
    """Run the parts. Each run goes to the result file at once."""
    if unknown := set(arguments.parts) - set(PARTS):
        raise ConfigError(f"no part {', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}")
    runs = {}
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "text.txt")
    for name in arguments.parts or PARTS:
        part = PARTS[name]
        check_room(name, folder, part)
        for title, found in part.runs(folder):
            add(title, found)
            runs[title] = found
        for left in folder.iterdir():
            if left.name not in ("text.txt", "cache"):
                shutil.rmtree(left)
    return harness.Page(json.dumps(runs, indent=1), {"runs": runs})


def check_room(name: str, folder: Path, part: Part) -> None:
    """Raise SystemExit if a part has too little room."""
    rooms = (
        (f"in {folder} (set FOLDER=...)", part.disk_bytes, shutil.disk_usage(folder).free),
        ("of memory", part.memory_bytes, psutil.virtual_memory().available),
    )
    for place, needed, free in rooms:
        if free < needed:
            raise SystemExit(f"part {name} needs {format_bytes(needed)} {place}, and {format_bytes(free)} are free")


def add(title: str, found: dict[str, Any]) -> None:
    """Add a run to the result file: the last two of each title stay."""
    results = json.loads(RESULT.read_text()) if RESULT.exists() else {"runs": {}}
    results |= harness.head('make real-size PART="..."')
    results["runs"][title] = [*results["runs"].get(title, []), found][-RUNS_KEPT:]
    harness.write(RESULT, results)


def digest(folder: Path) -> str:
    """Return a hash over exported weights."""
    whole = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while part := file.read(16 << 20):
                whole.update(part)
    return whole.hexdigest()


def write_text(path: Path) -> None:
    """Write the text to train on: the documents of this project."""
    pages = sorted((Path(__file__).parent.parent / "docs").rglob("*.md"))
    path.write_text("\n".join(page.read_text(encoding="utf-8") for page in pages), encoding="utf-8")


if __name__ == "__main__":
    harness.begin(sys.modules[__name__])
