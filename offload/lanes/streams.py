"""Lanes on accelerator streams: each copy lane has a stream, and tickets carry events.

A lane thread only enqueues work, and blocks only for host work, for example an update before the H2D copy of the new
weights. Streams are created once, and events are reused. The compute stream is the current stream in the calling
thread: autograd runs a backward on the stream of the forward.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from offload.accelerators import Accelerator
from offload.lanes.lanes import LaneRow, Lanes
from offload.lanes.threads import ThreadLane, Work
from offload.lanes.ticket import Lane, Ticket, raise_error, wait_until_done
from offload.lanes.timeline import DISK_LANES, LaneTime, Span, Throttle

Abort = Callable[[BaseException], None] | None
_MOST_SPANS = 1 << 13
"""Maximum number of recorded spans. Above this number, finished spans move to the timeline during a pass, after a wait
for compute.
"""


class StreamTicket(Ticket):
    """Position in a stream, marked by an event. The event returns to the pool with the last reference to the ticket. By
    then every waiter has enqueued a wait, and an enqueued wait keeps the state of the event at enqueue time.
    """

    __slots__ = ()

    def __del__(self) -> None:
        if self.event is not None:
            self.pool.append(self.event)


@dataclass
class StreamSpan:
    """Stream work between two positions."""

    lane: str
    """Lane or link name on the timeline."""
    name: str
    """Work name."""
    begin: Ticket
    """Position in the stream where the work began."""
    end: Ticket
    """Position in the stream where the work ended."""
    is_wait: bool = False
    """True if compute only waited for the lane."""


class StreamLane(ThreadLane):
    """Lane for copies, with a separate stream."""

    def __init__(self, name: str, lanes: StreamLanes, link: str) -> None:
        module = lanes.accelerator.module
        stream = module.Stream(lanes.accelerator.device)
        self._lanes = lanes
        self._stream = stream

        def enter() -> None:
            lanes.enter()
            module.set_stream(stream)

        abort = lanes.abort if name == "collective" else None
        super().__init__(name, lanes.lock, lanes.links[link], lanes.delays(name), link == "h2d", enter, abort)

    def _ticket(self) -> Ticket:
        return StreamTicket(self._link.name, pool=self._lanes.pool)

    def _order(self, event: torch.Event) -> None:
        self._stream.wait_event(event)
        if self._link.throttle is not None:  # a throttled link starts to count when the copy starts
            event.synchronize()

    def cancel(self, since: int = 0) -> None:
        super().cancel(since)
        self._stream.synchronize()  # the next user of the memory may wait for a cancelled ticket

    def drain(self) -> None:
        super().drain()
        self._stream.synchronize()

    def close(self) -> None:
        super().close()
        self._stream.synchronize()  # the memory of pending copies is about to be freed

    def _run(self, work: Work, ordered: float) -> None:
        if self._link.throttle is None:  # the events measure the work time
            self._start(work)
        else:
            super()._run(work, ordered)

    def _start(self, work: Work) -> None:
        begin = StreamTicket(
            self.name, is_done=True, event=self._lanes.record_event(self._stream), pool=self._lanes.pool
        )
        work.run()
        event = self._lanes.record_event(self._stream)
        work.ticket.event = event
        self._lanes.timed.append(StreamSpan(self._link.name, work.name, begin, work.ticket))
        if self._link.throttle is not None:  # work on a slow link ends after the real copy, never before
            event.synchronize()


class StreamLanes(Lanes):
    """h2d, returning, decoding, d2h, collective and the device-update lanes have streams. The network lane, host
    updates and disk lanes run on the host, and the host waits for the events of buffers to read or overwrite.
    """

    def __init__(
        self, accelerator: Accelerator, *, throttle: Mapping[str, Throttle], delay_seed: int | None, abort: Abort
    ) -> None:
        self.accelerator = accelerator
        self.timed: deque[StreamSpan] = deque()
        """Work in the streams, not yet on the timeline: the events must fire first."""
        self._last_wait: tuple[Ticket, float] | None = None  # last ticket the host waited for, and the end time
        self.pool: list[torch.Event] = []
        """Events for reuse: a step takes several for each unit, and the creation of one is a driver call."""
        self._last_shown: dict[str, float] = {}
        """End of the last span on the timeline, by lane."""
        super().__init__(overlap=True, throttle=throttle, delay_seed=delay_seed, abort=abort)

    def _open(self, row: LaneRow) -> Lane:
        if row.name in ("network", "update") or row.link in DISK_LANES:
            return super()._open(row)
        # Each copy lane has a stream. On a common one, a fetch enters as soon as the earlier work on the slot is in a
        # stream, and all copies behind the fetch, such as returning activations, wait for this work.
        return StreamLane(row.name, self, row.link)

    def enter(self) -> None:
        self.accelerator.enter()

    def record_event(self, stream: torch.Stream) -> torch.Event:
        """Return an event at the present end of `stream`."""
        try:
            event = self.pool.pop()
        except IndexError:
            event = self.accelerator.event(is_timed=True, sleeps=True)  # sleeps, which leaves the core to AdamW
        event.record(stream)
        return event

    def now(self) -> Ticket:
        event = self.record_event(self.accelerator.current_stream())
        return StreamTicket("compute", is_done=True, event=event, pool=self.pool)

    def mark(self) -> Sequence[Ticket]:
        return (self.now(),)

    def record_compute(self, name: str, begin: Ticket) -> Sequence[Ticket]:
        end = self.now()
        self.timed.append(StreamSpan("compute", name, begin, end))
        if len(self.timed) > _MOST_SPANS and self.timed[0].end.is_over:  # an evaluation has no step end
            self._show()
        return (end,)

    def _await(self, tickets: Sequence[Ticket], users: Sequence[Ticket]) -> None:
        """Block until the work is in the streams. Raises the first error among `tickets`, none of `users`."""
        wait_until_done(self.lock, (*tickets, *users))
        raise_error(tickets)

    def compute_after(self, tickets: Sequence[Ticket], *, users: Sequence[Ticket] = ()) -> None:
        self._await(tickets, users)
        late = []
        for ticket in (*tickets, *users):
            if ticket.event is not None and not ticket.event.query():
                late.append(ticket)  # noqa: PERF401 (a comprehension is a call)
        if not late:
            return
        begin = self.now()
        stream = self.accelerator.current_stream()
        for ticket in late:
            stream.wait_event(ticket.event)
        self.timed.append(StreamSpan(late[-1].lane, "", begin, self.now(), is_wait=True))

    def wait(self, tickets: Sequence[Ticket], *, users: Sequence[Ticket] = ()) -> None:
        self._await(tickets, users)
        # last ticket first: the earlier ones of the stream are over then
        for ticket in (*reversed(tickets), *users):
            if not ticket.is_over:
                begin = time.perf_counter()
                ticket.event.synchronize()
                self._last_wait = ticket, time.perf_counter()
                self.timeline.expose(ticket.lane, self._last_wait[1] - begin)

    def finish(self) -> None:
        super().finish()  # until the work is in the streams
        self.accelerator.wait()

    def end_step(self) -> tuple[float, dict[str, LaneTime], list[Span]]:
        self._show()  # compute is idle, because the loss was read
        return super().end_step()

    def _show(self) -> None:
        """Move finished spans to the timeline and release their events. The last host wait of this step serves as the
        time reference. Without one, wait for compute.
        """
        last_wait = self._last_wait
        self._last_wait = None
        if last_wait is None:
            now = self.now()
            if not now.event.query():
                now.event.synchronize()
            last_wait = now, time.perf_counter()
        now, now_s = last_wait
        while self.timed and self.timed[0].end.is_over:
            span = self.timed.popleft()
            begin = now_s - span.begin.event.elapsed_time(now.event) / 1e3
            end = now_s - span.end.event.elapsed_time(now.event) / 1e3
            if span.is_wait:
                self.timeline.expose(span.lane, end - begin)
                continue
            begin = max(begin, self._last_shown.get(span.lane, begin))  # two streams may share a link
            if begin <= end:
                self.timeline.add(span.lane, span.name, begin, end)
                self._last_shown[span.lane] = end


def overlaps(has_accelerator: bool, throttle: Mapping[str, Throttle], delay_seed: int | None) -> bool:
    """True where copies and updates run beside compute: on an accelerator, or with a throttle or random delays."""
    return has_accelerator or bool(throttle) or delay_seed is not None


def open_lanes(
    accelerator: Accelerator | None,
    throttle: Mapping[str, Throttle],
    delay_seed: int | None,
    overlap: bool,
    abort: Abort = None,
) -> Lanes:
    """Return the lanes for a device (None: the CPU). `delay_seed` seeds random waits (None: no waits). `overlap`: run
    lanes beside compute on a CPU too. `abort`: see `Lanes`.
    """
    if accelerator is not None:
        return StreamLanes(accelerator, throttle=throttle, delay_seed=delay_seed, abort=abort)
    return Lanes(overlap=overlap, throttle=throttle, delay_seed=delay_seed, abort=abort)
