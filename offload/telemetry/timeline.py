"""What every lane did, and when: the spans of a step, and from them how long a lane was busy and how much of that was
exposed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

_MOST_SPANS = 1 << 17
"""Between two ends of steps: evaluations without number may lie there."""


class Span(NamedTuple):
    """One piece of a lane's work, in seconds of `time.perf_counter`."""

    lane: str
    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class LaneTime:
    """Seconds of a step in which a lane worked, and seconds in which compute waited for it."""

    busy_seconds: float
    exposed_seconds: float


class Timeline:
    """The spans since the step before ended. Lanes add to it from their threads.

    Work that overlaps two steps counts in the one in which it ends. `compute` is busy whenever it does not wait.
    """

    def __init__(self, lanes: Iterable[str]) -> None:
        self._lanes = tuple(lanes)
        self._spans: deque[Span] = deque(maxlen=_MOST_SPANS)
        self._busy = dict.fromkeys(self._lanes, 0.0)
        self._exposed: dict[str, float] = {}
        self._begin = time.perf_counter()

    def add(self, lane: str, name: str, begin: float, end: float) -> None:
        """Note a piece of work."""
        self._spans.append(Span(lane, name, begin, end))
        if lane in self._busy:
            self._busy[lane] += end - begin

    def expose(self, lane: str, seconds: float) -> None:
        """Note that compute waited for a lane."""
        self._exposed[lane] = self._exposed.get(lane, 0.0) + seconds

    def begin_step(self) -> None:
        """Start the clock of a step; what was done since the last one belongs to it."""
        self._begin = time.perf_counter()
        self._exposed = {}

    def discount(self, *lanes: str) -> None:
        """What these lanes have done since the last step was for none (an evaluation, a recording pass)."""
        self._busy.update(dict.fromkeys(lanes, 0.0))

    def end_step(self) -> tuple[float, dict[str, LaneTime], list[Span]]:
        """Return the seconds since `begin_step`, each lane's share, and the spans."""
        end = time.perf_counter()
        spans = list(self._spans)
        self._spans.clear()
        busy, self._busy = self._busy, dict.fromkeys(self._lanes, 0.0)
        seconds = end - self._begin
        lanes = {lane: LaneTime(busy[lane], self._exposed.get(lane, 0.0)) for lane in self._lanes}
        waited = sum(self._exposed.values())
        return seconds, {"compute": LaneTime(max(0.0, seconds - waited), 0.0), **lanes}, spans
