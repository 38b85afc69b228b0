"""The built-in run with moments in fp32, bf16 and int8, and with fp32 and another rounding: the final evaluation loss.

python benchmarks/states.py --seeds 0 1 2 > benchmarks/results/states.json     # two minutes a run, twelve of them

Differences are against the fp32 run with the same seed, and thus equal initial weights and batches. The last variant
has an eps larger by a millionth. It shows the distance between runs that differ by rounding alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offload.extras.tools.benches.report import BenchmarkOutput, Result

ARMS = {
    "fp32": [],
    "bf16": ["--optimizer.states", "bf16"],
    "int8": ["--optimizer.states", "int8"],
    "fp32, eps larger by a millionth": ["--optimizer.eps", "1.000001e-8"],
}


def main() -> None:
    """Train, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="of each run (default %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    results, apart = [], {arm: [] for arm in ARMS if arm != "fp32"}
    for seed in arguments.seeds:
        losses = {arm: last_line(words, seed, arguments.steps)["eval_loss"] for arm, words in ARMS.items()}
        for arm, loss in losses.items():
            details = {"seed": seed, "steps": arguments.steps}
            if arm != "fp32":
                apart[arm].append(loss - losses["fp32"])
                details["difference"] = round(apart[arm][-1], 5)
            results.append(Result(f"final eval loss, {arm}", round(loss, 5), "nats", details=details))
            print(results[-1], file=sys.stderr, flush=True)
    for arm, differences in apart.items():
        largest = max(differences, key=abs)
        results.append(Result(f"{arm} - fp32, largest", round(largest, 5), "nats"))
        results.append(Result(f"{arm} - fp32, mean", round(statistics.mean(differences), 5), "nats"))
    print(BenchmarkOutput(results).document())


def last_line(words: Sequence[str], seed: int, steps: int) -> dict[str, Any]:
    """Return the last metrics line with an evaluation loss."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "offload.train", *words, "--run.seed", str(seed), "--train.steps", str(steps)]
        command += ["--run.dir", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = (json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if line.get("eval_loss") is not None][-1]


if __name__ == "__main__":
    main()
