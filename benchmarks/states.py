"""The built-in run with moments in fp32, bf16 and int8: the loss of evaluation that each ends with.

python benchmarks/states.py --seeds 0 1 2 > benchmarks/results/states.json     # two minutes a run, nine of them

A difference is that to the run with fp32 moments of the same seed, whose weights and batches begin alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from offload.benches.report import Result, document

STATES = ("fp32", "bf16", "int8")


def main() -> None:
    """Train, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="of each run (default %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    results, apart = [], {states: [] for states in STATES[1:]}
    for seed in arguments.seeds:
        losses = {states: final_loss(states, seed, arguments.steps) for states in STATES}
        for states, loss in losses.items():
            details = {"seed": seed, "steps": arguments.steps}
            if states != "fp32":
                apart[states].append(loss - losses["fp32"])
                details["difference"] = round(apart[states][-1], 5)
            results.append(Result(f"final eval loss, {states}", round(loss, 5), "nats", details=details))
            print(results[-1], file=sys.stderr, flush=True)
    for states, differences in apart.items():
        largest = max(differences, key=abs)
        results.append(Result(f"{states} - fp32, largest", round(largest, 5), "nats"))
        results.append(Result(f"{states} - fp32, mean", round(statistics.mean(differences), 5), "nats"))
    print(document(results))


def final_loss(states: str, seed: int, steps: int) -> float:
    """Return the last loss of evaluation of a run."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--optimizer.states", states, "--run.seed", str(seed), "--train.steps", str(steps)]
        command = [sys.executable, "-m", "offload.train", *words, "--run.dir", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = (json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines())
        return [line["eval_loss"] for line in lines if line.get("eval_loss") is not None][-1]


if __name__ == "__main__":
    main()
