"""Console output during a run and other long work: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import itertools
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

from offload.amounts import Measure, Tell, clock, unmeasured
from offload.errors import format_bytes

FIRST_LINE_S = 10.0
"""Seconds from the begin of work to the first line about its amount."""
LINE_S = 30.0
"""Seconds between two lines, about the same work or about steps."""
_BAR = 12  # columns of the progress bar
_LOOK_S = 1.0  # between two looks whether a line is due


class Progress:
    """Receives run events. `make_progress` selects the implementation.

    This base class prints nothing; it is used on all ranks except 0.
    """

    def say(self, text: str) -> None:
        """Print a permanent line."""

    def show_activity(self, text: str, measure: Measure = unmeasured) -> None:
        """Show new work and its amount, until the next work or step."""

    def begin_step(self, number: int, measure: Measure) -> None:
        """Show the amount of a step that takes long."""

    def step(self, fields: Mapping[str, Any], *, num_steps: int | None, eta_s: float | None) -> None:
        """Show a finished step. `fields` is its metrics.jsonl line."""

    def close(self) -> None:
        """Remove the live line."""


def make_progress(log_every: int, stream: TextIO | None = None) -> Progress:
    """Return the live display for a terminal, else plain lines every `log_every` steps."""
    if stream is None:
        stream = sys.stdout
    if stream.isatty():
        return LiveProgress(log_every, stream)
    return PlainProgress(log_every, stream)


def printable(text: str, stream: Any) -> str:
    """Return the text with escapes for characters missing in the stream encoding."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def fitted(text: str, width: int) -> str:
    """Return a text with lines of at most `width` characters, which end between words. A longer word stays whole."""
    lines = [[line] if len(line) <= width else wrapped(line, width) for line in text.splitlines()]
    return "\n".join(itertools.chain.from_iterable(lines))


def wrapped(text: str, width: int) -> list[str]:
    """Return lines of a text that end between words. A word longer than `width` has a line of its own."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def describe(fields: Mapping[str, Any], num_steps: int | None, eta_s: float | None, width: int | None = None) -> str:
    """Return one line about a step, for terminals and files.

    `width`: maximum length, by dropping parts; None: no limit.
    """
    total = ""
    if num_steps is not None:
        total = f"/{num_steps}"
    parts = {
        "step": f"step {fields['step']}{total}",
        "loss": f"loss {fields['loss']:.4f}",
        "lr": f"lr {fields['lr']:.2e}",
    }
    if fields["grad_norm"] is not None:
        parts["grad"] = f"grad {fields['grad_norm']:.3g}"
    if "loss_scale" in fields:
        parts["scale"] = f"scale {fields['loss_scale']:g}"
    if "rewards/accuracies" in fields:
        parts["accuracy"] = f"accuracy {fields['rewards/accuracies']:.2f}"
        parts["margin"] = f"margin {fields['rewards/margins']:.3g}"
    if "accuracy" in fields:
        parts["accuracy"] = f"accuracy {fields['accuracy']:.2f}"
    parts["speed"] = f"{fields['tokens_per_second']:,.0f} tok/s"
    parts["device"] = f"device {format_bytes(fields['peak_device_bytes'])}"
    parts["host"] = f"host {format_bytes(fields['peak_host_bytes'])}"
    if eta_s is not None:
        parts["eta"] = f"eta {clock(eta_s)}"
    for name in ("host", "device", "lr", "scale", "grad", "margin", "speed", "eta"):  # slowly changing parts go first
        if width is None or len("  ".join(parts.values())) <= width:
            break
        parts.pop(name, None)
    return "  ".join(parts.values())


class PlainProgress(Progress):
    """Flushed lines without control characters, for files and pipes.

    Work has lines with its amount after `FIRST_LINE_S`, and then every `LINE_S`; before the first step also one when it
    begins. Steps have a line every `log_every` steps, and every `LINE_S`, also within a step.
    """

    def __init__(self, log_every: int, stream: TextIO, *, names_work: bool = True) -> None:
        """names_work: work before the first step has a line when it begins."""
        self._log_every = log_every
        self._stream = stream
        self._names_work = names_work
        self._began_s = time.monotonic()
        self._last_line_s = self._began_s
        self._has_steps = False
        self._work: _Work | None = None
        # A thread prints the lines: during a long exchange nobody calls this object.
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def say(self, text: str) -> None:
        # One write, because the lines of a thread may come between two.
        print(f"{printable(text, self._stream)}\n", end="", file=self._stream, flush=True)

    def show_activity(self, text: str, measure: Measure = unmeasured) -> None:
        self._begin(text, measure, FIRST_LINE_S)
        if self._names_work and not self._has_steps:
            self.say(f"{text} ... (after {clock(time.monotonic() - self._began_s)})")

    def begin_step(self, number: int, measure: Measure) -> None:
        since_line_s = time.monotonic() - self._last_line_s  # lines about steps count too
        self._begin(f"step {number}", measure, max(0.0, LINE_S - since_line_s))

    def _begin(self, text: str, measure: Measure, line_after_s: float) -> None:
        now = time.monotonic()
        self._work = _Work(text, measure, now, now + line_after_s)
        if self._thread is None:
            # A daemon thread: the process can end without `close`.
            self._thread = threading.Thread(target=self._repeat, name="progress", daemon=True)
            self._thread.start()

    def _repeat(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            self.say_due()

    def say_due(self) -> None:
        """Print a line about the current work if one is due."""
        work, now = self._work, time.monotonic()
        if work is not None and now >= work.next_line_s:
            work.next_line_s = now + LINE_S
            self._last_line_s = now
            amount = work.describe(now)
            self.say(f"{work.text} ... {amount}{' ' * bool(amount)}(after {clock(now - self._began_s)})")

    def step(self, fields: Mapping[str, Any], *, num_steps: int | None, eta_s: float | None) -> None:
        is_first = not self._has_steps
        self._has_steps = True
        self._work = None
        is_due = time.monotonic() - self._last_line_s >= LINE_S
        if is_first or is_due or fields["step"] % self._log_every == 0 or fields["step"] == num_steps:
            self._last_line_s = time.monotonic()
            self.say(describe(fields, num_steps, eta_s))

    def close(self) -> None:
        self._work = None
        self._is_over.set()


class LiveProgress(Progress):
    """A rich line redrawn at every step, with a permanent copy every `log_every` steps.

    Work beside the steps has a bar with its amount.
    """

    def __init__(self, log_every: int, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._log_every = log_every
        self._console = Console(file=stream, highlight=False)
        self._live: Live = Live(
            console=self._console,
            refresh_per_second=8,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # else output for a file would go to the terminal
        )
        self._step_line: Any = None

    def say(self, text: str) -> None:
        text = fitted(printable(text, self._console.file), self._console.width)
        self._console.print(text, markup=False, soft_wrap=True)

    def show_activity(self, text: str, measure: Measure = unmeasured) -> None:
        now = time.monotonic()
        self._show(_WorkLine(_Work(text, measure, now, now), self._step_line))
        # At once: the work may not let the drawing thread run for a while.
        self._live.refresh()

    def begin_step(self, number: int, measure: Measure) -> None:
        now = time.monotonic()
        shown_s = now
        if self._step_line is not None:
            shown_s += FIRST_LINE_S
        self._show(_WorkLine(_Work(f"step {number}", measure, now, shown_s), self._step_line))

    def _show(self, line: Any) -> None:
        if not self._live.is_started:
            self._live.start()
        self._live.update(line)

    def step(self, fields: Mapping[str, Any], *, num_steps: int | None, eta_s: float | None) -> None:
        from rich.progress_bar import ProgressBar

        columns = self._console.width
        text = describe(fields, num_steps, eta_s, columns - _BAR - 1)
        bar = ProgressBar(total=num_steps, completed=fields["step"], pulse=num_steps is None)  # no end is known
        self._step_line = _barred(bar, text)
        self._show(self._step_line)
        if fields["step"] % self._log_every == 0:
            self.say(describe(fields, num_steps, eta_s, columns))

    def close(self) -> None:
        self._live.stop()


@dataclass
class _Work:
    """Work that is shown while it lasts, from `next_line_s` on. Times are `time.monotonic` seconds."""

    text: str
    measure: Measure
    began_s: float
    next_line_s: float

    def describe(self, now: float) -> str:
        return self.measure().describe(now - self.began_s)


class _WorkLine:
    """Work as a line on a terminal, made anew at each redraw: a bar, or a spinner without a total.

    The line of the last step stays above, and is alone before the work shows.
    """

    def __init__(self, work: _Work, step_line: Any) -> None:
        from rich.spinner import Spinner

        self._work = work
        self._step_line = step_line
        self._spinner = Spinner("dots")  # one object for all redraws, or the spinner would not turn

    def __rich__(self) -> Any:
        from rich.console import Group

        now = time.monotonic()
        if self._step_line is None:
            return self._line(now)
        if now >= self._work.next_line_s:
            return Group(self._step_line, self._line(now))
        return self._step_line

    def _line(self, now: float) -> Any:
        from rich.progress_bar import ProgressBar

        # Measured at each redraw: the work itself does not report.
        amount, seconds = self._work.measure(), now - self._work.began_s
        described = amount.describe(seconds) or clock(seconds)
        text = f"{self._work.text}: {described}"
        if not amount.total:
            return _barred(self._spinner, text, columns=1)
        return _barred(ProgressBar(total=amount.total, completed=amount.done), text)


def _barred(bar: Any, text: str, columns: int = _BAR) -> Any:
    """Return a line with a bar, or another sign, and a text."""
    from rich.table import Table
    from rich.text import Text

    line = Table.grid(padding=(0, 1))
    line.add_column(width=columns)
    line.add_column(no_wrap=True, overflow="ellipsis")
    line.add_row(bar, Text(text))
    return line


@contextmanager
def work_progress() -> Iterator[Tell]:
    """Show long work of a command on stderr in this context. Yields a function to call when a stage begins."""
    stream = sys.stderr
    shown = LiveProgress(1, stream) if stream.isatty() else PlainProgress(1, stream, names_work=False)
    try:
        yield shown.show_activity
    finally:
        shown.close()
