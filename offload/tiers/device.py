"""The device: a GPU, or an arena of ordinary memory that is held to the same budget.

The CPU device makes everything above it provable on a machine without a GPU: the same slots, the same copies, the same
refusals.
"""

from __future__ import annotations

import os

import torch

from offload.tiers.host import Arena
from offload.tiers.ledger import Ledger


class CpuDevice:
    """Ordinary memory in the part of a device."""

    torch_device = torch.device("cpu")
    pins_host_memory = False

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def allocate(self, name: str, num_bytes: int, fix: str = "") -> torch.Tensor:
        """Return `num_bytes` of device memory as a flat uint8 tensor, entered in the ledger under `name`."""
        self.ledger.reserve(name, num_bytes, fix)
        return Arena(num_bytes).take(num_bytes, torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between host and device, in the order of the calls; `wait` before the host reads what came down."""
        target.copy_(source)

    def wait(self) -> None:
        """Block the host until every copy so far has arrived."""

    @property
    def peak_bytes(self) -> int:
        """The most that was held at once."""
        return self.ledger.peak_bytes

    def random_state(self) -> tuple[torch.Tensor, ...]:
        """Return the state of the generators that a forward on this device may draw from."""
        return (torch.get_rng_state(),)

    def set_random_state(self, state: tuple[torch.Tensor, ...]) -> None:
        """Put back what `random_state` returned."""
        torch.set_rng_state(state[0])


class CudaDevice:
    """One CUDA GPU, on the caller's stream: copies and compute are ordered by it, so only the host ever waits."""

    pins_host_memory = True

    def __init__(self, ledger: Ledger, index: int) -> None:
        self.ledger = ledger
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)

    def allocate(self, name: str, num_bytes: int, fix: str = "") -> torch.Tensor:
        """Return `num_bytes` of device memory as a flat uint8 tensor, entered in the ledger under `name`."""
        self.ledger.reserve(name, num_bytes, fix)
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy between host and device; `wait` before the host reads what came down."""
        target.copy_(source, non_blocking=True)

    def wait(self) -> None:
        """Block the host until every copy so far has arrived."""
        torch.cuda.current_stream(self.torch_device).synchronize()

    @property
    def peak_bytes(self) -> int:
        """The most that was held at once, temporaries of operations included."""
        return torch.cuda.max_memory_allocated(self.torch_device)

    def random_state(self) -> tuple[torch.Tensor, ...]:
        """Return the state of the generators that a forward on this device may draw from."""
        return torch.get_rng_state(), torch.cuda.get_rng_state(self.torch_device)

    def set_random_state(self, state: tuple[torch.Tensor, ...]) -> None:
        """Put back what `random_state` returned."""
        torch.set_rng_state(state[0])
        torch.cuda.set_rng_state(state[1], self.torch_device)


Device = CpuDevice | CudaDevice


def open_device(ledger: Ledger) -> Device:
    """Return this rank's GPU where there is one, else the CPU in its part."""
    if torch.cuda.is_available():
        return CudaDevice(ledger, int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return CpuDevice(ledger)
