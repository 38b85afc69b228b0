"""Exceptions and interrupts in the middle of what an engine does: at a counted place, so that they come there again."""

from __future__ import annotations

import linecache
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import offload
from offload import Engine
from tests.engine.inside import parts_of

_PACKAGE = str(Path(offload.__file__).parent)


class Told(Exception):
    """Raised on purpose, by a model or on a lane."""


class Faults:
    """Counts the places where a fault can come, and raises at the one that it is told.

    forward: a module of the model is called (by a recompute, too); backward: a gradient passes one; lane: a piece of
    work of a lane; lines: a line of the package, in the thread that calls (a signal); time: a moment by the clock (a
    signal, which alone comes into the middle of a wait).
    """

    def __init__(self, model: nn.Module) -> None:
        self.counts: Counter[str] = Counter()
        self._armed: tuple[str, int] = ("", 0)
        self.has_raised = False
        for module in model.modules():
            if not list(module.children()):
                module.register_forward_pre_hook(self._before)
                module.register_forward_hook(self._after)

    def watch(self, engine: Engine) -> None:
        """Watch the lanes of an engine."""
        lanes = parts_of(engine).lanes
        for lane in lanes._all:
            lane.submit = self._submitting(lane.name, lane.submit)  # type: ignore[method-assign]

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Within, count every place."""
        self.counts.clear()
        begin = time.perf_counter()
        with self._traced():
            yield
        self.counts["time"] = int(1e6 * (time.perf_counter() - begin))

    @contextmanager
    def armed(self, where: str, share: float) -> Iterator[None]:
        """Within, raise once `share` of what was counted has passed."""
        number, self.counts = int(share * self.counts[where]) + 1, Counter()
        self._armed, self.has_raised = (where, number), False
        try:
            if where == "time":
                with _timer(number / 4e6, self._note):  # it was counted under a trace, which takes its time
                    yield
            elif where == "lines":
                with self._traced():
                    yield
            else:
                yield
        finally:
            self._armed = ("", 0)

    def _note(self) -> None:
        self.has_raised = True

    def _at(self, where: str) -> bool:
        """Count a place; True where the fault is to come."""
        self.counts[where] += 1
        here = self._armed == (where, self.counts[where])
        self.has_raised = self.has_raised or here
        return here

    def _before(self, _module: nn.Module, _args: Any) -> None:
        if self._at("forward"):
            raise Told("in a forward")

    def _after(self, _module: nn.Module, _args: Any, out: Any) -> None:
        if isinstance(out, torch.Tensor) and out.requires_grad and self._armed[0] in ("", "backward"):
            out.register_hook(self._passed)

    def _passed(self, _gradient: torch.Tensor) -> None:
        if self._at("backward"):
            raise Told("in a backward")

    def _submitting(self, name: str, submit: Callable[..., Any]) -> Callable[..., Any]:
        def submit_or_fail(work: Callable[[], object], **settings: Any) -> Any:
            def fail() -> None:
                raise Told(f"on the lane {name}")

            return submit(fail if self._at(name) else work, **settings)

        return submit_or_fail

    @contextmanager
    def _traced(self) -> Iterator[None]:
        def line(frame: FrameType, event: str, _argument: Any) -> Any:
            if event == "line" and not is_lock(frame) and self._at("lines"):
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
            return line

        def call(frame: FrameType, _event: str, _argument: Any) -> Any:
            return line if frame.f_code.co_filename.startswith(_PACKAGE) else None

        sys.settrace(call)
        try:
            yield
        finally:
            sys.settrace(None)


def is_lock(frame: FrameType) -> bool:
    """True at the `with` of a lock. It is visited again on the way out, before the lock is let go: no signal comes
    there, since Python looks for signals after calls into C, not before them."""
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return text.startswith("with ") and "lock:" in text


@contextmanager
def _timer(seconds: float, note: Callable[[], None]) -> Iterator[None]:
    """Within, an interrupt comes once after so many seconds."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        note()
        signal.raise_signal(signal.SIGINT)

    assert threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, max(1e-6, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
