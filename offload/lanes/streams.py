"""Lanes over an accelerator's streams: copies have a stream each, and tickets carry events.

A lane's thread enqueues; it blocks only for work of the host (an update that has to be done before its weights go up).
Streams are made once, events are used again. The stream of compute is whichever is current in the thread that asks:
autograd runs a backward under the stream of its forward.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from offload.accelerators import Accelerator
from offload.lanes.lane import Lane, ThreadLane, Work
from offload.lanes.lanes import Lanes
from offload.lanes.throttle import Throttle
from offload.lanes.ticket import Ticket
from offload.telemetry.timeline import LaneTime, Span

Abort = Callable[[BaseException], None] | None
_MOST_SPANS = 1 << 13
"""Before what is over is shown in the midst of a pass, for which compute is waited for."""


class StreamTicket(Ticket):
    """A place in a stream, by an event that goes back to its pool with the last who knows it. Whoever had to wait for
    the event has, by then, put the wait into a stream, and the stream holds what the event stood for at that moment.
    """

    __slots__ = ()

    def __del__(self) -> None:
        if self.event is not None:
            self.pool.append(self.event)


@dataclass
class StreamSpan:
    """What a stream did between two places in it."""

    lane: str
    """The name of the lane, or of its link, on the timeline."""
    name: str
    """The name of the work."""
    begin: Ticket
    """The place in the stream where the work began."""
    end: Ticket
    """The place in the stream where the work ended."""
    is_wait: bool = False
    """True if compute did nothing but wait for the lane."""


class StreamLane(ThreadLane):
    """A lane whose work is to put copies into a stream of its own."""

    def __init__(self, name: str, lanes: StreamLanes, link: str) -> None:
        module = lanes.accelerator.module
        self._lanes, self._stream = lanes, (stream := module.Stream(lanes.accelerator.device))

        def enter() -> None:
            lanes.enter()
            module.set_stream(stream)

        abort = lanes.abort if name == "collective" else None
        super().__init__(name, lanes.lock, lanes.links[link], lanes.delays(name), link == "h2d", enter, abort)

    def _ticket(self) -> Ticket:
        return StreamTicket(self._link.name, pool=self._lanes.pool)

    def _order(self, event: torch.Event) -> None:
        self._stream.wait_event(event)
        if self._link.throttle is not None:  # a played link begins to count when its copy does
            event.synchronize()

    def cancel(self, since: int = 0) -> None:
        super().cancel(since)
        self._stream.synchronize()  # what uses its memory next may wait for a ticket that was given up

    def drain(self) -> None:
        super().drain()
        self._stream.synchronize()

    def close(self) -> None:
        super().close()
        self._stream.synchronize()  # the memory of what is still in it is about to go

    def _run(self, work: Work, ordered: float) -> None:
        if self._link.throttle is None:  # the events tell when it was at work
            self._start(work)
        else:
            super()._run(work, ordered)

    def _start(self, work: Work) -> None:
        begin = StreamTicket(self.name, is_done=True, event=self._lanes.present(self._stream), pool=self._lanes.pool)
        work.run()
        event = self._lanes.present(self._stream)
        work.ticket.end_with(event)
        self._lanes.timed.append(StreamSpan(self._link.name, work.name, begin, work.ticket))
        if self._link.throttle is not None:
            event.synchronize()


class StreamLanes(Lanes):
    """h2d, returning, decoding, d2h, collective and the way of an update on the device have streams; the network,
    updates of the host and the lanes of the disk run on the host, which waits for the events of what they read or
    overwrite.
    """

    def __init__(
        self, accelerator: Accelerator, *, throttle: Mapping[str, Throttle], delay_seed: int | None, abort: Abort
    ) -> None:
        self.accelerator = accelerator
        self.timed: deque[StreamSpan] = deque()
        self._met: tuple[Ticket, float] | None = None  # what the host has waited for last, and when that was over
        self.pool: list[torch.Event] = []
        self._shown_until: dict[str, float] = {}
        super().__init__(overlap=True, throttle=throttle, delay_seed=delay_seed, abort=abort)

    def _open(self, name: str) -> Lane:
        return super()._open(name) if name in ("network", "update") else StreamLane(name, self, name)

    def _open_returning(self) -> Lane:
        # A fetch is in the stream of h2d as soon as what its slot waits for is in one: all behind it waits for that.
        return StreamLane("returning", self, "h2d")

    def _open_decoding(self) -> Lane:
        return StreamLane("decoding", self, "h2d")

    def _open_device_updates(self) -> tuple[Lane, Lane, Lane]:
        links = {"update_up": "h2d", "update_on_device": "update", "update_down": "d2h"}
        up, update, down = (StreamLane(name, self, link) for name, link in links.items())
        return up, update, down

    def enter(self) -> None:
        self.accelerator.enter()

    def present(self, stream: torch.Stream) -> torch.Event:
        """Return an event at the present end of a stream."""
        try:
            event = self.pool.pop()
        except IndexError:
            event = self.accelerator.event(is_timed=True, sleeps=True)  # and leaves the core to AdamW
        event.record(stream)
        return event

    def now(self) -> Ticket:
        event = self.present(self.accelerator.current_stream())
        return StreamTicket("compute", is_done=True, event=event, pool=self.pool)

    def mark(self) -> Sequence[Ticket]:
        return (self.now(),)

    def computed(self, name: str, begin: Ticket) -> Sequence[Ticket]:
        end = self.now()
        self.timed.append(StreamSpan("compute", name, begin, end))
        if len(self.timed) > _MOST_SPANS and self.timed[0].end.is_over:  # evaluations have no end of a step
            self._show()
        return (end,)

    def compute_after(self, tickets: Sequence[Ticket], *, fills: Sequence[Ticket] = ()) -> None:
        self._await(tickets, fills)  # until they are in their streams
        late = []
        for ticket in (*tickets, *fills):
            if ticket.event is not None and not ticket.event.query():
                late.append(ticket)  # noqa: PERF401 (a comprehension is a call)
        if not late:
            return
        begin, stream = self.now(), self.accelerator.current_stream()
        for ticket in late:
            stream.wait_event(ticket.event)
        self.timed.append(StreamSpan(late[-1].lane, "", begin, self.now(), is_wait=True))

    def wait(self, tickets: Sequence[Ticket], *, fills: Sequence[Ticket] = ()) -> None:
        self._await(tickets, fills)
        for ticket in (*reversed(tickets), *fills):  # what came last in a stream is waited for, the rest is over then
            if not ticket.is_over:
                begin = time.perf_counter()
                ticket.event.synchronize()
                self._met = ticket, time.perf_counter()
                self.timeline.expose(ticket.lane, self._met[1] - begin)

    def finish(self) -> None:
        super().finish()  # until it is in the streams
        self.accelerator.wait()

    def end_step(self) -> tuple[float, dict[str, LaneTime], list[Span]]:
        self._show()  # the loss was read: compute is idle
        return super().end_step()

    def _show(self) -> None:
        """Put on the timeline what is over, and let go of its events. Waits for compute, unless the host has waited
        for something in this step: then it knows when that was.
        """
        met, self._met = self._met, None
        if met is None:
            now = self.now()
            if not now.event.query():
                now.event.synchronize()
            met = now, time.perf_counter()
        now, now_s = met
        while self.timed and self.timed[0].end.is_over:
            stretch = self.timed.popleft()
            begin = now_s - stretch.begin.event.elapsed_time(now.event) / 1e3
            end = now_s - stretch.end.event.elapsed_time(now.event) / 1e3
            if stretch.is_wait:
                self.timeline.expose(stretch.lane, end - begin)
                continue
            begin = max(begin, self._shown_until.get(stretch.lane, begin))  # two streams may share a link
            if begin <= end:
                self.timeline.add(stretch.lane, stretch.name, begin, end)
                self._shown_until[stretch.lane] = end


def overlaps(has_accelerator: bool, throttle: Mapping[str, Throttle], delay_seed: int | None) -> bool:
    """True where copies and updates run beside compute: on an accelerator, and where a link is played or delayed."""
    return has_accelerator or bool(throttle) or delay_seed is not None


def open_lanes(
    accelerator: Accelerator | None,
    throttle: Mapping[str, Throttle],
    delay_seed: int | None,
    overlap: bool,
    abort: Abort = None,
) -> Lanes:
    """Return the lanes for a device, None for the CPU. `delay_seed`: wait at random, by this seed. `overlap`: beside
    compute on a CPU too. `abort`: as of Lanes.
    """
    if accelerator is not None:
        return StreamLanes(accelerator, throttle=throttle, delay_seed=delay_seed, abort=abort)
    return Lanes(overlap=overlap, throttle=throttle, delay_seed=delay_seed, abort=abort)
