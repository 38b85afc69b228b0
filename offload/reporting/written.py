"""The page as a file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from offload.errors import ConfigError, DiskError, errno_text
from offload.reporting.page import MOST_RUNS, RunView, read_views, render

REPORT = "report.html"
COMPARED = "compare.html"


def write_page(views: Sequence[RunView], out: Path | None = None) -> Path:
    """Write the page, whole or not at all, and return where: `out`, or in the folder of the first run. Raises
    ConfigError, DiskError.
    """
    if len(views) > MOST_RUNS:
        raise ConfigError(f"{len(views)} runs are given, and {MOST_RUNS} can be told apart on one page; give fewer.")
    path = out or views[0].run.path / (REPORT if len(views) == 1 else COMPARED)
    if path.suffix != ".html":  # so that no page replaces what a run has written
        raise ConfigError(f"--out is {path}; name a file that ends in .html.")
    text = render(views)
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        code = error.errno or 0
        raise DiskError(
            f"{path} cannot be written: {errno_text(code)}; set --out to another file.", code, path
        ) from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return path


def report_run(folder: Path, say: Callable[[str], None]) -> None:
    """Write the report of a run that has ended, and say where; a run never fails for it."""
    try:
        say(f"report: {write_page(read_views([folder], is_over=True))}")
    except Exception as error:
        say(f"note: the report could not be written: {type(error).__name__}: {' '.join(str(error).split())}")
