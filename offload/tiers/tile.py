"""What of a region is updated at once, and all of a region."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from offload.lanes.ticket import Fence
from offload.layout.codecs import Int8
from offload.layout.planes import CODES, STALE
from offload.layout.regions import Region
from offload.tiers.lease import NOTHING, Lease
from offload.tiers.model_files import FileRecord
from offload.tiers.nvme import Record


@dataclass(eq=False)
class Tile:
    """Elements of a region which are read, updated and written back at once: all of the region, or a piece where some
    of its planes are on disk.
    """

    begin: int
    """The first element."""
    end: int
    """The element behind the tile."""
    planes: dict[str, torch.Tensor]
    """The planes in memory, but for the gradients, by name."""
    record: Record | FileRecord | None
    """The planes on disk, or in a model's files; None without any."""
    fence: Fence = field(default_factory=lambda: Fence("weights"))
    """Who reads and writes the weights in memory, the low half and the moments: updates alone write these."""
    stale: Fence | None = None
    """Who reads and writes the weights from before the last update, where the pass beside that update computes with
    them; else None.
    """

    @property
    def travelling(self) -> str:
        """The name of the plane that goes to the device, and that ranks give each other."""
        return CODES if CODES in self.states else "weights"

    def fetch(self, is_ahead: bool, *co_fetched: str) -> Lease:
        """Lend what travels of the weights to the device, and planes that go up beside it. `is_ahead`: for the next
        step.
        """
        if self.stale is None:
            return self.lend(self.travelling, *co_fetched, fetches=True, is_ahead=is_ahead)
        fence, weights = self.stale, {"weights": self.planes[STALE]}
        return Lease(weights, fence.before_read(), fence.before_fill(), fence.read, fence.fill)

    def keep_stale(self, has_stale: bool) -> None:
        """The pass beside the last update computes, or does not, with the weights from before."""
        self.stale = Fence("stale weights") if has_stale else None

    def show(self, is_updated: bool) -> None:
        """The next pass computes with the weights as they are now, or will be by the update that is on its way;
        `is_updated`: another one begins beside it, which makes its weights, out of those that the pass computes with,
        where the stale ones were so far.
        """
        readers = () if self.stale is None else self.stale.before_fill()
        self.stale = None
        if is_updated:
            self.planes["weights"], self.planes[STALE] = self.planes[STALE], self.planes["weights"]
            self.stale = Fence("stale weights")
            self.stale.fill(*self.fence.before_read())
        self.fence.read(*readers)

    @property
    def states(self) -> list[str]:
        """The planes that there are of the tile, but for the gradients, in the order of a lease."""
        on_disk = self.record.planes if self.record is not None else {}
        return [name for where in (self.planes, on_disk) for name in where if name != "gradients"]

    def land(self, *names: str) -> Lease:
        """Lend memory for planes whose every element will come from the device, another rank or a file, whatever they
        were before. Where that fails, `read` gives it back.
        """
        return self.lend(*names, lands=True)

    def lend_early(self, *names: str) -> Lease | None:
        """Lend planes for work that is submitted later, with what `renewed` makes of the lease by then; what of them is
        on disk is read meanwhile. None where the ring is full of such leases.
        """
        is_full = self.record is not None and not self.record.has_room(self._on_disk(names))
        return None if is_full else self.lend(*names)

    def renewed(self, lease: Lease) -> Lease:
        """Return an early lease with what has to be waited for now."""
        return replace(
            lease, reads=(*self.fence.before_read(), *lease.reads), fills=(*self.fence.before_fill(), *lease.fills)
        )

    def lend(self, *names: str, lands: bool = False, fetches: bool = False, is_ahead: bool = False) -> Lease:
        """Lend these planes to the host; such as there are of them. `lands` and `fetches` are what `land` and `fetch`
        ask for.
        """
        planes = {name: self.planes[name] for name in names if name in self.planes}
        lease = Lease(planes, self.fence.before_read(), self.fence.before_fill(), self.fence.read, self.fence.fill)
        if self.stale is not None and STALE in planes:
            lease = lease.beside(self.stale)
        there = self._on_disk(names)
        if self.record is None or not there:
            return lease
        if lands:
            # Without planes of its own, what is in memory stays as it is.
            return self.record.land(there, lease if planes else NOTHING, travels=there == [self.travelling])
        return self.record.lend(there, lease, fetches=fetches, is_ahead=is_ahead)

    def _on_disk(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if self.record is not None and name in self.record.planes]


def encode(region: Region, planes: Mapping[str, torch.Tensor], span: slice) -> None:
    """Make what travels of some elements of a tile of its master weights, on whatever device these are; nothing where
    the weights themselves travel. The elements begin where a parameter or the tile does.
    """
    if CODES in planes:
        assert isinstance(region.link, Int8)
        low = planes["low"][span] if "low" in planes else None
        region.link.encode(planes["weights"][span], low, planes[CODES][region.plane(CODES).cut(span)])


@dataclass
class RegionState:
    """The planes of one region as this rank holds them, and how often each piece was updated (torch counts steps by
    parameter, so pieces of one have the same count).
    """

    region: Region
    """The region."""
    planes: dict[str, torch.Tensor]
    """The planes in memory, by name: of each what this rank holds."""
    tiles: list[Tile]
    """The tiles that this rank updates."""
    others: dict[int, list[Tile]]
    """The tiles that other ranks update and give to this one, by rank."""
    steps: list[int]
    """How often each piece was updated."""
    factors: dict[str, torch.Tensor] = field(default_factory=dict)
    """What the rule keeps of parameters as a whole, by name, in memory on every rank; right for what this rank updates.
    """
    stays: frozenset[str] = frozenset()
    """The names of the planes that rest on the device, to which the others stream."""
    error: torch.Tensor | None = None
    """What this rank keeps of `ERROR`; None where gradients travel as they are."""
    gradients: torch.Tensor | None = None
    """The gradients that wait in memory, of the elements that this rank updates; else None."""
    sums: torch.Tensor | None = None
    """Those that several passes add up, of the elements that this rank sums over its replica; else None. Where both are
    of the same elements they are the same memory.
    """
    landing: Fence = field(default_factory=lambda: Fence("waiting gradients"))
    """Who reads and writes these gradients."""

    @property
    def begin(self) -> int:
        """The first element that this rank updates."""
        return self.tiles[0].begin

    @property
    def is_late(self) -> bool:
        """True where passes compute with the weights from before the last update."""
        return self.tiles[0].stale is not None

    @property
    def held(self) -> list[Tile]:
        """The tiles with weights that this rank holds."""
        return [tile for tiles in (self.tiles, *self.others.values()) for tile in tiles]

    def keep_error(self, error: torch.Tensor) -> None:
        """The errors of coded gradients are kept in this memory."""
        self.error = error

    def keep_gradients(self, gradients: torch.Tensor | None, sums: torch.Tensor | None = None) -> None:
        """Gradients wait, and add up, in this memory from now on; None: in no memory."""
        self.gradients, self.sums = gradients, sums

    @property
    def keeps_gradients(self) -> bool:
        """True where the region's gradients wait for the norm."""
        return self.gradients is not None or self.has_room_on_disk

    @property
    def has_room_on_disk(self) -> bool:
        """True where the region's record has a place for gradients, which is used unless they wait in memory."""
        record = self.tiles[0].record
        return record is not None and "gradients" in record.planes

    def land(self) -> Iterator[tuple[slice, Lease]]:
        """Yield where gradients wait: of what this rank updates which elements, and memory for these. One lease is to
        be given back before the next one is taken.
        """
        if self.gradients is not None:
            planes, fence = {"gradients": self.gradients}, self.landing
            yield slice(0, len(self.gradients)), Lease(planes, (), fence.before_fill(), fence.read, fence.fill)
        elif self.has_room_on_disk:
            for tile in self.tiles:
                yield slice(tile.begin - self.begin, tile.end - self.begin), tile.land("gradients")

    def count(self, touched: Sequence[bool]) -> None:
        """Note that the pieces that received a gradient were updated."""
        self.steps = [steps + has for steps, has in zip(self.steps, touched, strict=True)]

    def factors_of(self, position: int) -> dict[str, torch.Tensor]:
        """Return what the rule keeps of the region's piece number `position` beside the planes, flat, in place."""
        its = {each.name: self.region.factor_spans(each)[position] for each in self.region.factors}
        return {name: self.factors[name][span] for name, span in its.items() if span.start < span.stop}

    def span(self, position: int) -> slice:
        """Return the elements of the region's piece number `position`."""
        start = self.region.offsets[position]
        return slice(start, start + self.region.sizes[position])
