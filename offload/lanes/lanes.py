"""The lanes of one engine, and how compute waits for them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from offload.lanes.lane import InlineLane, Lane, ThreadLane
from offload.lanes.throttle import LANES, Throttle
from offload.lanes.ticket import Ticket
from offload.telemetry.timeline import LaneTime, Span, Timeline


class Lanes:
    """`h2d`, `d2h` and `update` beside compute, which is the thread that calls. `here` does work on compute itself, for
    states that are on the device.

    `overlap` is False where all of them are compute: on a CPU without throttles, where a second busy thread costs more
    than it hides.
    """

    def __init__(self, *, overlap: bool, throttle: Mapping[str, Throttle], delay_seed: int | None = None) -> None:
        self.timeline = Timeline(LANES)
        self.overlap = overlap
        self.condition = threading.Condition()
        self._throttle, self._delay_seed = throttle, delay_seed
        self.h2d, self.d2h, self.update = map(self._open, LANES)
        self.here: Lane = InlineLane("compute", self.timeline)

    def _open(self, name: str) -> Lane:
        if not self.overlap:
            return InlineLane(name, self.timeline)
        throttle, delays = self._throttle.get(name), self.delays(name)
        return ThreadLane(name, self.condition, self.timeline, throttle, delays, overtakes=name == "h2d")

    def delays(self, name: str) -> random.Random | None:
        return None if self._delay_seed is None else random.Random(f"{self._delay_seed} {name}")

    # -- compute ---------------------------------------------------------------------------------------------

    def mark(self) -> Sequence[Ticket]:
        """Return the tickets of all that compute was given so far: none on a CPU, where it is done."""
        return ()

    def now(self) -> Any:
        """Return the present moment of compute, for `computed`."""
        return time.perf_counter()

    def computed(self, name: str, begin: Any) -> None:
        """Note what compute has done since `begin`."""
        self.timeline.add("compute", name, begin, time.perf_counter())

    def compute_after(self, tickets: Sequence[Ticket], *, behind: Sequence[Ticket] = ()) -> None:
        """Let what compute does next come after `tickets` (and raise what they raised) and `behind` others."""
        self.wait(tickets, behind=behind)

    def wait(self, tickets: Sequence[Ticket], *, behind: Sequence[Ticket] = ()) -> None:
        """Block this thread until `tickets` are done (and raise what they raised) and others are over. The time counts
        as exposed, for the lane that was waited for and, before its work could begin, for the one that held it up.
        """
        begin = time.perf_counter()
        late = [ticket for ticket in (*tickets, *behind) if not ticket.is_done]
        try:
            self._await(tickets, behind)
        finally:
            if late:
                self._expose(begin, max(late, key=lambda ticket: ticket.end))

    def _await(self, tickets: Sequence[Ticket], behind: Sequence[Ticket]) -> None:
        """Block until all are done; raise what those that are needed raised."""
        everyone = (*tickets, *behind)
        if not all(ticket.is_done for ticket in everyone):
            with self.condition:
                self.condition.wait_for(lambda: all(ticket.is_done for ticket in everyone))
        for ticket in tickets:
            if ticket.error is not None:
                raise ticket.error

    def _expose(self, begin: float, ticket: Ticket) -> None:
        end = time.perf_counter()
        worked = max(begin, min(ticket.begin or begin, end))
        self.timeline.expose(ticket.held_by, worked - begin)
        self.timeline.expose(ticket.lane, end - worked)

    def end_step(self) -> tuple[float, dict[str, LaneTime], list[Span]]:
        """Return the seconds of the step, each lane's share, and what every lane did."""
        return self.timeline.end_step()

    # -- the end ---------------------------------------------------------------------------------------------

    def give_up(self, updates_since: int) -> None:
        """Cancel all copies, and the updates submitted after position `updates_since`."""
        self.h2d.cancel()
        self.d2h.cancel()
        self.update.cancel(updates_since)

    def abandon(self) -> None:
        """Nobody waits any more: let the threads end by themselves. Safe wherever garbage is collected."""
        for lane in (self.h2d, self.d2h, self.update):
            lane.abandon()

    def close(self) -> None:
        """Give up what has not begun, and end the threads."""
        for lane in (self.h2d, self.d2h, self.update):
            lane.close()


def overlaps(throttle: Mapping[str, Throttle], delay_seed: int | None) -> bool:
    """True where copies and updates run beside compute: on a GPU, and where a link is played or delayed."""
    return torch.cuda.is_available() or bool(throttle) or delay_seed is not None


def open_lanes(throttle: Mapping[str, Throttle], delay_seed: int | None) -> Lanes:
    """Return the lanes for the device that there is. `delay_seed`: wait at random, by this seed."""
    if torch.cuda.is_available():
        from offload.lanes.cuda import CudaLanes

        return CudaLanes(throttle=throttle, delay_seed=delay_seed)
    return Lanes(overlap=overlaps(throttle, delay_seed), throttle=throttle, delay_seed=delay_seed)
