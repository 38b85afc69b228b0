"""Devices: an accelerator, or host memory with a device budget.

The CPU device makes all higher layers testable without a GPU: same slots, same copies, same budget errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from offload.accelerators import Accelerator
from offload.tiers.accelerator_device import AcceleratorDevice
from offload.tiers.blocks import Blocks
from offload.tiers.counters import Ledger
from offload.tiers.host import Arena, Pinning, copy_in_one_thread, discard_pages, trim_heap

SETTLING_BYTES = 64 << 20
"""Growth of the ledger between two returns of heap memory, because each walks the whole heap."""


class CpuDevice:
    """Host memory in the role of a device."""

    torch_device = torch.device("cpu")
    pinning: Pinning | None = None
    late_bytes = 0
    """Difference between peaks in equal steps, in bytes. 0: the ledger counts every byte."""
    waiting_bytes = 0
    """Bytes freed by all owners but still used by a stream."""
    decodes_at_once = True
    """True if decoding is one pass over memory. False: several torch operations."""
    autocast_type = torch_device.type
    """Device type whose autocast settings apply to the model."""

    def __init__(self, ledger: Ledger, copies_aside: bool) -> None:
        self.ledger = ledger
        self.blocks = Blocks(ledger, _resize)
        self._settled_bytes = 0  # in the ledger when holes were returned last
        self._copies_aside = copies_aside

    def allocate(self, name: str, num_bytes: int, fix: str = "") -> torch.Tensor:
        """Allocate `num_bytes` of device memory as flat uint8, recorded in the ledger under `name`."""
        self.ledger.reserve(name, num_bytes, fix)
        return self.blocks.add(Arena(num_bytes).take(num_bytes, torch.uint8))

    def park(self) -> None:
        """Give the memory of all allocations back, also after a `resume` that failed. No work may be pending."""
        self.blocks.empty()

    def resume(self) -> None:
        """Take memory for all allocations again, with zeros. Raises torch.OutOfMemoryError."""
        self.blocks.refill()

    def address(self, memory: torch.Tensor | torch.UntypedStorage) -> int:
        """Return the address of the first byte. Memory is told apart by this number alone: a device without storage
        gives every storage a range of its own.
        """
        return memory.data_ptr()

    def over(self, host: torch.Tensor) -> torch.Tensor:
        """Return a device tensor over registered host memory, flat, without a copy."""
        return host

    def return_holes(self) -> None:
        """Return freed memory between kept tensors to the system, once for 64 MiB that the ledger has grown.

        Kept tensors split the blocks that temporaries have left in the heap, so the next layer needs new blocks. The
        pages of the old ones would stay with the process: half as much as the kept tensors.
        """
        held_bytes = self.ledger.current_bytes
        if held_bytes >= self._settled_bytes + SETTLING_BYTES:
            trim_heap()
            self._settled_bytes = held_bytes
        self._settled_bytes = min(self._settled_bytes, held_bytes)  # growth counts from the lowest point since

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between host and device, with dtype conversion."""
        if self._copies_aside:
            copy_in_one_thread(target, source)
        else:
            target.data.copy_(source)

    def host_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a small flat host buffer for copies without staging."""
        return torch.empty(numel, dtype=dtype, device="cpu")

    def copy_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a device copy of `tensor` (here the tensor itself). The host may reuse the source at once, and waits
        only behind many pending copies.
        """
        return tensor

    def side_context(self) -> AbstractContextManager[Any]:
        """Return a context in which this thread's device work runs beside all other work."""
        return nullcontext()

    def stream_entry(self) -> Callable[[], AbstractContextManager[Any]]:
        """Return a context factory for another thread, to compute on this thread's stream."""
        return nullcontext

    def lend(self, tensor: torch.Tensor) -> None:
        """Mark another stream's tensor as used by the current stream: the allocator must not reuse the
        memory earlier.
        """

    def copy_to_host(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start a small D2H copy after all compute submitted so far. Returns a function to wait for the values."""
        return lambda: values

    def wait(self) -> None:
        """Wait for all work this thread submitted."""

    def to_host(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of any size on the host, after all compute submitted so far. CPU tensors as they are."""
        return values

    @property
    def peak_bytes(self) -> int:
        """Maximum bytes held at once."""
        return self.ledger.peak_bytes

    def take_recent_peak(self) -> int:
        """Return the maximum bytes held at once since the last call."""
        return self.ledger.take_recent_peak()

    def random_state(self) -> tuple[torch.Tensor, ...]:
        """Return the random generator states used by a forward on this device."""
        return (torch.get_rng_state(),)

    def set_random_state(self, state: tuple[torch.Tensor, ...]) -> None:
        """Restore the states from `random_state`."""
        torch.set_rng_state(state[0])

    def seed(self, number: int) -> None:
        """Seed the same generators. Faster than torch.manual_seed, which for every unused device type stores a deferred
        call with a traceback and takes milliseconds.
        """
        torch.default_generator.manual_seed(number)

    def close(self) -> None:
        """Restore driver and allocator settings."""
        if self.pinning is not None:
            self.pinning.close()


def _resize(block: torch.UntypedStorage, num_bytes: int) -> None:
    if not num_bytes:  # the next touch brings pages of zeros
        discard_pages(block.data_ptr(), block.nbytes())


Device = CpuDevice | AcceleratorDevice


def copy_planes(device: Device, targets: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor]) -> None:
    """Copy every target from the source with the same name, between host and device."""
    for name, target in targets.items():
        device.copy(target, sources[name])


def open_device(
    accelerator: Accelerator | None, ledger: Ledger, copies_aside: bool, most_bytes: int | None = None
) -> Device:
    """Return the device (accelerator None: CPU). `copies_aside`: copies run in separate threads. `most_bytes`: see
    `AcceleratorDevice`.
    """
    if accelerator is None:
        return CpuDevice(ledger, copies_aside)
    return AcceleratorDevice(ledger, accelerator, most_bytes)
