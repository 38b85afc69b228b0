"""Count bytes moved and held by a rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class Counters:
    """Traffic for the last step and memory peaks so far.

    Bytes cover parameters, gradients, optimizer states and activations. Elements exchanged between ranks are counted as
    in ZeRO (arXiv:1910.02054, section 7): an all-gather or reduce-scatter over P elements counts P; sending updated
    weights counts as an all-gather. An all-to-all counts all elements on a rank, including the own part. network_bytes
    counts bytes sent to ranks on other machines, including sums over replicas, as if each were sent directly to the
    receiver.

    Prefetches count for the step they serve: weights needed first and resident weights, fetched right after the update.

    h2d_bytes, d2h_bytes: copies to the device and to the host.
    nvme_read_bytes, nvme_write_bytes: disk transfers.
    all_gather_elements, reduce_scatter_elements, all_to_all_elements: exchanges between ranks.
    network_bytes: sent to other machines.
    experts_fetched: number of fetched experts.
    next_h2d_bytes, next_nvme_read_bytes, next_all_gather_elements, next_network_bytes: prefetches for the next step.
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
    _tiers: Any = field(default=None, repr=False)

    @property
    def total(self) -> int:
        """Total bytes in the last step."""
        return self.h2d_bytes + self.d2h_bytes + self.nvme_read_bytes + self.nvme_write_bytes

    @property
    def peak_device_bytes(self) -> int:
        """Peak of slots, gradient buffers, resident weights and unit inputs; on CUDA also operation temporaries."""
        return self._tiers.device.peak_bytes if self._tiers else 0

    @property
    def peak_host_bytes(self) -> int:
        """Peak of states, waiting gradients, staging, rings and activation checkpoints in host memory."""
        return self._tiers.host.peak_bytes if self._tiers else 0

    @property
    def peak_pinned_bytes(self) -> int:
        """Host memory registered with the device; 0 without a device."""
        return self._tiers.store.pinned_bytes if self._tiers else 0

    def read_peaks_from(self, tiers: Any) -> None:
        """Set the source for peaks: an object with a device, a host ledger and a store, such as `EngineState`."""
        self._tiers = tiers

    def count(self, name: str, amount: int, is_ahead: bool = False) -> None:
        """Add to a counter. `is_ahead`: for the next step."""
        name = f"next_{name}" if is_ahead else name
        setattr(self, name, getattr(self, name) + amount)

    def clear(self) -> None:
        """Reset the counters for the current step. Prefetches for the next step are kept."""
        for each in fields(self):
            if each.type == "int" and not each.name.startswith("next_"):
                setattr(self, each.name, 0)

    @contextmanager
    def preserve(self) -> Iterator[None]:
        """Restore all counters when this context ends."""
        before = {f.name: getattr(self, f.name) for f in fields(self) if f.type == "int"}
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    def begin_pass(self) -> None:
        """Move prefetches so far to the current step before another pass."""
        for each in fields(self):
            if each.name.startswith("next_"):
                self.count(each.name.removeprefix("next_"), getattr(self, each.name))
                setattr(self, each.name, 0)

    def begin_step(self) -> None:
        """Start counting a step."""
        self.clear()
        self.begin_pass()
