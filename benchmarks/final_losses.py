"""Final evaluation losses of the built-in run in several arms (command-line words by name), for several seeds."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from offload.extras.tools.benches.report import BenchmarkOutput, Result

_TRAIN = ("-m", "offload.train")


def compare_arms(description: str | None, arms: Mapping[str, Sequence[str]], train: Sequence[str] = _TRAIN) -> None:
    """Train every arm with every seed, and print the results. Differences are against the first arm.

    train: arguments for Python, in front of the words of an arm.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=400, help="of each run (default %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, help="folder that keeps the runs; finished ones are not repeated")
    arguments = parser.parse_args()
    results, first, apart = [], next(iter(arms)), {arm: [] for arm in arms}
    for seed in arguments.seeds:
        exact = 0.0
        for arm, words in arms.items():
            folder = arguments.runs and arguments.runs / f"{arm}, seed {seed}, {arguments.steps} steps"
            loss = last_line(words, seed, arguments.steps, train=train, folder=folder)["eval_loss"]
            exact = loss if arm == first else exact
            apart[arm].append(loss - exact)
            details = {"seed": seed, "steps": arguments.steps}
            details |= {} if arm == first else {"difference": round(apart[arm][-1], 5)}
            results.append(Result(f"final eval loss, {arm}", round(loss, 5), "nats", details=details))
            print(results[-1], file=sys.stderr, flush=True)
    del apart[first]
    for arm, differences in apart.items():
        results.append(Result(f"{arm} - {first}, largest", round(max(differences, key=abs), 5), "nats"))
        results.append(Result(f"{arm} - {first}, mean", round(statistics.mean(differences), 5), "nats"))
    print(BenchmarkOutput(results).document())


def last_line(
    words: Sequence[str], seed: int, steps: int, *, train: Sequence[str] = _TRAIN, folder: Path | None = None
) -> dict[str, Any]:
    """Return the last metrics line with an evaluation loss. A finished run in `folder` is read again."""
    with ExitStack() as stack:
        place = folder or Path(stack.enter_context(TemporaryDirectory()))
        done = place / "done"
        if not done.exists():
            command = [sys.executable, *train, *words, "--run.seed", str(seed), "--train.steps", str(steps)]
            subprocess.run([*command, "--run.dir", str(place)], check=True, stdout=subprocess.DEVNULL)
            done.touch()
        lines = map(json.loads, (place / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if line.get("eval_loss") is not None][-1]
