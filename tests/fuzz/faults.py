"""Exceptions and interrupts during engine operations, at a counted place for exact repetition."""

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
    """Raised on purpose, in a model or on a lane."""


class Faults:
    """Counts the possible places of a fault, and raises at the armed place.

    - forward: a module call, including recomputation.
    - backward: a gradient at a module output.
    - lane name: a piece of work on this lane.
    - lines: a package line in the calling thread (SIGINT).
    - time: a clock time (SIGINT). Only this fault can interrupt a wait.
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
        """Count the work on all engine lanes, and fail the armed work."""
        lanes = parts_of(engine).lanes
        for lane in lanes._all:
            lane.submit = self._submitting(lane.name, lane.submit)  # type: ignore[method-assign]

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count all places inside the block."""
        self.counts.clear()
        begin = time.perf_counter()
        with self._traced():
            yield
        self.counts["time"] = int(1e6 * (time.perf_counter() - begin))

    @contextmanager
    def armed(self, where: str, share: float) -> Iterator[None]:
        """Raise inside the block after `share` of the counted places."""
        number, self.counts = int(share * self.counts[where]) + 1, Counter()
        self._armed, self.has_raised = (where, number), False
        try:
            if where == "time":
                with _timer(number / 4e6, self._note):  # the count ran under a slow trace
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
        """Count a place. Return whether the fault is due."""
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
    """Return whether a frame is at the `with` of a lock.

    Python visits this line again before the lock release. A fault there would be unreal: Python checks for signals
    after C calls, not before them.
    """
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return text.startswith("with ") and "lock:" in text


@contextmanager
def _timer(seconds: float, note: Callable[[], None]) -> Iterator[None]:
    """Raise one SIGINT inside the block after `seconds`."""

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
