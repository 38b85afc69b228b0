"""How threads wait for tickets: one that is done wakes those who wait for it, and nobody else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress

from offload.interrupts import interrupts
from offload.lanes.ticket import Ticket


class Bell:
    """Wakes one thread. A ring is kept until it is heard, so it may come before the thread waits.

    To ring is one call into C and needs no lock: a finalizer may do it wherever it interrupts, between the look at what
    there is to do and the wait as well. (A Condition would lose that ring, and a thread that holds its lock is where a
    finalizer may run.)
    """

    __slots__ = ("_silence",)

    def __init__(self) -> None:
        self._silence = threading.Lock()
        self._silence.acquire()

    def ring(self) -> None:
        """Wake the thread, now or when it comes to wait."""
        with suppress(RuntimeError):  # it rings already
            self._silence.release()

    def wait(self, timeout_s: float = -1) -> None:
        """Wait for a ring, which may be one of long ago: look again at what was waited for."""
        self._silence.acquire(timeout=timeout_s)


class Countdown:
    """Calls `then` when the last of some tickets is done; `left` are not. All of it under the lanes' lock."""

    __slots__ = ("_then", "left")

    def __init__(self, tickets: Iterable[Ticket], then: Callable[[], None]) -> None:
        self._then, self.left = then, 0
        for ticket in tickets:
            if not ticket.is_done:
                ticket.watchers.append(self.tick)
                self.left += 1

    def tick(self) -> None:
        """One of them is done."""
        self.left -= 1
        if not self.left:
            self._then()


def wait_until_done(lock: AbstractContextManager[object], tickets: Sequence[Ticket]) -> None:
    """Block until all of them are done, or an interrupt comes. `lock`: of the lanes that they belong to."""
    for ticket in tickets:
        if not ticket.is_done:
            break
    else:
        return
    bell = Bell()
    with lock:
        countdown = Countdown(tickets, bell.ring)
    with interrupts.waking(bell.ring):
        while countdown.left:
            bell.wait()
            interrupts.look()
