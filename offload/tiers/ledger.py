"""What a tier holds, by name, against its budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from offload.errors import DoesNotFitError, format_bytes


@dataclass(eq=False)
class _Loan:
    """Memory that is held as long as nobody else needs it."""

    name: str
    """The name of the allocation."""
    num_bytes: int
    """The bytes."""
    is_over: Callable[[], bool]
    """Returns True if the memory can be given back now."""


@dataclass
class Ledger:
    """The named allocations of one tier. `reserve` refuses what would pass the budget, and prints the table of what is
    there.
    """

    tier: str
    """The name of the tier."""
    budget_bytes: int | None = None
    """The most that may be held at once; None without end."""
    flag: str = ""
    """The flag that sets the budget, for errors."""
    allocations: dict[str, int] = field(default_factory=dict)
    """The bytes that are held now, by name."""
    current_bytes: int = 0
    """The sum of those bytes."""
    peak_bytes: int = 0
    """The most that was held at once."""
    recent_peak_bytes: int = 0
    """The most that was held at once since somebody asked last."""
    _loans: list[_Loan] = field(default_factory=list)

    def reserve(self, name: str, num_bytes: int, fix: str = "") -> None:
        """Add `num_bytes` under `name` (adding to what it has); DoesNotFitError when the budget is passed."""
        if not num_bytes:
            return
        total = self.current_bytes + num_bytes
        if self.budget_bytes is not None and total > self.budget_bytes:
            self.make_room()
            total = self.current_bytes + num_bytes
        if self.budget_bytes is not None and total > self.budget_bytes:
            raise DoesNotFitError(self._refusal(name, num_bytes, fix))
        self.allocations[name] = self.allocations.get(name, 0) + num_bytes
        self.current_bytes = total
        self.peak_bytes = max(self.peak_bytes, total)
        self.recent_peak_bytes = max(self.recent_peak_bytes, total)

    def limit(self, num_bytes: int) -> None:
        """The tier has no budget of its own, and holds so much at most."""
        self.budget_bytes = num_bytes

    @contextmanager
    def lent(self, name: str, num_bytes: int, is_over: Callable[[], bool]) -> Iterator[None]:
        """Reserve `num_bytes` under `name` within, or until somebody else needs the memory and `is_over()`."""
        self.reserve(name, num_bytes)
        loan = _Loan(name, num_bytes, is_over)
        self._loans.append(loan)
        try:
            yield
        finally:
            self._end(loan)

    def make_room(self) -> None:
        """End the loans that are over."""
        for loan in list(self._loans):
            if loan.is_over():
                self._end(loan)

    def _end(self, loan: _Loan) -> None:
        if loan in self._loans:
            self._loans.remove(loan)
            self.release(loan.name, loan.num_bytes)

    def take_recent_peak(self) -> int:
        """Return the most that was held at once since this was called last."""
        peak, self.recent_peak_bytes = self.recent_peak_bytes, self.current_bytes
        return peak

    def clear(self) -> None:
        """Everything was freed."""
        self.allocations.clear()
        self._loans.clear()
        self.current_bytes = 0

    def release(self, name: str, num_bytes: int) -> None:
        """Give back `num_bytes` that were reserved under `name`."""
        if not num_bytes:
            return
        self.allocations[name] -= num_bytes
        self.current_bytes -= num_bytes
        if not self.allocations[name]:
            del self.allocations[name]

    def drop(self, name: str) -> None:
        """Give back all that was reserved under `name`."""
        self.release(name, self.allocations.get(name, 0))

    def _refusal(self, name: str, num_bytes: int, fix: str) -> str:
        assert self.budget_bytes is not None
        short = self.current_bytes + num_bytes - self.budget_bytes
        held = ", ".join(f"{key} {format_bytes(size)}" for key, size in self.allocations.items()) or "nothing"
        return (
            f"{self.flag or self.tier} is {format_bytes(self.budget_bytes)} ({self.budget_bytes} bytes), and {name} "
            f"needs {format_bytes(num_bytes)} beside what is held ({held}): {format_bytes(short)} ({short} bytes) too "
            f"little. {fix or f'Raise --{self.flag} to at least {self.current_bytes + num_bytes}.'} What a step "
            "holds in all `python -m offload.plan` tells."
        )
