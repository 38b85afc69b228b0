"""Simulated lanes with counted time. The engine submits and waits as usual, but no work is done."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from offload.lanes.lanes import LaneRow, Lanes
from offload.lanes.ticket import Lane, Run, Ticket, Tickets
from offload.lanes.timeline import LANES

COMPUTE, DECODING = "compute", "decoding"

Seconds = Callable[[int], float]
"""Maps a number of bytes to a duration on a link, in seconds."""


@dataclass(eq=False)
class _WorkItem:
    """Waiting work item in a simulated lane."""

    number: int
    """Submission order."""
    seconds: float
    """Duration on the link, in seconds."""
    ticket: Ticket
    """Ticket returned to the submitter."""
    num_left: int = 0
    """Number of unfinished tickets before this item."""
    last: Ticket | None = None
    """Last finished ticket among them. None: no wait so far."""
    launched_s: float = 0.0
    """Time when the host has launched all of the work, in simulated seconds: the work cannot end before."""


@dataclass(eq=False)
class _SharedDevice:
    """A device behind several links: a disk's controller, or the host's memory."""

    shares: Mapping[str, float]
    """By link: which share a transfer's time keeps other links from the device."""
    free_at: float = 0.0
    """Time when all such parts end, in simulated seconds."""

    def seconds_of(self, link: str, begin: float, seconds: float) -> float:
        """Return how long a transfer takes that begins at `begin` and takes `seconds` alone."""
        self.free_at = max(begin, self.free_at) + self.shares[link] * seconds
        return max(seconds, self.free_at - begin)


@dataclass(eq=False)
class _Link:
    """Link that does one work item at a time, in request order."""

    name: str
    """Link name on the timeline."""
    free_at: float = 0.0
    """Time when all assigned work ends, in simulated seconds."""
    busy_s: float = 0.0
    """Total work time so far, in seconds."""
    device: _SharedDevice | None = None
    """The device that does the work of this link and of others."""


class _TimedLane(Lane):
    """Lane without work: a submission takes the duration of a transfer."""

    def __init__(self, name: str, lanes: SimulatedLanes, seconds: Seconds) -> None:
        self.name = name
        self._lanes = lanes
        self._seconds = seconds

    def submit(
        self,
        work: Run,  # noqa: ARG002
        *,
        reads: Tickets = (),
        users: Tickets = (),
        name: str = "",  # noqa: ARG002
        num_bytes: int = 0,
    ) -> Ticket:
        self.position += 1
        return self.enqueue(self._seconds(num_bytes) if num_bytes else 0.0, (*reads, *users))

    def enqueue(self, seconds: float, after: Sequence[Ticket]) -> Ticket:
        """Queue work for `seconds`, to begin when all tickets in `after` are done."""
        raise NotImplementedError


class SimulatedLane(_TimedLane):
    """Simulated queue. With `overtakes` (h2d), ready work runs first, in submission order."""

    def __init__(self, name: str, lanes: SimulatedLanes, link: str, seconds: Seconds) -> None:
        super().__init__(name, lanes, seconds)
        self.link = lanes.link(link)
        self._overtakes = name == "h2d"
        self._queue: deque[_WorkItem] = deque()  # in order; not used by a lane that overtakes
        self._ready: list[tuple[int, _WorkItem]] = []  # a heap by submission order, for a lane that overtakes
        self._is_busy = False

    def enqueue(self, seconds: float, after: Sequence[Ticket], launched_s: float = 0.0) -> Ticket:
        item = _WorkItem(next(self._lanes.numbers), seconds, Ticket(self.link.name), launched_s=launched_s)
        for ticket in set(after):
            if not ticket.is_done:
                item.num_left += 1
                ticket.watchers.append(partial(self._is_done, item, ticket))
        if not self._overtakes:
            self._queue.append(item)
        elif not item.num_left:
            heapq.heappush(self._ready, (item.number, item))
        self._start(self._lanes.now_s)
        return item.ticket

    def end(self, item: _WorkItem) -> None:
        """Finish a work item and start the next one."""
        self._is_busy = False
        item.ticket.finish()
        self._start(item.ticket.end)

    def _is_done(self, item: _WorkItem, ticket: Ticket) -> None:
        item.num_left -= 1
        item.last = ticket
        if not item.num_left:
            if self._overtakes:
                heapq.heappush(self._ready, (item.number, item))
            self._start(ticket.end)

    def _next(self) -> _WorkItem | None:
        if self._overtakes:
            return heapq.heappop(self._ready)[1] if self._ready else None
        if not self._queue or self._queue[0].num_left:
            return None
        return self._queue.popleft()

    def _start(self, time: float) -> None:
        if self._is_busy or (item := self._next()) is None:
            return
        self._is_busy = True
        link, seconds = self.link, item.seconds
        begin = max(time, link.free_at)  # another lane may use the link
        if link.name == COMPUTE and item.last is not None and item.last.end == time:
            self._lanes.expose(link.free_at, item.last)
        if link.device is not None:
            seconds = link.device.seconds_of(link.name, begin, seconds)
        item.ticket.begin = begin
        item.ticket.end = max(begin + seconds, item.launched_s)
        link.free_at = item.ticket.end
        link.busy_s += seconds
        heapq.heappush(self._lanes.events, (item.ticket.end, item.number, self, item))


class _WorkByCompute(_TimedLane):
    """Work done by compute. In gradient reduction over replicas, compute waits for the network meanwhile."""

    def enqueue(self, seconds: float, after: Sequence[Ticket]) -> Ticket:
        lanes = self._lanes
        lanes.compute_after(after)
        lanes.compute(seconds)
        if self.name == "network":
            lanes.link(self.name).busy_s += seconds
            lanes.exposed_s[self.name] += seconds
            lanes.exchange_s += seconds
        return next(iter(lanes.mark()), None) or Ticket(COMPUTE, lanes.now_s, lanes.now_s, is_done=True)


class SimulatedLanes(Lanes):
    """Engine lanes with a simulated host clock, `now_s`. Host work and host waits advance the clock.

    On a CPU the host computes. With `in_stream`, compute is a separate lane: the host runs ahead, and compute ends no
    earlier than the kernel launches.
    """

    def __init__(
        self,
        seconds: Mapping[str, Seconds],
        *,
        in_stream: bool = False,
        inline: bool = False,
        shared: Sequence[Mapping[str, float]] = (),
    ) -> None:
        """`seconds` maps link names to duration functions: "h2d", "d2h", "update", "nvme_read", "nvme_write",
        "collective", "network", "update_on_device", "decoding" (bytes read and written; no other compute runs
        meanwhile) and "here" (compute work on states). `inline`: compute does all copies and updates except disk I/O.
        `shared`: devices behind several links, each with the share that a transfer's time keeps other links from it.
        """
        self.now_s = 0.0
        self.compute_s = 0.0  # of work on compute so far, waits for the network of replicas included
        self.exchange_s = 0.0  # these waits
        self.exposed_s: dict[str, float] = dict.fromkeys(LANES, 0.0)
        self._seconds = seconds
        self._in_stream = in_stream

        self._links = {name: _Link(name) for name in LANES}
        for device in map(_SharedDevice, shared):
            for name in device.shares:
                self.link(name).device = device
        self.events: list[tuple[float, int, SimulatedLane, _WorkItem]] = []
        """Started work, as a heap by end time."""
        self.numbers = itertools.count(1)

        # Of compute in a stream: what the next work waits for, and the last work.
        self._after: list[Ticket] = []
        self._last: Sequence[Ticket] = ()
        super().__init__(overlap=not inline, throttle={})  # opens the lanes, over the links above
        self._compute = SimulatedLane(COMPUTE, self, COMPUTE, lambda _: 0.0)
        self.on_compute = self._inline("here")
        self.collective_on_compute = self._inline("collective")
        self.network_on_compute = self._inline("network")

    # -- lanes -----------------------------------------------------------------------------------------------

    def _thread(self, name: str, link: str) -> Lane:
        return SimulatedLane(name, self, link, self._seconds.get(name) or self._seconds.get(link, lambda _: 0.0))

    def _inline(self, name: str) -> Lane:
        return _WorkByCompute(name, self, self._seconds.get(name, lambda _: 0.0))

    def _open(self, row: LaneRow) -> Lane:
        match row.name:
            case "returning" if self._in_stream:
                return self._thread(row.name, row.link)
            case "decoding":
                return self._open_decoding()
            case "update_on_device":
                return self._open_device_updates()
        return super()._open(row)

    def _open_decoding(self) -> Lane:
        """Open the decoding lane. Device kernels run one at a time; on a CPU the h2d thread or compute decodes."""
        if not self.overlap:
            return self._inline(DECODING)
        link = COMPUTE if self._in_stream else "h2d"
        return SimulatedLane(DECODING, self, link, self._seconds.get(DECODING, lambda _: 0.0))

    def _open_device_updates(self) -> Lane:
        name = "update_on_device"
        if not self.overlap:
            return self._inline(name)
        # Device updates do not share the host memory bandwidth, unless one throttle simulates both links.
        if self._seconds.get(name) not in (None, self._seconds.get("update")):
            self._links[name] = _Link("update")
        return self._thread(name, name if name in self._links else "update")

    def link(self, name: str) -> _Link:
        """Return the link `name`, shared by several lanes."""
        return self._links.setdefault(name, _Link(name))

    @property
    def busy_s(self) -> dict[str, float]:
        """Total work time per link and for compute, in seconds. If two links have one name, the longer time counts."""
        busy_s: dict[str, float] = {}
        for link in self._links.values():
            busy_s[link.name] = max(busy_s.get(link.name, 0.0), link.busy_s)
        return busy_s | {COMPUTE: max(self.compute_s, busy_s[COMPUTE]) - self.exchange_s}

    # -- compute and the host --------------------------------------------------------------------------------

    def mark(self) -> Sequence[Ticket]:
        return self._last

    def compute(self, seconds: float, host_s: float = 0.0) -> None:
        """Compute for `seconds`. `host_s` is the launch time on the host; if the host computes, `host_s` is additional
        work.
        """
        if self._in_stream:
            self._last = (self._compute.enqueue(seconds, self._after, self.now_s + host_s),)
            self._after = []
            self.spend(host_s)
        else:
            seconds += host_s
            self.spend(seconds)
        self.compute_s += seconds

    def compute_after(self, tickets: Sequence[Ticket], *, users: Sequence[Ticket] = ()) -> None:
        if self._in_stream:
            self._after += [ticket for ticket in (*tickets, *users) if not ticket.is_done]
        else:
            begin = self.now_s
            self.expose(begin, self._wait((*tickets, *users)))

    def wait(self, tickets: Sequence[Ticket], *, users: Sequence[Ticket] = ()) -> None:
        self._wait((*tickets, *users))

    def _wait(self, tickets: Sequence[Ticket]) -> Ticket | None:
        """Advance the clock until all tickets are done. Returns the last ticket that required a wait, or None."""
        late = [ticket for ticket in tickets if not ticket.is_done]
        for ticket in late:
            while not ticket.is_done:
                assert self.events, "nothing is under way, and what is waited for is not done"
                self._end_next()
        self.spend(0.0)  # ends all other work with the same end
        return max(late, key=lambda ticket: ticket.end, default=None)

    def finish(self) -> None:
        """Advance the clock until all work is done."""
        while self.events:
            self._end_next()

    def spend(self, seconds: float) -> None:
        """Advance the host clock by `seconds`."""
        until = self.now_s + seconds
        while self.events and self.events[0][0] <= until:  # one by one, because an end may start more work
            self._end_next()
        self.now_s = until

    def expose(self, begin: float, ticket: Ticket | None) -> None:
        """Record idle compute from `begin` until `ticket` ends."""
        if ticket is not None and ticket.end > begin:
            self.exposed_s[ticket.lane] = self.exposed_s.get(ticket.lane, 0.0) + ticket.end - begin

    def _end_next(self) -> None:
        time, _, lane, item = heapq.heappop(self.events)
        self.now_s = max(self.now_s, time)
        lane.end(item)
