"""Lanes in a time that is only counted: who submits what, and waits for whom, is as in `offload.lanes`. Pure."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from offload.lanes.ticket import Ticket

COMPUTE = "compute"


@dataclass(eq=False)
class _Piece:
    """What waits in a lane: its seconds on the link, and how many tickets are not done that it comes after."""

    number: int
    seconds: float
    ticket: Ticket
    num_left: int = 0
    last: Ticket | None = None


@dataclass(eq=False)
class _Link:
    """A link does one thing at a time, in the order in which its lanes came to it. `busy_s`: since the beginning."""

    name: str
    free_at: float = 0.0
    busy_s: float = 0.0


@dataclass(eq=False)
class _Lane:
    """A queue; one that overtakes takes what may begin before what may not yet, in the order of submission."""

    link: _Link
    overtakes: bool
    queue: deque[_Piece] = field(default_factory=deque)
    ready: list[tuple[int, _Piece]] = field(default_factory=list)
    is_busy: bool = False

    def next(self) -> _Piece | None:
        """Take the next piece that may begin."""
        if self.overtakes:
            return heapq.heappop(self.ready)[1] if self.ready else None
        return self.queue.popleft() if self.queue and not self.queue[0].num_left else None


class VirtualLanes:
    """Lanes by name, each over a link, beside the host, whose `now` (seconds) moves by what it does and waits for.

    `exposed_s`: by link, how long compute had nothing to do for it.
    """

    def __init__(self, links: Mapping[str, str], overtaking: Sequence[str] = ()) -> None:
        """`links`: the link of each lane."""
        self.now = 0.0
        made = {name: _Link(name) for name in dict.fromkeys(links.values())}
        self._lanes = {name: _Lane(made[link], name in overtaking) for name, link in links.items()}
        self._links = made
        self._events: list[tuple[float, int, _Lane, _Piece]] = []
        self._count = 0
        self.exposed_s: dict[str, float] = dict.fromkeys(made, 0.0)

    @property
    def busy_s(self) -> dict[str, float]:
        """Return how long each link was given work so far."""
        return {name: link.busy_s for name, link in self._links.items()}

    def submit(self, lane: str, seconds: float, reads: Sequence[Ticket] = (), fills: Sequence[Ticket] = ()) -> Ticket:
        """Queue work of so many seconds, which begins when all these tickets are done."""
        its, self._count = self._lanes[lane], self._count + 1
        piece = _Piece(self._count, seconds, Ticket(its.link.name))
        for ticket in {*reads, *fills}:
            if not ticket.is_done:
                piece.num_left += 1
                ticket.watchers.append(partial(self._is_done, its, piece, ticket))
        if not its.overtakes:
            its.queue.append(piece)
        elif not piece.num_left:
            heapq.heappush(its.ready, (piece.number, piece))
        self._start(its, self.now)
        return piece.ticket

    def wait(self, tickets: Sequence[Ticket]) -> Ticket | None:
        """Let time pass until all are done; return the last one that was waited for."""
        late = [ticket for ticket in tickets if not ticket.is_done]
        for ticket in late:
            while not ticket.is_done:
                assert self._events, "nothing is under way, and what is waited for is not done"
                self.now = max(self.now, self._events[0][0])
                self._end_next()
        self.spend(0.0)
        return max(late, key=lambda ticket: ticket.end, default=None)

    def spend(self, seconds: float) -> None:
        """Let so much time pass."""
        until = self.now + seconds
        while self._events and self._events[0][0] <= until:
            self._end_next()
        self.now = until

    def expose(self, begin: float, ticket: Ticket | None) -> None:
        """Note that compute has had nothing to do from `begin` to the end of a ticket."""
        if ticket is not None and ticket.end > begin:
            self.exposed_s[ticket.lane] = self.exposed_s.get(ticket.lane, 0.0) + ticket.end - begin

    def _is_done(self, lane: _Lane, piece: _Piece, ticket: Ticket) -> None:
        piece.num_left -= 1
        piece.last = ticket
        if not piece.num_left:
            if lane.overtakes:
                heapq.heappush(lane.ready, (piece.number, piece))
            self._start(lane, ticket.end)

    def _start(self, lane: _Lane, time: float) -> None:
        if lane.is_busy or (piece := lane.next()) is None:
            return
        lane.is_busy, link = True, lane.link
        begin = max(time, link.free_at)
        if link.name == COMPUTE and piece.last is not None and piece.last.end == time:
            self.expose(link.free_at, piece.last)
        piece.ticket.begin, piece.ticket.end = begin, begin + piece.seconds
        link.free_at = piece.ticket.end
        link.busy_s += piece.seconds
        heapq.heappush(self._events, (piece.ticket.end, piece.number, lane, piece))

    def _end_next(self) -> None:
        time, _, lane, piece = heapq.heappop(self._events)
        lane.is_busy = False
        piece.ticket.finish()
        self._start(lane, time)


class Compute(Protocol):
    """How compute runs beside the lanes."""

    busy_s: float
    """Seconds that it computed so far."""

    def compute_after(self, tickets: Sequence[Ticket]) -> None:
        """What compute does next comes after these tickets."""

    def run(self, seconds: float, host_s: float = 0.0) -> None:
        """Compute for so long, which the host takes `host_s` to launch."""

    def mark(self) -> Sequence[Ticket]:
        """Return the tickets of all that compute was given so far."""


class OnHost:
    """Compute is what the host does: on a CPU."""

    def __init__(self, lanes: VirtualLanes) -> None:
        self._lanes, self.busy_s = lanes, 0.0

    def compute_after(self, tickets: Sequence[Ticket]) -> None:
        begin = self._lanes.now
        self._lanes.expose(begin, self._lanes.wait(tickets))

    def run(self, seconds: float, host_s: float = 0.0) -> None:
        self._lanes.spend(seconds + host_s)
        self.busy_s += seconds + host_s

    def mark(self) -> Sequence[Ticket]:
        return ()


class InStream:
    """Compute is a lane of its own, which the host runs ahead of: on an accelerator. It takes as long as its launches
    where these are longer.
    """

    def __init__(self, lanes: VirtualLanes) -> None:
        self._lanes, self.busy_s = lanes, 0.0
        self._after: list[Ticket] = []
        self._last: Sequence[Ticket] = ()

    def compute_after(self, tickets: Sequence[Ticket]) -> None:
        self._after += [ticket for ticket in tickets if not ticket.is_done]

    def run(self, seconds: float, host_s: float = 0.0) -> None:
        self._last = (self._lanes.submit(COMPUTE, max(seconds, host_s), self._after),)
        self._after = []
        self._lanes.spend(host_s)
        self.busy_s += max(seconds, host_s)

    def mark(self) -> Sequence[Ticket]:
        return self._last
