"""A step's lanes as rows of bars, in percent of the step, so that they fit any width: what ran while a unit computed,
and what while none did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.reporting.figures import COMPUTE
from offload.reporting.recorded import KeptStep, Piece, seconds_text

_PASSES = ("forward", "backward")
_LANES = (COMPUTE, "h2d", "d2h", "collective", "network", "nvme_read", "nvme_write", "update")
_NARROW = 0.004  # of a step: bars below are drawn as one with what they touch
_NEAR = 0.0008  # of a step: bars nearer than this touch
_IDLE = 0.0005  # of a step: gaps of compute that are shorter count as work


@dataclass(frozen=True)
class Bar:
    """A stretch of a lane's work, in percent of the step."""

    begin: float
    width: float
    kind: str
    """`forward` and `backward` of compute; `hidden`, while a unit computes; `exposed`, while none does."""
    title: str


@dataclass(frozen=True)
class Row:
    """A lane's bars, by their begin."""

    lane: str
    bars: tuple[Bar, ...]


def rows(step: KeptStep) -> tuple[Row, ...]:
    """Return a row for each lane that worked, compute first. Where compute's own thread did everything, the trace has
    one lane, and of that all but the passes of units is exposed.
    """
    lanes = {piece.lane for piece in step.pieces}
    gaps = _gaps([piece for piece in step.pieces if piece.lane == COMPUTE], step.seconds)
    order = [*(lane for lane in _LANES if lane in lanes), *sorted(lanes - set(_LANES))]
    return tuple(Row(lane, _bars([p for p in step.pieces if p.lane == lane], gaps, step.seconds)) for lane in order)


def _gaps(pieces: Sequence[Piece], seconds: float) -> list[tuple[float, float]]:
    """Return when compute did nothing: begin and end of each gap."""
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
    """Join what would be drawn narrower than a pixel with what it touches; return also how many pieces each is."""
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
    """Cut a piece where compute's gaps begin and end."""
    found, now = [], piece.begin
    for begin, end in gaps:
        first, last = max(begin, piece.begin), min(end, piece.end)
        if first < last:
            if now < first:
                found.append((now, first, "hidden"))
            found.append((first, last, "exposed"))
            now = last
    return [*found, (now, piece.end, "hidden")] if now < piece.end else found
