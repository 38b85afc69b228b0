"""Deferred Ctrl-C during engine work. Python can raise at any line, even between two lines with dependent effects.

A signal is therefore recorded, and passed to the program's handler at the next safe point: at unit entry or exit,
during a wait for a lane or another rank, and at the end of engine work. A second signal before a safe point is passed
on at once; the resulting exception leaves the engine states in an undefined order.

Signals reach only the main thread of a process, so other threads neither hold nor receive any.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that stop a run: Ctrl-C, the end asked for, a closed terminal."""
_Handler = Callable[[int, FrameType | None], Any]


def is_wanted(number: int) -> bool:
    """Tell whether a stop signal may get a handler. nohup ignores SIGHUP, and this stays so."""
    return number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN


class Interrupts:
    """Context manager: in the main thread, signals wait for `check` or for the end of the context. Contexts may nest.

    num_forced: number of exceptions raised inside engine work by a second signal, in this process.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset all state, for example in a child forked during engine work."""
        self.num_forced = 0
        self._main = threading.main_thread().ident
        self._depth = 0  # open contexts
        self._firmness = 0  # open contexts without safe points
        self._pending: int | None = None  # the pending signal
        self._handlers: dict[int, _Handler] = {}  # of the program, put back at the end
        self._threads: set[int] = set()  # threads doing work for the context
        self._wakes: list[Callable[[], None]] = []  # of threads that wait: a wait is a safe point

    def __enter__(self) -> None:
        if threading.get_ident() != self._main:
            return
        if not self._depth:
            self._threads = {self._main}
            for number in STOP_SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler) and handler != self._on_signal:
                    self._handlers[number] = handler
                    signal.signal(number, self._on_signal)
        self._depth += 1  # last: an earlier signal is passed on at once

    def __exit__(self, *_error: object) -> None:
        if threading.get_ident() != self._main:
            return
        self._depth -= 1
        if not self._depth:
            for number, handler in self._handlers.items():
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, handler)
            self.check()

    def check(self) -> None:
        """Mark a safe point: pass on a pending signal, which usually raises KeyboardInterrupt.

        Call only with consistent state, or state made consistent by the exception handling.
        """
        if self._pending is not None and not self._firmness and threading.get_ident() in self._threads:
            number, self._pending = self._pending, None  # together: no signal comes between
            self._handlers[number](number, None)

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Context manager without safe points, for work to be finished once started."""
        self._firmness += 1
        try:
            yield
        finally:
            self._firmness -= 1

    @contextmanager
    def wake_on_signal(self, wake: Callable[[], None]) -> Iterator[None]:
        """Context manager for a waiting thread: a signal calls `wake`, and the thread then calls `check`."""
        self._wakes.append(wake)
        try:
            yield
        finally:
            self._wakes.remove(wake)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Context manager for a thread doing part of the main thread's work while the main thread waits."""
        self._threads.add(threading.get_ident())
        try:
            yield
        finally:
            self._threads.discard(threading.get_ident())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        waiting, self._pending = self._pending, number  # together, as in `check`
        if waiting is None and self._depth:
            for wake in list(self._wakes):
                wake()
            return
        self._pending = None
        try:  # a second signal, or one outside the context: passed on at once
            for each in (waiting, number):
                if each is not None:
                    self._handlers[each](each, frame)
        except BaseException:
            self.num_forced += self._depth > 0
            raise


interrupts = Interrupts()
"""The instance for this process."""
os.register_at_fork(after_in_child=interrupts.reset)
