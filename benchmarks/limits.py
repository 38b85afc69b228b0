"""Upper limits of this machine: matrix products, memory, and the GPU link.

Each limit is the best of several short measurements, because other load only lowers a rate.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.alone import main_of
from offload.app.config.command_line import run_command
from offload.extras.tools.benches.report import Result
from offload.native import kernels

SUMMARY = "what matrix products, memory and links of this machine reach at most"
HOST_BYTES = 1 << 28
"""Memory to read and write, too large for caches."""


def add_arguments(_parser: argparse.ArgumentParser) -> None:
    """Declare no options: a limit belongs to the whole machine."""


def run(_arguments: argparse.Namespace) -> list[Result]:
    """Measure, and return one result for each limit."""
    import torch

    from offload.accelerators import device_of, own_accelerator
    from offload.extras.plan.probe import flops_per_second, host_bytes_per_second, link_bytes_per_second

    threads = kernels.num_threads()
    torch.set_num_threads(threads)
    accelerator = own_accelerator()
    device, details = device_of(accelerator), {"threads": threads}
    results = [
        Result(product_name(name), flops_per_second(device, dtype) / 1e12, "TFLOP/s", details=dict(details))
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    ]
    results.append(Result("memory, read and written", host_bytes_per_second(HOST_BYTES) / 1e9, "GB/s", details=details))
    if accelerator is not None:
        rates = {name: link_bytes_per_second(accelerator, name) for name in ("h2d", "d2h")}
        results += [Result(f"link, {name}", rate / 1e9, "GB/s") for name, rate in rates.items()]
    return results


def product_name(precision: str) -> str:
    """Return the name of the product limit for a precision."""
    return f"matrix product, {precision}"


if __name__ == "__main__":
    run_command(main_of(sys.modules[__name__]))
