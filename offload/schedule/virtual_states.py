"""States in a simulation: regions in tiles, in memory or on disk, and the device's memory through which they stream.

What waits for what is as in `offload.tiers`: `Tile` and `Record` in `store.py` and `nvme.py`, `Slots` in `slots.py`.
There are fences and rings, and no bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from offload.lanes.ticket import Fence, Ticket
from offload.layout.regions import DiskLayout, Region
from offload.schedule.virtual_lanes import Compute
from offload.tiers.cargoes import Cargoes, Slot
from offload.tiers.ring import Ring, Stretch

Seconds = Callable[[int], float]
"""What a piece of work of so many bytes takes on a link."""


def ring_of(num_bytes: int, kind: str) -> Ring:
    """Return a ring over memory that there is none of."""
    return Ring(torch.empty(num_bytes, dtype=torch.uint8, device="meta"), kind)


def taken(ring: Ring, num_bytes: int) -> Stretch:
    """Take a stretch of a ring that was planned for it."""
    stretch = ring.take(num_bytes)
    assert stretch is not None, f"the {ring.kind} was planned for this"
    return stretch


@dataclass(eq=False)
class VirtualTile:
    """`numel` elements of a region. `disk`: the planes of it on disk, by name, with their bytes there. `recent`: where
    in the ring of updates it still lies. `shown`: the fence of the weights from before, where passes compute with
    those.
    """

    region: Region
    numel: int
    disk: Mapping[str, int]
    fence: Fence = field(default_factory=lambda: Fence("weights"))
    record: Fence = field(default_factory=lambda: Fence("record"))
    landing: Fence = field(default_factory=lambda: Fence("waiting gradients"))
    recent: Stretch | None = None
    early: Stretch | None = None
    shown: Fence | None = None

    @property
    def state_bytes(self) -> int:
        """Bytes on disk of what an update changes."""
        return sum(size for name, size in self.disk.items() if name != "gradients")

    def show(self, is_updated: bool) -> None:
        """As of `offload.tiers.store.Tile.show`."""
        readers = () if self.shown is None else self.shown.before_fill()
        self.shown = None
        if is_updated:
            self.shown = Fence("shown weights")
            self.shown.fill(*self.fence.before_read())
        self.fence.read(*readers)


@dataclass(eq=False)
class VirtualRegion:
    """A region's tiles that this rank updates, and what else it holds of the weights. `landing`: the fence of the
    gradients that wait in memory.
    """

    region: Region
    tiles: list[VirtualTile]
    others: list[VirtualTile]
    landing: Fence = field(default_factory=lambda: Fence("waiting gradients"))

    @property
    def held(self) -> list[VirtualTile]:
        """Everything with weights that this rank holds."""
        return [*self.tiles, *self.others]


def virtual_region(region: Region, layout: DiskLayout) -> VirtualRegion:
    """Cut a region in tiles as the store does. What other ranks update, and this one holds too, is one tile beside each
    of its own.
    """
    sharding = layout.sharding
    sizes = [end - begin for begin, end in layout.tiles(region)]

    def tiles(names: Sequence[str], times: int) -> list[VirtualTile]:
        planes = [region.plane(name) for name in names]
        disk = [{plane.name: times * plane.disk_bytes(size) for plane in planes} for size in sizes]
        return [VirtualTile(region, times * size, its) for size, its in zip(sizes, disk, strict=True)]

    num_peers = sharding.num_peers
    others = tiles(layout.on_disk(region, is_own=False), num_peers) if num_peers else []
    return VirtualRegion(region, tiles(layout.on_disk(region, is_own=True), 1), others)


class VirtualSlots(Cargoes):
    """The device's memory for weights, of which an `Executor` thinks that it is the engine's.

    `bring_up(region, fills, is_whole)` submits a region's way to the device and returns the tickets after which it is
    there. `pending`: the regions that are updated in the slot when they come up, with all of their master weights.
    """

    def __init__(
        self,
        capacity_bytes: int,
        resident: Iterable[Region],
        compute: Compute,
        bring_up: Callable[[Region, Sequence[Ticket], bool], list[Ticket]],
        layout: DiskLayout = DiskLayout(),  # noqa: B008 (frozen)
    ) -> None:
        super().__init__(layout.rides, compute)
        self.capacity_bytes, self._bring_up = capacity_bytes, bring_up
        self.pending: set[Region] = set()
        self.brings_masters = self.pending.__contains__
        self._slots = [Slot(0, 0, capacity_bytes)] if capacity_bytes else []
        self._resident = tuple(resident)
        self._staying = {region.index: Fence("resident weights") for region in self._resident}

    def _fill(self, slot: Slot, gone: Sequence[Slot], fills: Sequence[Ticket], is_ahead: bool) -> list[Ticket]:  # noqa: ARG002
        its = self.cargoes[slot.cargo]
        return [ticket for region in its for ticket in self._bring_up(region, fills, slot.is_whole)]

    def need_masters(self, regions: Iterable[Region]) -> None:
        self.pending.update(regions)
        super().need_masters(self.pending)

    def refresh(self) -> None:
        """Bring the resident regions that are trained up again, after an update."""
        for region in self._resident:
            if region.trainable:
                fence = self._staying[region.index]
                fence.fill(*self._bring_up(region, fence.before_fill(), False))
