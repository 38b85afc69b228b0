"""Measure the rates used in planning. Each measurement takes milliseconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from offload.accelerators import Accelerator, open_accelerator
from offload.native import kernels
from offload.tiers.host import Arena

_SIZES = (512, 4096)
"""Matrix sizes. A GPU needs a large one for full speed; on a CPU a large one takes seconds."""
_LINK_BYTES = 1 << 25
_LONG_S = 0.05
"""Time limit in seconds: larger products predicted to exceed the limit are skipped, and slow measurements run twice."""
_NUM_LAUNCHES = 256
"""Small enough for the launch queue of a device."""
_ROOFLINE_PLANES = 3
"""Planes written in place (weights, two moments), beside one plane only read (gradients), as in AdamW."""


def link_bytes_per_second(accelerator: Accelerator, *directions: str) -> float:
    """Return the copy rate between pinned memory and accelerator in bytes per second.

    directions: "h2d", "d2h" or both. With both, the copies run concurrently and the rates are summed.
    """
    sides = []
    for direction in directions:
        on_host = torch.empty(_LINK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        on_device = torch.empty(_LINK_BYTES, dtype=torch.uint8, device=accelerator.device)
        ends = (on_device, on_host) if direction == "h2d" else (on_host, on_device)
        sides.append((accelerator.module.Stream(accelerator.device), *ends))

    def run() -> None:
        for stream, target, source in sides:
            with accelerator.module.stream(stream):
                target.copy_(source, non_blocking=True)
        accelerator.wait()

    return len(directions) * _LINK_BYTES / _best_seconds(run)


def copy_bytes_per_second(num_copies: int, num_bytes: int) -> float:
    """Return the total rate of `num_copies` concurrent host memory copies of `num_bytes` each, in bytes per second."""
    pairs = [[torch.ones(num_bytes, dtype=torch.uint8) for _ in range(2)] for _ in range(num_copies)]
    with ThreadPoolExecutor(num_copies) as pool:
        seconds = _best_seconds(lambda: list(pool.map(lambda pair: pair[0].copy_(pair[1]), pairs)))
    return num_copies * num_bytes / seconds


def device_bytes_per_second(device: torch.device, num_bytes: int) -> float:
    """Return the device memory rate in bytes read and written per second, for an in-place operation."""
    flat = torch.zeros(num_bytes // 4, device=device)

    def run() -> None:
        flat.add_(1)
        _wait(device)

    return 2 * flat.nbytes / _best_seconds(run)


def host_bytes_per_second(num_bytes: int) -> float:
    """Return the host memory rate in bytes read and written per second, in place with all cores, as in an update.

    num_bytes: memory size, larger than the caches.
    """
    if not kernels.is_native():
        return device_bytes_per_second(torch.device("cpu"), num_bytes)
    numel = num_bytes // (4 * (_ROOFLINE_PLANES + 1))
    arena = Arena((_ROOFLINE_PLANES + 1) * 4 * numel)
    *written, read = [arena.take(numel, torch.float32).fill_(1) for _ in range(_ROOFLINE_PLANES + 1)]
    moved = sum(2 * plane.nbytes for plane in written) + read.nbytes
    variants = [partial(kernels.roofline, written, read, variant=v) for v in range(kernels.NUM_ROOFLINE_VARIANTS)]
    return moved / min(map(_best_seconds, variants))


def launch_seconds(device: torch.device) -> float:
    """Return the seconds Python takes to launch a small torch operation."""
    small = torch.zeros(8, device=device)

    def run() -> None:
        for _ in range(_NUM_LAUNCHES):
            torch.add(small, 1)

    try:
        return _best_seconds(run) / _NUM_LAUNCHES
    finally:
        _wait(device)


def flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """Return the matrix product rate in FLOP/s, from the largest size fast enough to measure."""
    rate = 0.0
    for size in _SIZES:
        num_operations = 2 * size**3
        if rate and num_operations / rate > _LONG_S:
            break
        matrix = torch.ones(size, size, device=device, dtype=dtype)
        rate = num_operations / _best_seconds(partial(_multiply, matrix))
    return rate


def _multiply(matrix: torch.Tensor) -> None:
    torch.mm(matrix, matrix)
    _wait(matrix.device)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        open_accelerator(device).wait()


def _best_seconds(run: Callable[[], object]) -> float:
    """Return the best of four runs, or of two if they are slow."""
    best, start = float("inf"), time.perf_counter()
    for number in range(4):
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
        if number and time.perf_counter() - start > _LONG_S:
            break
    return best
