"""The built-in run, its states on the host, with weights that travel exactly, and in int8: the loss of evaluation that
each ends with, and the bytes that go up in its last step.

python benchmarks/link_weights.py --seeds 0 1 2 > benchmarks/results/link_weights.json     # two minutes a run, six

A difference is that to the exact run of the same seed, whose weights and batches begin alike.
"""

from __future__ import annotations

import argparse
import statistics
from concurrent.futures import ThreadPoolExecutor
from itertools import product

from benchmarks.states import last_line
from offload.benches.report import Measured, Result

LINKS = ("exact", "int8")
ON_HOST = ["--offload.parameters", "cpu", "--offload.optimizer", "cpu", "--offload.prefetch", "0"]


def main() -> None:
    """Train, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="of each run (default %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--precision", default="fp32", help="train.precision (default %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default %(default)s)")
    arguments = parser.parse_args()
    words = [*ON_HOST, "--train.precision", arguments.precision]
    runs = list(product(arguments.seeds, LINKS))
    with ThreadPoolExecutor(arguments.jobs) as pool:
        lines = pool.map(
            lambda run: last_line([*words, "--offload.link_weights", run[1]], run[0], arguments.steps), runs
        )
        found = dict(zip(runs, lines, strict=True))
    results = [
        Result(
            f"final eval loss, {link}",
            round(line["eval_loss"], 5),
            "nats",
            details={"seed": seed, "steps": arguments.steps, "h2d_bytes": line["h2d_bytes"]},
        )
        for (seed, link), line in found.items()
    ]
    apart = [found[seed, "int8"]["eval_loss"] - found[seed, "exact"]["eval_loss"] for seed in arguments.seeds]
    results.append(Result("int8 - exact, largest", round(max(apart, key=abs), 5), "nats"))
    results.append(Result("int8 - exact, mean", round(statistics.mean(apart), 5), "nats"))
    print(Measured(results).document())


if __name__ == "__main__":
    main()
