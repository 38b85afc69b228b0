"""Tile: unit of update. RegionState: all tiles and planes in a region on this rank. DeferredUpdates: updates that are
ready, but not yet in a lane.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NoReturn, Protocol

import torch

from offload.lanes.ticket import Fence, Ticket
from offload.layout.codecs import QuantizedCodec
from offload.layout.planes import CODES, STALE
from offload.layout.regions import Region
from offload.tiers.lease import NOTHING, Lease
from offload.tiers.model_files import FileRecord
from offload.tiers.nvme import Record


@dataclass(eq=False)
class Tile:
    """Region part that is read, updated and written in one piece. One tile covers the region if no plane is on disk."""

    begin: int
    """First element."""
    end: int
    """End element (exclusive)."""
    planes: dict[str, torch.Tensor]
    """Planes in memory by name, without gradients."""
    record: Record | FileRecord | None
    """Planes on disk or in model files. None: no such planes."""
    stored: slice
    """Elements of the whole region's travelling plane in this tile."""
    fence: Fence = field(default_factory=lambda: Fence("weights"))
    """Readers and writers for weights, low half and moments in memory. Only updates write them."""
    stale: Fence | None = None
    """Readers and writers for stale weights, while a pass computes with them during an update. None: no
    stale weights.
    """

    @property
    def travelling(self) -> str:
        """Plane name for H2D copies and exchanges between ranks."""
        if CODES in self.states:
            return CODES
        return "weights"

    def fetch(self, *names: str, is_ahead: bool) -> Lease:
        """Return a lease on planes for an H2D copy: the travelling one, then co-fetched ones. `is_ahead`: for the next
        step.
        """
        if self.stale is None:
            return self.lend(*names, fetches=True, is_ahead=is_ahead)
        return Lease.of({"weights": self.planes[STALE]}, self.stale)

    def show(self, is_updated: bool) -> None:
        """Let the next pass compute with the current weights, after pending updates.

        `is_updated`: another update starts during this pass. The two weight planes then swap: the pass reads the
        current weights as the stale plane, and the update writes new weights into the old stale memory.
        """
        readers: Sequence[Ticket] = ()
        if self.stale is not None:
            readers = self.stale.before_fill()
        self.stale = None
        if is_updated:
            self.planes["weights"], self.planes[STALE] = self.planes[STALE], self.planes["weights"]
            self.stale = Fence("stale weights")
            self.stale.record_writer(*self.fence.before_read())
        self.fence.record_reader(*readers)  # copies from the old stale memory, which the update now fills

    @property
    def states(self) -> list[str]:
        """Existing plane names without gradients, in lease order."""
        names = [*self.planes]
        if self.record is not None:
            names += self.record.planes
        return [name for name in names if name != "gradients"]

    def land(self, *names: str) -> Lease:
        """Return a lease on memory for planes filled completely from the device, another rank or a file. On failure,
        end the lease with `done_reading`.
        """
        return self.lend(*names, lands=True)

    def lend_early(self, *names: str) -> Lease | None:
        """Return an early lease: disk planes are read at once, and the work is submitted later with the result of
        `renew_lease`. None: the ring is full.
        """
        # Planes in memory need no room.
        if self.record is not None and not self.record.has_room(self._on_disk(names)):
            return None
        return self.lend(*names)

    def renew_lease(self, lease: Lease) -> Lease:
        """Return an early lease with the tickets to wait for now."""
        # Other work on the planes may have come since the lease was made.
        return replace(
            lease, reads=(*self.fence.before_read(), *lease.reads), users=(*self.fence.before_fill(), *lease.users)
        )

    def lend(self, *names: str, lands: bool = False, fetches: bool = False, is_ahead: bool = False) -> Lease:
        """Return a lease on the existing planes among `names`, for the host. `lands` and `fetches`: see `land` and
        `fetch`.
        """
        planes = {name: self.planes[name] for name in names if name in self.planes}
        lease = Lease.of(planes, self.fence)
        if self.stale is not None and STALE in planes:
            lease = lease.beside(self.stale)
        if self.record is None:
            return lease
        disk_names = self._on_disk(names)
        if not disk_names:
            return lease
        if lands:
            if not planes:  # the lease must not mark planes in memory as changed
                lease = NOTHING
            return self.record.land(disk_names, lease, travels=disk_names == [self.travelling])
        return self.record.lend(disk_names, lease, fetches=fetches, is_ahead=is_ahead)

    def _on_disk(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if self.record is not None and name in self.record.planes]


def encode(region: Region, planes: Mapping[str, torch.Tensor], span: slice) -> None:
    """Quantize a span of master weights for copies, on their device. No effect for exact copies. The span starts at a
    parameter or tile start.
    """
    if CODES in planes:
        assert isinstance(region.link, QuantizedCodec)
        low = None
        if "low" in planes:
            low = planes["low"][span]
        region.link.encode(planes["weights"][span], low, planes[CODES][region.plane(CODES).cut(span)])


@dataclass
class RegionState:
    """Region state on this rank: planes, and update counts per piece. torch counts steps per parameter, so all pieces
    of one parameter have equal counts.
    """

    region: Region
    """The region."""
    planes: dict[str, torch.Tensor]
    """Planes in memory by name, each with this rank's elements."""
    tiles: list[Tile]
    """Tiles updated by this rank."""
    others: dict[int, list[Tile]]
    """Tiles updated and sent by other ranks, by rank."""
    steps: list[int]
    """Updates so far, per piece."""
    factors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Update rule factors by name, in memory on every rank. Valid only for elements updated by this rank."""
    stays: frozenset[str] = frozenset()
    """Names of planes on the device; the other planes stream there."""
    error: torch.Tensor | None = None
    """Gradient error feedback on this rank, see `ERROR`. None: exact gradients."""
    gradients: torch.Tensor | None = None
    """Gradients in memory, for the elements updated by this rank. None: on disk or absent."""
    sums: torch.Tensor | None = None
    """Gradients accumulated over passes, for the elements this rank reduces in its replica (None: no accumulation). For
    equal elements the same memory as `gradients`.
    """
    gradient_fence: Fence = field(default_factory=lambda: Fence("waiting gradients"))
    """Readers and writers for these gradients."""

    @property
    def begin(self) -> int:
        """First element updated by this rank."""
        return self.tiles[0].begin

    @property
    def is_stale(self) -> bool:
        """True if passes compute with stale weights."""
        return self.tiles[0].stale is not None

    @cached_property
    def held_tiles(self) -> list[Tile]:
        """All tiles with weights on this rank."""
        return [tile for tiles in (self.tiles, *self.others.values()) for tile in tiles]

    @property
    def has_gradient_plane(self) -> bool:
        """True if gradients have memory or disk room of their own, to wait for the gradient norm."""
        return self.gradients is not None or self.has_room_on_disk

    @property
    def has_room_on_disk(self) -> bool:
        """True if the disk record has a gradient plane, used unless gradients are in memory."""
        record = self.tiles[0].record
        return record is not None and "gradients" in record.planes

    def lend_gradients(self) -> Iterator[tuple[slice, Lease]]:
        """Yield (elements, lease) for all waiting gradients on this rank. End each lease before the next one."""
        if self.gradients is not None:
            yield slice(0, len(self.gradients)), Lease.of({"gradients": self.gradients}, self.gradient_fence)
        elif self.has_room_on_disk:
            for tile in self.tiles:
                yield slice(tile.begin - self.begin, tile.end - self.begin), tile.land("gradients")

    def count(self, touched: Sequence[bool]) -> None:
        """Count an update for all pieces with a gradient."""
        self.steps = [steps + has for steps, has in zip(self.steps, touched, strict=True)]

    def factors_of(self, position: int) -> dict[str, torch.Tensor]:
        """Return the factors for piece number `position` as flat views."""
        spans = {each.name: self.region.factor_spans(each)[position] for each in self.region.factors}
        return {name: self.factors[name][span] for name, span in spans.items() if span.start < span.stop}

    def span(self, position: int) -> slice:
        """Return the elements in piece number `position`."""
        start = self.region.offsets[position]
        return slice(start, start + self.region.sizes[position])


class PendingUpdate(Protocol):
    """An update of a region, to be started later."""

    def submit(self) -> None:
        """Submit the update of all tiles to a lane."""

    def update_tile(self, tile: Tile, planes: Mapping[str, torch.Tensor]) -> int | torch.Tensor:
        """Update a tile's planes, with gradients if the update has any. Return the number of non-finite weights."""

    def refuse(self, num_wrong: int) -> NoReturn:
        """Raise NonFiniteError for this number of weights."""


class DeferredUpdates:
    """Updates to start before the next use of the weights.

    pending: by region, in the order of use in the next step. in_slot: updates of regions in their slots, at the next
    fetch.
    """

    def __init__(self) -> None:
        self.pending: dict[Region, PendingUpdate] = {}
        self.in_slot: dict[Region, PendingUpdate] = {}

    def start(self, last: Region | None = None) -> None:
        """Start pending updates up to region `last` (None: all).

        `last` is the next region to fetch: updates behind it would fill the ring needed for the fetch. No effect if
        `last` has no pending update.
        """
        if last is None or last in self.pending:
            for region in list(self.pending):
                self.pending.pop(region).submit()
                if region is last:
                    break
