"""How far the reading of large files has come: a bar on a terminal, a line now and then anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from offload.errors import format_bytes

_LINE_EVERY_S = 10.0


@contextmanager
def byte_progress(what: str, num_bytes: int, stream: TextIO | None = None) -> Iterator[Callable[[int], None]]:
    """Show `what` while within; yield the function to be called with the number of bytes of each piece.

    stream: stderr, if none is given: results are for stdout.
    """
    stream = sys.stderr if stream is None else stream
    with _bar(what, num_bytes, stream) if stream.isatty() else _lines(what, num_bytes, stream) as tell:
        yield tell


@contextmanager
def _bar(what: str, num_bytes: int, stream: TextIO) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    shown = Progress(
        TextColumn("{task.description}"), BarColumn(), *columns, console=Console(file=stream), transient=True
    )
    with shown:
        task = shown.add_task(escape(what), total=num_bytes)
        yield lambda size: shown.advance(task, size)


@contextmanager
def _lines(what: str, num_bytes: int, stream: TextIO) -> Iterator[Callable[[int], None]]:
    done, last = 0, time.monotonic()

    def tell(size: int) -> None:
        nonlocal done, last
        done += size
        if time.monotonic() - last > _LINE_EVERY_S:
            last = time.monotonic()
            print(f"{what}: {format_bytes(done)} of {format_bytes(num_bytes)}", file=stream, flush=True)

    yield tell
