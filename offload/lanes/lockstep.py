"""Passes that run side by side, each in a thread of its own, of which one runs at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from offload.interrupts import interrupts

_T = TypeVar("_T")
_LOOK_S = 0.1
"""How often a thread that waits looks whether its run is over: an interrupt may end that at any line."""


class _GivenUpError(BaseException):
    """Raised in a function whose neighbour has failed. No `except Exception` of a model's takes it for its own."""


class Lockstep(Generic[_T]):
    """Runs functions by turns: each goes on until it calls `turn`, or ends, and then the next one does, round and
    round. So their order is always the same, and each may look like ordinary code that calls into the other.

    The first one is run by the thread that calls. The threads of the others stay until `close`: libraries of matrix
    products have memory for each thread, which is as long in coming as a small step. `switched(leaves, comes)` is
    called at every change, by the thread that gives up its turn.

    Whose turn it is stands in `current`. The queues only wake those who wait for it, so that none waits for a message
    that an interrupt has prevented.
    """

    def __init__(self, switched: Callable[[int, int], None]) -> None:
        self._switched = switched
        self.current = 0
        self._running = threading.Lock()  # held within `run`, and free however that ends
        self._turns: list[SimpleQueue[None]] = []  # where each function waits for its turn
        self._threads: list[ThreadPoolExecutor] = []
        self._alive: list[int] = []
        self._results: dict[int, _T] = {}
        self._error: BaseException | None = None

    def run(self, functions: Sequence[Callable[[], _T]]) -> list[_T]:
        """Return the results of all functions. What one of them raises ends the others, one by one, at their turns."""
        self._wait_for_threads()  # after an interrupt they may be in the run before
        with self._running:
            self.current, self._error, self._results = 0, None, {}
            self._turns = [SimpleQueue() for _ in functions]
            self._alive = list(range(len(functions)))
            while len(self._threads) < len(functions) - 1:
                self._threads.append(ThreadPoolExecutor(1, f"pass {len(self._threads) + 1}"))
            for number, (thread, function) in enumerate(zip(self._threads, functions[1:], strict=False), 1):
                thread.submit(self._wait_and_run, number, function)
            try:
                self._run(0, functions[0])
            finally:
                self._wait_for_threads(0)
        if self._error is not None:
            raise self._error
        return [self._results[number] for number in range(len(functions))]

    def _wait_for_threads(self, *ended: int) -> None:
        """Return when no thread runs a function. `ended`: functions that may get the turn though they are over."""
        idle = [thread.submit(int) for thread in self._threads]
        while wait(idle, _LOOK_S).not_done:
            for number in ended:
                self._leave(number)

    def close(self) -> None:
        """End the threads. Nothing is run."""
        while self._threads:
            self._threads.pop().shutdown()

    def turn(self) -> None:
        """Let the others run up to their next turn. Called by the function that runs."""
        self._check()
        own, comes = self.current, self._next()
        if comes != own:
            self._hand_over(own, comes)
            self._wait_for_turn(own)
            self._check()

    def _check(self) -> None:
        if self._error is not None or not self._running.locked():
            raise _GivenUpError

    def _wait_for_turn(self, number: int) -> None:
        while self.current != number:
            try:
                self._turns[number].get(timeout=_LOOK_S)
            except Empty:
                if not self._running.locked():
                    raise _GivenUpError from None

    def _next(self) -> int:
        return next((number for number in self._alive if number > self.current), self._alive[0])

    def _hand_over(self, leaves: int, comes: int) -> None:
        if self._error is None:
            self._switched(leaves, comes)
        self.current = comes
        self._turns[comes].put(None)

    def _wait_and_run(self, number: int, function: Callable[[], _T]) -> None:
        with interrupts.shared():
            self._wait_for_turn(number)
            self._run(number, function)

    def _run(self, number: int, function: Callable[[], _T]) -> None:
        try:
            self._check()
            self._results[number] = function()
        except BaseException as error:
            self._error = self._error or error
        self._leave(number)

    def _leave(self, number: int) -> None:
        """Give up the turn for good."""
        self._alive = [other for other in self._alive if other != number]
        if self.current == number and self._alive:
            self._hand_over(number, self._next())
