"""Passes that run side by side, each in a thread of its own, of which one runs at a time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Generic, TypeVar

_T = TypeVar("_T")


class _GivenUpError(BaseException):
    """Raised in a branch whose neighbour has failed. No `except Exception` of a model's takes it for its own."""


class _Branch:
    """A function that a thread is to run, once, however often it is given to one."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function
        self.has_ended = False
        self._wakes: SimpleQueue[None] = SimpleQueue()

    def run(self) -> None:
        function, self._function = self._function, None
        if function is None:
            return
        try:
            function()
        finally:
            self.has_ended = True
            self._wakes.put(None)

    def join(self) -> None:
        while not self.has_ended:
            self._wakes.get()


class _Thread:
    """A thread that runs one branch after the other. It holds none in between, nor who gives them."""

    def __init__(self, name: str) -> None:
        self._given: SimpleQueue[_Branch | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, args=(self._given,), name=name, daemon=True)
        weakref.finalize(self, self._given.put, None)
        try:
            self._thread.start()
        except BaseException:  # an interrupt: it may have started
            self._given.put(None)
            raise

    @staticmethod
    def _serve(given: SimpleQueue[_Branch | None]) -> None:
        while (branch := given.get()) is not None:
            branch.run()
            del branch

    def give(self, branch: _Branch) -> None:
        self._given.put(branch)

    def close(self) -> None:
        self._given.put(None)
        self._thread.join()


class Lockstep(Generic[_T]):
    """Runs functions by turns: each goes on until it calls `turn`, or ends, and then the next one does, round and
    round. So their order is always the same, and each may look like ordinary code that calls into the other.

    The first one is run by the thread that calls. The threads of the others stay until `close`: libraries of matrix
    products have memory for each thread, which is as long in coming as a small step. `switched(leaves, comes)` is
    called at every change, by the thread that gives up its turn.
    """

    def __init__(self, switched: Callable[[int, int], None]) -> None:
        self._switched = switched
        self.current = 0
        # An interrupt may come between any two lines. So `current` alone says whose turn it is, in one assignment, and
        # a wake only has a waiting thread look at it: it may come twice.
        self._wakes: list[SimpleQueue[None]] = []
        self._threads: list[_Thread] = []
        self._alive: list[int] = []
        self._results: dict[int, _T] = {}
        self._error: BaseException | None = None

    def run(self, functions: Sequence[Callable[[], _T]]) -> list[_T]:
        """Return the results of all functions. What one of them raises ends the others, one by one, at their turns."""
        self.current, self._error, self._results = 0, None, {}
        self._wakes = [SimpleQueue() for _ in functions]
        self._alive = list(range(len(functions)))
        branches = [_Branch(partial(self._begin, number, each)) for number, each in enumerate(functions[1:], 1)]
        try:
            self._give(branches)
            self._run(0, functions[0])
        except BaseException as error:  # an interrupt, here
            self._error = self._error or error
        while not all(branch.has_ended for branch in branches):
            try:
                self._leave(0)
                self._give(branches)  # again: after an interrupt nobody knows which of them were
                for branch in branches:
                    branch.join()
            except BaseException as error:  # an interrupt: none is left behind, to meet those of the next run
                self._error = self._error or error
        failure, self._error = self._error, None
        if failure is not None:
            raise failure
        return [self._results[number] for number in range(len(functions))]

    def close(self) -> None:
        """End the threads. Nothing is run."""
        while self._threads:
            self._threads.pop().close()

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

    def _give(self, branches: Sequence[_Branch]) -> None:
        while len(self._threads) < len(branches):
            self._threads.append(_Thread(f"pass {len(self._threads) + 1}"))
        for thread, branch in zip(self._threads, branches, strict=False):
            thread.give(branch)

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
