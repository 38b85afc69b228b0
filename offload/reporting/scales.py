"""Where a step and a value lie in a curve: leather's scales, with coordinates in tenths, as more would only make a file
larger.
"""

from __future__ import annotations

import leather
from leather.scales import Scale

_MOST_TICKS = 6


class Values(leather.Linear):
    """Values of a curve, between two ticks."""

    def __init__(self, low: float, high: float) -> None:
        super().__init__(*_apart(low, high))

    def project(self, value: float, range_min: float, range_max: float) -> float:
        return round(float(super().project(value, range_min, range_max)), 1)


class Steps(Scale):
    """Steps from the first to the last, with ticks at whole ones among them."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last

    def contains(self, v: float) -> bool:
        return self._first <= v <= self._last

    def project(self, value: float, range_min: float, range_max: float) -> float:
        share = (float(value) - self._first) / max(1, self._last - self._first)
        return round(range_min + share * (range_max - range_min), 1)

    def ticks(self) -> list[int]:
        if self._first == self._last:
            return [self._first]
        found = [int(tick) for tick in leather.Linear(self._first, self._last).ticks() if tick == int(tick)]
        found = [tick for tick in found if self.contains(tick)]
        return found[:: -(-len(found) // _MOST_TICKS)] or [self._first, self._last]


def _apart(low: float, high: float) -> tuple[float, float]:
    """Return a domain with some width: labels of four digits are to tell the ticks apart."""
    least = 2e-3 * max(abs(low), abs(high)) or 1.0
    if high - low >= least:
        return low, high
    return low - least, high + least
