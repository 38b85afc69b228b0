"""trace.json.gz: lane activity with one track per lane, for https://ui.perfetto.dev and chrome://tracing.

Trace Event Format: a JSON object with a list of events. "M" names a track; "X" is a span with begin (`ts`) and duration
(`dur`) in microseconds. The format allows nested but no partially overlapping spans on a track; here they are disjoint.
"""

from __future__ import annotations

import gzip
import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from offload.lanes.timeline import Span
from offload.native.io import disk_error

FIRST_STEPS = 3  # include the first pass with fetches on demand, and the step distributing spare memory
LAST_STEPS = 10
"""Number of traced steps at the end. With the first and the slowest steps, the file stays small for long runs."""

_STEPS = "steps"
_GAP = 0.1  # step share: gap width for omitted steps


@dataclass(frozen=True)
class _Step:
    """Step number, marks on the steps track (the step itself last), and spans."""

    number: int
    marks: tuple[Span, ...]
    spans: tuple[Span, ...]

    @property
    def all(self) -> tuple[Span, ...]:
        return (*self.marks, *self.spans)

    @property
    def seconds(self) -> float:
        return self.marks[-1].end - self.marks[-1].begin


class Trace:
    """Keeps the first and last steps of a run and the slowest of the others, and writes a trace file.

    lanes: lane names in display order.
    is_serial: all lanes run on the compute thread, so their time is subtracted from compute spans.
    """

    def __init__(self, path: Path, lanes: Iterable[str], *, is_serial: bool) -> None:
        self._path = path
        self._lanes = tuple(lanes)
        self._is_serial = is_serial
        # Kept steps. All steps of a long run would not fit the memory, or a viewer.
        self._first: list[_Step] = []
        self._slowest: list[_Step] = []  # at most one
        self._last: deque[_Step] = deque()
        self._marks: list[Span] = []

    def mark(self, name: str, begin: float, end: float) -> None:
        """Record work between two steps, in `time.perf_counter` seconds. The spans arrive with the next step."""
        self._marks.append(Span(_STEPS, name, begin, end))

    def step(self, number: int, begin: float, end: float, spans: Sequence[Span]) -> None:
        """Record a finished step."""
        self.mark(f"step {number}", begin, end)
        traced = _Step(number, tuple(self._marks), tuple(spans))
        self._marks.clear()
        if len(self._first) < FIRST_STEPS:
            self._first.append(traced)
            return
        self._last.append(traced)
        if len(self._last) > LAST_STEPS:
            # Only steps that leave the last ones compete, so no step is kept twice.
            self._slowest = [max([*self._slowest, self._last.popleft()], key=lambda step: step.seconds)]

    def write(self) -> None:
        """Write the file atomically. Raises DiskError."""
        # Renamed when complete: a reader never sees half a file.
        partial = self._path.with_name(f"{self._path.name}.partial")
        try:
            text = json.dumps({"displayTimeUnit": "ms", "traceEvents": self.events()})
            partial.write_bytes(gzip.compress(text.encode()))
            partial.replace(self._path)
        except OSError as error:
            raise disk_error("the write", self._path, error) from error
        finally:
            partial.unlink(missing_ok=True)

    def events(self) -> list[dict[str, Any]]:
        """Return the events: track names first, then spans in start order, with the first span at time 0."""
        spans = sorted(self._spans(), key=lambda span: span.begin)
        # Known lanes in their order, then any others, and the steps at the end.
        names = dict.fromkeys((*self._lanes, *(span.lane for span in spans if span.lane != _STEPS), _STEPS))
        tracks = {name: number for number, name in enumerate(names, 1)}
        origin = spans[0].begin if spans else 0.0
        metadata = [_metadata_event("process_name", 0, name="offload")]
        for name, number in tracks.items():
            metadata.append(_metadata_event("thread_name", number, name=name))
            metadata.append(_metadata_event("thread_sort_index", number, sort_index=number))
        return metadata + [_span_event(span, tracks[span.lane], origin) for span in spans]

    def _spans(self) -> list[Span]:
        """Return all spans, disjoint within each track."""
        tracks: dict[str, list[Span]] = {}
        for span in _close_gaps([*self._first, *self._slowest, *self._last]):
            track = span.lane
            if self._is_serial and track != _STEPS:  # one thread did all
                track = "compute"
            tracks.setdefault(track, []).append(span)
        return [span for track in tracks.values() for span in _make_disjoint(track)]


def _close_gaps(steps: Sequence[_Step]) -> list[Span]:
    """Return the spans for all steps, shifted to close the gaps left by omitted steps."""
    spans: list[Span] = list(steps[0].all) if steps else []
    shift = 0.0  # seconds left out so far
    for before, after in pairwise(steps):
        if after.number > before.number + 1:
            begin, end = before.marks[-1].end, after.marks[0].begin
            first, last = before.number + 1, after.number - 1
            omitted = f"steps {first} to {last}"
            if first == last:
                omitted = f"step {first}"
            room = min(span.begin for span in after.all) - max(span.end for span in before.all)
            gap = max(0.0, room - _GAP * after.seconds)
            name = f"{omitted} left out ({end - begin:.3f} s)"
            spans.append(Span(_STEPS, name, begin - shift, end - shift - gap))
            shift += gap
        spans += [span._replace(begin=span.begin - shift, end=span.end - shift) for span in after.all]
    return spans


def _make_disjoint(spans: Iterable[Span]) -> list[Span]:
    """Make spans disjoint: at any time, the span started last keeps the interval."""
    disjoint: list[Span] = []
    open_spans: list[Span] = []
    now = 0.0

    def advance(time: float) -> None:
        """Assign the interval from `now` to `time` to the innermost open span."""
        nonlocal now
        while open_spans and now < time:
            inner = open_spans[-1]
            end = min(inner.end, time)
            if now < end:
                disjoint.append(inner._replace(begin=now, end=end))
            now = max(now, end)
            if inner.end <= now:
                open_spans.pop()
        now = time

    # Of two with the same begin the longer one first: the shorter one is inside.
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        advance(span.begin)
        open_spans.append(span)
    advance(max((span.end for span in open_spans), default=now))
    return disjoint


def _metadata_event(event_name: str, track: int, **values: Any) -> dict[str, Any]:
    return {"name": event_name, "ph": "M", "pid": 1, "tid": track, "args": values}


def _span_event(span: Span, track: int, origin: float) -> dict[str, Any]:
    # Round both ends to nanoseconds and derive the duration, so that rounding causes no overlap.
    begin, end = (round((time - origin) * 1e9) for time in (span.begin, span.end))
    category = "lane"
    if span.lane == _STEPS:
        category = "step"
    names = {"name": span.name or span.lane, "cat": category}
    return {**names, "ph": "X", "pid": 1, "tid": track, "ts": begin / 1e3, "dur": (end - begin) / 1e3}
