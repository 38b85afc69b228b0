"""Runs several passes in turns, each in its own thread. Only one thread runs at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from offload.interrupts import interrupts

_T = TypeVar("_T")
_LOOK_S = 0.1
"""Seconds between two checks for the end of the run in a waiting thread. An interrupt may end a run at any line."""


class _GivenUpError(BaseException):
    """Raised in the other functions of a lockstep after one has failed, to end them. A BaseException, because
    `except Exception` in model code must not catch this error.
    """


class Lockstep(Generic[_T]):
    """Runs functions in turns: each runs until it calls `turn` or ends, then the next one runs, in a fixed cycle. The
    order is deterministic, and each function is ordinary code.

    The calling thread runs the first function. The other threads live until `close`: BLAS libraries allocate workspace
    for each new thread, and the allocation takes about as long as a small step. `switched(previous, successor)` runs at
    every switch, in the thread of the leaving function.

    `current` is the number of the function with the turn. The queues only wake waiting threads; no thread depends on a
    queue message, because an interrupt may prevent the message.
    """

    def __init__(self, switched: Callable[[int, int], None]) -> None:
        self._switched = switched
        self.current = 0
        self._running = threading.Lock()  # held during `run`, released by any end of `run`
        self._turns: list[SimpleQueue[None]] = []  # one queue per function, to wake the thread
        self._threads: list[ThreadPoolExecutor] = []
        self._alive: list[int] = []
        self._results: dict[int, _T] = {}
        self._error: BaseException | None = None

    def run(self, functions: Sequence[Callable[[], _T]]) -> list[_T]:
        """Run all functions and return their results. An exception in one function ends the other functions at their
        next turn.
        """
        self._wait_for_threads()  # after an interrupt the threads may still run the previous call
        with self._running:
            self.current = 0
            self._error = None
            self._results = {}
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
        results, self._results = self._results, {}  # nothing of a step stays on the device
        return [results[number] for number in range(len(functions))]

    def _wait_for_threads(self, *ended: int) -> None:
        """Wait until no thread runs a function. `ended`: finished functions that may still receive the turn."""
        # A pool of one thread runs work in order, so this call ends after the function before.
        idle = [thread.submit(int) for thread in self._threads]
        while wait(idle, _LOOK_S).not_done:
            for number in ended:
                self._leave(number)

    def close(self) -> None:
        """End the threads. Call while no function runs."""
        while self._threads:
            self._threads.pop().shutdown()

    def turn(self) -> None:
        """Let the other functions run up to their next turn. Call from the running function."""
        self._check()
        current, successor = self.current, self._next()
        if successor != current:
            self._hand_over(current, successor)
            self._wait_for_turn(current)
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

    def _hand_over(self, previous: int, successor: int) -> None:
        if self._error is None:
            self._switched(previous, successor)
        self.current = successor
        self._turns[successor].put(None)

    def _wait_and_run(self, number: int, function: Callable[[], _T]) -> None:
        with interrupts.shared():
            self._wait_for_turn(number)
            self._run(number, function)

    def _run(self, number: int, function: Callable[[], _T]) -> None:
        try:
            self._check()
            self._results[number] = function()
        except BaseException as error:
            # The first one is the cause. The others follow from the end of the run.
            self._error = self._error or error
        self._leave(number)

    def _leave(self, number: int) -> None:
        """Remove a finished function from the cycle and pass the turn on."""
        self._alive = [other for other in self._alive if other != number]
        if self.current == number and self._alive:
            self._hand_over(number, self._next())
