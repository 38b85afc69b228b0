"""How fast this machine is, as far as a plan has to know: measured once, in a few milliseconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from offload.accelerators import open_accelerator
from offload.layout.planes import Plane

_NUM_ELEMENTS = 1 << 21
_SIZES = (512, 4096)
"""Of matrices. A GPU shows by a large one what it can; a CPU is busy with it for seconds."""
_LONG_S = 0.05
"""A product that would take longer is not made."""


def update_bytes_per_second(
    update: Callable[[Mapping[str, torch.Tensor], torch.Tensor], object], moments: Sequence[Plane]
) -> float:
    """Return the bytes of states that `update(states, gradients)`, of fp32 weights and these moments, reads and writes
    in a second.
    """
    states = {plane.name: torch.zeros(plane.numel(_NUM_ELEMENTS), dtype=plane.dtype) for plane in moments}
    states["weights"], gradients = torch.zeros(_NUM_ELEMENTS), torch.zeros(_NUM_ELEMENTS)
    return 2 * sum(flat.nbytes for flat in states.values()) / _best_seconds(lambda: update(states, gradients))


def flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """Return the floating point operations of a matrix product in a second, of a large one where that takes no time."""
    found = 0.0
    for size in _SIZES:
        num_operations = 2 * size**3
        if found and num_operations / found > _LONG_S:
            break
        matrix = torch.ones(size, size, device=device, dtype=dtype)
        found = num_operations / _best_seconds(partial(_multiply, matrix))
    return found


def _multiply(matrix: torch.Tensor) -> None:
    torch.mm(matrix, matrix)
    if not matrix.is_cpu:
        open_accelerator(matrix.device).wait()


def _best_seconds(run: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(4):
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return best
