"""The device: an accelerator, or an arena of ordinary memory that is held to the same budget.

The CPU device makes everything above it provable on a machine without a GPU: the same slots, the same copies, the same
refusals.
"""

from __future__ import annotations

import ctypes

import torch

from offload.accelerators import Accelerator, own_accelerator
from offload.tiers.host import Arena
from offload.tiers.ledger import Ledger
from offload.tiers.pinning import Pinning

_SHARE_OF_FREE_MEMORY = 0.9
"""The rest is for the allocator's fragments and the libraries' workspaces."""


class CpuDevice:
    """Ordinary memory in the part of a device."""

    torch_device = torch.device("cpu")
    pinning: Pinning | None = None

    def __init__(self, ledger: Ledger, copies_aside: bool) -> None:
        self.ledger = ledger
        self._copies_aside = copies_aside

    def allocate(self, name: str, num_bytes: int, fix: str = "") -> torch.Tensor:
        """Return `num_bytes` of device memory as a flat uint8 tensor, entered in the ledger under `name`."""
        self.ledger.reserve(name, num_bytes, fix)
        return Arena(num_bytes).take(num_bytes, torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between host and device. On a thread of its own a copy takes one core: torch would take them all."""
        if self._copies_aside and target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous():
            ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
        else:
            target.data.copy_(source)

    @property
    def budget_bytes(self) -> int | None:
        """The most that may be held at once; None for no limit."""
        return self.ledger.budget_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was held at once."""
        return self.ledger.peak_bytes

    def take_recent_peak(self) -> int:
        """Return the most that was held at once since this was called last."""
        return self.ledger.take_recent_peak()

    def random_state(self) -> tuple[torch.Tensor, ...]:
        """Return the state of the generators that a forward on this device may draw from."""
        return (torch.get_rng_state(),)

    def set_random_state(self, state: tuple[torch.Tensor, ...]) -> None:
        """Put back what `random_state` returned."""
        torch.set_rng_state(state[0])


class AcceleratorDevice:
    """An accelerator, with what CpuDevice has. Work goes into the caller's stream, which on a lane is the lane's."""

    def __init__(self, ledger: Ledger, accelerator: Accelerator) -> None:
        self.ledger, self._accelerator = ledger, accelerator
        self.torch_device, self._module = accelerator.device, accelerator.module
        self.pinning: Pinning | None = Pinning(accelerator) if accelerator.can_register else None
        accelerator.enter()
        self._peak_bytes = 0

    def allocate(self, name: str, num_bytes: int, fix: str = "") -> torch.Tensor:
        self.ledger.reserve(name, num_bytes, fix)
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy between host and device. `data`: autograd, which may be in the middle of a backward, must not
        take it for a change of the weights that it has saved next to it.
        """
        target.data.copy_(source, non_blocking=True)
        for tensor in (target, source):
            if not tensor.is_cpu:  # freed memory must not be handed out again before this stream is done with it
                tensor.record_stream(self._accelerator.current_stream())

    @property
    def budget_bytes(self) -> int | None:
        """The most that may be held at once: as was said, or nearly all that others leave."""
        if self.ledger.budget_bytes is not None:
            return self.ledger.budget_bytes
        free = self._accelerator.free_bytes + self._module.memory_reserved(self.torch_device)
        return int(free * _SHARE_OF_FREE_MEMORY)

    @property
    def peak_bytes(self) -> int:
        """The most that was held at once, temporaries of operations included."""
        self._peak_bytes = max(self._peak_bytes, self._module.max_memory_allocated(self.torch_device))
        return self._peak_bytes

    def take_recent_peak(self) -> int:
        recent = self._module.max_memory_allocated(self.torch_device)
        self._peak_bytes = max(self._peak_bytes, recent)
        self._module.reset_peak_memory_stats(self.torch_device)
        return recent

    def random_state(self) -> tuple[torch.Tensor, ...]:
        return torch.get_rng_state(), self._module.get_rng_state(self.torch_device)

    def set_random_state(self, state: tuple[torch.Tensor, ...]) -> None:
        torch.set_rng_state(state[0])
        self._module.set_rng_state(state[1], self.torch_device)


Device = CpuDevice | AcceleratorDevice


def open_device(ledger: Ledger, copies_aside: bool) -> Device:
    """Return this process's accelerator, or else the CPU in its part. `copies_aside`: on threads of their own."""
    accelerator = own_accelerator()
    return CpuDevice(ledger, copies_aside) if accelerator is None else AcceleratorDevice(ledger, accelerator)
