"""Ctrl-C while an engine works: Python would raise at any line, between any two of which belong together.

So a signal is noted, and handed to the handler that the program has at the next border: where a unit is entered or
left, where the host waits for a lane or another rank, and where the engine's work ends. A second signal before that
border is handed on at once, and what it raises leaves the engine's states in no known order.

Signals belong to the process and come to its main thread: elsewhere nothing is held, and nothing comes.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_Handler = Callable[[int, FrameType | None], Any]


class Interrupts:
    """Used as a context: within, in the main thread, signals wait for `look`, or for the end. May be nested.

    num_forced: how often a second signal has raised at some line of that work, in this process.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin, as in a child that was forked in the middle of some work."""
        self.num_forced = 0
        self._main = threading.main_thread().ident
        self._depth = self._firmness = 0
        self._came: int | None = None  # the signal that waits
        self._handlers: dict[int, _Handler] = {}
        self._threads: set[int] = set()  # that do the work of the context
        self._wakes: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        if threading.get_ident() != self._main:
            return
        if not self._depth:
            self._threads = {self._main}
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler) and handler != self._on_signal:
                    self._handlers[number] = handler
                    signal.signal(number, self._on_signal)
        self._depth += 1  # last: whatever comes before is handed on at once

    def __exit__(self, *_error: object) -> None:
        if threading.get_ident() != self._main:
            return
        self._depth -= 1
        if not self._depth:
            for number, handler in self._handlers.items():
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, handler)
            self.look()

    def look(self) -> None:
        """This is a border: hand on the signal that came, which mostly raises KeyboardInterrupt. To be called where all
        is in order, or will be when an exception has passed.
        """
        if self._came is not None and not self._firmness and threading.get_ident() in self._threads:
            number, self._came = self._came, None
            self._handlers[number](number, None)

    @contextmanager
    def firm(self) -> Iterator[None]:
        """Within, there is no border: what has begun has to be ended."""
        self._firmness += 1
        try:
            yield
        finally:
            self._firmness -= 1

    @contextmanager
    def waking(self, wake: Callable[[], None]) -> Iterator[None]:
        """Within, this thread waits, and a signal calls `wake`: `look` is to be called then."""
        self._wakes.append(wake)
        try:
            yield
        finally:
            self._wakes.remove(wake)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Within, this thread does a part of the main thread's work, which waits for it."""
        self._threads.add(threading.get_ident())
        try:
            yield
        finally:
            self._threads.discard(threading.get_ident())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        waiting, self._came = self._came, number
        if waiting is None and self._depth:
            for wake in list(self._wakes):
                wake()
            return
        self._came = None
        try:
            for each in (waiting, number):
                if each is not None:
                    self._handlers[each](each, frame)
        except BaseException:
            self.num_forced += self._depth > 0
            raise


interrupts = Interrupts()
"""Those of this process."""
os.register_at_fork(after_in_child=interrupts.reset)
