"""Memory ledger for a tier: named allocations and a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from offload.errors import DoesNotFitError, format_bytes


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
            self.make_room()
            total = self.current_bytes + num_bytes
        if self.budget_bytes is not None and total > self.budget_bytes:
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
        if loan in self._loans:
            self._loans.remove(loan)
            self.release(loan.name, loan.num_bytes)

    def take_recent_peak(self) -> int:
        """Return the maximum bytes held at once since the last call."""
        peak, self.recent_peak_bytes = self.recent_peak_bytes, self.current_bytes
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
