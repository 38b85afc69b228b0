"""Draw step lanes as bars, in percent, divided into hidden and exposed work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.extras.tools.reporting.figures import COMPUTE
from offload.extras.tools.reporting.run_record import TracedStep, TraceSpan, seconds_text
from offload.lanes.timeline import LANES

_PASSES = ("forward", "backward")
_LANES = (COMPUTE, *LANES)
_NARROW = 0.004  # step share: narrower bars merge with touching ones
_NEAR = 0.0008  # step share: closer bars touch
_IDLE = 0.0005  # step share: shorter compute gaps count as work


@dataclass(frozen=True)
class Bar:
    """Lane work interval, in percent of the step."""

    begin: float
    width: float
    kind: str
    """"forward" or "backward" on compute; elsewhere "hidden" (a unit computes) or "exposed" (no unit computes)."""
    title: str


@dataclass(frozen=True)
class Row:
    """Lane bars, sorted by start."""

    lane: str
    bars: tuple[Bar, ...]


def rows(step: TracedStep) -> tuple[Row, ...]:
    """Return a row for each lane with work, compute first.

    If the compute thread did everything, the trace has one lane, with all work outside unit passes exposed.
    """
    lanes = {span.lane for span in step.spans}
    gaps = _gaps([span for span in step.spans if span.lane == COMPUTE], step.seconds)
    order = [*(lane for lane in _LANES if lane in lanes), *sorted(lanes - set(_LANES))]
    return tuple(Row(lane, _bars([p for p in step.spans if p.lane == lane], gaps, step.seconds)) for lane in order)


def _gaps(spans: Sequence[TraceSpan], seconds: float) -> list[tuple[float, float]]:
    """Return (begin, end) for each compute gap."""
    gaps, now = [], 0.0
    for span in sorted(spans, key=lambda span: span.begin):
        if span.begin - now > _IDLE * seconds:
            gaps.append((now, span.begin))
        now = max(now, span.end)  # spans may lie within one another
    if seconds - now > _IDLE * seconds:
        gaps.append((now, seconds))
    return gaps


def _bars(spans: Sequence[TraceSpan], gaps: Sequence[tuple[float, float]], seconds: float) -> tuple[Bar, ...]:
    parts: list[tuple[float, float, str, str]] = []
    for span in spans:
        title = f"{span.name}: {seconds_text(span.end - span.begin)}"
        if span.lane == COMPUTE:
            bar_class = span.name.partition(" ")[0]
            if bar_class not in _PASSES:
                bar_class = "exposed"
            parts.append((span.begin, span.end, bar_class, title))
        else:
            parts += [(begin, end, kind, title) for begin, end, kind in _cut(span, gaps)]
    return tuple(
        Bar(
            round(100 * begin / seconds, 3),
            round(100 * (end - begin) / seconds, 3),
            bar_class,
            title if count == 1 else f"{title}, ... {count} pieces in {seconds_text(end - begin)}",
        )
        for begin, end, bar_class, title, count in _merged(parts, seconds)
    )


def _merged(parts: Sequence[tuple[float, float, str, str]], seconds: float) -> list[tuple[float, float, str, str, int]]:
    """Merge bars narrower than a pixel with touching ones. Also returns the merge counts."""
    bars: list[tuple[float, float, str, str, int]] = []
    for begin, end, bar_class, title in parts:
        if bars:
            first, last, last_class, last_title, count = bars[-1]
            # A step may have ten thousand pieces of work: a page with all of them would not open on a phone.
            narrow = min(end - begin, last - first) < _NARROW * seconds
            if last_class == bar_class and narrow and begin - last < _NEAR * seconds:
                bars[-1] = (first, max(end, last), bar_class, last_title, count + 1)
                continue
        bars.append((begin, end, bar_class, title, 1))
    return bars


def _cut(span: TraceSpan, gaps: Sequence[tuple[float, float]]) -> list[tuple[float, float, str]]:
    """Cut an interval where compute gaps begin and end."""
    parts, now = [], span.begin
    for begin, end in gaps:
        first, last = max(begin, span.begin), min(end, span.end)
        if first < last:
            if now < first:
                parts.append((now, first, "hidden"))
            parts.append((first, last, "exposed"))
            now = last
    if now < span.end:
        parts.append((now, span.end, "hidden"))
    return parts
