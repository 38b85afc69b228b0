"""Waits for tickets. A finished ticket wakes exactly the threads waiting for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress

from offload.interrupts import interrupts
from offload.lanes.ticket import Ticket


class Bell:
    """Wakes one thread. A ring before the wait is kept until the wait.

    A ring is one call into C and needs no lock. A finalizer can ring at any point, also between the check for work and
    the wait. (A Condition would lose the ring, and a finalizer may run in the thread holding the lock of the
    Condition.)
    """

    __slots__ = ("_silence",)

    def __init__(self) -> None:
        self._silence = threading.Lock()
        self._silence.acquire()

    def ring(self) -> None:
        """Wake the thread, now or at the next wait."""
        with suppress(RuntimeError):  # already ringing
            self._silence.release()

    def wait(self, timeout_s: float = -1) -> None:
        """Wait for a ring. The ring may be an old one: the caller must check the condition again."""
        self._silence.acquire(timeout=timeout_s)


class Countdown:
    """Calls `then` when the last ticket is done. `left` counts the unfinished tickets. Use under the lock
    of the lanes.
    """

    __slots__ = ("_then", "left")

    def __init__(self, tickets: Iterable[Ticket], then: Callable[[], None]) -> None:
        self._then, self.left = then, 0
        for ticket in tickets:
            if not ticket.is_done:
                ticket.watchers.append(self.tick)
                self.left += 1

    def tick(self) -> None:
        """Count one finished ticket."""
        self.left -= 1
        if not self.left:
            self._then()


def wait_until_done(lock: AbstractContextManager[object], tickets: Sequence[Ticket]) -> None:
    """Block until all tickets are done or an interrupt comes. `lock`: the lock of the lanes that own the tickets."""
    for ticket in tickets:
        if not ticket.is_done:
            break
    else:
        return
    bell = Bell()
    with lock:
        countdown = Countdown(tickets, bell.ring)
    with interrupts.wake_on_signal(bell.ring):
        while countdown.left:
            bell.wait()
            interrupts.check()
