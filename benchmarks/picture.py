"""Draw lines over a logarithmic axis as SVG, in a light and a dark version."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from unittest import mock

from offload.errors import DiskError, errno_text

WIDTH, HEIGHT = 900, 500
_COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#edc948", "#9c755f")
"""Distinguishable on both backgrounds. Further lines are dashed."""
_FONTS = {f"{part}_font_family": "Helvetica, Arial, sans-serif" for part in ("title", "axis_title", "legend", "tick")}
_DARK = {
    "background_color": "#16181d",
    "title_color": "#e6e6e6",
    "axis_title_color": "#b8bcc4",
    "label_color": "#9aa0aa",
    "legend_color": "#d0d3d9",
    "tick_color": "#2b2f38",
    "zero_color": "#4a4f5a",
}
_LIGHT = {"background_color": "#ffffff", "label_color": "#666666"}
Line = Sequence[tuple[float, float]]


def make_folder(path: Path) -> None:
    """Create the folder for a picture. Raises DiskError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_written(path, error) from None


def draw(path: Path, title: str, lines: Mapping[str, Line], x_name: str, y_name: str) -> list[Path]:
    """Write lines with (x, y) points, by name, to PATH.svg and PATH-dark.svg. Returns both paths.

    x must be positive. Ticks double from one to the next. Raises DiskError.
    """
    stem = path.with_suffix("") if path.suffix == ".svg" else path
    make_folder(stem)
    written = []
    for suffix, theme in (("", _LIGHT), ("-dark", _DARK)):
        file = stem.with_name(f"{stem.name}{suffix}.svg")
        with mock.patch.multiple("leather.theme", **_FONTS, **theme):  # leather has one theme for the process
            text = _chart(title, lines, x_name, y_name)
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            with suppress(OSError):
                file.unlink(missing_ok=True)
            raise _not_written(file, error) from None
        written.append(file)
    return written


def _not_written(path: Path, error: OSError) -> DiskError:
    code = error.errno or 0
    return DiskError(f"{path} cannot be written: {errno_text(code)}; set --picture to another file.", code, path)


def _chart(title: str, lines: Mapping[str, Line], x_name: str, y_name: str) -> str:
    import leather

    chart = leather.Chart(title)
    xs = sorted({x for line in lines.values() for x, _ in line})
    most = max((y for line in lines.values() for _, y in line), default=1.0) or 1.0
    for number, (name, line) in enumerate(lines.items()):
        points = sorted((math.log2(x), y) for x, y in line)
        color = _COLORS[number % len(_COLORS)]
        dashes = "6,4" if number >= len(_COLORS) else "none"
        if len(points) > 1:
            chart.add_line(points, name=name, stroke_color=color, width=2, stroke_dasharray=dashes)
        else:
            chart.add_dots(points, name=name, fill_color=color)
    low, high = math.floor(math.log2(xs[0])), math.ceil(math.log2(xs[-1]))
    chart.add_x_scale(low, max(high, low + 1))
    chart.add_y_scale(0, most * 1.1)
    ticks = list(range(low, max(high, low + 1) + 1))
    chart.add_x_axis(ticks=ticks, tick_formatter=lambda value, *_: _short(2.0 ** float(value)), name=x_name)
    chart.add_y_axis(tick_formatter=lambda value, *_: _short(float(value)), name=y_name)
    return str(chart.to_svg(width=WIDTH, height=HEIGHT))


def _short(value: float) -> str:
    """Return a number as axis label."""
    for size, unit in ((1 << 20, "Mi"), (1 << 10, "Ki")):
        if value >= size and value % size == 0:
            return f"{value / size:g}{unit}"
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"
