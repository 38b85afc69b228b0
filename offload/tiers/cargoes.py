"""Slot bookkeeping without memory: cargo positions in device memory, and waits between their users."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from offload.lanes.lanes import Lanes
from offload.lanes.ticket import Fence, Ticket
from offload.layout.planes import Plane
from offload.layout.regions import Region
from offload.tiers.deferred_updates import DeferredUpdates


@dataclass(eq=False)
class Slot:
    """Device memory range with a present or past cargo."""

    cargo: int
    """Cargo index."""
    begin: int
    """First byte."""
    end: int
    """End byte (exclusive)."""
    is_whole: bool = False
    """True if the slot also has the co-fetched master planes, for updates in the slot."""
    fence: Fence = field(default_factory=lambda: Fence("slot"))
    """Slot writers and readers."""


class Cargoes(ABC):
    """Device memory for weights: streaming slots, and resident regions.

    A cargo is a unit's set of streaming regions, by index (0: empty). `fetch` copies a cargo to an offset; `wait`
    orders compute after the copy; `used` records compute as a reader. Subclasses implement the copy in `_fill`.
    """

    def __init__(
        self, co_fetched: Callable[[Region], Sequence[Plane]], deferred: DeferredUpdates, lanes: Lanes
    ) -> None:
        """`co_fetched` returns the planes next to a region's weights in a slot."""
        self._co_fetched, self._deferred, self._lanes = co_fetched, deferred, lanes
        self._slots: list[Slot] = []
        self._valid_slots: dict[int, Slot] = {}  # by cargo; valid until another update changes the weights
        self._resident_fences: dict[int, Fence] = {}  # resident regions, by region index
        self._forget_cargoes()

    @abstractmethod
    def _fill(
        self, slot: Slot, overwritten: Sequence[Slot], fills: Sequence[Ticket], is_ahead: bool
    ) -> Sequence[Ticket]:
        """Copy the slot's cargo to the device, after `fills` (tickets from users of the slots `overwritten`).
        Returns the copy tickets.
        """

    # -- cargoes ---------------------------------------------------------------------------------------------

    def _forget_cargoes(self) -> None:
        self.cargoes: list[tuple[Region, ...]] = [()]
        self._sizes = [0]  # by cargo, in bytes
        self._slot_sizes: dict[int, int] = {}  # by region index, in bytes
        self._numbers: dict[tuple[Region, ...], int] = {}  # by a unit's regions

    def cargo_of(self, regions: Sequence[Region]) -> int:
        """Return the cargo index for a unit with these regions."""
        regions = tuple(regions)
        cargo = self._numbers.get(regions)
        if cargo is None:
            streaming = tuple(region for region in regions if not self.is_resident(region))
            if streaming not in self.cargoes:
                self.cargoes.append(streaming)
                self._sizes.append(sum(self._slot_bytes(region) for region in streaming))
            cargo = self._numbers[regions] = self.cargoes.index(streaming)
        return cargo

    def cargo_bytes(self, cargo: int) -> int:
        """Return the bytes a cargo takes in a slot."""
        return self._sizes[cargo]

    def _slot_bytes(self, region: Region) -> int:
        num_bytes = self._slot_sizes.get(region.index)
        if num_bytes is None:
            co_fetched_bytes = sum(plane.num_bytes(region.numel) for plane in self._co_fetched(region))
            num_bytes = self._slot_sizes[region.index] = region.weight_bytes + co_fetched_bytes
        return num_bytes

    def is_resident(self, region: Region) -> bool:
        """Return True if the region stays on the device."""
        return region.index in self._resident_fences

    def valid_offsets(self) -> dict[int, int]:
        """Return offsets for all valid cargoes, fetched or in transit."""
        return {cargo: slot.begin for cargo, slot in self._valid_slots.items()}

    def offset(self, cargo: int) -> int:
        """Return the cargo offset; -1 for an empty or absent cargo."""
        slot = self._valid_slots.get(cargo)
        return -1 if slot is None else slot.begin

    # -- fetch and use ------------------------------------------------------------------------------------------

    def fetch(self, cargo: int, offset: int, evicts: Collection[int] = (), is_ahead: bool = False) -> None:
        """Copy a cargo to `offset`, after the last readers in all overwritten slots. `is_ahead`: for the next step."""
        end = offset + self._sizes[cargo]
        evicted = set(map(self._valid_slots.get, evicts))
        slots, overwritten = [], []
        fills: list[Ticket] = []
        slot = Slot(cargo, offset, end, is_whole=not self._deferred.in_slot.keys().isdisjoint(self.cargoes[cargo]))
        for other in self._slots:
            if other not in evicted and not (other.begin < end and offset < other.end):
                slots.append(other)
                continue
            overwritten.append(other)
            fills += other.fence.before_fill()
            if self._valid_slots.get(other.cargo) is other:
                del self._valid_slots[other.cargo]
            # The rest of an evicted slot keeps the same fence: the next cargo there waits for the same readers.
            for part in ((other.begin, min(offset, other.end)), (max(end, other.begin), other.end)):
                if part[0] < part[1]:
                    slots.append(Slot(other.cargo, *part, fence=other.fence))  # noqa: PERF401
        self._slots = [*slots, slot]
        slot.fence.fill(*self._fill(slot, overwritten, fills, is_ahead))
        self._valid_slots[cargo] = slot  # only now: all copies are submitted

    def wait(self, cargo: int, regions: Sequence[Region]) -> None:
        """Order compute after a cargo fetch, and after copies of resident regions."""
        slot = self._valid_slots.get(cargo)
        tickets = list(slot.fence.before_read()) if slot is not None else []
        for region in regions:
            if region.index in self._resident_fences:
                tickets += self._resident_fences[region.index].before_read()
        if tickets:
            self._lanes.compute_after(tickets)

    def used(self, cargo: int, regions: Sequence[Region], marks: Sequence[Ticket]) -> None:
        """Record compute, up to `marks`, as a weight reader."""
        slot = self._valid_slots.get(cargo)
        if slot is not None:
            slot.fence.read(*marks)
        for region in regions:
            if region.index in self._resident_fences:
                self._resident_fences[region.index].read(*marks)

    def settle(self) -> None:
        """Order compute after all copies of resident regions, because modules read them without a fetch."""
        tickets = [ticket for fence in self._resident_fences.values() for ticket in fence.before_read()]
        if tickets:
            self._lanes.compute_after(tickets)

    # -- invalidation -------------------------------------------------------------------------------------------

    def invalidate(self, regions: Iterable[Region]) -> list[Slot]:
        """Invalidate cargoes with these regions before an update elsewhere. Returns their slots."""
        stale = set(regions)
        slots = [slot for slot in self._valid_slots.values() if not stale.isdisjoint(self.cargoes[slot.cargo])]
        self._retire(slots)
        return slots

    def need_masters(self, regions: Iterable[Region]) -> None:
        """Prepare updates in slots: invalidate slots with these regions but without master planes."""
        needed, lacking = set(regions), []
        for slot in self._valid_slots.values():
            masters_needed = needed.intersection(self.cargoes[slot.cargo])
            if masters_needed and not slot.is_whole and any(map(self._co_fetched, masters_needed)):
                lacking.append(slot)
            elif masters_needed:
                slot.is_whole = True
        self._retire(lacking)

    def forget(self) -> None:
        """Invalidate all streaming cargoes (after a cancelled step)."""
        self._retire(list(self._valid_slots.values()))

    def _retire(self, slots: Collection[Slot]) -> None:
        """Remove slots from the valid ones. Compute may still read them."""
        marks = self._lanes.mark() if slots else ()
        for slot in slots:
            slot.fence.read(*marks)
            del self._valid_slots[slot.cargo]
