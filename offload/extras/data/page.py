"""HTML page about training data."""

from __future__ import annotations

from pathlib import Path

from offload.extras.data.view import DataView, describe_rows
from offload.extras.tools.reporting.html import fill, write_html


def write_data_page(view: DataView, path: Path) -> None:
    """Write the page atomically. Raises DiskError."""
    write_html(path, fill("data.html.j2", view=view, rows=describe_rows(view)), "--page")
