"""Show progress while reading large files: a bar on a terminal, otherwise occasional lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TextIO

from offload.errors import format_bytes

_LINE_EVERY_S = 10.0


def byte_progress(label: str, num_bytes: int) -> AbstractContextManager[Callable[[int], None]]:
    """Show progress on stderr in this context. Yields a function to call with the byte count for each piece."""
    show = _bar if sys.stderr.isatty() else _lines
    return show(label, num_bytes, sys.stderr)


@contextmanager
def _bar(label: str, num_bytes: int, stream: TextIO) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), *columns, console=Console(file=stream), transient=True
    )
    with progress:
        task = progress.add_task(escape(label), total=num_bytes)
        yield lambda size: progress.advance(task, size)


@contextmanager
def _lines(label: str, num_bytes: int, stream: TextIO) -> Iterator[Callable[[int], None]]:
    done, last = 0, time.monotonic()

    def report(size: int) -> None:
        nonlocal done, last
        done += size
        if time.monotonic() - last > _LINE_EVERY_S:
            last = time.monotonic()
            print(f"{label}: {format_bytes(done)} of {format_bytes(num_bytes)}", file=stream, flush=True)

    yield report
