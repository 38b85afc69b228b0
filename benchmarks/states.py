"""The built-in run with moments in fp32, bf16 and int8, and with fp32 and another rounding: the final evaluation loss.

python -m benchmarks.states --seeds 0 1 2 > benchmarks/results/states.json     # two minutes a run, twelve of them

Differences are against the fp32 run with the same seed, and thus equal initial weights and batches. The last variant
has an eps larger by a millionth. It shows the distance between runs that differ by rounding alone.
"""

from __future__ import annotations

from benchmarks.final_losses import compare_arms

ARMS = {
    "fp32": [],
    "bf16": ["--optimizer.states", "bf16"],
    "int8": ["--optimizer.states", "int8"],
    "fp32, eps larger by a millionth": ["--optimizer.eps", "1.000001e-8"],
}

if __name__ == "__main__":
    compare_arms(__doc__, ARMS)
