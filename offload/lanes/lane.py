"""A lane: an ordered queue of work with a thread of its own, or none, where work is done as it is given.

Work of one lane is done in the order in which it was submitted, each piece after the tickets it names; a lane that
overtakes keeps to the tickets alone. All lanes of an engine share one condition: whoever waits, waits for it, and can
be woken by a ticket, by a cancellation or by the end.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from offload.lanes.throttle import Throttle
from offload.lanes.ticket import CancelledError, Ticket
from offload.telemetry.timeline import Timeline

_LONGEST_DELAY_S = 0.004


class Lane(Protocol):
    """What the engine asks of a lane."""

    name: str
    error: BaseException | None
    """The first failure, until everything is cancelled."""
    position: int
    """How many pieces of work were submitted so far."""

    def submit(
        self,
        work: Callable[[], object],
        *,
        after: Sequence[Ticket] = (),
        behind: Sequence[Ticket] = (),
        name: str = "",
        num_bytes: int = 0,
    ) -> Ticket:
        """Queue `work`, which moves `num_bytes`. It begins when the tickets of `after` are done, and fails if one of
        them failed; those of `behind` only have to be over (they used a buffer that this will fill).
        """

    def cancel(self, since: int = 0) -> None:
        """Give up what was submitted after position `since` and has not begun, and do not sleep any more for what
        has. Returns when none of it is being done any more (on a GPU: put into its stream).
        """

    def drain(self) -> None:
        """Wait until all is done; raise the first error of the lane."""

    def abandon(self) -> None:
        """Give everything up without waiting for what has begun; the thread ends then."""

    def close(self) -> None:
        """End the lane's thread, after the work that it has begun."""


class InlineLane:
    """Does work where and when it is submitted, and raises its errors there. What it takes is exposed, but for what
    compute does itself.
    """

    error: BaseException | None = None

    def __init__(self, name: str, timeline: Timeline) -> None:
        self.name, self._timeline, self.position = name, timeline, 0

    def submit(self, work: Callable[[], object], *, name: str = "", **_rest: object) -> Ticket:
        begin = time.perf_counter()
        self.position += 1
        work()
        end = time.perf_counter()
        self._timeline.add(self.name, name, begin, end)
        if self.name != "compute":
            self._timeline.expose(self.name, end - begin)
        return Ticket(self.name, begin, end, is_done=True)

    def cancel(self, since: int = 0) -> None:
        pass

    def drain(self) -> None:
        pass

    def abandon(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(eq=False)
class Work:
    """One piece in a lane's queue."""

    run: Callable[[], object]
    after: Sequence[Ticket]
    behind: Sequence[Ticket]
    name: str
    num_bytes: int
    ticket: Ticket
    submitted: float
    has_begun: bool = False
    is_cancelled: bool = False


class ThreadLane:
    """A queue and a thread. `throttle` makes it as slow as the link that it plays; `delays` adds random waits, by which
    a missing wait elsewhere is found out.

    With `overtakes` work that may begin does not stay behind work that may not yet: the lane has no order then but that
    of the tickets.

    The time of throttled work is counted from the moment at which it could have begun, so that a thread that wakes up
    late does not make the link slower than it is.
    """

    def __init__(
        self,
        name: str,
        condition: threading.Condition,
        timeline: Timeline,
        throttle: Throttle | None = None,
        delays: random.Random | None = None,
        overtakes: bool = False,
    ) -> None:
        self.name, self.position, self._overtakes = name, 0, overtakes
        self._condition, self._timeline, self._throttle, self._delays = condition, timeline, throttle, delays
        self._queue: deque[Work] = deque()
        self._is_closed = False
        self._free_at = 0.0
        self.error: BaseException | None = None
        self._thread: threading.Thread | None = None  # started by the first piece of work

    def submit(
        self,
        work: Callable[[], object],
        *,
        after: Sequence[Ticket] = (),
        behind: Sequence[Ticket] = (),
        name: str = "",
        num_bytes: int = 0,
    ) -> Ticket:
        ticket = self._ticket()
        with self._condition:
            assert not self._is_closed, f"the lane {self.name} is closed"
            self.position += 1
            ticket.position = self.position
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=f"offload {self.name}", daemon=True)
                self._thread.start()
            self._queue.append(Work(work, after, behind, name, num_bytes, ticket, time.perf_counter()))
            self._condition.notify_all()
        return ticket

    def cancel(self, since: int = 0) -> None:
        with self._condition:
            given_up = [work for work in self._queue if work.ticket.position > since]
            for work in given_up:
                work.is_cancelled = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: not any(work.has_begun and not work.ticket.is_done for work in given_up))
            if not since:
                self.error = None

    def drain(self) -> None:
        with self._condition:
            self._condition.wait_for(lambda: not self._queue)
        if self.error is not None:
            raise self.error

    def abandon(self) -> None:
        with self._condition:
            self._is_closed = True
            for work in self._queue:
                work.is_cancelled = True
            self._condition.notify_all()

    def close(self) -> None:
        self.abandon()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    # -- the thread ------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (work := self._take()) is not None:
            error = self._do(work)
            with self._condition:
                self._queue.remove(work)
                work.ticket.error = error
                work.ticket.is_done = True
                if error is not None and self.error is None and not isinstance(error, CancelledError):
                    self.error = error
                self._condition.notify_all()
            del work, error  # what the work refers to must not live until the next piece comes

    def _take(self) -> Work | None:
        """Wait for a piece of work, and for all that it comes after; None at the end."""
        with self._condition:
            self._condition.wait_for(lambda: self._next() is not None or (self._is_closed and not self._queue))
            work = self._next()
            if work is not None:
                work.has_begun = not work.is_cancelled
            return work

    def _next(self) -> Work | None:
        """Return the first piece in the queue, or with `overtakes` in any place of it, that may begin."""
        for work in self._queue:
            if work.is_cancelled or all(ticket.is_done for ticket in (*work.after, *work.behind)):
                return work
            if not self._overtakes:
                break
        return None

    def _do(self, work: Work) -> BaseException | None:
        if not work.has_begun:
            return CancelledError(f"{work.name} was given up with its step")
        for ticket in work.after:
            if ticket.error is not None:
                return ticket.error
        try:
            for ticket in (*work.after, *work.behind):
                self._order(ticket)
            if self._delays is not None:
                time.sleep(self._delays.random() * _LONGEST_DELAY_S)
            self._run(work)
        except BaseException as error:
            return error
        return None

    def _ticket(self) -> Ticket:
        return Ticket(self.name)

    def _start(self, work: Work) -> None:
        """Do the work, or put it into a GPU's stream."""
        work.run()

    def _order(self, ticket: Ticket) -> None:
        """Make what this lane does next come after a ticket that is done, or in a GPU's stream."""
        if ticket.event is not None:
            ticket.event.synchronize()

    def _run(self, work: Work) -> None:
        """Do the work, fill its ticket, note its span."""
        ticket, begin = work.ticket, time.perf_counter()
        last = max((*work.after, *work.behind), key=lambda t: t.end, default=None)
        ready = max(work.submitted, last.end if last is not None else 0.0)
        if last is not None and last.end == ready > self._free_at:
            ticket.held_by = last.lane
        self._start(work)
        end = time.perf_counter()
        if self._throttle is not None:
            begin = max(ready, self._free_at)
            end = max(end, begin + self._throttle.seconds(work.num_bytes))
            with self._condition:
                while not work.is_cancelled and (left := end - time.perf_counter()) > 0:
                    self._condition.wait(left)
            end = min(end, time.perf_counter())  # given up: the link is free from now on
        ticket.begin, ticket.end, self._free_at = begin, end, end
        if ticket.event is None:
            self._timeline.add(self.name, work.name, begin, end)
