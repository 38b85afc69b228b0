"""How fast this machine is, as far as a plan has to know: measured once, in a few milliseconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from offload.accelerators import Accelerator, open_accelerator
from offload.layout.planes import Plane

_NUM_ELEMENTS = 1 << 21
_SIZES = (512, 4096)
"""Of matrices. A GPU shows by a large one what it can; a CPU is busy with it for seconds."""
_LINK_BYTES = 1 << 25
_LONG_S = 0.05
"""A product that would take longer is not made."""


def update_bytes_per_second(
    update: Callable[[Mapping[str, torch.Tensor], torch.Tensor], object], moments: Sequence[Plane], device: torch.device
) -> float:
    """Return the bytes of states that `update(states, gradients)`, of fp32 weights and these moments on `device`, reads
    and writes in a second.
    """
    sizes = {plane.name: (plane.numel(_NUM_ELEMENTS), plane.dtype) for plane in moments}
    sizes |= dict.fromkeys(("weights", "gradients"), (_NUM_ELEMENTS, torch.float32))
    states = {name: torch.zeros(numel, dtype=dtype, device=device) for name, (numel, dtype) in sizes.items()}
    gradients = states.pop("gradients")

    def run() -> None:
        update(states, gradients)
        _wait(device)

    return 2 * sum(flat.nbytes for flat in states.values()) / _best_seconds(run)


def link_bytes_per_second(accelerator: Accelerator, is_up: bool) -> float:
    """Return the bytes that pinned memory sends to an accelerator, or gets from it, in a second, by itself."""
    on_host = torch.empty(_LINK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    on_device = torch.empty(_LINK_BYTES, dtype=torch.uint8, device=accelerator.device)
    target, source = (on_device, on_host) if is_up else (on_host, on_device)

    def run() -> None:
        target.copy_(source, non_blocking=True)
        accelerator.wait()

    return _LINK_BYTES / _best_seconds(run)


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
    _wait(matrix.device)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        open_accelerator(device).wait()


def _best_seconds(run: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(4):
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return best
