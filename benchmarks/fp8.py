"""The built-in run in bf16 with products in bf16 and in FP8 (emulated on a CPU): the final evaluation loss.

python -m benchmarks.fp8 --runs build/fp8 > benchmarks/results/fp8.json     # nine runs; again: goes on

The model is the built-in one with MLPs of 352 instead of 344, a multiple of 16, and the smallest size of FP8 layers is
lowered to 128, so all linear layers of the blocks multiply in FP8. Differences are against bf16 with the same seed, and
thus equal initial weights and batches. `benchmarks/states.py` shows the distance between runs that differ by rounding
alone.
"""

from __future__ import annotations

from benchmarks.final_losses import compare_arms

LEAST_SIZE = 128
_MATMUL = {"bf16": "precision", "fp8_rowwise": "fp8_rowwise", "fp8_tensorwise": "fp8_tensorwise"}
ARMS = {arm: ["--train.precision", "bf16", "--train.matmul", matmul] for arm, matmul in _MATMUL.items()}
_TRAIN = (
    "import sys; from offload.app.config.presets import PRESETS; from offload.extras.quant import products; "
    "from offload.train import main; PRESETS['tiny']['intermediate_size'] = 352; "
    f"products.LEAST_SIZE = {LEAST_SIZE}; sys.exit(main(sys.argv[1:]))"
)

if __name__ == "__main__":
    compare_arms(__doc__, ARMS, ("-c", _TRAIN))
