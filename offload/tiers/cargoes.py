"""Which cargoes lie where in a stretch of memory, and who waits for whom there: without the memory itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from offload.lanes.lanes import Lanes
from offload.lanes.ticket import Fence, Ticket
from offload.layout.planes import Plane
from offload.layout.regions import Region
from offload.tiers.due import Due


@dataclass(eq=False)
class Slot:
    """A stretch of the device's memory in which a cargo lies, or lay."""

    cargo: int
    """The number of the cargo."""
    begin: int
    """The first byte of the stretch."""
    end: int
    """The byte behind the stretch."""
    is_whole: bool = False
    """True if the master weights came up too, as far as they are updated in the slot."""
    fence: Fence = field(default_factory=lambda: Fence("slot"))
    """Who fills the stretch, and who reads it."""


class Cargoes(ABC):
    """The device's memory for weights: the stretch through which cargoes stream, and the regions that stay for good.

    The regions of a unit that stream together are its cargo (by number, 0 for none). `fetch` brings a cargo to an
    offset; `wait` lets compute come after it; `used` notes compute as a reader. `_fill` says how a cargo comes up.
    """

    def __init__(self, co_fetched: Callable[[Region], Sequence[Plane]], due: Due, lanes: Lanes) -> None:
        """`co_fetched`: the planes that a region has in a slot beside its weights."""
        self._co_fetched, self._due, self._lanes = co_fetched, due, lanes
        self._slots: list[Slot] = []
        self._lying: dict[int, Slot] = {}  # by cargo: what is good until its weights are updated elsewhere
        self._staying: dict[int, Fence] = {}  # of the regions that stay, by their index
        self._forget_cargoes()

    @abstractmethod
    def _fill(self, slot: Slot, gone: Sequence[Slot], fills: Sequence[Ticket], is_ahead: bool) -> Sequence[Ticket]:
        """Let a slot's cargo come up once these are over who used what is gone; return after what it is there."""

    # -- cargoes ---------------------------------------------------------------------------------------------

    def _forget_cargoes(self) -> None:
        self.cargoes: list[tuple[Region, ...]] = [()]
        self._sizes = [0]  # of cargoes, in bytes
        self._slot_sizes: dict[int, int] = {}  # in bytes, of regions, by their index
        self._numbers: dict[tuple[Region, ...], int] = {}  # by a unit's regions

    def cargo_of(self, regions: Sequence[Region]) -> int:
        """Return the number of the cargo that a unit with these regions needs."""
        regions = tuple(regions)
        found = self._numbers.get(regions)
        if found is None:
            streaming = tuple(region for region in regions if not self.is_resident(region))
            if streaming not in self.cargoes:
                self.cargoes.append(streaming)
                self._sizes.append(sum(self._slot_bytes(region) for region in streaming))
            found = self._numbers[regions] = self.cargoes.index(streaming)
        return found

    def cargo_bytes(self, cargo: int) -> int:
        """Return the bytes that a cargo takes in a slot."""
        return self._sizes[cargo]

    def _slot_bytes(self, region: Region) -> int:
        found = self._slot_sizes.get(region.index)
        if found is None:
            beside = sum(plane.num_bytes(region.numel) for plane in self._co_fetched(region))
            found = self._slot_sizes[region.index] = region.weight_bytes + beside
        return found

    def is_resident(self, region: Region) -> bool:
        """True where a region is on the device for good."""
        return region.index in self._staying

    def held(self) -> dict[int, int]:
        """Return where every cargo lies that is on the device, or on its way there, and still good."""
        return {cargo: slot.begin for cargo, slot in self._lying.items()}

    def offset(self, cargo: int) -> int:
        """Return where a cargo lies; -1 where it has nothing that streams."""
        slot = self._lying.get(cargo)
        return -1 if slot is None else slot.begin

    # -- a use -----------------------------------------------------------------------------------------------

    def fetch(self, cargo: int, offset: int, evicts: Collection[int] = (), is_ahead: bool = False) -> None:
        """Bring a cargo up, once all that it overwrites has had its last reader. `is_ahead`: for the next step."""
        end = offset + self._sizes[cargo]
        evicted = set(map(self._lying.get, evicts))
        kept, gone = [], []
        fills: list[Ticket] = []
        slot = Slot(cargo, offset, end, is_whole=not self._due.in_slot.keys().isdisjoint(self.cargoes[cargo]))
        for other in self._slots:
            if other not in evicted and not (other.begin < end and offset < other.end):
                kept.append(other)
                continue
            gone.append(other)
            fills += other.fence.before_fill()
            if self._lying.get(other.cargo) is other:
                del self._lying[other.cargo]
            # Who comes where nothing was overwritten yet has to wait for the same.
            for part in ((other.begin, min(offset, other.end)), (max(end, other.begin), other.end)):
                if part[0] < part[1]:
                    kept.append(Slot(other.cargo, *part, fence=other.fence))  # noqa: PERF401
        self._slots = [*kept, slot]
        slot.fence.fill(*self._fill(slot, gone, fills, is_ahead))
        self._lying[cargo] = slot  # now that all of it is on its way

    def wait(self, cargo: int, regions: Sequence[Region]) -> None:
        """Let compute come after the fetch of a unit's cargo, and of its regions that stay."""
        slot = self._lying.get(cargo)
        tickets = list(slot.fence.before_read()) if slot is not None else []
        for region in regions:
            if region.index in self._staying:
                tickets += self._staying[region.index].before_read()
        if tickets:
            self._lanes.compute_after(tickets)

    def used(self, cargo: int, regions: Sequence[Region], marks: Sequence[Ticket]) -> None:
        """Note that compute has read a unit's weights up to these marks."""
        slot = self._lying.get(cargo)
        if slot is not None:
            slot.fence.read(*marks)
        for region in regions:
            if region.index in self._staying:
                self._staying[region.index].read(*marks)

    def settle(self) -> None:
        """Let compute come after every fetch of what stays: its modules run without asking."""
        tickets = [ticket for fence in self._staying.values() for ticket in fence.before_read()]
        if tickets:
            self._lanes.compute_after(tickets)

    # -- what is stale ---------------------------------------------------------------------------------------

    def invalidate(self, regions: Iterable[Region]) -> list[Slot]:
        """Regions are about to be updated elsewhere: what lies of them on the device is stale. Return where it lay."""
        stale = set(regions)
        slots = [slot for slot in self._lying.values() if not stale.isdisjoint(self.cargoes[slot.cargo])]
        self._retire(slots)
        return slots

    def need_masters(self, regions: Iterable[Region]) -> None:
        """Regions are to be updated in their slots: those that lie there without their master weights come up anew."""
        needed, lacking = set(regions), []
        for slot in self._lying.values():
            its = needed.intersection(self.cargoes[slot.cargo])
            if its and not slot.is_whole and any(map(self._co_fetched, its)):
                lacking.append(slot)
            elif its:
                slot.is_whole = True
        self._retire(lacking)

    def forget(self) -> None:
        """Nothing that streams is on the device any more (the step was given up)."""
        self._retire(list(self._lying.values()))

    def _retire(self, slots: Collection[Slot]) -> None:
        """What lies in slots is good for nobody; compute may still be reading it."""
        marks = self._lanes.mark() if slots else ()
        for slot in slots:
            slot.fence.read(*marks)
            del self._lying[slot.cargo]
