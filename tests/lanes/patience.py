"""Shared helpers for lane tests, independent of machine speed: a gate blocks unwanted events, and expected events have
`PATIENCE_S`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from offload.lanes.lanes import Lanes
from offload.lanes.timeline import Throttle
from tests.forks import PATIENCE_S

MOMENT_S = 0.05
FOREVER_S = 600


class Opener:
    """Open lanes, and close them all at the end."""

    def __init__(self) -> None:
        self._opened: list[Lanes] = []

    def __call__(self, throttle: dict[str, Throttle] | None = None, seed: int | None = None) -> Lanes:
        self._opened.append(Lanes(overlap=True, throttle=throttle or {}, delay_seed=seed))
        return self._opened[-1]

    def close(self) -> None:
        for lanes in self._opened:
            within(lanes.close)


class Gate:
    """Work that blocks after the start until `open`."""

    def __init__(self) -> None:
        self.begun, self._open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self._open.wait(PATIENCE_S), "nobody opened the gate"

    def wait_begun(self) -> None:
        assert self.begun.wait(PATIENCE_S)

    def open(self) -> None:
        self._open.set()


def start(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Call a function in a new thread. The list receives the result or the exception."""
    result: list[Any] = []

    def call() -> None:
        try:
            result.append(function())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread, result


def within(function: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    """Call a function and fail after `patience_s` seconds if still running."""
    thread, result = start(function)
    thread.join(patience_s)
    assert not thread.is_alive(), "it hangs"
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


def eventually(condition: Callable[[], object], patience_s: float = PATIENCE_S) -> bool:
    end = time.perf_counter() + patience_s
    while not condition() and time.perf_counter() < end:
        time.sleep(0.002)
    return bool(condition())


def fail(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def nothing() -> None:
    pass
