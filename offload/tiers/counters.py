"""Bytes of a rank: moved in a step, and held in a tier, with a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from offload.errors import DoesNotFitError, format_bytes


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
        """Set the source for peaks: an object with a device, a host ledger and a store, such as `Memory`."""
        self._tiers = tiers

    def count(self, name: str, amount: int, is_ahead: bool = False) -> None:
        """Add to a counter. `is_ahead`: for the next step."""
        if is_ahead:
            name = f"next_{name}"
        setattr(self, name, getattr(self, name) + amount)

    def clear(self) -> None:
        """Reset the counters for the current step. Prefetches for the next step are kept."""
        for each in fields(self):
            # Annotations are text here. Other types are no counters.
            if each.type == "int" and not each.name.startswith("next_"):
                setattr(self, each.name, 0)

    @contextmanager
    def preserve(self) -> Iterator[None]:
        """Restore all counters when this context ends."""
        before = {f.name: getattr(self, f.name) for f in fields(self) if f.type == "int"}  # text, as in `clear`
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


@dataclass(eq=False)
class _Loan:
    """Memory held until another allocation needs the room."""

    name: str
    """Allocation name."""
    num_bytes: int
    """Size in bytes."""
    is_over: Callable[[], bool]
    """Returns True if the memory can be released now."""


@dataclass
class Ledger:
    """Named allocations in one tier. `reserve` raises an error listing all allocations if the budget is too small."""

    tier: str
    """Tier name."""
    budget_bytes: int | None = None
    """Maximum bytes held at once. None: no limit."""
    flag: str = ""
    """Flag for the budget, in error messages."""
    allocations: dict[str, int] = field(default_factory=dict)
    """Present bytes by name."""
    current_bytes: int = 0
    """Present bytes in total."""
    peak_bytes: int = 0
    """Maximum bytes held at once."""
    recent_peak_bytes: int = 0
    """Maximum bytes held at once since the last `take_recent_peak`."""
    _loans: list[_Loan] = field(default_factory=list)

    def reserve(self, name: str, num_bytes: int, fix: str = "") -> None:
        """Add `num_bytes` to the allocation `name`. Raises DoesNotFitError if the budget is too small."""
        if not num_bytes:
            return
        total = self.current_bytes + num_bytes
        if self.budget_bytes is not None and total > self.budget_bytes:
            self.make_room()  # loans end only under need
            total = self.current_bytes + num_bytes
        if self.budget_bytes is not None and total > self.budget_bytes:  # loans did not suffice
            short = total - self.budget_bytes
            allocations = (
                ", ".join(f"{key} {format_bytes(size)}" for key, size in self.allocations.items()) or "nothing"
            )
            raise DoesNotFitError(
                f"{self.flag or self.tier} is {format_bytes(self.budget_bytes)} ({self.budget_bytes} bytes), but "
                f"{name} needs {format_bytes(num_bytes)} in addition to the current allocations ({allocations}): "
                f"{format_bytes(short)} ({short} bytes) too little.",
                f"{fix or f'Raise --{self.flag} to at least {total}.'} `python -m offload.plan` shows the memory needs "
                "of a step.",
            )
        self.allocations[name] = self.allocations.get(name, 0) + num_bytes
        self.current_bytes = total
        self.peak_bytes = max(self.peak_bytes, total)
        self.recent_peak_bytes = max(self.recent_peak_bytes, total)

    @contextmanager
    def reserve_until(self, name: str, num_bytes: int, is_over: Callable[[], bool]) -> Iterator[None]:
        """Reserve `num_bytes` under `name` for the block, or until another allocation needs the memory and `is_over()`
        is True.
        """
        self.reserve(name, num_bytes)
        loan = _Loan(name, num_bytes, is_over)
        self._loans.append(loan)
        try:
            yield
        finally:
            self._end(loan)

    def make_room(self) -> None:
        """End all loans with `is_over()` True."""
        for loan in list(self._loans):
            if loan.is_over():
                self._end(loan)

    def _end(self, loan: _Loan) -> None:
        if loan in self._loans:  # `make_room` may have ended the loan before its block
            self._loans.remove(loan)
            self.release(loan.name, loan.num_bytes)

    def take_recent_peak(self) -> int:
        """Return the maximum bytes held at once since the last call."""
        peak = self.recent_peak_bytes
        self.recent_peak_bytes = self.current_bytes
        return peak

    def clear(self) -> None:
        """Remove all allocations."""
        self.allocations.clear()
        self._loans.clear()
        self.current_bytes = 0

    def release(self, name: str, num_bytes: int) -> None:
        """Release `num_bytes` from the allocation `name`."""
        if not num_bytes:
            return
        self.allocations[name] -= num_bytes
        self.current_bytes -= num_bytes
        if not self.allocations[name]:
            del self.allocations[name]

    def drop(self, name: str) -> None:
        """Release the allocation `name`."""
        self.release(name, self.allocations.get(name, 0))
