"""Passes that run side by side, each in a thread of its own, of which one runs at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Generic, TypeVar

_T = TypeVar("_T")


class _GivenUpError(BaseException):
    """Raised in a branch whose neighbour has failed. No `except Exception` of a model's takes it for its own."""


class Lockstep(Generic[_T]):
    """Runs functions by turns: each goes on until it calls `turn`, or ends, and then the next one does, round and
    round. So their order is always the same, and each may look like ordinary code that calls into the other.

    The first one is run by the thread that calls. `switched(leaves, comes)` is called at every change, by the thread
    that gives up its turn.
    """

    def __init__(self, switched: Callable[[int, int], None]) -> None:
        self._switched = switched
        self.current = 0
        # An interrupt may come between any two lines. So `current` alone says whose turn it is, in one assignment, and
        # a wake only has a waiting thread look at it: it may come twice.
        self._wakes: list[SimpleQueue[None]] = []
        self._alive: list[int] = []
        self._results: dict[int, _T] = {}
        self._error: BaseException | None = None

    def run(self, functions: Sequence[Callable[[], _T]]) -> list[_T]:
        """Return the results of all functions. What one of them raises ends the others, one by one, at their turns."""
        self.current, self._error, self._results = 0, None, {}
        self._wakes = [SimpleQueue() for _ in functions]
        self._alive, others = [0], []
        try:
            for number, function in enumerate(functions[1:], 1):
                self._alive.append(number)
                others.append(
                    threading.Thread(target=self._begin, args=(number, function), name=f"pass {number}", daemon=True)
                )
                others[-1].start()
            self._run(0, functions[0])
            for thread in others:
                thread.join()
        except BaseException as error:  # an interrupt, here
            self._error = self._error or error
            self._leave(0)
            for thread in others:
                if thread.is_alive():  # the last one may have been about to begin: it ends by itself
                    thread.join()
        failure, self._error = self._error, None
        if failure is not None:
            raise failure
        return [self._results[number] for number in range(len(functions))]

    def turn(self) -> None:
        """Let the others run up to their next turn. Called by the function that runs."""
        self._check()
        own, comes = self.current, self._next()
        if comes == own:
            return
        try:
            self._hand_over(own, comes)
            self._wait(own)
        except BaseException as error:  # an interrupt: who has the turn ends first, and those behind it
            self._error = self._error or error
            self._wait(own)
            raise
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise _GivenUpError

    def _next(self) -> int:
        return next((number for number in self._alive if number > self.current), self._alive[0])

    def _hand_over(self, leaves: int, comes: int) -> None:
        if self._error is None:
            self._switched(leaves, comes)
        self.current = comes
        self._wakes[comes].put(None)

    def _wait(self, own: int) -> None:
        self._wakes[self.current].put(None)  # again, where an interrupt came before the first
        while self.current != own:
            self._wakes[own].get()

    def _begin(self, number: int, function: Callable[[], _T]) -> None:
        self._wait(number)
        self._run(number, function)

    def _run(self, number: int, function: Callable[[], _T]) -> None:
        try:
            self._check()
            self._results[number] = function()
        except BaseException as error:
            self._error = self._error or error
        try:
            self._leave(number)
        except BaseException as error:
            self._error = self._error or error
            self._leave(number)

    def _leave(self, number: int) -> None:
        """Give up the turn for good. May be done again, after an interrupt."""
        if self.current == number:
            self._alive = [other for other in self._alive if other != number]
            if self._alive:
                self._hand_over(number, self._next())
        else:
            self._wakes[self.current].put(None)
