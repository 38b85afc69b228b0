"""Work beside compute: tickets and waits for them, the interface of a lane, and fences.

A lane is an ordered work queue. It runs work in submission order, each piece after the tickets named with it. A lane
with `overtakes` obeys the tickets only. All lanes in an engine share one lock. Each lane has a bell: a finished ticket,
a cancellation or the shutdown rings the bell to wake the lane thread.

A fence is the race rule for a buffer: no read before the fill is done, no fill before the reads are done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

from offload.interrupts import interrupts

_MANY = 16
"""Number of readers of a fence above which finished ones are dropped."""


class CancelledError(Exception):
    """Raised for work cancelled before the start, together with the step."""


class Ticket:
    """Handle of one work item. `begin` and `end` are `time.perf_counter` seconds.

    `is_done` is set when the work is done; for GPU stream work, when the work is in the stream, and then `event` fires
    at the end. `position` counts all work in the lane. `lane` is the displayed lane name (the link name); `delayed_by`
    names the lane with the work that delayed this ticket. `watchers` are called when the work is done. `pool` receives
    the event for reuse.
    """

    __slots__ = ("begin", "delayed_by", "end", "error", "event", "is_done", "lane", "pool", "position", "watchers")

    def __init__(
        self,
        lane: str,
        begin: float = 0.0,
        end: float = 0.0,
        is_done: bool = False,
        event: Any = None,
        pool: Any = None,
    ) -> None:
        self.lane = lane
        self.delayed_by = lane
        self.position = 0
        # Times on the host.
        self.begin = begin
        self.end = end
        # Completion: on the host, and in a GPU stream.
        self.is_done = is_done
        self.event = event
        self.pool = pool
        self.error: BaseException | None = None
        self.watchers: list[Callable[[], None]] = []

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the work as done or failed, and wake the waiting threads. Call under the lock of the lanes."""
        self.error = error
        self.is_done = True  # after the error, because readers take no lock
        watchers, self.watchers = self.watchers, []
        for watcher in watchers:
            watcher()

    def synchronize(self) -> None:
        """Block until the work is over, on the device too. The ticket must be done."""
        if self.event is not None:
            self.event.synchronize()

    @property
    def is_over(self) -> bool:
        """True when no part of the work is left, on the device too."""
        return self.is_done and (self.event is None or bool(self.event.query()))


Run = Callable[[], object]
Tickets = Sequence[Ticket]


class Lane:
    """Interface between the engine and a lane."""

    name: str
    error: BaseException | None = None
    """First failure, kept until the failed work is cancelled or the lanes forget failures."""
    position: int = 0
    """Number of submissions so far."""

    def submit(
        self, work: Run, *, reads: Tickets = (), users: Tickets = (), name: str = "", num_bytes: int = 0
    ) -> Ticket:
        """Queue `work`, a transfer of `num_bytes`. Work starts when all `reads` tickets are done, and fails with any
        error among them. `users`: tickets of earlier users of the memory to overwrite; they must be over, failed or
        not.
        """
        raise NotImplementedError

    def revoke(self, since: int = 0) -> None:
        """Cancel like `cancel`, but return at once."""

    def cancel(self, since: int = 0) -> None:
        """Cancel the work submitted after position `since`: drop pieces not yet begun, stop the throttle sleep of begun
        pieces, and forget their error. Returns when no such piece runs any more (on a GPU: when all are in the stream).
        """

    def finish(self) -> None:
        """Wait until all work is done or failed."""

    def drain(self) -> None:
        """Wait until all work is done, then raise the first lane error."""

    def abandon(self) -> None:
        """Cancel all work without waiting for begun pieces. The thread then ends. Takes no lock."""

    def close(self) -> None:
        """End the lane thread after the work in progress."""


class Fence:
    """Race rule for one buffer: a read waits for the last fill, and a fill waits for all readers.

    `buffer_type` names the buffer. Tests disable all waits of one type and must detect the race.
    """

    __slots__ = ("_filled", "_readers", "buffer_type")

    def __init__(self, buffer_type: str) -> None:
        self.buffer_type = buffer_type
        self._filled: Sequence[Ticket] = ()
        self._readers: list[Ticket] = []

    def before_read(self) -> Sequence[Ticket]:
        """Return the tickets to wait for before a read."""
        return self._filled

    def before_fill(self) -> Sequence[Ticket]:
        """Return the tickets to wait for before a fill."""
        return (*self.before_read(), *self._readers)

    def record_reader(self, *tickets: Ticket) -> None:
        """Record readers."""
        if len(self._readers) >= _MANY:  # a buffer without further fills (frozen weights) would collect readers forever
            self._readers = [reader for reader in self._readers if not reader.is_over]
        self._readers += tickets

    def record_writer(self, *tickets: Ticket) -> None:
        """Record the writers of one joint fill. They run after all earlier users."""
        self._filled = tickets
        self._readers.clear()

    @property
    def has_failed(self) -> bool:
        """True if the last fill failed or was cancelled."""
        return any(ticket.error is not None for ticket in self._filled)

    def forgive(self) -> None:
        """Forget failed fills. The caller repairs the buffer content."""
        self._filled = [ticket for ticket in self._filled if ticket.error is None]


class Bell:
    """Wakes one thread. A ring before the wait is kept until the wait.

    A ring is one call into C and needs no lock. A finalizer can ring at any point, also between the check for work and
    the wait. (A Condition would lose the ring, and a finalizer may run in the thread holding the lock of the
    Condition.)
    """

    __slots__ = ("_silence",)

    def __init__(self) -> None:
        self._silence = threading.Lock()
        self._silence.acquire()  # held while nothing has rung

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
        self._then = then
        self.left = 0
        for ticket in tickets:
            if not ticket.is_done:
                ticket.watchers.append(self.tick)
                self.left += 1

    def tick(self) -> None:
        """Count one finished ticket."""
        self.left -= 1
        if not self.left:
            self._then()


def raise_error(tickets: Sequence[Ticket]) -> None:
    """Raise the first error among tickets that are done."""
    for ticket in tickets:
        if ticket.error is not None:
            raise ticket.error


def wait_until_done(lock: AbstractContextManager[object], tickets: Sequence[Ticket]) -> None:
    """Block until all tickets are done or an interrupt comes. `lock`: the lock of the lanes that own the tickets."""
    for ticket in tickets:  # mostly done already: no lock, no bell
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
            interrupts.check()  # a Ctrl-C rings too: a wait is a safe point for the exception
