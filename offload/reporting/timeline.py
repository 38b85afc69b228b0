"""Draw step lanes as bars, in percent, divided into hidden and exposed work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.reporting.figures import COMPUTE
from offload.reporting.recorded import KeptStep, Piece, seconds_text

_PASSES = ("forward", "backward")
_LANES = (COMPUTE, "h2d", "d2h", "collective", "network", "nvme_read", "nvme_write", "update")
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


def rows(step: KeptStep) -> tuple[Row, ...]:
    """Return a row for each lane with work, compute first.

    If the compute thread did everything, the trace has one lane, with all work outside unit passes exposed.
    """
    lanes = {piece.lane for piece in step.pieces}
    gaps = _gaps([piece for piece in step.pieces if piece.lane == COMPUTE], step.seconds)
    order = [*(lane for lane in _LANES if lane in lanes), *sorted(lanes - set(_LANES))]
    return tuple(Row(lane, _bars([p for p in step.pieces if p.lane == lane], gaps, step.seconds)) for lane in order)


def _gaps(pieces: Sequence[Piece], seconds: float) -> list[tuple[float, float]]:
    """Return (begin, end) for each compute gap."""
    found, now = [], 0.0
    for piece in sorted(pieces, key=lambda piece: piece.begin):
        if piece.begin - now > _IDLE * seconds:
            found.append((now, piece.begin))
        now = max(now, piece.end)
    return [*found, (now, seconds)] if seconds - now > _IDLE * seconds else found


def _bars(pieces: Sequence[Piece], gaps: Sequence[tuple[float, float]], seconds: float) -> tuple[Bar, ...]:
    parts: list[tuple[float, float, str, str]] = []
    for piece in pieces:
        title = f"{piece.name}: {seconds_text(piece.end - piece.begin)}"
        if piece.lane == COMPUTE:
            what = piece.name.partition(" ")[0]
            parts.append((piece.begin, piece.end, what if what in _PASSES else "exposed", title))
        else:
            parts += [(begin, end, kind, title) for begin, end, kind in _cut(piece, gaps)]
    return tuple(
        Bar(
            round(100 * begin / seconds, 3),
            round(100 * (end - begin) / seconds, 3),
            kind,
            title if count == 1 else f"{title}, ... {count} pieces in {seconds_text(end - begin)}",
        )
        for begin, end, kind, title, count in _merged(parts, seconds)
    )


def _merged(parts: Sequence[tuple[float, float, str, str]], seconds: float) -> list[tuple[float, float, str, str, int]]:
    """Merge bars narrower than a pixel with touching ones. Also returns the merge counts."""
    bars: list[tuple[float, float, str, str, int]] = []
    for begin, end, kind, title in parts:
        if bars:
            first, last, before, said, count = bars[-1]
            narrow = min(end - begin, last - first) < _NARROW * seconds
            if before == kind and narrow and begin - last < _NEAR * seconds:
                bars[-1] = (first, max(end, last), kind, said, count + 1)
                continue
        bars.append((begin, end, kind, title, 1))
    return bars


def _cut(piece: Piece, gaps: Sequence[tuple[float, float]]) -> list[tuple[float, float, str]]:
    """Cut an interval where compute gaps begin and end."""
    found, now = [], piece.begin
    for begin, end in gaps:
        first, last = max(begin, piece.begin), min(end, piece.end)
        if first < last:
            if now < first:
                found.append((now, first, "hidden"))
            found.append((first, last, "exposed"))
            now = last
    return [*found, (now, piece.end, "hidden")] if now < piece.end else found
