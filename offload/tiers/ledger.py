"""What a tier holds, by name, against its budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from offload.errors import DoesNotFitError, format_bytes


@dataclass
class Ledger:
    """The named allocations of one tier. `reserve` refuses what would pass the budget, and prints the table of
    what is there.
    """

    tier: str
    budget_bytes: int | None = None
    flag: str = ""
    allocations: dict[str, int] = field(default_factory=dict)
    current_bytes: int = 0
    peak_bytes: int = 0
    recent_peak_bytes: int = 0
    give_way: Callable[[], object] | None = None
    """Releases what somebody holds only as long as nobody else needs it."""

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

    def make_room(self) -> None:
        """Have released what is held only as long as nobody else needs it."""
        if self.give_way is not None:
            self.give_way()

    def take_recent_peak(self) -> int:
        """Return the most that was held at once since this was called last."""
        peak, self.recent_peak_bytes = self.recent_peak_bytes, self.current_bytes
        return peak

    def clear(self) -> None:
        """Everything was freed."""
        self.allocations.clear()
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
