"""The lanes of one engine, and how compute waits for them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from offload.lanes.lane import InlineLane, Lane, Link, Run, ThreadLane, Tickets
from offload.lanes.throttle import LANES, Throttle
from offload.lanes.ticket import Ticket
from offload.lanes.waiting import wait_until_done
from offload.telemetry.timeline import LaneTime, Span, Timeline


class Here(Lane):
    """Does work on compute itself, which raises its errors where it is submitted. It is over when compute has done it:
    on an accelerator when its stream has, and not when it was launched.
    """

    name = "compute"

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes

    def _submit(self, work: Run, reads: Tickets, fills: Tickets, name: str, num_bytes: int) -> Ticket:  # noqa: ARG002
        self.position += 1
        self._lanes.compute_after(reads, fills=fills)
        begin = self._lanes.now()
        work()
        self._lanes.computed(name, begin)
        return Ticket(self.name, end=time.perf_counter(), is_done=True)


class Lanes:
    """The lanes beside compute, which is the thread that calls:

    - `h2d`, `d2h`, `update`, each with a link of its own;
    - `returning`, over the link of h2d, by which activations come back past fetches that wait for their slots (on a CPU
      that is h2d itself, which overtakes);
    - `decoding`, by which what came up in codes becomes weights, beside the next copy (on a CPU that is h2d itself);
    - for updates on the device of states that are not there `update_up` over the link of h2d, `update_on_device` over
      that of update (on a CPU they are one lane) and `update_down` over that of d2h: past fetches, and past gradients
      and activations on their way down, which would wait there for the updates of the whole model;
    - `collective`, which alone exchanges with other ranks what does not rest on the device, in the order in which all
      ranks submit it;
    - `network`, which sums gradients that rest on the host over the replicas of the model, beside all of these;
    - for the disk `fetch_read`, `update_read` and `activation_read` over the link `nvme_read`, `update_write` and
      `activation_write` over `nvme_write`: lanes of one link do not wait for each other's tickets;
    - `here`, which does work on compute itself, for states that are on the device, and `here_together` and
      `here_between`, which exchange these with other ranks, and sum their gradients over replicas.

    `overlap` is False where h2d, d2h, collective, network and update are compute: on a CPU without throttles, where a
    second busy thread costs more than it hides. The lanes of the disk have threads of their own in any case (they block
    in C++), from their first piece of work on.
    """

    def __init__(
        self,
        *,
        overlap: bool,
        throttle: Mapping[str, Throttle],
        delay_seed: int | None = None,
        abort: Callable[[BaseException], None] | None = None,
    ) -> None:
        """`abort`: where other ranks wait for this one's exchanges, tells them that there will be none."""
        self.timeline = Timeline(LANES)
        self.overlap, self.abort = overlap, abort
        self.lock = threading.Lock()
        self.links = {name: Link(name, self.timeline, throttle.get(name)) for name in LANES}
        self._delay_seed = delay_seed
        self.h2d, self.d2h, self.collective = map(self._open, ("h2d", "d2h", "collective"))
        self.network, self.update = map(self._open, ("network", "update"))
        self.returning, self.decoding = self._open_returning(), self._open_decoding()
        reads = ("fetch_read", "update_read", "activation_read")
        self.fetch_read, self.update_read, self.activation_read = (self._thread(name, "nvme_read") for name in reads)
        writes = ("update_write", "activation_write")
        self.update_write, self.activation_write = (self._thread(name, "nvme_write") for name in writes)
        self.here: Lane = Here(self)
        self.here_together: Lane = Here(self)
        self.here_between: Lane = Here(self)
        self.update_up, self.update_on_device, self.update_down = self._open_device_updates()
        self._changing = (self.update, self.update_on_device, self.update_down, self.update_write)
        self._updating = tuple(dict.fromkeys((self.update_read, self.update_up, *self._changing)))  # a failure's way
        copying = (
            self.fetch_read,
            self.activation_read,
            self.h2d,
            self.returning,
            self.d2h,
            self.collective,
            self.network,
        )
        self._all = tuple(dict.fromkeys((*copying, self.decoding, self.activation_write, *self._updating)))
        self._settled = dict.fromkeys(self._all, 0)

    def _open(self, name: str) -> Lane:
        return self._thread(name, name) if self.overlap else self._inline(name)

    def _open_returning(self) -> Lane:
        return self.h2d

    def _open_decoding(self) -> Lane:
        return self.h2d

    def _open_device_updates(self) -> tuple[Lane, Lane, Lane]:
        if not self.overlap:
            return self.h2d, self.update, self.d2h
        return self._thread("update_up", "h2d"), self.update, self._thread("update_down", "d2h")

    def _thread(self, name: str, link: str) -> Lane:
        abort = self.abort if name in ("collective", "network") else None
        return ThreadLane(name, self.lock, self.links[link], self.delays(name), name == "h2d", self.enter, abort)

    def _inline(self, name: str) -> Lane:
        return InlineLane(name, self.timeline, lambda reads, fills: self.compute_after(reads, fills=fills))

    def enter(self) -> None:
        """Called by the thread of a lane before its work."""

    def delays(self, name: str) -> random.Random | None:
        return None if self._delay_seed is None else random.Random(f"{self._delay_seed} {name}")

    # -- compute ---------------------------------------------------------------------------------------------

    def mark(self) -> Sequence[Ticket]:
        """Return the tickets of all that compute was given so far: none on a CPU, where it is done."""
        return ()

    def now(self) -> Any:
        """Return the present moment of compute, for `computed`."""
        return time.perf_counter()

    def computed(self, name: str, begin: Any) -> Sequence[Ticket]:
        """Note what compute has done since `begin`; return what `mark` would."""
        self.timeline.add("compute", name, begin, time.perf_counter())
        return ()

    def compute_after(self, tickets: Sequence[Ticket], *, fills: Sequence[Ticket] = ()) -> None:
        """Let what compute does next come after `tickets` (and raise what they raised), and fill what those of `fills`
        have used.
        """
        self.wait(tickets, fills=fills)

    def wait(self, tickets: Sequence[Ticket], *, fills: Sequence[Ticket] = ()) -> None:
        """Block this thread until `tickets` are done (and raise what they raised) and others are over. The time counts
        as exposed, for the lane that was waited for and, before its work could begin, for the one that held it up.
        """
        begin = time.perf_counter()
        late = [ticket for ticket in (*tickets, *fills) if not ticket.is_done]
        try:
            self._await(tickets, fills)
        finally:
            if late:
                last, end = max(late, key=lambda ticket: ticket.end), time.perf_counter()
                worked = max(begin, min(last.begin or begin, end))
                self.timeline.expose(last.held_by, worked - begin)
                self.timeline.expose(last.lane, end - worked)

    def _await(self, tickets: Sequence[Ticket], fills: Sequence[Ticket]) -> None:
        """Block until all are done; raise what those that are needed raised."""
        wait_until_done(self.lock, (*tickets, *fills))
        for ticket in tickets:
            if ticket.error is not None:
                raise ticket.error

    def end_step(self) -> tuple[float, dict[str, LaneTime], list[Span]]:
        """Return the seconds of the step, each lane's share, and what every lane did."""
        with self.lock:  # lanes add to it under theirs
            return self.timeline.end_step()

    # -- the end ---------------------------------------------------------------------------------------------

    @property
    def failure(self) -> BaseException | None:
        """The error of an update that failed. That of a read is its own as soon as it cannot begin for it; of what is
        read for others nothing is lost.
        """
        return next((lane.error for lane in self._changing if lane.error is not None), None)

    def forget_failures(self) -> None:
        """What failed was made good."""
        for lane in self._all:
            lane.forget_failure()

    def drain_updates(self) -> None:
        """Wait until every update is done and written; raise what failed."""
        for lane in self._changing:
            lane.drain()

    def finish(self) -> None:
        """Wait until every lane has done, or failed to do, what it was given."""
        for lane in self._all:
            lane.finish()

    def settle(self) -> None:
        """What the lanes of updates were given so far belongs to a step that is over: `give_up` leaves it alone."""
        self._settled.update((lane, lane.position) for lane in self._updating)

    def give_up(self) -> None:
        """Cancel all copies, and the updates that were submitted since `settle`. With other ranks all of it is done
        instead: they wait for every exchange that they were told of, and it may wait for anything.
        """
        if self.abort is not None:
            self.finish()
        for lane, since in self._settled.items():
            lane.revoke(since)  # none begins anything while another ends
        for lane, since in self._settled.items():
            lane.cancel(since)

    def abandon(self) -> None:
        """Nobody waits any more: let the threads end by themselves. Safe wherever garbage is collected."""
        for lane in self._all:
            lane.abandon()

    def close(self) -> None:
        """Give up what has not begun, and end the threads."""
        self.abandon()  # all of them at once
        for lane in self._all:
            lane.close()
