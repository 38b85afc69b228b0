"""The built-in run in bf16 with products in bf16 and in FP8 (emulated on a CPU): the final evaluation loss.

python -m benchmarks.fp8 > benchmarks/results/fp8.json     # nine runs of some minutes

The model is the built-in one with MLPs of 352 instead of 344, a multiple of 16, and the smallest size of FP8 layers is
lowered to 128, so all linear layers of the blocks multiply in FP8. Differences are against bf16 with the same seed, and
thus equal initial weights and batches. `benchmarks/states.py` shows the distance between runs that differ by rounding
alone.
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

from offload.extras.tools.benches.report import BenchmarkOutput, Result

LEAST_SIZE = 128
ARMS = {
    "bf16": [],
    "fp8_rowwise": ["--train.matmul", "fp8_rowwise"],
    "fp8_tensorwise": ["--train.matmul", "fp8_tensorwise"],
}
_TRAIN = (
    "import sys; from offload.app.config.presets import PRESETS; from offload.extras.quant import products; "
    "from offload.train import main; PRESETS['tiny']['intermediate_size'] = 352; "
    f"products.LEAST_SIZE = {LEAST_SIZE}; sys.exit(main(sys.argv[1:]))"
)


def main() -> None:
    """Train, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="of each run (default %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    results, apart = [], {arm: [] for arm in ARMS if arm != "bf16"}
    for seed in arguments.seeds:
        losses = {arm: final_loss(words, seed, arguments.steps) for arm, words in ARMS.items()}
        for arm, loss in losses.items():
            details = {"seed": seed, "steps": arguments.steps}
            if arm != "bf16":
                apart[arm].append(loss - losses["bf16"])
                details["difference"] = round(apart[arm][-1], 5)
            results.append(Result(f"final eval loss, {arm}", round(loss, 5), "nats", details=details))
            print(results[-1], file=sys.stderr, flush=True)
    for arm, differences in apart.items():
        results.append(Result(f"{arm} - bf16, largest", round(max(differences, key=abs), 5), "nats"))
        results.append(Result(f"{arm} - bf16, mean", round(statistics.mean(differences), 5), "nats"))
    print(BenchmarkOutput(results).document())


def final_loss(words: Sequence[str], seed: int, steps: int) -> float:
    """Return the last evaluation loss of a run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _TRAIN, "--train.precision", "bf16", *words]
        command += ["--run.seed", str(seed), "--train.steps", str(steps), "--run.dir", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        return [float(line["eval_loss"]) for line in lines if line.get("eval_loss") is not None][-1]


if __name__ == "__main__":
    main()
