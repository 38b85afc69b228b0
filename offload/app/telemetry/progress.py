"""Console output during a run and during reads of large files: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from offload.errors import format_bytes

ACTIVITY_LINE_S = 60.0
"""Seconds between two lines about the same work before the first step."""
STEP_LINE_S = 30.0
"""Seconds from which a step has a line whatever its number."""
_BAR = 12  # columns of the progress bar


class Progress:
    """Receives run events. `make_progress` selects the implementation.

    This base class prints nothing; it is used on all ranks except 0.
    """

    def say(self, text: str) -> None:
        """Print a permanent line."""

    def show_activity(self, text: str) -> None:
        """Show the work that has begun, up to the first step. Later work is shown by the steps."""

    def step(self, fields: Mapping[str, Any], *, num_steps: int | None, eta_s: float | None) -> None:
        """Show a finished step. `fields` is its metrics.jsonl line."""

    def close(self) -> None:
        """Remove the live line."""


def make_progress(log_every: int, stream: TextIO | None = None) -> Progress:
    """Return the live display for a terminal, else plain lines every `log_every` steps."""
    stream = sys.stdout if stream is None else stream
    return LiveProgress(log_every, stream) if stream.isatty() else PlainProgress(log_every, stream)


def printable(text: str, stream: Any) -> str:
    """Return the text with escapes for characters missing in the stream encoding."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def describe(fields: Mapping[str, Any], num_steps: int | None, eta_s: float | None, width: int | None = None) -> str:
    """Return one line about a step, for terminals and files.

    `width`: maximum length, by dropping parts; None: no limit.
    """
    total = "" if num_steps is None else f"/{num_steps}"
    parts = {
        "step": f"step {fields['step']}{total}",
        "loss": f"loss {fields['loss']:.4f}",
        "lr": f"lr {fields['lr']:.2e}",
    }
    if fields["grad_norm"] is not None:
        parts["grad"] = f"grad {fields['grad_norm']:.3g}"
    if "rewards/accuracies" in fields:
        parts["accuracy"] = f"accuracy {fields['rewards/accuracies']:.2f}"
        parts["margin"] = f"margin {fields['rewards/margins']:.3g}"
    parts["speed"] = f"{fields['tokens_per_second']:,.0f} tok/s"
    parts["device"] = f"device {format_bytes(fields['peak_device_bytes'])}"
    parts["host"] = f"host {format_bytes(fields['peak_host_bytes'])}"
    if eta_s is not None:
        parts["eta"] = f"eta {clock(eta_s)}"
    for name in ("host", "device", "lr", "grad", "margin", "speed", "eta"):  # slowly changing parts go first
        if width is None or len("  ".join(parts.values())) <= width:
            break
        parts.pop(name, None)
    return "  ".join(parts.values())


def clock(seconds: float) -> str:
    """Return m:ss, or h:mm:ss from one hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class PlainProgress(Progress):
    """Flushed lines without control characters, for files and pipes.

    Work before the first step has a line when it begins, and one a minute. Steps have a line every `log_every` steps,
    and every half minute.
    """

    def __init__(self, log_every: int, stream: TextIO) -> None:
        self._log_every = log_every
        self._stream = stream
        self._began_s = self._last_line_s = time.monotonic()
        self._activity = ""
        self._is_over = threading.Event()

    def say(self, text: str) -> None:
        # One write, because the lines of a thread may come between two.
        print(f"{printable(text, self._stream)}\n", end="", file=self._stream, flush=True)

    def show_activity(self, text: str) -> None:
        if self._is_over.is_set():
            return
        is_first, self._activity = not self._activity, text
        self._say_activity()
        if is_first:
            threading.Thread(target=self._repeat_activity, name="progress", daemon=True).start()

    def _say_activity(self) -> None:
        self.say(f"{self._activity} ... (after {clock(time.monotonic() - self._began_s)})")

    def _repeat_activity(self) -> None:
        while not self._is_over.wait(ACTIVITY_LINE_S):
            self._say_activity()

    def step(self, fields: Mapping[str, Any], *, num_steps: int | None, eta_s: float | None) -> None:
        is_first = not self._is_over.is_set()
        self._is_over.set()
        is_due = time.monotonic() - self._last_line_s >= STEP_LINE_S
        if is_first or is_due or fields["step"] % self._log_every == 0 or fields["step"] == num_steps:
            self._last_line_s = time.monotonic()
            self.say(describe(fields, num_steps, eta_s))

    def close(self) -> None:
        self._is_over.set()


class LiveProgress(Progress):
    """A rich line redrawn at every step, with a permanent copy every `log_every` steps."""

    def __init__(self, log_every: int, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._log_every = log_every
        self._console = Console(file=stream, highlight=False)
        self._live: Live = Live(console=self._console, refresh_per_second=8, transient=True)

    def say(self, text: str) -> None:
        self._console.print(printable(text, self._console.file), markup=False, soft_wrap=True)

    def show_activity(self, text: str) -> None:
        from rich.spinner import Spinner

        self._show(Spinner("dots", text))
        self._live.refresh()

    def _show(self, line: Any) -> None:
        if not self._live.is_started:
            self._live.start()
        self._live.update(line)

    def step(self, fields: Mapping[str, Any], *, num_steps: int | None, eta_s: float | None) -> None:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        columns = self._console.width
        text = describe(fields, num_steps, eta_s, columns - _BAR - 1)
        line = Table.grid(padding=(0, 1))
        line.add_column(width=_BAR)
        line.add_column(no_wrap=True, overflow="ellipsis")
        line.add_row(ProgressBar(total=num_steps, completed=fields["step"], pulse=num_steps is None), text)
        self._show(line)
        if fields["step"] % self._log_every == 0:
            self.say(describe(fields, num_steps, eta_s, columns))

    def close(self) -> None:
        self._live.stop()


_LINE_EVERY_S = 10.0


@contextmanager
def byte_progress(label: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show progress on stderr in this context. Yields a function to call with the byte count for each piece."""
    if not sys.stderr.isatty():
        yield _byte_lines(label, num_bytes)
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task(escape(label), total=num_bytes)
        yield lambda size: progress.advance(task, size)


def _byte_lines(label: str, num_bytes: int) -> Callable[[int], None]:
    done, last = 0, time.monotonic()

    def report(size: int) -> None:
        nonlocal done, last
        done += size
        if time.monotonic() - last > _LINE_EVERY_S:
            last = time.monotonic()
            print(f"{label}: {format_bytes(done)} of {format_bytes(num_bytes)}", file=sys.stderr, flush=True)

    return report
