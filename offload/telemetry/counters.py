"""Bytes moved and bytes held, by rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Protocol


class Tiers(Protocol):
    """What has a device, a ledger of host memory and a store, which know their peaks."""

    device: Any
    host: Any
    store: Any


@dataclass
class Counters:
    """The bytes that moved for the last step (parameters, gradients, optimizer states, activations), the elements that
    ranks exchanged for it, the experts that came up for it where they are streamed, and the peaks so far.

    Elements are counted as in ZeRO (arXiv:1910.02054, section 7): an all-gather or a reduce-scatter over P elements is
    P; weights that each rank gives to the others are an all-gather. An all-to-all is all that a rank has of it, its own
    part included. Of these, and of sums over replicas, what a rank sends to ranks of other machines is counted in
    bytes: to each of them what it is to get, as if that went straight.

    What comes up ahead of a step belongs to it: weights that it needs first, and those that stay on the device, right
    after their update.
    """

    h2d_bytes: int = 0
    d2h_bytes: int = 0
    nvme_read_bytes: int = 0
    nvme_write_bytes: int = 0
    next_h2d_bytes: int = 0
    next_nvme_read_bytes: int = 0
    all_gather_elements: int = 0
    reduce_scatter_elements: int = 0
    all_to_all_elements: int = 0
    next_all_gather_elements: int = 0
    experts_fetched: int = 0
    network_bytes: int = 0
    next_network_bytes: int = 0
    _tiers: Tiers | None = field(default=None, repr=False)

    @property
    def total(self) -> int:
        """All bytes of the last step."""
        return self.h2d_bytes + self.d2h_bytes + self.nvme_read_bytes + self.nvme_write_bytes

    @property
    def peak_device_bytes(self) -> int:
        """Slots, gradient buffers, resident weights and unit inputs; on CUDA also the temporaries of operations."""
        return self._tiers.device.peak_bytes if self._tiers else 0

    @property
    def peak_host_bytes(self) -> int:
        """States, waiting gradients, staging, rings and activation checkpoints in host memory."""
        return self._tiers.host.peak_bytes if self._tiers else 0

    @property
    def peak_pinned_bytes(self) -> int:
        """Host memory that is registered with the device; 0 without one."""
        return self._tiers.store.pinned_bytes if self._tiers else 0

    def look_at(self, tiers: Tiers) -> None:
        """These hold the bytes whose peaks are asked for."""
        self._tiers = tiers

    def count(self, name: str, amount: int, is_ahead: bool = False) -> None:
        """Add to what is counted under `name`; `is_ahead`: for the next step."""
        name = f"next_{name}" if is_ahead else name
        setattr(self, name, getattr(self, name) + amount)

    def clear(self) -> None:
        """What moved so far belongs to no step, but for what came up ahead of the next."""
        self.h2d_bytes = self.d2h_bytes = self.nvme_read_bytes = self.nvme_write_bytes = 0
        self.all_gather_elements = self.reduce_scatter_elements = self.network_bytes = self.experts_fetched = 0
        self.all_to_all_elements = 0

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Within, what moves belongs to no step."""
        before = {f.name: getattr(self, f.name) for f in fields(self) if f.type == "int"}
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    def begin_pass(self) -> None:
        """What came up ahead so far belongs to the step that goes on with another pass."""
        self.h2d_bytes, self.next_h2d_bytes = self.h2d_bytes + self.next_h2d_bytes, 0
        self.nvme_read_bytes, self.next_nvme_read_bytes = self.nvme_read_bytes + self.next_nvme_read_bytes, 0
        self.all_gather_elements += self.next_all_gather_elements
        self.network_bytes += self.next_network_bytes
        self.next_all_gather_elements = self.next_network_bytes = 0

    def begin_step(self) -> None:
        """Start counting a step."""
        self.clear()
        self.begin_pass()
