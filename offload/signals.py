"""Ctrl-C and SIGTERM while a model trains: the first asks for a stop after the step, the second leaves at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class StopSignals:
    """`requested` turns true at the first signal; a second one raises KeyboardInterrupt wherever the program is.

    Signals can only be caught in the main thread; in another one this never turns true.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.requested = False
        self.name = ""
        self._say = say
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self.name = signal.Signals(number).name
        self._say(f"{self.name}: finishing this step, then saving; once more to leave at once.")
