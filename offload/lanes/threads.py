"""Lanes with a thread, and the links that time their work."""

from __future__ import annotations

import atexit
import math
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from offload.lanes.ticket import Bell, CancelledError, Countdown, Lane, Run, Ticket, Tickets, wait_until_done
from offload.lanes.timeline import Throttle, Timeline

_LONGEST_DELAY_S = 0.004
"""Longest random wait before work, for tests of races."""
_serving: set[weakref.ref[ThreadLane]] = set()
"""Lanes with a thread. Weak: a lane leaves with the end of its thread."""
_END_S = 10.0
"""Longest wait for a thread when the interpreter exits."""


@dataclass(eq=False)
class Work:
    """Work item in a lane queue."""

    run: Run
    """Function to run. On a lane with a stream, the function puts the work into the stream."""
    reads: Tickets
    """Tickets to wait for first. If one has an error, this work fails with the same error."""
    users: Tickets
    """Tickets to wait for first, failed or not: their work used the memory filled by this work."""
    name: str
    """Name in the timeline and in error messages."""
    num_bytes: int
    """Number of transferred bytes, from which a throttled link computes the duration."""
    ticket: Ticket
    """Ticket returned to the submitter."""
    waits: Countdown
    """Countdown over the unfinished tickets in `reads` and `users`."""
    submitted: float
    """Submission time, `time.perf_counter` seconds."""
    has_begun: bool = False
    """True after the lane thread has taken the work."""
    is_cancelled: bool = False
    """True after a cancellation together with the step."""

    def release(self) -> None:
        """Free the objects of the function and of the tickets."""
        self.run = _nothing
        self.reads = self.users = ()


def _nothing() -> None:
    """The function of released work."""


def _cancellation(work: Work) -> CancelledError:
    return CancelledError(f"{work.name} was cancelled with its step")


@atexit.register
def _end_all() -> None:
    """End all lane threads before the interpreter exits. A later return from C++ in a thread would abort
    the process.
    """
    lanes = [lane for lane in [serving() for serving in list(_serving)] if lane is not None]
    for lane in lanes:
        lane.abandon()
    for lane in lanes:
        lane.join(_END_S)


class ThreadLane(Lane):
    """Lane with a queue and a thread, over a link. `delays` adds random waits, to reveal a missing wait in tests.

    With `overtakes`, ready work passes waiting work: only the tickets define the order.

    The clock of throttled work starts when the work could have begun, so a late thread wake-up does not slow the link.
    """

    def __init__(
        self,
        name: str,
        lock: threading.Lock,
        link: Link,
        delays: random.Random | None = None,
        overtakes: bool = False,
        enter: Callable[[], object] | None = None,
        abort: Callable[[BaseException], None] | None = None,
    ) -> None:
        """`enter` runs in the thread before the first work item and selects the GPU for this thread. If `enter` fails,
        the item fails too. The thread calls `abort` after failed work, and after work stopped by a failed ticket.
        """
        self.name = name
        self._overtakes = overtakes
        self._link = link
        self._delays = delays

        # Shared with the lane thread.
        self._lock = lock  # of all lanes: a finished ticket may start work on any of them
        self._queue: deque[Work] = deque()
        """Work not yet finished, with the piece in progress: cancellation and `finish` look for both."""
        self._bell = Bell()
        self._is_idle = False  # True while the thread waits for work or is about to wait
        self._is_closed = False

        self._abort = abort
        self._failed_at = 0  # position of the failed work
        self._enter = enter  # None after the first work item
        self._thread: threading.Thread | None = None  # started by the first submission

    def submit(
        self, work: Run, *, reads: Tickets = (), users: Tickets = (), name: str = "", num_bytes: int = 0
    ) -> Ticket:
        ticket = self._ticket()
        with self._lock:
            assert not self._is_closed, f"the lane {self.name} is closed"
            self.position += 1
            ticket.position = self.position
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=f"offload {self.name}", daemon=True)
                _serving.add(weakref.ref(self, _serving.discard))
                self._thread.start()
            waits = Countdown((*reads, *users), self._wake)
            self._queue.append(Work(work, reads, users, name, num_bytes, ticket, waits, time.perf_counter()))
            self._wake()
        return ticket

    def revoke(self, since: int = 0) -> None:
        with self._lock:
            for work in self._queue:
                if work.ticket.position > since:
                    work.is_cancelled = True
                    if not work.has_begun:  # the caller may query a fence at once, before the thread sees the flag
                        work.ticket.error = _cancellation(work)
        self._bell.ring()  # wake the thread from a sleep, or from a wait for cancelled work

    def cancel(self, since: int = 0) -> None:
        self.revoke(since)
        with self._lock:
            running = [work.ticket for work in self._queue if work.has_begun and work.ticket.position > since]
        wait_until_done(self._lock, running)
        if self._failed_at > since:  # an earlier failure belongs to a finished step and stays
            self.error, self._failed_at = None, 0

    def finish(self) -> None:
        while self._queue:  # again for work submitted meanwhile
            with self._lock:
                tickets = [work.ticket for work in self._queue]
            wait_until_done(self._lock, tickets)

    def drain(self) -> None:
        self.finish()
        if self.error is not None:
            raise self.error

    def abandon(self) -> None:
        # No lock: a finalizer may call this in a thread with the lock held. The lane thread does the rest.
        self._is_closed = True
        self._bell.ring()  # after the flag: the woken thread must see the flag

    def close(self) -> None:
        self.abandon()
        self.join()

    def join(self, patience_s: float | None = None) -> None:
        """Wait until the thread of an abandoned lane ends, at most `patience_s` (None: no limit)."""
        # A finalizer may run in the lane thread itself, and a thread cannot join itself.
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(patience_s)

    def _wake(self) -> None:
        """Wake the thread if any work can begin now. Call under the lock."""
        if self._is_idle and self._next() is not None:
            self._is_idle = False
            self._bell.ring()

    # -- lane thread --------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (work := self._take()) is not None:
            error = self._execute(work)
            work.release()  # first: a park that waits for the ticket gives the memory away
            if error is not None and self._abort is not None and not isinstance(error, CancelledError):
                self._abort(error)  # other ranks wait for this exchange
            with self._lock:
                self._queue.remove(work)
                if error is not None and self.error is None and not isinstance(error, CancelledError):
                    self.error, self._failed_at = error, work.ticket.position
                work.ticket.finish(error)
            del error  # free the objects in its traceback now, not when the next work arrives

    def _take(self) -> Work | None:
        """Wait for work and for the tickets before it. Returns None when the lane ends."""
        while True:
            with self._lock:
                self._is_idle = False
                work = self._next()
                if work is not None:
                    work.has_begun = not (work.is_cancelled or self._is_closed)
                    return work
                if self._is_closed and not self._queue:
                    return None
                self._is_idle = True
            self._bell.wait()  # any change since the lock release has rung the bell

    def _next(self) -> Work | None:
        """Return the first work item ready to begin: the queue head, or with `overtakes` any item."""
        for work in self._queue:
            if not work.waits.left or self._is_cancelled(work):  # cancelled work waits for nothing
                return work
            if not self._overtakes:
                break
        return None

    def _is_cancelled(self, work: Work) -> bool:
        return work.is_cancelled or self._is_closed

    def _execute(self, work: Work) -> BaseException | None:
        if not work.has_begun:
            return _cancellation(work)
        for ticket in work.reads:
            if ticket.error is not None:  # the data is missing; the first cause is the error to show
                return ticket.error
        try:
            if self._enter is not None:
                self._enter()
                self._enter = None  # once a thread, but again after a failure
            tickets = (*work.reads, *work.users)
            is_late = self._link.throttle is not None and not all(ticket.is_over for ticket in tickets)
            for ticket in tickets:
                if ticket.event is not None:
                    self._order(ticket.event)
            if self._delays is not None:
                time.sleep(self._delays.random() * _LONGEST_DELAY_S)
            self._run(work, time.perf_counter() if is_late else 0.0)
        except BaseException as error:
            return error
        return None

    def _ticket(self) -> Ticket:
        return Ticket(self._link.name)

    def _start(self, work: Work) -> None:
        """Do the work, or put it into the GPU stream."""
        work.run()

    def _order(self, event: Any) -> None:
        """Order the next work of this lane after an event in a GPU stream."""
        event.synchronize()

    def _run(self, work: Work, ordered: float) -> None:
        """Do the work, then sleep until the throttled duration ends or the work is cancelled.

        `ordered` is the time after the wait for GPU events (0.0: no wait): a stream ticket is done on the host before
        the event fires.
        """
        ticket, link = work.ticket, self._link
        last = max((*work.reads, *work.users), key=attrgetter("end"), default=None)
        ready = max(work.submitted, ordered, last.end if last is not None else 0.0)
        with self._lock:
            if last is not None and last.end == ready > link.free_at:  # not held up by the link or the submission
                ticket.delayed_by = last.lane
            link.begin(ticket, ready, work.num_bytes)
        end = math.inf
        try:
            self._start(work)
            end = max(ticket.end, time.perf_counter())
            while not self._is_cancelled(work) and (left := end - time.perf_counter()) > 0:
                self._bell.wait(left)
        finally:
            with self._lock:
                link.end(ticket, work.name, min(end, time.perf_counter()))


class Link:
    """Clock for one resource, and one timeline row. Call all methods under the lock of the lanes.

    A throttled link does one work item at a time: each gets the time after all earlier ones, and the lane sleeps until
    then. Without a throttle, several lanes may use the link at the same time. Spans on the timeline never overlap:
    shared time belongs to the item that ends first.
    """

    def __init__(self, name: str, timeline: Timeline, throttle: Throttle | None = None) -> None:
        self.name = name
        self.throttle = throttle
        self._timeline = timeline
        self._under_way: list[Ticket] = []
        self._last_shown = 0.0  # end of the last span on the timeline
        self._last_end = 0.0  # end of the last finished work
        self.free_at = 0.0  # when a throttled link can begin the next work

    def begin(self, ticket: Ticket, ready: float, num_bytes: int) -> None:
        """Set the start time of `ticket`: now, or on a throttled link when the work is `ready` and the link is free."""
        if self.throttle is None:
            ticket.begin = ticket.end = time.perf_counter()
        else:
            begin = max(ready, self.free_at)
            ticket.begin = begin
            ticket.end = begin + self.throttle.seconds(num_bytes)
        self._under_way.append(ticket)
        self.free_at = max(self.free_at, ticket.end)

    def end(self, ticket: Ticket, name: str, end: float) -> None:
        """Record the end of work: earlier than planned for cancelled work, later for slow work."""
        begin = max(self._last_shown, min(map(attrgetter("begin"), self._under_way)))
        self._under_way.remove(ticket)
        ticket.begin = min(ticket.begin, end)
        ticket.end = end
        self._last_end = max(self._last_end, end)  # later work may have ended earlier
        self.free_at = max([self._last_end, *map(attrgetter("end"), self._under_way)])
        if ticket.event is None and begin <= end:  # events show GPU stream work
            self._timeline.add(self.name, name, begin, end)
            self._last_shown = end
