"""What the tests of lanes share. Nothing here expects a time closer than this machine keeps it: what must not happen is
held up by a gate, and what must happen has `PATIENCE_S`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from offload.lanes.lanes import Lanes
from offload.lanes.throttle import Throttle
from tests.forks import PATIENCE_S

MOMENT_S = 0.05
FOREVER_S = 600


class Opener:
    """Opens lanes, and closes them all."""

    def __init__(self) -> None:
        self._opened: list[Lanes] = []

    def __call__(self, throttle: dict[str, Throttle] | None = None, seed: int | None = None) -> Lanes:
        self._opened.append(Lanes(overlap=True, throttle=throttle or {}, delay_seed=seed))
        return self._opened[-1]

    def close(self) -> None:
        for lanes in self._opened:
            within(lanes.close)


class Gate:
    """Work that stays begun until it is let go."""

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
    """Call a function in a thread of its own; its result or its error comes into the list."""
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
    """Call a function, which has to be done soon: what hangs fails instead."""
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
