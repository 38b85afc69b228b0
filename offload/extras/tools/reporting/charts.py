"""Draw curves as inline SVG with leather scales, axes and lines.

Colours and fonts come from the page CSS, so one drawing serves light and dark mode. Coordinates have one decimal to
keep files small.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence

import leather
from leather import Axis, Dots, Line, Series
from leather.scales import Scale

from offload.extras.tools.reporting.run_record import count_text

CurvePoint = tuple[int, float | None]
_WIDTH, _HEIGHT = 330, 180  # about phone width in pixels, so text keeps its size
_TOP, _BOTTOM = 8, 26
_CHAR = 7.7  # label digit width, in drawing units
_MOST_TICKS = 6
_MOST_POINTS = 360  # per curve: one per unit of width
_BEYOND = 1e20  # larger values are omitted: leather decimals have 28 digits


def curves(series: Sequence[Sequence[CurvePoint]], *, with_dots: bool = False) -> str | None:
    """Return an SVG with one curve per run over steps, in the page classes c0, c1, ... None: no run has a point.

    with_dots: mark each point, for the few evaluations.
    """
    drawable = [thin([(step, _drawable(value)) for step, value in points]) for points in series]
    finite_points = [(step, value) for points in drawable for step, value in points if value is not None]
    if not finite_points:
        return None
    steps, values = zip(*finite_points, strict=True)
    x, y = StepAxis(min(steps), max(steps)), ValueAxis(min(values), max(values))
    # An SVG has no layout, so the width of the labels is estimated.
    left = round(_CHAR * max(len(count_text(float(tick))) for tick in y.ticks())) + 10
    right = round(_CHAR * len(f"{max(steps):,}") / 2) + 4  # half the last label extends beyond the plot
    width, height = _WIDTH - left - right, _HEIGHT - _TOP - _BOTTOM

    root = ET.Element("svg", {"viewBox": f"0 0 {_WIDTH} {_HEIGHT}", "role": "img", "class": "curves"})
    plot = ET.SubElement(root, "g", transform=f"translate({left} {_TOP})")
    plot.append(Axis(None, lambda tick, *_rest: f"{tick:,}").to_svg(width, height, x, "bottom"))
    plot.append(Axis(None, lambda tick, *_rest: count_text(float(tick))).to_svg(width, height, y, "left"))
    for index, points in enumerate(drawable):
        if not any(value is not None for _, value in points):
            continue
        # The page gives each class a colour, also in dark mode.
        group = ET.SubElement(plot, "g", {"class": f"c{index}"})
        group.append(Line("currentColor", 1.6).to_svg(width, height, x, y, Series(points), None))
        if with_dots or len(points) == 1:  # a line through one point has no length
            group.append(Dots("currentColor", 2.6).to_svg(width, height, x, y, Series(points), None))
    return ET.tostring(root, encoding="unicode")


def _drawable(value: float | None) -> float | None:
    """Return a value, or None for one too large for the chart."""
    if value is None or abs(value) > _BEYOND:
        return None
    return value


def thin(points: Sequence[CurvePoint]) -> list[CurvePoint]:
    """Reduce the points to about `_MOST_POINTS`.

    Each step group keeps the minimum and the maximum, so no spike is lost. A group without values becomes a gap.
    """
    if len(points) <= _MOST_POINTS:
        return list(points)
    length = -(-2 * len(points) // _MOST_POINTS)  # a group keeps two points
    kept_points: list[CurvePoint] = []
    for begin in range(0, len(points), length):
        finite_points = [(step, value) for step, value in points[begin : begin + length] if value is not None]
        if not finite_points:
            kept_points.append((points[begin][0], None))
            continue
        ends = {min(finite_points, key=lambda point: point[1]), max(finite_points, key=lambda point: point[1])}
        kept_points += sorted(ends)
    return kept_points


class ValueAxis(leather.Linear):
    """Value axis between two ticks."""

    def __init__(self, low: float, high: float) -> None:
        least = 2e-3 * max(abs(low), abs(high)) or 1.0  # keeps four-digit tick labels distinct
        if high - low < least:
            low, high = low - least, high + least
        super().__init__(low, high)

    def project(self, value: float, range_min: float, range_max: float) -> float:
        return round(float(super().project(value, range_min, range_max)), 1)


class StepAxis(Scale):
    """Step axis with ticks at whole steps."""

    def __init__(self, first: int, last: int) -> None:
        self._first = first
        self._last = last

    def contains(self, v: float) -> bool:
        return self._first <= v <= self._last

    def project(self, value: float, range_min: float, range_max: float) -> float:
        share = (float(value) - self._first) / max(1, self._last - self._first)
        return round(range_min + share * (range_max - range_min), 1)

    def ticks(self) -> list[int]:
        if self._first == self._last:
            return [self._first]
        ticks = [int(tick) for tick in leather.Linear(self._first, self._last).ticks() if tick == int(tick)]
        ticks = [tick for tick in ticks if self.contains(tick)]
        return ticks[:: -(-len(ticks) // _MOST_TICKS)] or [self._first, self._last]
