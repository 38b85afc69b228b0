"""The last evaluation loss of the built-in run, with settings that change rounding or formats, for several seeds.

python -m benchmarks.final_losses states --out benchmarks/results/states.json     # twelve runs of two minutes

Each experiment has arms with settings of their own. Runs with the same seed have equal initial weights and batches, so
a difference to the first arm comes from the settings. In `states` the last arm has an eps larger by a millionth: the
distance between runs that differ by rounding alone.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import harness
from benchmarks.picture import draw
from offload.app.config.command_line import say
from offload.extras.tools.benches.report import Result
from tests.run_folder import lines_of

SUMMARY = "the last evaluation loss of the built-in run, by number format"
QUICK = {"steps": 2, "seeds": [0]}
WINDOW = 20
"""Steps in a point of the picture."""


@dataclass(frozen=True)
class Experiment:
    """Settings by arm, the reference first, and the command that trains."""

    arms: Mapping[str, Sequence[str]]
    train: Sequence[str] = ("-m", "offload.train")


def link(setting: str, codecs: Sequence[str], *words: str) -> Experiment:
    """Return the experiment for a quantized link, with states on the host."""
    on_host = ["--offload.parameters", "cpu", "--offload.optimizer", "cpu", "--offload.prefetch", "0"]
    fp32 = ["--train.precision", "fp32"]
    return Experiment({codec: [*on_host, *fp32, *words, f"--offload.{setting}", codec] for codec in codecs})


FP8_LEAST_SIZE = 128
FP8_TRAIN = (
    "import sys; from offload.app.config.presets import PRESETS; from offload.extras.quant import products; "
    "from offload.train import main; PRESETS['tiny']['intermediate_size'] = 352; "
    f"products.LEAST_SIZE = {FP8_LEAST_SIZE}; sys.exit(main(sys.argv[1:]))"
)
"""MLPs of 352 instead of 344, a multiple of 16, and a smaller least size put all linear layers of blocks into FP8."""
WIDE_SHAPE = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 2}
WIDE_TRAIN = (
    "import sys, torch; from offload.app.config.presets import PRESETS; from offload.train import main; "
    f"PRESETS['tiny'].update({WIDE_SHAPE}); from benchmarks.final_losses import products_in_fp32; "
    "kept = products_in_fp32(); sys.exit(main(sys.argv[1:]))"
)
"""Two layers whose products have the least size of FP8, over the vocabulary and the heads of `tiny`."""
WIDE_WORDS = [
    *("--train.batch_size", "2", "--data.sequence_length", "32", "--optimizer.lr", "1e-3"),
    *("--train.recompute", "never", "--train.eval_every", "0", "--train.eval_batches", "64"),
]
MATMULS = {"bf16": "precision", "fp8_rowwise": "fp8_rowwise", "fp8_tensorwise": "fp8_tensorwise"}
IN_BF16 = {arm: ["--train.precision", "bf16", "--train.matmul", matmul] for arm, matmul in MATMULS.items()}
EXPERIMENTS = {
    "states": Experiment(
        {
            "fp32": [],
            "bf16": ["--optimizer.states", "bf16"],
            "int8": ["--optimizer.states", "int8"],
            "fp32, eps larger by a millionth": ["--optimizer.eps", "1.000001e-8"],
        }
    ),
    "fp8": Experiment(IN_BF16, ("-c", FP8_TRAIN)),
    "fp8_wide": Experiment({arm: [*words, *WIDE_WORDS] for arm, words in IN_BF16.items()}, ("-c", WIDE_TRAIN)),
    "link_weights": link("link_weights", ("exact", "int8")),
    "link_gradients": link("link_gradients", ("exact", "int8", "int4"), "--gpus", "2", "--offload.replicas", "2"),
}


def products_in_fp32() -> Any:
    """Multiply bf16 matrices on the CPU in fp32, rounded once, while the returned library is referenced.

    Without bf16 in hardware torch's own product takes up to seventy times as long.
    """
    import torch

    def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        zero = torch.zeros((), device="cpu")
        return torch.addmm(zero, left.float(), right.float(), beta=0).to(left.dtype)

    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", multiply, "CPU")
    return library


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--steps", type=int, default=400, help="of each run (default %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default %(default)s)")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the losses of training here")
    parser.add_argument("--runs", type=Path, help="folder that keeps the runs; finished ones are not repeated")


def run(arguments: argparse.Namespace) -> list[Result]:
    """Train every arm with every seed; return the losses, and the differences to the first arm."""
    arms = list(EXPERIMENTS[arguments.experiment].arms)
    runs = list(itertools.product(arguments.seeds, arms))
    with ThreadPoolExecutor(arguments.jobs) as pool:
        lines = dict(zip(runs, pool.map(lambda each: trained(arguments, *each), runs), strict=True))
    found = {each: last_evaluation(of_run) for each, of_run in lines.items()}
    if arguments.picture is not None:
        curves = {arm: curve([lines[seed, arm] for seed in arguments.seeds]) for arm in arms}
        lowest = math.floor(min(loss for points in curves.values() for _, loss in points))
        title = f"Training loss, mean of {len(arguments.seeds)} seeds and {WINDOW} steps"
        draw(arguments.picture, title, curves, "step", "nats", lowest)
    results = []
    for (seed, arm), line in found.items():
        details = {"seed": seed, "steps": arguments.steps, "h2d_bytes": line["h2d_bytes"]}
        name = f"final eval loss, {arm}, seed {seed}"
        results.append(Result(name, round(line["eval_loss"], 5), "nats", details=details))
    first, *others = arms
    for arm in others:
        apart = [found[seed, arm]["eval_loss"] - found[seed, first]["eval_loss"] for seed in arguments.seeds]
        results.append(Result(f"{arm} - {first}, largest", round(max(apart, key=abs), 5), "nats"))
        results.append(Result(f"{arm} - {first}, mean", round(statistics.mean(apart), 5), "nats"))
    return results


def curve(runs: Sequence[Sequence[Mapping[str, Any]]]) -> list[tuple[float, float]]:
    """Return points (step, loss): the mean over runs and `WINDOW` steps, from metrics lines with equal steps."""
    by_step = list(zip(*runs, strict=True))
    windows = [by_step[begin : begin + WINDOW] for begin in range(0, len(by_step), WINDOW)]
    return [
        (lines[-1][0]["step"], statistics.mean(line["loss"] for of_step in lines for line in of_step))
        for lines in windows
    ]


def last_evaluation(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the last metrics line with an evaluation loss."""
    return [line for line in lines if line.get("eval_loss") is not None][-1]


def trained(arguments: argparse.Namespace, seed: int, arm: str) -> list[dict[str, Any]]:
    """Return the metrics lines of a run. A finished run in the folder of runs is read again."""
    experiment = EXPERIMENTS[arguments.experiment]
    with ExitStack() as stack:
        if arguments.runs is None:
            place = Path(stack.enter_context(TemporaryDirectory()))
        else:
            place = arguments.runs / f"{arm}, seed {seed}, {arguments.steps} steps"
        done = place / "done"
        if not done.exists():
            command = [sys.executable, *experiment.train, *experiment.arms[arm]]
            command += ["--run.seed", str(seed), "--train.steps", str(arguments.steps), "--run.dir", str(place)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            done.touch()
        lines = lines_of(place)
    say(f"{arm}, seed {seed}: {last_evaluation(lines)['eval_loss']:.5f}")
    return lines


if __name__ == "__main__":
    harness.begin(sys.modules[__name__])
