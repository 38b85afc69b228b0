"""The one owner of "where is it": every region's planes, on the tier that the placement says.

A plane is a flat tensor over a region, whose table says which there are (`offload.layout.planes`). Over several ranks
each holds what its sharding says of a plane.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from offload.distributed.comm import Comm
from offload.lanes.lanes import Lanes
from offload.lanes.ticket import Fence, Ticket
from offload.layout.planes import MASTER, STALE, Factor, Plane
from offload.layout.regions import DiskLayout, ParameterInfo, Region
from offload.native import kernels
from offload.telemetry.counters import Counters
from offload.tiers.device import Device
from offload.tiers.host import Arena
from offload.tiers.lease import NOTHING, Lease
from offload.tiers.ledger import Ledger
from offload.tiers.nvme import Nvme, Record

Read = Callable[[int, int], torch.Tensor]
_PIECE = 1 << 20
"""Elements of a parameter that are taken over at once."""


@dataclass(eq=False)
class Tile:
    """Elements `begin` to `end` of a region, which are read, updated and written back at once: all of it, or a tile
    where some of its planes are on disk. `planes` are those in memory, but for the gradients.

    The fence of the weights also stands for the low half and the moments: updates alone write them. `stale`: that of
    the weights from before the last update, where the pass beside that update computes with them.
    """

    begin: int
    end: int
    planes: dict[str, torch.Tensor]
    record: Record | None
    fence: Fence = field(default_factory=lambda: Fence("weights"))
    stale: Fence | None = None

    def fetch(self, is_ahead: bool, *co_fetched: str) -> Lease:
        """Lend the weights to the device, and planes that go up beside them. `is_ahead`: for the next step."""
        if self.stale is None:
            return self._lend(("weights", *co_fetched), fetches=True, is_ahead=is_ahead)
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
        return self._lend(names, lands=True)

    def lend(self, *names: str) -> Lease:
        """Lend these planes to the host; such as there are of them."""
        return self._lend(names)

    def lend_early(self, *names: str) -> Lease | None:
        """Lend planes for work that is submitted later, with what `renewed` makes of the lease by then; what of them is
        on disk is read meanwhile. None where the ring is full of such leases.
        """
        is_full = self.record is not None and not self.record.has_room(self._on_disk(names))
        return None if is_full else self._lend(names)

    def renewed(self, lease: Lease) -> Lease:
        """Return an early lease with what has to be waited for now."""
        return replace(
            lease, reads=(*self.fence.before_read(), *lease.reads), fills=(*self.fence.before_fill(), *lease.fills)
        )

    def _lend(
        self, names: Sequence[str], *, lands: bool = False, fetches: bool = False, is_ahead: bool = False
    ) -> Lease:
        planes = {name: self.planes[name] for name in names if name in self.planes}
        lease = Lease(planes, self.fence.before_read(), self.fence.before_fill(), self.fence.read, self.fence.fill)
        if self.stale is not None and STALE in planes:
            lease = lease.beside(self.stale)
        there = self._on_disk(names)
        if self.record is None or not there:
            return lease
        if lands:
            return self.record.land(there, lease if planes else NOTHING)  # else what is in memory stays as it is
        return self.record.lend(there, lease, fetches=fetches, is_ahead=is_ahead)

    def _on_disk(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if self.record is not None and name in self.record.planes]


@dataclass
class RegionState:
    """The planes of one region, and how often each of its parameters was updated (torch counts steps by parameter).

    `planes` are those in memory, over what this rank holds of each. `tiles` are those that this rank updates, `others`
    the tiles that other ranks update and give to this one, by rank. `gradients` wait in memory, over the elements that
    this rank updates, behind the `landing` fence. `factors` are in memory, on every rank; those of what it updates are
    true. `stays`: planes that rest on the device, to which the others stream.
    """

    region: Region
    planes: dict[str, torch.Tensor]
    tiles: list[Tile]
    others: dict[int, list[Tile]]
    steps: list[int]
    factors: dict[str, torch.Tensor] = field(default_factory=dict)
    stays: frozenset[str] = frozenset()
    gradients: torch.Tensor | None = None
    landing: Fence = field(default_factory=lambda: Fence("waiting gradients"))

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
        """Note that the parameters that received a gradient were updated."""
        self.steps = [steps + has for steps, has in zip(self.steps, touched, strict=True)]

    def factors_of(self, position: int) -> dict[str, torch.Tensor]:
        """Return what the rule keeps of the region's parameter number `position` beside the planes, flat, in place."""
        its = {each.name: self.region.factor_spans(each)[position] for each in self.region.factors}
        return {name: self.factors[name][span] for name, span in its.items() if span.start < span.stop}

    def span(self, position: int) -> slice:
        """Return the elements of the region's parameter number `position`."""
        start = self.region.offsets[position]
        return slice(start, start + self.region.sizes[position])


class Store:
    """All regions' planes, each kind of state on its tier. Host memory is taken by the byte from one arena."""

    def __init__(
        self,
        regions: Sequence[Region],
        infos: Sequence[ParameterInfo],
        *,
        tier: str,
        device: Device,
        host: Ledger,
        lanes: Lanes,
        layout: DiskLayout | None = None,
        nvme: Nvme | None = None,
        comm: Comm | None = None,
        counters: Counters | None = None,
    ) -> None:
        """`tier`: of what `layout` does not put on disk, for which there is `nvme`. `comm`: of the ranks of its
        sharding.
        """
        self.tier, self._device, self._host, self._lanes = tier, device, host, lanes
        self._home = {
            parameter: (region.index, position)
            for region in regions
            for position, parameter in enumerate(region.parameters)
        }
        self._infos, self._layout, self._nvme = infos, layout or DiskLayout(), nvme
        self.comm, self.sharding = comm or Comm(), self._layout.sharding
        self._counters = counters or Counters()
        self._spoilt: dict[str, int] = {}  # by parameter: how many of its weights were not finite as they were given
        here = lanes.here, lanes.here, lanes.here_together  # nothing but compute would have to wait for them there
        lanes_of_states = (lanes.d2h, lanes.update, lanes.collective) if tier == "cpu" else here
        self.down, self.updating, self.exchanges = lanes_of_states
        self._arenas: dict[str, Arena] = {}
        wanted = {
            region: [plane for plane in region.states if plane.name not in self._layout.of(region)]
            for region in regions
        }
        stays = {r: [plane for plane in planes if self._layout.stays(r, plane)] for r, planes in wanted.items()}
        rest = {region: [p for p in planes if p not in stays[region]] for region, planes in wanted.items()}
        made = self._allocate("states", rest) | self._allocate("states", stays, "device")
        self.states = [
            self._state(region, {plane.name: made[region, plane.name] for plane in planes})
            for region, planes in wanted.items()
        ]
        self._by_index = {state.region.index: state for state in self.states}
        small = [(region, factor, 4 * region.factor_numel(factor)) for region in regions for factor in region.factors]
        small = [each for each in small if each[2]]
        for (region, name), flat in self._take("factors", small, tier).items() if small else ():
            self[region].factors[name] = flat

    def _state(self, region: Region, planes: dict[str, torch.Tensor]) -> RegionState:
        by_rank = range(self.sharding.num_ranges) if self.sharding.publishes else [self.sharding.owner]
        others = {rank: self._tiles(region, planes, rank) for rank in by_rank}
        tiles = others.pop(self.sharding.owner)
        stays = frozenset(plane.name for plane in region.states if self._layout.stays(region, plane))
        return RegionState(region, planes, tiles, others, [0] * len(region.parameters), stays=stays)

    def _tiles(self, region: Region, planes: dict[str, torch.Tensor], owner: int) -> list[Tile]:
        """Return the tiles of a rank's range, with what this rank holds of them."""
        is_own, tiles = owner == self.sharding.owner, []
        on_disk = [region.plane(name) for name in self._layout.on_disk(region, is_own)]
        for begin, end in self._layout.tiles(region, owner):
            record = None
            if on_disk:
                assert self._nvme is not None
                record = self._nvme.record(region.name, end - begin, on_disk)
            mine = {}
            for plane in map(region.plane, planes):
                start = self.sharding.held(region, plane.name).start
                if is_own or not self.sharding.is_cut(plane):
                    mine[plane.name] = planes[plane.name][plane.cut(slice(begin - start, end - start))]
            tiles.append(Tile(begin, end, mine, record))
        return tiles

    def co_fetched(self, region: Region) -> tuple[Plane, ...]:
        """Return what a region has in a slot beside its weights."""
        return self._layout.co_fetched(region)

    def updates_in_slot(self, region: Region) -> bool:
        """True where a region is updated in its slot, when it comes up."""
        return self.tier == "cpu" and self._layout.updates_in_slot(region)

    @property
    def lends_early(self) -> bool:
        """True where states can be lent before the gradients are there: none wait in the same records."""
        return not any(state.has_room_on_disk for state in self.states)

    def hold_gradients(self, accumulates: bool, waits: bool = True) -> None:
        """Make a gradient plane for every trained region: in the dtype of its weights, or in fp32 where several
        passes are summed; none where gradients do not wait in memory.
        """
        trained = [state for state in self.states if state.region.trainable]
        wanted = {
            s.region: [replace(plane, dtype=torch.float32) if accumulates else plane]
            for s in trained
            if accumulates or (waits and not s.has_room_on_disk)
            for plane in [s.region.plane("gradients")]
        }
        held = {s.region: s.gradients.dtype for s in trained if s.gradients is not None}
        if held == {region: plane.dtype for region, (plane,) in wanted.items()}:
            return
        for state in trained:
            state.gradients = None
        (self._host if self.tier == "cpu" else self._device.ledger).drop("gradients")
        if (arena := self._arenas.pop("gradients", None)) is not None:
            arena.close()
        for (region, _), flat in self._allocate("gradients", wanted).items():
            state, start = self[region], self.sharding.held(region, "gradients").start
            own = self.sharding.own(region)
            # Stage 1 holds the whole plane, as ZeRO does, although only what is updated is ever used.
            state.gradients = flat[own.start - start : own.stop - start]

    def stage(self, name: str, num_bytes: int) -> torch.Tensor:
        """Return memory beside the states, in place of what there was under this name."""
        if self.tier == "device":
            self._device.ledger.drop(name)
            return self._device.allocate(name, num_bytes)
        self._host.drop(name)
        self._host.reserve(name, num_bytes)
        return Arena(num_bytes, self._device.pinning).take(num_bytes, torch.uint8)

    def came_down(self, num_bytes: int) -> None:
        """Count what was brought down to the states from the device, if they are elsewhere."""
        if self.tier == "cpu":
            self._counters.count("d2h_bytes", num_bytes)

    def _allocate(
        self, kind: str, wanted: dict[Region, list[Plane]], tier: str | None = None
    ) -> dict[tuple[Region, str], torch.Tensor]:
        """Make planes, on the tier of the states or another."""
        planes = [
            (region, plane, self.sharding.share(plane, plane.num_bytes(region.numel)))
            for region, its in wanted.items()
            for plane in its
        ]
        return self._take(kind, planes, tier or self.tier)

    def _take(
        self, kind: str, planes: Sequence[tuple[Region, Plane | Factor, int]], tier: str
    ) -> dict[tuple[Region, str], torch.Tensor]:
        """Make arrays of so many bytes: by one arena on the host, one by one on the device."""
        if tier == "device":
            return {
                (region, plane.name): self._device.allocate(plane.label, num_bytes).view(plane.dtype)
                for region, plane, num_bytes in planes
            }
        for _, plane, num_bytes in planes:
            self._host.reserve(plane.label, num_bytes)
        arena = self._arenas[kind] = Arena(sum(num_bytes for *_, num_bytes in planes), self._device.pinning)
        return {
            (region, plane.name): arena.take(num_bytes // plane.dtype.itemsize, plane.dtype)
            for region, plane, num_bytes in planes
        }

    def __getitem__(self, region: Region) -> RegionState:
        return self._by_index[region.index]

    def region(self, index: int) -> Region:
        """Return a region by its index."""
        return self._by_index[index].region

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that the device can copy from without staging."""
        rings = self._nvme.pinned_bytes if self._nvme is not None else 0
        return rings + sum(arena.pinned_bytes for arena in self._arenas.values())

    def write(self, parameter: int, read: Read, dtype: torch.dtype, source: int | None = None) -> None:
        """Set the master weights of one parameter, piece by piece: `read(begin, end)` gives elements of it, flat, in
        `dtype`, any float one. Collective with `source`: that rank's alone is asked.
        """
        region, position = self._home[parameter]
        state, info = self._by_index[region], self._infos[parameter]
        is_shared = source is not None and self.comm.size > 1
        for begin in range(0, info.numel, _PIECE):
            end = min(begin + _PIECE, info.numel)
            if not is_shared:
                flat = read(begin, end)
            else:
                flat = read(begin, end).cpu() if source == self.comm.rank else torch.empty(end - begin, dtype=dtype)
                self.comm.broadcast(flat, source or 0, f"first weights of {info.name}")
            if not math.isfinite(flat.sum()) and (wrong := flat.numel() - int(flat.isfinite().sum())):
                self._spoilt[info.name] = self._spoilt.get(info.name, 0) + wrong
            for tiles in (state.tiles, *state.others.values()):
                for planes, mine, its in self._opened(state, position, tiles, MASTER, begin, end, changes=True):
                    self._put(planes, mine, flat[its], state.region.has_low)

    def why_not_finite(self, otherwise: str) -> str:
        """Say what makes numbers not finite: weights that were not when they were given, else what `otherwise` says."""
        if not self._spoilt:
            return otherwise
        name, others = next(iter(self._spoilt)), len(self._spoilt) - 1
        more = f" (and of {others} other parameters)" if others else ""
        return (
            f"The cause: {self._spoilt[name]} weights of {name}{more} were not finite when they were loaded, before "
            "any update. Load the model from files that are whole."
        )

    @staticmethod
    def _put(planes: dict[str, torch.Tensor], mine: slice, piece: torch.Tensor, is_split: bool) -> None:
        """Set elements of a tile, of a split master or a plain one."""
        low: torch.Tensor | int = 0
        if is_split and piece.dtype != torch.bfloat16:
            piece, low = kernels.split(piece.float().to(planes["weights"].device))
        planes["weights"][mine].copy_(piece)
        if "low" in planes:
            planes["low"][mine] = low

    def read(self, parameter: int) -> torch.Tensor:
        """Return a fresh fp32 CPU copy of one parameter's master weights, in its shape. Collective."""
        info = self._infos[parameter]
        return self.read_range(parameter, 0, info.numel).view(info.shape)

    def read_range(self, parameter: int, begin: int, end: int, *, travelling: bool = False) -> torch.Tensor:
        """Return a fresh CPU copy of elements `begin` to `end` of one parameter, flat: of its fp32 master weights, or
        of what the device uses (bf16, or fp32). Collective.
        """
        region, _ = self._home[parameter]
        dtype = self._by_index[region].region.plane("weights").dtype if travelling else torch.float32
        found = torch.empty(end - begin, dtype=dtype)
        for planes, mine, its in self.opened(parameter, *MASTER[: 1 if travelling else 2], begin=begin, end=end):
            weights = planes["weights"][mine].cpu()
            found[its] = kernels.join(weights, planes["low"][mine].cpu()) if "low" in planes else weights
        return self._completed(parameter, begin, found)

    def read_here(self, parameter: int) -> torch.Tensor:
        """Return a fresh CPU copy of a parameter as the device uses it (bf16, or fp32), in its shape. Not collective:
        this rank has to hold all of its weights.
        """
        region, position = self._home[parameter]
        state, info = self._by_index[region], self._infos[parameter]
        found = torch.empty(info.numel, dtype=state.region.plane("weights").dtype)
        for tiles in (state.tiles, *state.others.values()):
            for planes, mine, its in self._opened(state, position, tiles, MASTER[:1], 0, info.numel, changes=False):
                found[its] = planes["weights"][mine].cpu()
        return found.view(info.shape)

    def _completed(self, parameter: int, begin: int, found: torch.Tensor) -> torch.Tensor:
        """Return elements of a parameter, from `begin` on, of which each rank has filled what it updates, with what the
        others have.
        """
        region, position = self._home[parameter]
        state, what = self._by_index[region], f"weights of {self._infos[parameter].name}"
        if self.sharding.num_ranges > 1:
            start = state.span(position).start + begin
            for rank, (first, last) in enumerate(self.sharding.ranges(state.region)):
                low, high = max(start, first), min(start + len(found), last)
                if low < high:
                    self.comm.broadcast(found[low - start : high - start], rank, what)
        return found

    def opened(
        self, parameter: int, *names: str, begin: int = 0, end: int | None = None, changes: bool = False
    ) -> Iterator[tuple[dict[str, torch.Tensor], slice, slice]]:
        """Return (planes of a tile, the parameter's elements in them, the same counted from `begin`) of every tile with
        a share of elements `begin` to `end` of a parameter that this rank updates, for this thread to read or, with
        `changes`, to write.
        """
        region, position = self._home[parameter]
        state, end = self._by_index[region], self._infos[parameter].numel if end is None else end
        return self._opened(state, position, state.tiles, names, begin, end, changes)

    def _opened(
        self,
        state: RegionState,
        position: int,
        tiles: Sequence[Tile],
        names: Sequence[str],
        first: int,
        last: int,
        changes: bool,
    ) -> Iterator[tuple[dict[str, torch.Tensor], slice, slice]]:
        first, last = (state.span(position).start + number for number in (first, last))
        low = bisect_right(tiles, first, key=lambda tile: tile.end)
        high = bisect_left(tiles, last, key=lambda tile: tile.begin)
        for tile in tiles[low:high] if first < last else ():
            begin, end = max(first, tile.begin), min(last, tile.end)
            lease = tile.lend(*names)
            give_back = lease.done_reading
            try:
                self._lanes.wait(lease.reads, fills=lease.fills if changes else ())
                mine, its = (slice(begin - start, end - start) for start in (tile.begin, first))
                yield lease.planes, mine, its
                give_back = lease.done_writing if changes else lease.done_reading
            finally:
                give_back(Ticket("compute", is_done=True))

    def publish(self, region: Region, number: int, own: Lease, reads: Sequence[Ticket]) -> None:
        """Give the new weights of tile `number` of this rank's range, `own`, to all ranks once these tickets are done,
        and take theirs.
        """
        state, what = self[region], f"new weights of {region.name}"
        self._counters.count("all_gather_elements", own.planes["weights"].numel() * self.sharding.num_ranges)
        for rank in range(self.sharding.num_ranges):
            is_own = rank == self.sharding.owner
            lease = own if is_own else state.others[rank][number].land("weights")
            ticket = self.exchanges.submit(
                partial(self.comm.broadcast, lease.planes["weights"], rank, f"{what}, tile {number} of rank {rank}"),
                reads=reads if is_own else (),
                fills=() if is_own else lease.fills,
                name=what,
                # By a link's bytes a second each rank's are exchanged at once; here one rank's go at a time.
                num_bytes=lease.planes["weights"].nbytes // max(1, self.sharding.size - 1),
            )
            (lease.done_reading if is_own else lease.done_writing)(ticket)

    def forgive(self) -> None:
        """All states are about to be written anew: updates that failed or were given up are nobody's concern."""
        self._spoilt.clear()
        for state in self.states:
            for tile in state.held:
                tile.fence.forgive()
                if tile.record is not None:
                    tile.record.fence.forgive()

    def reset(self) -> None:
        """A step was interrupted: nothing is lent any more."""
        if self._nvme is not None:
            self._nvme.reset()

    def close(self) -> None:
        """Let go of the planes."""
        self.states.clear()
        self._by_index.clear()
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
        if self._nvme is not None:
            self._nvme.close()
