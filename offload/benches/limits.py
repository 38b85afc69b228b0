"""What this machine can do at most, against which the others are held: matrix products, memory, the link to a GPU.

Each is the best of several short measurements, since a limit is what is reached when nobody else is in the way.
"""

from __future__ import annotations

import argparse
import time

from offload.benches.report import Result
from offload.native import kernels

NUM_ELEMENTS = 1 << 24
NUM_PASSES = 7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    parser.add_argument("--threads", type=int, help="threads of torch and of the kernels (default: physical cores)")


def run(arguments: argparse.Namespace) -> list[Result]:
    """Measure, and return one result per limit."""
    import torch

    from offload.accelerators import device_of, own_accelerator
    from offload.machine.rates import flops_per_second, link_bytes_per_second

    threads = arguments.threads or kernels.num_threads()
    torch.set_num_threads(threads)
    accelerator = own_accelerator()
    device, details = device_of(accelerator), {"threads": threads}
    results = [
        Result(product_name(name), flops_per_second(device, dtype) / 1e12, "TFLOP/s", details=dict(details))
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    ]
    results.append(Result("memory, read and written", _memory_bytes_per_second(threads) / 1e9, "GB/s", details=details))
    if accelerator is not None:
        rates = {name: link_bytes_per_second(accelerator, is_up=name == "h2d") for name in ("h2d", "d2h")}
        results += [Result(f"link, {name}", rate / 1e9, "GB/s") for name, rate in rates.items()]
    return results


def product_name(precision: str) -> str:
    """Return the name of the limit of matrix products in a precision."""
    return f"matrix product, {precision}"


def _memory_bytes_per_second(threads: int) -> float:
    """Return the bytes that an update without arithmetic reads and writes in a second: three planes there and back,
    and a gradient.
    """
    import torch

    planes, gradient = [torch.ones(NUM_ELEMENTS) for _ in range(3)], torch.ones(NUM_ELEMENTS)
    num_bytes, best = NUM_ELEMENTS * (2 * 3 * 4 + 4), float("inf")
    for variant in range(kernels.NUM_ROOFLINE_VARIANTS):
        for _ in range(NUM_PASSES):
            begin = time.perf_counter()
            kernels.roofline(planes, gradient, variant=variant, threads=threads)
            best = min(best, time.perf_counter() - begin)
    return num_bytes / best
