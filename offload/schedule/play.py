"""A step that is played: what its kinds have in common."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offload.lanes.ticket import Fence, Ticket
from offload.layout.regions import DiskLayout, Region
from offload.schedule.execute import Executor
from offload.schedule.virtual_lanes import COMPUTE, Compute, InStream, OnHost, VirtualLanes
from offload.schedule.virtual_states import Seconds, VirtualSlots
from offload.schedule.virtual_updates import Memory, VirtualStates

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


class Play(ABC):
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
            self._compute,
            self._bring_up,
            engine.layout,
        )
        self._executor = Executor(
            self._slots, engine.lookahead, engine.most, lands_late=lambda region: region.index in engine.lasting
        )
        self._due: dict[Region, Fence] = {}
        self._users: dict[int, list[tuple[Region, ...]]] = {}
        for call in calls:
            for region in call.regions:
                self._users.setdefault(region.index, []).append(call.regions)

    def state(self) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        """Return what has passed so far: time and written bytes; busy and exposed seconds."""
        counts = {"now": self._lanes.now, "written": float(self._states.nvme_written_bytes)}
        return counts, {**self._lanes.busy_s, COMPUTE: self._compute.busy_s}, dict(self._lanes.exposed_s)

    @abstractmethod
    def step(self) -> None:
        """Play one step."""

    def _update(self, region: Region, fence: Fence, publishes: bool = True) -> None:
        self._slots.invalidate((region,))
        self._states.update(region, fence, publishes)
        self._lanes.spend(self._engine.tile_host_s * len(self._states.of[region.index].tiles))

    def _rank(self, region: Region, first: Mapping[int, int]) -> float:
        if self._slots.is_resident(region):
            return -1
        users = self._users.get(region.index, ())
        return min((first.get(self._slots.cargo_of(regions), math.inf) for regions in users), default=math.inf)

    def _go_on(self, wraps: bool) -> None:
        """What the next step needs first comes up. `wraps`: its units are updated one by one."""
        self._slots.refresh()
        self._executor.end()
        self._executor.expect("step", wraps)

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
