"""The built-in run with states on the host, with exact and with quantized transfers: the final evaluation loss, and the
bytes copied to the device in the last step.

python benchmarks/links.py link_weights > benchmarks/results/link_weights.json         # two minutes a run, six
python benchmarks/links.py link_gradients --seeds 0 > benchmarks/results/link_gradients.json     # two replicas; three

Differences are against the exact run with the same seed, and thus equal initial weights and batches.
"""

from __future__ import annotations

import argparse
import statistics
from concurrent.futures import ThreadPoolExecutor
from itertools import product

from benchmarks.final_losses import last_line
from offload.extras.tools.benches.report import BenchmarkOutput, Result

LINKS = {"link_weights": ("exact", "int8"), "link_gradients": ("exact", "int8", "int4")}
ON_HOST = ["--offload.parameters", "cpu", "--offload.optimizer", "cpu", "--offload.prefetch", "0"]
REPLICAS = ["--gpus", "2", "--offload.replicas", "2"]


def main() -> None:
    """Train, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("setting", choices=LINKS, help="of the offload section")
    parser.add_argument("--steps", type=int, default=400, help="of each run (default %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--precision", default="fp32", help="train.precision (default %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default %(default)s)")
    arguments = parser.parse_args()
    words, links = [*ON_HOST, "--train.precision", arguments.precision], LINKS[arguments.setting]
    words += [*(REPLICAS if arguments.setting == "link_gradients" else ()), f"--offload.{arguments.setting}"]
    runs = list(product(arguments.seeds, links))
    with ThreadPoolExecutor(arguments.jobs) as pool:
        lines = pool.map(lambda run: last_line([*words, run[1]], run[0], arguments.steps), runs)
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
    for link in links[1:]:
        apart = [found[seed, link]["eval_loss"] - found[seed, "exact"]["eval_loss"] for seed in arguments.seeds]
        results.append(Result(f"{link} - exact, largest", round(max(apart, key=abs), 5), "nats"))
        results.append(Result(f"{link} - exact, mean", round(statistics.mean(apart), 5), "nats"))
    print(BenchmarkOutput(results).document())


if __name__ == "__main__":
    main()
