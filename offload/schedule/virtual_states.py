"""States in a simulation: regions in tiles, in memory or on disk, and the device's memory through which they stream.

What waits for what is as in `offload.tiers`: `Tile` and `Record` in `store.py` and `nvme.py`, `Slots` in `slots.py`.
There are fences and rings, and no bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from offload.lanes.ticket import Fence, Ticket
from offload.layout.regions import DiskLayout, Region
from offload.schedule.virtual_lanes import Compute, VirtualLanes
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

    num_peers = sharding.num_ranges - 1 if sharding.publishes else 0
    others = tiles(layout.on_disk(region, is_own=False), num_peers) if num_peers else []
    return VirtualRegion(region, tiles(layout.on_disk(region, is_own=True), 1), others)


@dataclass(eq=False)
class Slot:
    """What lies, or lay, in a stretch of the device's memory. `is_whole`: with the rest of its master weights."""

    cargo: int
    begin: int
    end: int
    fence: Fence = field(default_factory=lambda: Fence("slot"))
    is_whole: bool = False


class VirtualSlots:
    """The device's memory for weights, of which an `Executor` thinks that it is the engine's.

    `bring_up(region, fills, is_whole)` submits a region's way to the device and returns the tickets after which it is
    there. `pending`: the regions that are updated in the slot when they come up, with all of their master weights.
    """

    def __init__(
        self,
        capacity_bytes: int,
        resident: Iterable[Region],
        lanes: VirtualLanes,
        compute: Compute,
        bring_up: Callable[[Region, Sequence[Ticket], bool], list[Ticket]],
        layout: DiskLayout = DiskLayout(),  # noqa: B008 (frozen)
    ) -> None:
        self.capacity_bytes, self._lanes, self._compute, self._bring_up = capacity_bytes, lanes, compute, bring_up
        self._layout = layout
        self.pending: set[Region] = set()
        self.cargoes: list[tuple[Region, ...]] = [()]
        self._numbers: dict[tuple[Region, ...], int] = {}
        self._slots = [Slot(0, 0, capacity_bytes)] if capacity_bytes else []
        self._lying: dict[int, Slot] = {}
        self._resident = {region.index: (region, Fence("resident weights")) for region in resident}

    def cargo_of(self, regions: Sequence[Region]) -> int:
        regions = tuple(regions)
        found = self._numbers.get(regions)
        if found is None:
            streaming = tuple(region for region in regions if region.index not in self._resident)
            if streaming not in self.cargoes:
                self.cargoes.append(streaming)
            found = self._numbers[regions] = self.cargoes.index(streaming)
        return found

    def cargo_bytes(self, cargo: int) -> int:
        return sum([region.weight_bytes + self._rides_bytes(region) for region in self.cargoes[cargo]])

    def _rides_bytes(self, region: Region) -> int:
        return sum([plane.num_bytes(region.numel) for plane in self._layout.rides(region)])

    def held(self) -> dict[int, int]:
        return {cargo: slot.begin for cargo, slot in self._lying.items()}

    def offset(self, cargo: int) -> int:
        slot = self._lying.get(cargo)
        return -1 if slot is None else slot.begin

    def is_resident(self, region: Region) -> bool:
        """True where a region is on the device for good."""
        return region.index in self._resident

    def fetch(self, cargo: int, offset: int, evicts: Collection[int] = (), is_ahead: bool = False) -> None:  # noqa: ARG002
        end = offset + self.cargo_bytes(cargo)
        evicted = [self._lying[other] for other in evicts if other in self._lying]
        gone = [s for s in self._slots if s in evicted or (s.begin < end and offset < s.end)]
        self._lying = {other: s for other, s in self._lying.items() if s not in gone}
        rest = [
            Slot(other.cargo, *part, fence=other.fence)
            for other in gone
            for part in ((other.begin, min(offset, other.end)), (max(end, other.begin), other.end))
            if part[0] < part[1]
        ]
        slot = Slot(cargo, offset, end, is_whole=not self.pending.isdisjoint(self.cargoes[cargo]))
        self._slots = [other for other in self._slots if other not in gone] + [*rest, slot]
        fills = [ticket for other in gone for ticket in other.fence.before_fill()]
        its = self.cargoes[cargo]
        slot.fence.fill(*[ticket for region in its for ticket in self._bring_up(region, fills, slot.is_whole)])
        self._lying[cargo] = slot

    def wait(self, cargo: int, regions: Sequence[Region]) -> None:
        slot = self._lying.get(cargo)
        tickets = list(slot.fence.before_read()) if slot is not None else []
        for region in regions:
            if region.index in self._resident:
                tickets += self._resident[region.index][1].before_read()
        self._compute.after(tickets)

    def used(self, cargo: int, regions: Sequence[Region], marks: Sequence[Ticket]) -> None:
        slot = self._lying.get(cargo)
        if slot is not None:
            slot.fence.read(*marks)
        for region in regions:
            if region.index in self._resident:
                self._resident[region.index][1].read(*marks)

    def invalidate(self, regions: Collection[Region]) -> None:
        """What lies of these regions on the device is stale."""
        stale = set(regions)
        self._retire([slot for slot in self._lying.values() if not stale.isdisjoint(self.cargoes[slot.cargo])])

    def _retire(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            slot.fence.read(*self._compute.mark())
            del self._lying[slot.cargo]

    def need_masters(self, regions: Collection[Region]) -> None:
        """Regions are to be updated in their slots: those that lie there without their master weights come up anew."""
        self.pending.update(regions)
        lacking = []
        for slot in self._lying.values():
            its = self.pending.intersection(self.cargoes[slot.cargo])
            if its and not slot.is_whole and any(map(self._layout.rides, its)):
                lacking.append(slot)
            elif its:
                slot.is_whole = True
        self._retire(lacking)

    def refresh(self) -> None:
        """Bring the resident regions that are trained up again, after an update."""
        for region, fence in self._resident.values():
            if region.trainable:
                fence.fill(*self._bring_up(region, fence.before_fill(), False))

    def settle(self) -> None:
        """Let compute come after every fetch of what stays."""
        self._compute.after([ticket for _, fence in self._resident.values() for ticket in fence.before_read()])

    def forget(self) -> None:
        self._lying.clear()
