"""Work intervals per lane in a step, and artificial link limits, to simulate slower PCIe links and disks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

_MOST_SPANS = 1 << 17
"""Limit between two step ends, where any number of evaluations can run."""


class Span(NamedTuple):
    """One lane work interval.

    lane, name: names of the lane and the work.
    begin, end: `time.perf_counter` seconds.
    """

    lane: str
    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class LaneTime:
    """Times of a lane in a step.

    busy_seconds: time with work.
    exposed_seconds: time compute waited for the lane.
    """

    busy_seconds: float
    exposed_seconds: float


class Timeline:
    """Spans since the last step ended. Lanes add spans from their threads.

    Work overlapping two steps counts for the second step. `compute` is busy except for waits.
    """

    def __init__(self, lanes: Iterable[str]) -> None:
        self._lanes = tuple(lanes)
        self._spans: deque[Span] = deque(maxlen=_MOST_SPANS)
        self._busy = dict.fromkeys(self._lanes, 0.0)
        """Seconds of work, by lane. A sum of its own, because the oldest spans may be dropped."""
        self._exposed: dict[str, float] = {}
        """Seconds in which compute waited, by lane."""
        self._begin = time.perf_counter()

    def add(self, lane: str, name: str, begin: float, end: float) -> None:
        """Record a span."""
        self._spans.append(Span(lane, name, begin, end))
        if lane in self._busy:
            self._busy[lane] += end - begin

    def expose(self, lane: str, seconds: float) -> None:
        """Record a wait of compute for a lane."""
        self._exposed[lane] = self._exposed.get(lane, 0.0) + seconds

    def begin_step(self) -> None:
        """Start the step clock. Work since the last step counts for this step."""
        self._begin = time.perf_counter()
        self._exposed = {}

    def discount(self, *lanes: str) -> None:
        """Drop busy time since the last step for these lanes: work outside any step (evaluation, recording pass)."""
        self._busy.update(dict.fromkeys(lanes, 0.0))

    def end_step(self) -> tuple[float, dict[str, LaneTime], list[Span]]:
        """Return (seconds since `begin_step`, time per lane, spans)."""
        end = time.perf_counter()
        spans = list(self._spans)
        self._spans.clear()
        busy = self._busy
        self._busy = dict.fromkeys(self._lanes, 0.0)
        seconds = end - self._begin
        lanes = {lane: LaneTime(busy[lane], self._exposed.get(lane, 0.0)) for lane in self._lanes}
        waited = sum(self._exposed.values())
        # Compute counts as busy outside waits, because not all work there has a span.
        return seconds, {"compute": LaneTime(max(0.0, seconds - waited), 0.0), **lanes}, spans


DISK_LANES = ("nvme_read", "nvme_write")
LANES = ("h2d", "d2h", "collective", "network", *DISK_LANES, "update")
"""Links with a throttle and a row on the timeline. Several lanes may share one link, see `Lanes`."""


@dataclass(frozen=True)
class Throttle:
    """Minimum work duration: `seconds(num_bytes)`. Slower work takes the real time."""

    bytes_per_second: float | None = None
    """Bandwidth in bytes per second. None: no limit."""
    latency_s: float = 0.0
    """Latency per work item, in seconds."""

    def seconds(self, num_bytes: int) -> float:
        """Return the minimum duration in seconds for a transfer of `num_bytes`."""
        return self.latency_s + (num_bytes / self.bytes_per_second if self.bytes_per_second else 0.0)
