"""Measure training steps over token count (batch and sequence), placement and ZeRO stage on one machine.

Each point is a short run of `python -m offload.train` in separate processes, with the model, data and settings given
after `--`, so a failed point does not affect the others. The first steps do not count, because spare memory is
distributed during them.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.picture import draw, make_folder
from offload.app.config.command_line import say
from offload.errors import ConfigError, DiskError, DoesNotFitError
from offload.extras.tools.benches.report import BenchmarkOutput, Result, spread
from tests.run_folder import lines_of

SUMMARY = "training steps over tokens a step, placement and ZeRO stage, with a picture"
QUICK = {"batch": [2], "sequence": [16], "steps": 1, "rounds": 1}
NUM_WARM_STEPS = 4  # after the third step an engine distributes spare device memory
TIERS = ("device", "cpu", "nvme", "auto")
MISFIT = "does not fit"
RESIDENT = "device"
"""Reference placement for ratios."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--batch", type=int, nargs="+", default=[4, 8, 16], help="rows a step (default: 4 8 16)")
    parser.add_argument("--sequence", type=int, nargs="+", default=[256], help="tokens a row (default: 256)")
    parser.add_argument(
        "--placement",
        nargs="+",
        default=["device", "cpu"],
        help=f"{', '.join(TIERS)}, or two of them as PARAMETERS+OPTIMIZER (default: device cpu)",
    )
    parser.add_argument("--stage", type=int, nargs="+", choices=range(4), default=[3], help="ZeRO stages (default: 3)")
    parser.add_argument("--gpus", type=int, default=1, help="ranks (default: 1)")
    parser.add_argument("--steps", type=int, default=8, help="measured in a run, after four (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each point, in turns (default: %(default)s)")
    parser.add_argument("--picture", metavar="FILE.svg", help="draw tokens a second here, and in FILE-dark.svg")
    parser.add_argument("settings", nargs="*", metavar="-- SETTINGS", help="any of train: -- --model.preset small ...")


@dataclass(frozen=True)
class Point:
    """Configuration for one run."""

    batch: int
    """Batch rows per step, over all ranks."""
    sequence: int
    """Tokens per row."""
    placement: str
    """A tier in `TIERS`, or two as PARAMETERS+OPTIMIZER."""
    stage: int
    """ZeRO stage."""
    ranks: int
    """Number of ranks."""

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch * self.sequence

    @property
    def line(self) -> str:
        """Name shared by all points on one line."""
        return self.placement + (f", stage {self.stage}, {self.ranks} ranks" if self.ranks > 1 else "")

    @property
    def name(self) -> str:
        """Name in results."""
        return f"{self.line}: {self.batch} x {self.sequence}"

    def words(self) -> Iterator[str]:
        """Yield the `train` options for this point."""
        parameters, _, optimizer = self.placement.partition("+")
        yield from ("--train.batch_size", str(self.batch), "--data.sequence_length", str(self.sequence))
        yield from ("--offload.parameters", parameters, "--offload.optimizer", optimizer or parameters)
        yield from ("--gpus", str(self.ranks))
        if self.ranks > 1:
            yield from ("--offload.zero_stage", str(self.stage))


Steps = list[dict[str, Any]]
"""metrics.jsonl lines of counted steps."""
Train = Callable[[Point, Sequence[str], int], Steps]
"""Trains a point with further settings for a number of counted steps. Raises OffloadError."""


def run(arguments: argparse.Namespace) -> BenchmarkOutput:
    """Measure all points. Ratios compare with the resident placement ("device") at the same token count."""
    return sweep(points(arguments), arguments, train_in_child)


def points(arguments: argparse.Namespace) -> list[Point]:
    """Return the requested points. Raises ConfigError."""
    for key in ("steps", "rounds", "gpus"):
        if getattr(arguments, key) < 1:
            raise ConfigError(f"--{key} is {getattr(arguments, key)}; it must be at least 1.")
    for key in ("batch", "sequence"):
        if min(getattr(arguments, key)) < 1:
            raise ConfigError(f"--{key} is {min(getattr(arguments, key))}; it must be at least 1.")
    for name in arguments.placement:
        if not 1 <= len(name.split("+")) <= 2 or not set(name.split("+")) <= set(TIERS):
            raise ConfigError(f"--placement is {name!r}; it must be one of {', '.join(TIERS)}, or two joined by a +.")
    stages = arguments.stage if arguments.gpus > 1 else arguments.stage[:1]  # with one rank all stages are the same
    shapes = sorted(itertools.product(arguments.batch, arguments.sequence), key=lambda shape: shape[0] * shape[1])
    lines = itertools.product(arguments.placement, stages)
    return list(dict.fromkeys(Point(*shape, *line, arguments.gpus) for line in lines for shape in shapes))


def sweep(points: Sequence[Point], arguments: argparse.Namespace, train: Train) -> BenchmarkOutput:
    """Measure points with `train`, taking turns, and draw a picture."""
    if arguments.picture:
        make_folder(Path(arguments.picture))
    runs: dict[Point, list[Steps]] = {point: [] for point in points}
    left_out: dict[Point, str] = {}
    for _, point in harness.turns(points, arguments.rounds):
        if point in left_out:
            continue
        try:
            steps = train(point, arguments.settings, arguments.steps)
        except (DoesNotFitError, ConfigError) as error:
            left_out[point] = f"{MISFIT}: {error}" if isinstance(error, DoesNotFitError) else str(error)
            say(f"{point.name} is left out: {left_out[point]}")
        else:
            runs[point].append(steps)
            say(f"{point.name}: {_rate(point, steps):,.0f} tokens/s")
    if len(left_out) == len(points):
        error_class = DoesNotFitError if all(why.startswith(MISFIT) for why in left_out.values()) else ConfigError
        raise error_class(f"no point could be measured; the first one: {left_out[points[0]]}")
    measured = {point: output for point, output in runs.items() if point not in left_out}
    results = [_result(point, measured) for point in measured]
    output = BenchmarkOutput(results, [(point.name, why) for point, why in left_out.items()])
    if arguments.picture:
        lines: dict[str, list[tuple[float, float]]] = {}
        for point, result in zip(measured, results, strict=True):
            lines.setdefault(point.line, []).append((point.tokens, result.value))
        title = "Tokens a second over tokens a step"
        try:
            output.files.extend(draw(Path(arguments.picture), title, lines, "tokens a step", "tokens a second"))
        except DiskError as error:  # keep the measurements
            output.left_out.append(("the picture", str(error)))
    return output


def train_in_child(point: Point, settings: Sequence[str], num_steps: int) -> Steps:
    """Train in a separate process and return the metrics."""
    with tempfile.TemporaryDirectory(prefix="offload-sweep-") as folder:
        command = [
            *(sys.executable, "-m", "offload.train", *settings, *point.words()),
            *("--train.steps", str(NUM_WARM_STEPS + num_steps), "--train.max_seconds", "none"),
            *("--run.dir", f"{folder}/run", "--data.eval_share", "0"),
            *("--checkpoint.export", "false", "--checkpoint.every", "none", "--checkpoint.resume", "never"),
        ]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode:
            messages = [line for line in process.stderr.splitlines() if line.startswith("offload: ")]
            text = (messages or [_ended(process.returncode)])[-1].removeprefix("offload: ")
            raise (DoesNotFitError if process.returncode == DoesNotFitError.exit_code else ConfigError)(text)
        return lines_of(Path(folder) / "run")[NUM_WARM_STEPS:]


def _ended(code: int) -> str:
    """Return how a silent process ended."""
    if code == -signal.SIGKILL:
        more = "as the kernel does where memory runs out; give --offload.host_memory after --, or fewer rows"
        return f"ended by signal {-code}, {more}"
    return f"ended by signal {-code}" if code < 0 else f"exit code {code}"


def _rate(point: Point, steps: Steps) -> float:
    """Return tokens per second at the median step time."""
    return point.tokens / statistics.median(step["step_seconds"] for step in steps)


def _result(point: Point, runs: Mapping[Point, list[Steps]]) -> Result:
    steps = list(itertools.chain(*runs[point]))
    seconds, rates = [step["step_seconds"] for step in steps], [_rate(point, each) for each in runs[point]]
    exposed = {
        name: statistics.median(step["lanes"].get(name, {}).get("exposed_seconds", 0.0) for step in steps)
        for name in sorted({name for step in steps for name in step["lanes"]} - {"compute"})
    }
    worst = max(exposed, key=lambda name: exposed[name], default=None)
    details = {
        **asdict(point),
        "tokens_per_step": point.tokens,
        "step_seconds": statistics.median(seconds),
        "spread": round(spread(seconds), 4),
        "best": point.tokens / min(seconds),
        "waits_for": worst if worst is not None and exposed[worst] > 0 else None,
        "exposed_seconds": exposed,
        "peak_device_bytes": max(step["peak_device_bytes"] for step in steps),
        "peak_host_bytes": max(step["peak_host_bytes"] for step in steps),
    }
    resident, reference = replace(point, placement=RESIDENT), None
    if point != resident and resident in runs:
        reference = resident.name, [_rate(resident, each) for each in runs[resident]]
    return harness.summary(point.name, rates, "tokens/s", reference, **details)


if __name__ == "__main__":
    harness.begin(sys.modules[__name__])
