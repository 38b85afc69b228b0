"""A link: what the work of a lane goes over, alone or with that of others. It is throttled and shown as one."""

from __future__ import annotations

import time
from operator import attrgetter

from offload.lanes.throttle import Throttle
from offload.lanes.ticket import Ticket
from offload.telemetry.timeline import Timeline


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
            ticket.begin = ticket.end = time.perf_counter()
        else:
            ticket.begin = max(ready, self.free_at)
            ticket.end = ticket.begin + self.throttle.seconds(num_bytes)
        self._under_way.append(ticket)
        self.free_at = max(self.free_at, ticket.end)

    def end(self, ticket: Ticket, name: str, end: float) -> None:
        """The work is over: earlier than its time was where it was given up, later where it really took longer."""
        begin = max(self._shown_until, min(map(attrgetter("begin"), self._under_way)))
        self._under_way.remove(ticket)
        ticket.begin, ticket.end = min(ticket.begin, end), end
        self._over_until = max(self._over_until, end)  # one that began later may have ended before
        self.free_at = max([self._over_until, *map(attrgetter("end"), self._under_way)])
        if ticket.event is None and begin <= end:  # what is in a GPU's stream, its events show
            self._timeline.add(self.name, name, begin, end)
            self._shown_until = end
