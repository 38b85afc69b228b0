"""The last evaluation loss of the built-in run, with settings that change rounding or formats, for several seeds.

python -m benchmarks.final_losses states --out benchmarks/results/states.json     # twelve runs of two minutes

Each experiment has arms with settings of their own. Runs with the same seed have equal initial weights and batches, so
a difference to the first arm comes from the settings. In `states` the last arm has an eps larger by a millionth: the
distance between runs that differ by rounding alone.
"""

from __future__ import annotations

import argparse
import itertools
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
from offload.app.config.command_line import say
from offload.extras.tools.benches.report import Result
from tests.run_folder import lines_of

SUMMARY = "the last evaluation loss of the built-in run, by number format"
QUICK = {"steps": 2, "seeds": [0]}


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
MATMULS = {"bf16": "precision", "fp8_rowwise": "fp8_rowwise", "fp8_tensorwise": "fp8_tensorwise"}
EXPERIMENTS = {
    "states": Experiment(
        {
            "fp32": [],
            "bf16": ["--optimizer.states", "bf16"],
            "int8": ["--optimizer.states", "int8"],
            "fp32, eps larger by a millionth": ["--optimizer.eps", "1.000001e-8"],
        }
    ),
    "fp8": Experiment(
        {arm: ["--train.precision", "bf16", "--train.matmul", matmul] for arm, matmul in MATMULS.items()},
        ("-c", FP8_TRAIN),
    ),
    "link_weights": link("link_weights", ("exact", "int8")),
    "link_gradients": link("link_gradients", ("exact", "int8", "int4"), "--gpus", "2", "--offload.replicas", "2"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--steps", type=int, default=400, help="of each run (default %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default %(default)s)")
    parser.add_argument("--runs", type=Path, help="folder that keeps the runs; finished ones are not repeated")


def run(arguments: argparse.Namespace) -> list[Result]:
    """Train every arm with every seed; return the losses, and the differences to the first arm."""
    arms = list(EXPERIMENTS[arguments.experiment].arms)
    runs = list(itertools.product(arguments.seeds, arms))
    with ThreadPoolExecutor(arguments.jobs) as pool:
        lines = pool.map(lambda each: last_line(arguments, *each), runs)
        found = dict(zip(runs, lines, strict=True))
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


def last_line(arguments: argparse.Namespace, seed: int, arm: str) -> dict[str, Any]:
    """Return the last metrics line with an evaluation loss. A finished run in the folder of runs is read again."""
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
        last = [line for line in lines_of(place) if line.get("eval_loss") is not None][-1]
    say(f"{arm}, seed {seed}: {last['eval_loss']:.5f}")
    return last


if __name__ == "__main__":
    harness.begin(sys.modules[__name__])
