"""What a training step takes, played before it is made: the engine's own schedule over lanes in counted time.

An `Executor`, the engine's own, brings weights up ahead of compute and thinks that it does so in the engine's slots.
Its fetches, the landings, updates and activations are submitted as the engine submits them, in the same order, behind
the same fences, and each takes what its bytes take on its link. So nothing here says how lanes overlap: that follows.

What is not played: random delays, evaluations, checkpoints, and steps of own loops that add several backwards up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offload.lanes.ticket import Fence, Ticket
from offload.layout.regions import DiskLayout, Region
from offload.schedule.execute import Executor
from offload.schedule.virtual_lanes import COMPUTE, Compute, InStream, OnHost, VirtualLanes
from offload.schedule.virtual_states import Seconds, VirtualSlots, ring_of, taken
from offload.schedule.virtual_updates import Memory, VirtualStates
from offload.tiers.nvme import RING_TILES

CLIPS = ("none", "deferred", "speculative")
_NUM_STEPS, _NUM_WARM = 6, 3
"""Played, and of these not counted. The first one fetches on demand; then what a step leaves on the device may differ
from step to step for a while.
"""
_LINKS = {
    "h2d": "h2d",
    "d2h": "d2h",
    "update": "update",
    "update_up": "h2d",
    "update_on_device": "update",
    "update_down": "d2h",
    "collective": "collective",
    "fetch_read": "nvme_read",
    "update_read": "nvme_read",
    "activation_read": "nvme_read",
    "update_write": "nvme_write",
    "activation_write": "nvme_write",
    COMPUTE: COMPUTE,
}


@dataclass(frozen=True)
class Call:
    """A use of a unit in a step, over all its micro-batches: its forward and later its backward. Without `regions` it
    is a stretch of compute between units.

    regions: of the unit.
    forward_s, backward_s: seconds of compute; the backward's with the forward that a recompute makes again.
    forward_host_s, backward_host_s: what the host takes to launch it, or, where the host computes, what it does beside.
    num_parts: micro-batches, over which the seconds are spread evenly.
    saved_bytes: of the inputs that wait for the backward below the device; 0 where they stay on it, or the graph does.
    """

    regions: tuple[Region, ...]
    forward_s: float
    backward_s: float
    forward_host_s: float = 0.0
    backward_host_s: float = 0.0
    num_parts: int = 1
    saved_bytes: int = 0


@dataclass(frozen=True)
class Engine:
    """What of an engine says how its lanes work, as its plan has it.

    regions: all, by their index.
    resident: the indices of those that are on the device for good.
    lasting: the indices of those whose gradients land only once the backward is over.
    layout: what is on disk, in what tiles, and which range is this rank's.
    memory: the rings.
    capacity_bytes: of the device's memory through which cargoes stream.
    lookahead, most: how many cargoes come early, and are held at once (None for as many as fit).
    on_device: states rest on the device.
    in_stream: compute is a stream of an accelerator, which the host runs ahead of.
    inline: copies and updates are made by compute itself.
    clip: when updates are made: none (at once), deferred or speculative.
    corrects: with speculative clipping, what was updated before the norm was known is corrected.
    keeps_gradients: they wait in memory or on disk.
    delays: updates come a step late, beside the next one.
    activations: where unit inputs wait: device, cpu or nvme.
    wide: gradients are summed in fp32 in their buffer.
    learns: a backward of its own comes first, for the norm (rules whose gradients do not wait).
    has_backward: False for a step of forwards alone, whose updates are made in the slots or once it is over.
    step_host_s: what the host does once a step.
    tile_host_s: what the host does for each tile of an update that it submits.
    """

    regions: tuple[Region, ...]
    resident: frozenset[int]
    lasting: frozenset[int]
    layout: DiskLayout
    memory: Memory
    capacity_bytes: int
    lookahead: int
    most: int | None
    on_device: bool = False
    in_stream: bool = False
    inline: bool = False
    clip: str = "deferred"
    corrects: bool = False
    keeps_gradients: bool = True
    delays: bool = False
    activations: str = "device"
    wide: bool = False
    learns: bool = False
    has_backward: bool = True
    step_host_s: float = 0.0
    tile_host_s: float = 0.0


@dataclass(frozen=True)
class Simulated:
    """A steady step: its seconds; of each link, and of compute, the busy ones; how long compute had nothing to do for
    each link; bytes written to disk.
    """

    seconds: float
    busy_s: Mapping[str, float]
    exposed_s: Mapping[str, float]
    nvme_written_bytes: float


def simulate(
    calls: Sequence[Call], engine: Engine, seconds: Mapping[str, Seconds], num_steps: int = _NUM_STEPS
) -> Simulated:
    """Play steps of these calls and return the steady one: the mean of the later half.

    seconds: what bytes take, by link: "h2d", "d2h", "update", "nvme_read", "nvme_write", "collective" (given this
    rank's own bytes of what all exchange); "update_on_device", and "here" for what compute does with states itself.
    """
    play = _Play(calls, engine, seconds)
    warm = min(_NUM_WARM, num_steps - 1)
    for _ in range(warm):
        play.step()
    before = play.state()
    for _ in range(num_steps - warm):
        play.step()
    after, count = play.state(), num_steps - warm
    mean = [{name: (b[name] - a.get(name, 0.0)) / count for name in b} for a, b in zip(before, after, strict=True)]
    return Simulated(mean[0]["now"], mean[1], mean[2], mean[0]["written"])


class _Play:
    """The state of a simulation, between two steps of it."""

    def __init__(self, calls: Sequence[Call], engine: Engine, seconds: Mapping[str, Seconds]) -> None:
        self._calls, self._engine, self._seconds = calls, engine, seconds
        links = dict(_LINKS)
        if engine.in_stream:  # on a CPU the lane of fetches overtakes, and activations come back by it
            links["returning"] = "h2d"
        self._lanes = VirtualLanes(links, overtaking=("h2d",))
        self._compute: Compute = InStream(self._lanes) if engine.in_stream else OnHost(self._lanes)
        self._states = VirtualStates(
            engine.regions,
            engine.layout,
            engine.memory,
            seconds,
            self._lanes,
            self._compute,
            on_device=engine.on_device,
            keeps_gradients=engine.keeps_gradients,
            inline=engine.inline,
        )
        all_stay = engine.on_device and not engine.layout.sharding.gathers
        self._slots = VirtualSlots(
            engine.capacity_bytes,
            [region for region in engine.regions if all_stay or region.index in engine.resident],
            self._lanes,
            self._compute,
            self._bring_up,
            engine.layout,
        )
        self._executor = Executor(
            self._slots, engine.lookahead, engine.most, lands_late=lambda region: region.index in engine.lasting
        )
        self._ring = ring_of(engine.memory.activations, "activation ring")
        self._tile_bytes = max(1, engine.memory.activations // RING_TILES - 2 * 4096)
        self._saved: dict[int, Fence] = {}
        self._coming: dict[tuple[int, int], list[Ticket]] = {}
        self._due: dict[Region, Fence] = {}
        self._order: list[Region] = []  # of updates, in the last step
        self._landed: list[tuple[Region, Fence]] = []
        self._tickets: list[Ticket] = []
        self._updates_at_once = False
        self._users: dict[int, list[tuple[Region, ...]]] = {}
        for call in calls:
            for region in call.regions:
                self._users.setdefault(region.index, []).append(call.regions)

    def state(self) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        """Return what has passed so far: time and written bytes; busy and exposed seconds."""
        counts = {"now": self._lanes.now, "written": float(self._states.nvme_written_bytes)}
        return counts, {**self._lanes.busy_s, COMPUTE: self._compute.busy_s}, dict(self._lanes.exposed_s)

    def step(self) -> None:
        """Play one step."""
        if not self._engine.has_backward:
            self._step_forward()
            return
        if self._engine.learns:
            self._begin(learns=True)
            self._pass(learns=True)
            self._land_rest(learns=True)
            self._lanes.wait(self._tickets)
            self._executor.end()
        self._begin(learns=False)
        self._pass(learns=False)
        self._end()

    # -- passes ----------------------------------------------------------------------------------------------

    @property
    def _is_immediate(self) -> bool:
        return self._updates_at_once and self._engine.clip != "speculative"

    def _begin(self, learns: bool) -> None:
        clip = self._engine.clip
        self._landed, self._tickets = [], []
        self._updates_at_once = not learns and (self._engine.learns or clip != "deferred") and not self._engine.delays
        self._slots.settle()
        self._executor.begin("step", wraps=self._is_immediate)

    def _pass(self, learns: bool) -> None:
        for number, call in enumerate(self._calls):
            self._put_away(number, call)
            self._forward(call)
        self._read_early()
        for number in reversed(range(len(self._calls))):
            self._backward(number, self._calls[number], learns)

    def _forward(self, call: Call) -> None:
        if not call.regions:
            self._compute.run(call.forward_s, call.forward_host_s)
            return
        self._executor.enter(call.regions, False)
        self._update_in_slot(call)
        self._compute.run(call.forward_s, call.forward_host_s)
        self._executor.leave(call.regions, self._compute.mark())

    def _backward(self, number: int, call: Call, learns: bool) -> None:
        if not call.regions:
            self._compute.run(call.backward_s, call.backward_host_s)
            return
        self._executor.enter(call.regions, True)
        passing = [r for r in call.regions if r.trainable and r.index not in self._engine.lasting]
        sizes = [r.numel * (2 if r.is_bf16 and not self._engine.wide else 4) for r in passing]
        stretch = taken(self._states.buffer, sum(sizes)) if passing and sum(sizes) else None
        if stretch is not None:
            self._compute.after(stretch.fills)
        for part in range(call.num_parts):
            self._bring_back(number, call, part)
            self._compute.run(call.backward_s / call.num_parts, call.backward_host_s / call.num_parts)
        if stretch is not None:
            for region in passing:
                self._land(region, stretch.fence, learns)
            stretch.is_open = False
        self._executor.leave(call.regions, self._compute.mark())

    # -- unit inputs -----------------------------------------------------------------------------------------

    def _put_away(self, number: int, call: Call) -> None:
        if not call.saved_bytes or self._engine.activations == "device":
            return
        fence = self._saved[number] = Fence("activation checkpoints")
        if self._engine.activations == "cpu":
            fence.fill(self._states.submit("d2h", "d2h", call.saved_bytes, self._compute.mark()))
            return
        tickets = []
        for size in _tiles(call.saved_bytes, self._tile_bytes):
            stretch = taken(self._ring, size)
            down = self._states.submit("d2h", "d2h", size, self._compute.mark(), stretch.fills)
            seconds = self._seconds["nvme_write"](size)
            tickets.append(self._lanes.submit("activation_write", seconds, (down,)))
            stretch.fence.fill(down)
            stretch.fence.read(tickets[-1])
            stretch.is_open = False
            self._states.nvme_written_bytes += size
        fence.fill(*tickets)

    def _bring_back(self, number: int, call: Call, part: int) -> None:
        """Wait for the saved inputs of a micro-batch, and start on what is needed after them."""
        self._prepare(number, part)
        tickets = self._coming.pop((number, part), None)
        if tickets is None:
            return
        self._compute.after(tickets)
        if self._engine.inline:
            return
        if part + 1 < call.num_parts:
            self._prepare(number, part + 1)
        else:
            earlier = (other for other in reversed(range(number)) if other in self._saved)
            self._prepare(next(earlier, -1), 0)

    def _prepare(self, number: int, part: int) -> None:
        fence = self._saved.get(number)
        if fence is None or (number, part) in self._coming:
            return
        call, lane = self._calls[number], "returning" if self._engine.in_stream else "h2d"
        size, reads = call.saved_bytes // call.num_parts, (*fence.before_read(), *self._compute.mark())
        if part + 1 == call.num_parts:
            del self._saved[number]
        if self._engine.activations == "cpu":
            self._coming[number, part] = [self._states.submit(lane, "h2d", size, reads)]
            return
        tickets = []
        for tile in _tiles(size, self._tile_bytes):
            stretch = taken(self._ring, tile)
            seconds = self._seconds["nvme_read"](tile)
            reading = self._lanes.submit("activation_read", seconds, fence.before_read(), stretch.fills)
            stretch.fence.fill(reading)
            tickets.append(self._states.submit(lane, "h2d", tile, (reading, *self._compute.mark())))
            stretch.fence.read(tickets[-1])
            stretch.is_open = False
        self._coming[number, part] = tickets

    # -- gradients and updates -------------------------------------------------------------------------------

    def _read_early(self) -> None:
        """The backward begins: read what is updated first, if it waits for the norm."""
        engine = self._engine
        on_disk = any("gradients" in engine.layout.of(region) for region in engine.regions)
        if engine.clip == "deferred" and not engine.delays and not engine.learns and not on_disk:
            for region in self._order:
                if not self._states.lend_early(region):
                    break

    def _land(self, region: Region, source: Fence, learns: bool) -> None:
        if learns:
            return
        fence, tickets = self._states.land(region, source)
        self._tickets += tickets
        self._landed.append((region, fence))
        if self._updates_at_once:
            self._update(region, fence, publishes=self._is_immediate)

    def _update(self, region: Region, fence: Fence, publishes: bool = True) -> None:
        self._slots.invalidate((region,))
        self._states.update(region, fence, publishes)
        self._lanes.spend(self._engine.tile_host_s * len(self._states.of[region.index].tiles))

    def _land_rest(self, learns: bool) -> None:
        """The backward is over: land what waited on the device."""
        for region in self._engine.regions:
            if region.trainable and region.index in self._engine.lasting:
                self._land(region, Fence("lasting gradients"), learns)

    def _end(self) -> None:
        """As of `Updates.apply` and `Steps.end`."""
        engine, first = self._engine, self._executor.first_uses()
        self._land_rest(learns=False)
        if self._is_immediate:
            self._slots.refresh()
            self._go_on()
        self._lanes.wait([*self._tickets, *self._compute.mark()])
        ranked = sorted(self._landed, key=lambda landed: self._rank(landed[0], first))
        if self._updates_at_once and engine.clip == "speculative":
            # All but the last one were updated with the norm so far.
            for region, fence in ranked if engine.corrects else ():
                if region is not self._landed[-1][0]:
                    self._update(region, fence, publishes=False)
            for region, _ in ranked if engine.layout.sharding.publishes else ():
                for number in range(len(self._states.of[region.index].tiles)):
                    self._states.publish(region, number)
        elif not self._updates_at_once:
            due = list(reversed(ranked)) if engine.delays else ranked
            self._due, self._order = dict(due), [region for region, _ in due]
            self._slots.invalidate(self._due)
            self._show()
        if not self._is_immediate:
            self._slots.refresh()
            self._go_on()
            self._submit_due()
        self._compute.run(0.0, engine.step_host_s)
        self._slots.settle()

    def _rank(self, region: Region, first: Mapping[int, int]) -> float:
        if self._slots.is_resident(region):
            return -1
        users = self._users.get(region.index, ())
        return min((first.get(self._slots.cargo_of(regions), math.inf) for regions in users), default=math.inf)

    def _show(self) -> None:
        """Where updates are late, the next pass computes with the weights from before those that are due."""
        if self._engine.delays:
            for region in self._due:
                for tile in self._states.of[region.index].held:
                    tile.show(True)

    def _go_on(self) -> None:
        self._executor.end()
        self._executor.expect("step", self._is_immediate and not self._engine.learns)

    # -- a step without gradients ----------------------------------------------------------------------------

    def _step_forward(self) -> None:
        """As of `offload.engine.methods.forwards`: what its passes do side by side is in the forward of each call."""
        engine = self._engine
        self._slots.settle()
        self._executor.begin("step")
        for call in self._calls:
            self._forward(call)
        self._lanes.wait(self._compute.mark())  # for the losses
        first = self._executor.first_uses()
        trained = sorted((r for r in engine.regions if r.trainable), key=lambda region: self._rank(region, first))
        in_slots = [r for r in trained if self._updates_in_slot(r)]
        self._slots.need_masters(in_slots)
        self._due = {region: Fence("no gradients") for region in trained if region not in in_slots}
        self._slots.invalidate(self._due)
        self._slots.refresh()
        self._go_on()
        self._submit_due()
        self._compute.run(0.0, engine.step_host_s)
        self._slots.settle()

    def _updates_in_slot(self, region: Region) -> bool:
        """True where the update is put off until the weights come up."""
        engine = self._engine
        return not engine.on_device and engine.layout.updates_in_slot(region) and not self._slots.is_resident(region)

    def _update_in_slot(self, call: Call) -> None:
        for region in call.regions:
            if region in self._slots.pending:
                self._slots.pending.remove(region)
                down = self._states.update_in_slot(region)
                self._slots.used(self._slots.cargo_of(call.regions), (), (down,))

    def _bring_up(self, region: Region, fills: Sequence[Ticket], is_whole: bool) -> list[Ticket]:
        self._submit_due(region)
        return self._states.bring_up(region, fills, is_whole)

    def _submit_due(self, last: Region | None = None) -> None:
        """Submit the updates that are due up to that of a region, or all."""
        if last is None or last in self._due:
            for region in list(self._due):
                self._update(region, self._due.pop(region))
                if region is last:
                    break


def _tiles(num_bytes: int, most: int) -> list[int]:
    """Cut bytes in pieces of at most so many."""
    return [min(most, num_bytes - begin) for begin in range(0, num_bytes, most)]
