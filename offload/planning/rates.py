"""How fast this machine is, as far as a plan has to know: measured once, in a few milliseconds."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from offload import native

_NUM_ELEMENTS = 1 << 21
_STATE_BYTES = 24  # an fp32 weight and two moments, read and written


def update_bytes_per_second() -> float:
    """Return the optimizer state bytes that AdamW reads and writes in a second."""
    planes = [torch.zeros(_NUM_ELEMENTS) for _ in range(4)]
    seconds = _best_seconds(
        lambda: native.adamw(*planes, step=1, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    )
    return _NUM_ELEMENTS * _STATE_BYTES / seconds


def flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """Return the floating point operations of a large matrix product in a second."""
    size = 4096 if device.type == "cuda" else 512
    matrix = torch.ones(size, size, device=device, dtype=dtype)

    def multiply() -> None:
        torch.mm(matrix, matrix)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return 2 * size**3 / _best_seconds(multiply)


def _best_seconds(run: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(4):
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return best
