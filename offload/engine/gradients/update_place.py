"""Where the update of a tile runs: where its planes are, or on the device, to which they stream and come back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from offload.lanes.lane import Lane
from offload.lanes.lanes import Lanes
from offload.lanes.ticket import Fence, Ticket
from offload.layout.planes import CODES
from offload.layout.regions import Region, align
from offload.planning.device_updates import PLANE_ALIGNMENT, UPDATE_RING
from offload.telemetry.counters import Counters
from offload.tiers.device import Device, copy_planes
from offload.tiers.lease import Lease
from offload.tiers.ring import Ring


@dataclass(frozen=True)
class TileUpdate:
    """What is to be done with a tile, in place."""

    region: Region
    """The region of the tile."""
    work: Callable[[Mapping[str, torch.Tensor], torch.Tensor], int | torch.Tensor]
    """Does the update, given planes and gradients; returns how many weights are no longer finite."""
    lease: Lease
    """The states of the tile."""
    planes: Mapping[str, torch.Tensor]
    """The planes of the lease, and the gradients, by name."""
    fence: Fence
    """Who reads and writes the gradients."""
    stays: Container[str]
    """The names of the planes that rest on the device in any case."""
    refuse: Callable[[int], None]
    """Raises; called with the number of weights that are no longer finite, where there are any."""
    name: str
    """The name that the timeline shows."""
    num_bytes: int
    """The bytes of states that the update reads and writes."""

    def run(self, planes: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Do the work on these planes. Return how many weights are no longer finite where an accelerator alone knows
        it; else refuse them here.
        """
        num_wrong = self.work(planes, planes["gradients"])
        if isinstance(num_wrong, torch.Tensor) and not num_wrong.is_cpu:
            return num_wrong
        if num_wrong:
            self.refuse(int(num_wrong))
        return None


class UpdatePlace(Protocol):
    """Where updates run."""

    def begin_step(self) -> None:
        """A step begins."""

    def submit(self, tile: TileUpdate) -> Ticket:
        """Submit the update of a tile: after its gradients, behind every fetch of what it overwrites. The ticket stands
        for its new weights.
        """

    def check(self) -> None:
        """All of a step is submitted: refuse weights that are no longer finite."""

    def reset(self) -> None:
        """A step was given up."""

    def free(self) -> None:
        """Let go of every buffer."""


class InPlace:
    """Updates states where they are, on one lane: that of updates on the host, or compute itself on the device."""

    def __init__(self, lane: Lane, device: Device, within: Callable[[], AbstractContextManager[Any]]) -> None:
        """`within`: the context of the work."""
        self._lane, self._device, self._within = lane, device, within
        self._counts: list[tuple[TileUpdate, torch.Tensor]] = []  # of weights that are not finite, known to the device

    def begin_step(self) -> None:
        """Forget what the last step has counted."""
        self._counts = []

    def submit(self, tile: TileUpdate) -> Ticket:
        """Submit the update of a tile: after its gradients, behind every fetch of what it overwrites. The ticket stands
        for its new weights.
        """
        ticket = self._lane.submit(
            partial(self._run, tile),
            reads=(*tile.fence.before_read(), *tile.lease.reads),
            fills=tile.lease.fills,
            name=tile.name,
            num_bytes=tile.num_bytes,
        )
        tile.fence.read(ticket)
        tile.lease.done_writing(ticket)
        return ticket

    def _run(self, tile: TileUpdate) -> None:
        with self._within():
            count = tile.run(tile.planes)
        if count is not None:
            self._counts.append((tile, count))

    def check(self) -> None:
        """All of a step is submitted: ask an accelerator once for what it has counted."""
        if self._counts:
            tiles, counts = zip(*self._counts, strict=True)
            self._counts = []
            for tile, num_wrong in zip(tiles, self._device.bring_down(torch.stack(counts))().tolist(), strict=True):
                if num_wrong:
                    tile.refuse(num_wrong)

    def reset(self) -> None:
        """A step was given up."""

    def free(self) -> None:
        """Let go of every buffer."""


class OnDevice:
    """Updates states of the host on the device, in the stretches of a ring: three lanes bring a tile up, update it and
    bring down what was changed, each beside the others and beside compute.
    """

    def __init__(
        self, memory: torch.Tensor, num_regions: int, lanes: Lanes, device: Device, counters: Counters
    ) -> None:
        """`memory`: of the device, flat uint8."""
        self._ring, self._lanes, self._device, self._counters = Ring(memory, UPDATE_RING), lanes, device, counters
        self._begun: Sequence[Ticket] = ()
        self._counts: dict[Region, tuple[TileUpdate, torch.Tensor]] = {}  # of weights that are not finite
        self._told, self._telling = device.host_memory(num_regions, torch.int64), Fence("counts")

    def begin_step(self) -> None:
        """Count anew; what the last step has counted is looked at by a lane."""
        self._counts = {}
        self._begun = self._lanes.mark()  # compute has cleared the memory, or filled what stays from a checkpoint

    def submit(self, tile: TileUpdate) -> Ticket:
        """Submit what `InPlace.submit` does, and its copies."""
        there = {name: flat for name, flat in tile.planes.items() if name not in tile.stays}
        sizes = [align(flat.nbytes, PLANE_ALIGNMENT) for flat in there.values()]
        stretch = self._ring.take(sum(sizes))
        assert stretch is not None, "the ring was planned for the largest tile"
        places = stretch.flat.split(sizes)
        here = {
            name: place[: flat.nbytes].view(flat.dtype)
            for place, (name, flat) in zip(places, there.items(), strict=True)
        }
        changed = {name: flat for name, flat in there.items() if name != "gradients"}
        read = {name: flat for name, flat in here.items() if name != CODES}

        up_bytes = sum(flat.nbytes for flat in read.values())
        up = self._lanes.update_up.submit(
            partial(copy_planes, self._device, read, there),
            reads=(*tile.fence.before_read(), *tile.lease.reads, *self._begun),
            fills=stretch.fills,
            name=tile.name,
            num_bytes=up_bytes,
        )
        stretch.fence.fill(up)
        tile.fence.read(up)
        updated = self._lanes.update_on_device.submit(
            partial(self._run, tile, {**tile.planes, **here}, self._counts),
            reads=stretch.fence.before_read(),
            name=tile.name,
            num_bytes=tile.num_bytes,
        )
        stretch.fence.fill(updated)
        down_bytes = sum(flat.nbytes for flat in changed.values())
        down = self._lanes.update_down.submit(
            partial(copy_planes, self._device, changed, here),
            reads=stretch.fence.before_read(),
            fills=tile.lease.fills,
            name=tile.name,
            num_bytes=down_bytes,
        )
        stretch.fence.read(down)
        stretch.close()
        tile.lease.done_writing(down)
        self._counters.count("h2d_bytes", up_bytes)
        self._counters.count("d2h_bytes", down_bytes)
        return down

    @staticmethod
    def _run(
        tile: TileUpdate, here: Mapping[str, torch.Tensor], counts: dict[Region, tuple[TileUpdate, torch.Tensor]]
    ) -> None:
        count = tile.run(here)
        if count is not None and tile.region in counts:
            counts[tile.region][1].add_(count)
        elif count is not None:
            counts[tile.region] = tile, count

    def check(self) -> None:
        """All of a step is submitted: let a lane look at what an accelerator counts in it. Nobody waits for that."""
        if self._device.torch_device.type == "cpu":
            return
        counts, told = self._counts, self._told

        def bring_down() -> None:
            if counts:
                self._device.copy(told[: len(counts)], torch.stack([count for _, count in counts.values()]))

        def refuse() -> None:
            for (tile, _), num_wrong in zip(counts.values(), told.tolist(), strict=False):
                if num_wrong:
                    tile.refuse(num_wrong)

        copied = self._lanes.update_on_device.submit(bring_down, fills=self._telling.before_fill(), name="check")
        self._telling.fill(copied)
        looked = self._lanes.update.submit(refuse, reads=self._telling.before_read(), name="check")
        self._telling.read(looked)

    def reset(self) -> None:
        """A step was given up: no stretch is lent any more."""
        self._ring.reset()

    def free(self) -> None:
        """Let go of the device's memory."""
        self._ring = Ring(torch.empty(0, dtype=torch.uint8), UPDATE_RING)


class ByRegion:
    """Updates some regions on the device, to which they stream, and beside these the others where they are."""

    def __init__(self, on_device: OnDevice, in_place: InPlace, streamed: Collection[int]) -> None:
        """`streamed`: the regions that are updated on the device, by index."""
        self._places: Mapping[bool, UpdatePlace] = {True: on_device, False: in_place}
        self._streamed = streamed

    def begin_step(self) -> None:
        """A step begins."""
        for place in self._places.values():
            place.begin_step()

    def submit(self, tile: TileUpdate) -> Ticket:
        """Submit the update of a tile where its region has it."""
        return self._places[tile.region.index in self._streamed].submit(tile)

    def check(self) -> None:
        """All of a step is submitted."""
        for place in self._places.values():
            place.check()

    def reset(self) -> None:
        """A step was given up."""
        for place in self._places.values():
            place.reset()

    def free(self) -> None:
        """Let go of every buffer."""
        for place in self._places.values():
            place.free()


def open_place(
    in_place: InPlace,
    memory: torch.Tensor | None,
    streamed: Collection[int],
    regions: Sequence[Region],
    lanes: Lanes,
    device: Device,
    counters: Counters,
) -> UpdatePlace:
    """Return where updates run: of regions that are `streamed`, by index, on the device, through this `memory` of it
    (None where no region is); of the others in place.
    """
    if memory is None:
        return in_place
    on_device = OnDevice(memory, len(regions), lanes, device, counters)
    has_others = any(region.trainable and region.index not in streamed for region in regions)
    return ByRegion(on_device, in_place, streamed) if has_others else on_device
