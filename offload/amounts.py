"""How far long work is. A display asks for it when it draws, so the work itself only counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from offload.errors import format_bytes

BYTES = "bytes"


@dataclass(frozen=True)
class Amount:
    """Work done at one moment.

    done, total: counts of `unit`. total 0: not known before the end.
    place: where the work is, for example a unit of the model; empty: nowhere to name.
    """

    done: int = 0
    total: int = 0
    unit: str = BYTES
    place: str = ""

    def describe(self, seconds: float) -> str:
        """Return the place, the work done, and, with a total, the rate and the time left. Empty without any of them.

        seconds: time since the work began.
        """
        parts = []
        if self.place:
            parts.append(self.place)
        if self.total:
            parts.append(f"{self._count(self.done)} of {self._count(self.total)}{self._unit}")
        elif self.done:
            parts.append(f"{self._count(self.done)}{self._unit} so far")
        if self.total and self.done and seconds >= 1:
            rate = self.done / seconds  # the mean so far: single pieces differ in size and speed
            shown = f"{rate:.3g}" if self._unit else format_bytes(rate)
            parts += [f"{shown}{self._unit}/s", f"{clock(max(0, self.total - self.done) / rate)} left"]
        return ", ".join(parts)

    def _count(self, number: int) -> str:
        if self.unit == BYTES:
            return format_bytes(number)
        return f"{number:,}"

    @property
    def _unit(self) -> str:
        if self.unit == BYTES:  # `format_bytes` writes its own unit
            return ""
        return f" {self.unit}"


Measure = Callable[[], Amount]
"""Returns the amount at this moment. A display calls it from another thread than the work."""
Tell = Callable[[str, Measure], None]
"""Receives a stage of long work when it begins, and how to ask for its amount."""


class Tally:
    """A count of work done, as a `Measure`. Only the work adds to it."""

    def __init__(self, total: int, unit: str = BYTES) -> None:
        self.done = 0
        self.total = total
        self.unit = unit

    def add(self, size: int) -> None:
        self.done += size

    def __call__(self) -> Amount:
        return Amount(self.done, self.total, self.unit)


def unmeasured() -> Amount:
    """Return nothing done of nothing: a `Measure` for work that cannot be counted."""
    return Amount()


def tell_nobody(text: str, measure: Measure) -> None:
    """Drop a stage: nothing is shown."""


def clock(seconds: float) -> str:
    """Return m:ss, or h:mm:ss from one hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}"
