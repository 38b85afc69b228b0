"""A lane: an ordered queue of work with a thread of its own, or none, where work is done as it is given.

Work of one lane is done in the order in which it was submitted, each piece after the tickets it names; a lane that
overtakes keeps to the tickets alone. All lanes of an engine share one lock, and each has a bell of its own, by which a
ticket, a cancellation or the end wakes its thread.
"""

from __future__ import annotations

import atexit
import math
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from offload.lanes.throttle import Throttle
from offload.lanes.ticket import CancelledError, Ticket
from offload.lanes.waiting import Bell, Countdown, wait_until_done
from offload.telemetry.timeline import Timeline

_LONGEST_DELAY_S = 0.004
Run = Callable[[], object]
Tickets = Sequence[Ticket]


class Lane:
    """What the engine asks of a lane; of one without a thread all is done as soon as it is submitted."""

    name: str
    error: BaseException | None = None
    """The first failure, until what failed is cancelled."""
    position: int = 0
    """How many pieces of work were submitted so far."""

    def submit(
        self,
        work: Run,
        *,
        reads: Tickets = (),
        fills: Tickets = (),
        name: str = "",
        num_bytes: int = 0,
    ) -> Ticket:
        """Queue `work`, which moves `num_bytes`. It begins when the tickets of `reads` are done, and fails if one of
        them failed; those of `fills` only have to be over (they used a buffer that this will fill).
        """
        return self._submit(work, reads, fills, name, num_bytes)

    def _submit(self, work: Run, reads: Tickets, fills: Tickets, name: str, num_bytes: int) -> Ticket:
        raise NotImplementedError

    def forget_failure(self) -> None:
        """What failed was made good."""
        self.error = None

    def revoke(self, since: int = 0) -> None:
        """Give up as `cancel` does, and return at once."""

    def cancel(self, since: int = 0) -> None:
        """Give up what was submitted after position `since` and has not begun, and do not sleep any more for what
        has; an error of it is forgotten. Returns when none of it is being done any more (on a GPU: put into its
        stream).
        """

    def finish(self) -> None:
        """Wait until all is done, or has failed."""

    def drain(self) -> None:
        """Wait until all is done; raise the first error of the lane."""

    def abandon(self) -> None:
        """Give everything up without waiting for what has begun; the thread ends then. Takes no lock."""

    def close(self) -> None:
        """End the lane's thread, after the work that it has begun."""


class InlineLane(Lane):
    """Does work where and when it is submitted, and raises its errors there. What it takes is exposed. `wait` is for
    tickets of lanes that have threads.
    """

    def __init__(self, name: str, timeline: Timeline, wait: Callable[[Tickets, Tickets], None]) -> None:
        self.name, self._timeline, self._wait = name, timeline, wait

    def _submit(self, work: Run, reads: Tickets, fills: Tickets, name: str, num_bytes: int) -> Ticket:  # noqa: ARG002
        self.position += 1
        self._wait(reads, fills)
        begin = time.perf_counter()
        work()
        end = time.perf_counter()
        self._timeline.add(self.name, name, begin, end)
        self._timeline.expose(self.name, end - begin)
        return Ticket(self.name, begin, end, is_done=True)


@dataclass(eq=False)
class Work:
    """One piece in a lane's queue."""

    run: Run
    """Does the work; on a lane with a stream, puts the work into the stream."""
    reads: Tickets
    """The tickets that must be done first; an error of one of them is this work's error too."""
    fills: Tickets
    """The tickets that must be over first, whether they failed or not: their work used the memory that is filled now.
    """
    name: str
    """The name that the timeline and error messages show."""
    num_bytes: int
    """The bytes that the work moves, by which a throttled link counts its seconds."""
    ticket: Ticket
    """The ticket that the submitter got."""
    waits: Countdown
    """How many of `reads` and `fills` are not done yet."""
    submitted: float
    """When the work was submitted, in seconds of `time.perf_counter`."""
    has_begun: bool = False
    """True once the lane's thread has taken the work up."""
    is_cancelled: bool = False
    """True once the work was given up with its step."""


def _given_up(work: Work) -> CancelledError:
    return CancelledError(f"{work.name} was given up with its step")


_serving: set[weakref.ref[ThreadLane]] = set()
_END_S = 10.0


@atexit.register
def _end_all() -> None:
    """End all threads before Python does: one that comes back from C++ afterwards would abort the process."""
    lanes = [lane for lane in [serving() for serving in list(_serving)] if lane is not None]
    for lane in lanes:
        lane.abandon()
    for lane in lanes:
        lane.join(_END_S)


class ThreadLane(Lane):
    """A queue and a thread, over a link. `delays` adds random waits, by which a missing wait elsewhere is found out.

    With `overtakes` work that may begin does not stay behind work that may not yet: the lane has no order then but that
    of the tickets.

    The time of throttled work is counted from the moment at which it could have begun, so that a thread that wakes up
    late does not make the link slower than it is.
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
        """`enter` is called by the thread before its first piece, which fails with it: it chooses the thread's GPU.
        `abort` is called by the thread when work failed, or could not begin as what it comes after had failed.
        """
        self.name, self._overtakes, self._enter = name, overtakes, enter
        self._lock, self._link, self._delays = lock, link, delays
        self._queue: deque[Work] = deque()
        self._bell = Bell()
        self._is_idle = False  # the thread waits for work, or is about to
        self._is_closed = False
        self._abort = abort
        self._failed_at = 0  # the position of what the error is of
        self._thread: threading.Thread | None = None  # started by the first piece of work

    def _submit(self, work: Run, reads: Tickets, fills: Tickets, name: str, num_bytes: int) -> Ticket:
        ticket = self._ticket()
        with self._lock:
            assert not self._is_closed, f"the lane {self.name} is closed"
            self.position += 1
            ticket.position = self.position
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=f"offload {self.name}", daemon=True)
                _serving.add(weakref.ref(self, _serving.discard))
                self._thread.start()
            waits = Countdown((*reads, *fills), self._wake)
            self._queue.append(Work(work, reads, fills, name, num_bytes, ticket, waits, time.perf_counter()))
            self._wake()
        return ticket

    def revoke(self, since: int = 0) -> None:
        with self._lock:
            for work in self._queue:
                if work.ticket.position > since:
                    work.is_cancelled = True
                    if not work.has_begun:  # a fence may be asked at once, before the thread has come to it
                        work.ticket.error = _given_up(work)
        self._bell.ring()  # it may sleep, or wait for work that is given up

    def cancel(self, since: int = 0) -> None:
        self.revoke(since)
        with self._lock:
            begun = [work.ticket for work in self._queue if work.has_begun and work.ticket.position > since]
        wait_until_done(self._lock, begun)
        if self._failed_at > since:
            self.error, self._failed_at = None, 0

    def finish(self) -> None:
        while self._queue:
            with self._lock:
                tickets = [work.ticket for work in self._queue]
            wait_until_done(self._lock, tickets)

    def drain(self) -> None:
        self.finish()
        if self.error is not None:
            raise self.error

    def abandon(self) -> None:
        # No lock: a finalizer may call this, also in a thread that holds the lock. The thread does the rest.
        self._is_closed = True
        self._bell.ring()  # after the flag: who hears it sees it

    def close(self) -> None:
        self.abandon()
        self.join()

    def join(self, patience_s: float | None = None) -> None:
        """Wait for the end of the thread of a lane that was abandoned."""
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(patience_s)

    def _wake(self) -> None:
        """Let the thread take what it waited for, if there is something now. Under the lock."""
        if self._is_idle and self._next() is not None:
            self._is_idle = False
            self._bell.ring()

    # -- the thread ------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (work := self._take()) is not None:
            error = self._do(work)
            if error is not None and self._abort is not None and not isinstance(error, CancelledError):
                self._abort(error)
            with self._lock:
                self._queue.remove(work)
                if error is not None and self.error is None and not isinstance(error, CancelledError):
                    self.error, self._failed_at = error, work.ticket.position
                work.ticket.finish(error)
            del work, error  # what the work refers to must not live until the next piece comes

    def _take(self) -> Work | None:
        """Wait for a piece of work, and for all that it comes after; None at the end."""
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
            self._bell.wait()  # whatever has changed since the lock was let go has rung

    def _next(self) -> Work | None:
        """Return the first piece in the queue, or with `overtakes` in any place of it, that may begin."""
        for work in self._queue:
            if not work.waits.left or self._is_given_up(work):
                return work
            if not self._overtakes:
                break
        return None

    def _is_given_up(self, work: Work) -> bool:
        return work.is_cancelled or self._is_closed

    def _do(self, work: Work) -> BaseException | None:
        if not work.has_begun:
            return _given_up(work)
        for ticket in work.reads:
            if ticket.error is not None:
                return ticket.error
        try:
            if self._enter is not None:
                self._enter()
                self._enter = None
            tickets = (*work.reads, *work.fills)
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
        """Do the work, or put it into a GPU's stream."""
        work.run()

    def _order(self, event: Any) -> None:
        """Make what this lane does next come after an event of a GPU's stream."""
        event.synchronize()

    def _run(self, work: Work, ordered: float) -> None:
        """Do the work in its time on the link; sleep until that is over, or it is given up. `ordered`: when it had
        waited for a GPU's stream, whose tickets end on the host before they do.
        """
        ticket, link = work.ticket, self._link
        last = max((*work.reads, *work.fills), key=attrgetter("end"), default=None)
        ready = max(work.submitted, ordered, last.end if last is not None else 0.0)
        with self._lock:
            if last is not None and last.end == ready > link.free_at:
                ticket.wait_for(last)
            link.begin(ticket, ready, work.num_bytes)
        end = math.inf
        try:
            self._start(work)
            end = max(ticket.end, time.perf_counter())
            while not self._is_given_up(work) and (left := end - time.perf_counter()) > 0:
                self._bell.wait(left)
        finally:
            with self._lock:
                link.end(ticket, work.name, min(end, time.perf_counter()))


class Link:
    """A clock, and a row of the timeline. Everything here is called under the lock of the lanes.

    A throttled link does one thing at a time: work that begins takes the time after all that was taken before, and its
    lane sleeps until that is over. Without a throttle the work of several lanes may really go on at once. On the
    timeline nothing overlaps either way, and the link is busy while any of it goes on: the time that several share is
    shown for the one that ends first.
    """

    def __init__(self, name: str, timeline: Timeline, throttle: Throttle | None = None) -> None:
        self.name, self.throttle, self._timeline = name, throttle, timeline
        self._under_way: list[Ticket] = []
        self._shown_until = self._over_until = 0.0
        self.free_at = 0.0

    def begin(self, ticket: Ticket, ready: float, num_bytes: int) -> None:
        """Give work its time: from now on, or on a throttled link from when it was `ready` and the link is free."""
        if self.throttle is None:
            ticket.last(now := time.perf_counter(), now)
        else:
            begin = max(ready, self.free_at)
            ticket.last(begin, begin + self.throttle.seconds(num_bytes))
        self._under_way.append(ticket)
        self.free_at = max(self.free_at, ticket.end)

    def end(self, ticket: Ticket, name: str, end: float) -> None:
        """The work is over: earlier than its time was where it was given up, later where it really took longer."""
        begin = max(self._shown_until, min(map(attrgetter("begin"), self._under_way)))
        self._under_way.remove(ticket)
        ticket.last(min(ticket.begin, end), end)
        self._over_until = max(self._over_until, end)  # one that began later may have ended before
        self.free_at = max([self._over_until, *map(attrgetter("end"), self._under_way)])
        if ticket.event is None and begin <= end:  # what is in a GPU's stream, its events show
            self._timeline.add(self.name, name, begin, end)
            self._shown_until = end
