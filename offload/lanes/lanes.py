"""All lanes of one engine, lanes without a thread, and the waits of compute for lanes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from offload.lanes.threads import Link, ThreadLane
from offload.lanes.ticket import Lane, Run, Ticket, Tickets, raise_error, wait_until_done
from offload.lanes.timeline import DISK_LANES, LANES, LaneTime, Span, Throttle, Timeline


class InlineLane(Lane):
    """Lane without a thread: runs work in the caller, at submission, and raises errors there. The full duration counts
    as exposed time.
    """

    def __init__(self, name: str, lanes: Lanes) -> None:
        self.name = name
        self._lanes = lanes

    def submit(
        self,
        work: Run,
        *,
        reads: Tickets = (),
        users: Tickets = (),
        name: str = "",
        num_bytes: int = 0,  # noqa: ARG002
    ) -> Ticket:
        self.position += 1
        self._lanes.compute_after(reads, users=users)
        return self._run(work, name)

    def _run(self, work: Run, name: str) -> Ticket:
        begin = time.perf_counter()
        work()
        end = time.perf_counter()
        self._lanes.timeline.add(self.name, name, begin, end)
        self._lanes.timeline.expose(self.name, end - begin)
        return Ticket(self.name, begin, end, is_done=True)


class ComputeLane(InlineLane):
    """Runs work on compute and raises errors at submission. The ticket is over when compute has done the work: on an
    accelerator when the stream has run the work, not at launch.
    """

    def _run(self, work: Run, name: str) -> Ticket:
        begin = self._lanes.now()
        work()
        self._lanes.record_compute(name, begin)
        return Ticket(self.name, end=time.perf_counter(), is_done=True)


_READS = "reads"
_CHANGES = "changes"


class LaneRow(NamedTuple):
    """A lane in the table of lanes."""

    name: str
    """Attribute of `Lanes`."""
    link: str
    """Link of the transfers. Lanes with a common link do not wait for each other's tickets."""
    on_cpu: str = ""
    """Lane with this work if compute is the CPU. Empty: a lane of its own."""
    inline: str = ""
    """The same, if nothing overlaps compute."""
    update: str = ""
    """Part in an update: reads states, or changes them. An error in a lane that changes states is a failed update."""


LANE_TABLE = (
    LaneRow("fetch_read", "nvme_read"),
    LaneRow("activation_read", "nvme_read"),
    LaneRow("h2d", "h2d"),
    LaneRow("returning", "h2d", on_cpu="h2d", inline="h2d"),
    LaneRow("d2h", "d2h"),
    LaneRow("collective", "collective"),
    LaneRow("network", "network"),
    LaneRow("decoding", "h2d", on_cpu="h2d", inline="h2d"),
    LaneRow("activation_write", "nvme_write"),
    LaneRow("update_read", "nvme_read", update=_READS),
    LaneRow("update_up", "h2d", inline="h2d", update=_READS),
    LaneRow("update", "update", update=_CHANGES),
    LaneRow("update_on_device", "update", on_cpu="update", inline="update", update=_CHANGES),
    LaneRow("update_down", "d2h", inline="d2h", update=_CHANGES),
    LaneRow("update_write", "nvme_write", update=_CHANGES),
)
"""All lanes, ordered along the path of a failure. A row comes after the rows of the lanes that it names."""


class Lanes:
    """All lanes beside compute. Compute is the calling thread.

    `overlap` is False where h2d, d2h, collective, network and update run inside compute: on a CPU without throttles, a
    second busy thread costs more time than it hides. Disk lanes always have threads, because they block in C++. A
    thread starts with the first submission.
    """

    h2d: Lane
    """Weights to the device."""
    returning: Lane
    """H2D copies of activations. They pass weight fetches still waiting for slots. On a CPU h2d lets them pass."""
    decoding: Lane
    """Decodes quantized weights on the device, beside the next copy."""
    d2h: Lane
    """Gradients and activations to the host."""
    collective: Lane
    """Exchanges offloaded data with other ranks. All ranks submit in the same order."""
    network: Lane
    """All-reduce over replicas for gradients in host memory, beside all other lanes."""
    update: Lane
    """Updates on the host."""
    # Device updates of offloaded states. In a common lane, weight fetches and D2H copies of gradients and activations
    # would wait for the updates of the whole model.
    update_up: Lane
    update_on_device: Lane
    update_down: Lane
    # Disk lanes. Each reader has a lane of its own, so a fetch does not wait behind an update.
    fetch_read: Lane
    update_read: Lane
    activation_read: Lane
    update_write: Lane
    activation_write: Lane

    def __init__(
        self,
        *,
        overlap: bool,
        throttle: Mapping[str, Throttle],
        delay_seed: int | None = None,
        abort: Callable[[BaseException], None] | None = None,
    ) -> None:
        """`abort` informs waiting ranks of a failure, so that they do not wait for an exchange (None: no other rank
        waits).
        """
        self.timeline = Timeline(LANES)
        self.overlap = overlap
        self.abort = abort
        self.lock = threading.Lock()
        """One for all lanes: a ticket finished on one lane starts work on another."""
        self.links = {name: Link(name, self.timeline, throttle.get(name)) for name in LANES}
        self._delay_seed = delay_seed

        opened: dict[LaneRow, Lane] = {}
        for row in LANE_TABLE:
            opened[row] = self._open(row)
            setattr(self, row.name, opened[row])
        # Some names share a lane on a CPU, hence the dicts.
        self._all = tuple(dict.fromkeys(opened.values()))
        self._updating = tuple(dict.fromkeys(lane for row, lane in opened.items() if row.update))
        self._changing = tuple(dict.fromkeys(lane for row, lane in opened.items() if row.update == _CHANGES))
        self._closed_at = dict.fromkeys(self._all, 0)
        """Position of each lane at the end of the last finished step, for `give_up`."""

        # States on the device: work in the order of compute, so without a thread.
        self.on_compute: Lane = ComputeLane("compute", self)
        self.collective_on_compute: Lane = ComputeLane("compute", self)
        """Exchanges states on the device with other ranks."""
        self.network_on_compute: Lane = ComputeLane("compute", self)
        """Reduces gradients on the device over replicas."""

    def _open(self, row: LaneRow) -> Lane:
        """Open a lane, or return the lane with its work."""
        shared = row.on_cpu if self.overlap else row.inline
        if shared:
            lane: Lane = getattr(self, shared)
            return lane
        has_thread = self.overlap or row.link in DISK_LANES
        if has_thread:
            return self._thread(row.name, row.link)
        return self._inline(row.name)

    def _thread(self, name: str, link: str) -> Lane:
        abort = self.abort if name in ("collective", "network") else None  # only there other ranks wait
        # Returning activations share h2d here, and pass the fetches still waiting for slots.
        return ThreadLane(name, self.lock, self.links[link], self.delays(name), name == "h2d", self.enter, abort)

    def _inline(self, name: str) -> Lane:
        return InlineLane(name, self)

    def enter(self) -> None:
        """Prepare the current lane thread before the first work: select the device."""

    def delays(self, name: str) -> random.Random | None:
        if self._delay_seed is None:
            return None
        return random.Random(f"{self._delay_seed} {name}")

    # -- compute ---------------------------------------------------------------------------------------------

    def mark(self) -> Sequence[Ticket]:
        """Return tickets for all work submitted to compute so far. Empty on a CPU, where the work is already done."""
        return ()

    def now(self) -> Any:
        """Return the current position of compute, as the `begin` of `record_compute`."""
        return time.perf_counter()

    def record_compute(self, name: str, begin: Any) -> Sequence[Ticket]:
        """Record the compute work since `begin` in the timeline. Returns the same tickets as `mark`."""
        self.timeline.add("compute", name, begin, time.perf_counter())
        return ()

    def compute_after(self, tickets: Sequence[Ticket], *, users: Sequence[Ticket] = ()) -> None:
        """Order the next compute work after `tickets`, and raise their errors. Also wait until the `users` tickets,
        readers of a buffer to overwrite, are over.
        """
        self.wait(tickets, users=users)

    def wait(self, tickets: Sequence[Ticket], *, users: Sequence[Ticket] = ()) -> None:
        """Block this thread until `tickets` are done, and raise their errors. Also wait until `users` are over.

        The time counts as exposed for the lane of the last ticket. Time before the start of its work counts for the
        lane that held up this start.
        """
        late = []
        for ticket in (*tickets, *users):
            if not ticket.is_done:
                late.append(ticket)  # noqa: PERF401 (a comprehension is a call)
        if late:
            begin = time.perf_counter()
            try:
                wait_until_done(self.lock, late)
            finally:  # also after an interrupt
                last = max(late, key=lambda ticket: ticket.end)
                end = time.perf_counter()
                worked = max(begin, min(last.begin or begin, end))
                self.timeline.expose(last.delayed_by, worked - begin)
                self.timeline.expose(last.lane, end - worked)
        raise_error(tickets)

    def end_step(self) -> tuple[float, dict[str, LaneTime], list[Span]]:
        """Return the step duration in seconds, the time per lane, and the spans on every lane."""
        with self.lock:  # lanes add spans under the lock
            return self.timeline.end_step()

    # -- failure, cancellation, shutdown ------------------------------------------------------------------------

    @property
    def failure(self) -> BaseException | None:
        """Error from a failed update, or None. A failed read counts as soon as an update cannot begin without the data.
        Failed reads for other purposes lose no state and do not count.
        """
        return next((lane.error for lane in self._changing if lane.error is not None), None)

    def forget_failures(self) -> None:
        """Clear the errors of all lanes after a recovery."""
        for lane in self._all:
            lane.error = None

    def drain_updates(self) -> None:
        """Wait until every update is done and written. Raises the first failure."""
        for lane in self._changing:
            lane.drain()

    def finish(self) -> None:
        """Wait until every lane has finished all submitted work, with or without errors."""
        for lane in self._all:
            if lane.position:
                lane.finish()

    def close_step(self) -> None:
        """Record the present positions of the update lanes. Work up to there belongs to a finished step, and `give_up`
        does not cancel this work.
        """
        self._closed_at.update((lane, lane.position) for lane in self._updating)

    def give_up(self) -> None:
        """Cancel all copies, and all updates submitted since `close_step`. With other ranks, finish all work instead:
        the other ranks wait for every announced exchange, and an exchange may depend on any other work.
        """
        if self.abort is not None:
            self.finish()
        for lane, since in self._closed_at.items():
            lane.revoke(since)  # first on all lanes: otherwise one lane begins work while another ends
        for lane, since in self._closed_at.items():
            lane.cancel(since)

    def abandon(self) -> None:
        """Let all threads end without a wait. Safe in a finalizer."""
        for lane in self._all:
            lane.abandon()

    def close(self) -> None:
        """Cancel the work not yet begun, and end the threads."""
        self.abandon()  # all threads first: they end in parallel
        for lane in self._all:
            lane.close()
