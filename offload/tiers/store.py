"""Store: the single owner of all planes and their locations.

A plane is a flat tensor over a region (`offload.layout.planes`). Each rank holds the part defined by `Sharding`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from offload.distributed.comm import Comm
from offload.lanes.lanes import Lanes
from offload.lanes.ticket import Ticket
from offload.layout.planes import ERROR, Factor, Plane, summed
from offload.layout.regions import ParameterInfo, Region
from offload.layout.residence import DEVICE, DISK, FILES, HOST, Residence
from offload.tiers.counters import Counters, Ledger
from offload.tiers.device import Device
from offload.tiers.host import Arena
from offload.tiers.lease import Lease
from offload.tiers.model_files import FileRecord, ModelFiles
from offload.tiers.nvme import Nvme, Record
from offload.tiers.tile import RegionState, Tile
from offload.tiers.values import Values

# Groups of planes, each with its own memory.
_TRAVELLING = "states"
"""Planes that are copied to the device or from it: pinned."""
_RESTING = "resting states"
"""Planes that are never copied: they need no pinned memory."""
_STAYING = "states on the device"
"""Planes on the device, below a common tier on the host."""
_UNPINNED = (_RESTING, "factors", "errors")
_Sized = tuple[Region, Plane | Factor, int]
"""An array to allocate: region, plane, bytes."""


class Store:
    """Planes for all regions, each kind of state on one tier. Host memory is byte-exact, in pinned arenas for copied
    planes and unpinned arenas for others.

    `publishes`: each rank sends updated weights to the other ranks with the same weights.
    """

    def __init__(
        self,
        regions: Sequence[Region],
        infos: Sequence[ParameterInfo],
        *,
        device: Device,
        host: Ledger,
        lanes: Lanes,
        residence: Residence | None = None,
        nvme: Nvme | None = None,
        files: ModelFiles | None = None,
        comm: Comm | None = None,
        counters: Counters | None = None,
    ) -> None:
        """`residence`: the tier of each plane (None: all on the host). `comm`: all ranks in the sharding."""
        self.residence = residence or Residence()
        self.infos = infos
        self.counters = counters or Counters()

        # Memory of each tier.
        self.device = device
        self._host = host
        self._nvme = nvme
        self._files = files
        self._rings = [each for each in (nvme, files) if each is not None]
        self._arenas: dict[str, Arena] = {}
        """Host memory by group of planes: copied ones pinned, resting ones not."""

        # Ranks.
        self.comm = comm or Comm()
        self.sharding = self.residence.sharding
        self.within, self.between = self.comm.split(self.sharding.num_replicas)
        self.publishes = self.sharding.publishes

        # Lanes of the states.
        tier = self.residence.common
        self.is_below_device = tier != DEVICE
        """True if the common tier is the host, over a link to the device."""
        self.lanes = lanes
        if self.is_below_device:
            self.d2h_lane = lanes.d2h
            self.update_lane = lanes.update
            self.collective_lane = lanes.collective
            self.network_lane = lanes.network
        else:  # only compute would wait for a lane
            self.d2h_lane = lanes.on_compute
            self.update_lane = lanes.on_compute
            self.collective_lane = lanes.collective_on_compute
            self.network_lane = lanes.network_on_compute

        # Arrays in memory, and the tiles over them.
        memory = self._take_planes(regions)
        self.states = {region: self._state_of(region, memory) for region in regions}
        comms = self.comm, self.within, self.between
        self.values = Values(self.states.values(), infos, self.sharding, *comms, lanes, device)
        factors = [(region, factor, 4 * region.factor_numel(factor)) for region in regions for factor in region.factors]
        present = [each for each in factors if each[2]]
        for (region, name), flat in self._take("factors", present, tier).items():
            self.states[region].factors[name] = flat
        errors = [(region, ERROR, num_bytes) for region in regions if (num_bytes := self.sharding.error_bytes(region))]
        for (region, _), flat in self._take("errors", errors, tier).items():
            self.states[region].error = flat

    def _take_planes(self, regions: Sequence[Region]) -> dict[tuple[Region, str], torch.Tensor]:
        """Allocate all planes in memory, group by group."""
        groups: dict[str, list[_Sized]] = {_TRAVELLING: [], _RESTING: [], _STAYING: []}
        for region in regions:
            for plane in region.states:
                if group := self._group_of(region, plane):
                    groups[group].append((region, plane, self.sharding.plane_bytes(region, plane)))
        common = self.residence.common
        tiers = {_TRAVELLING: common, _RESTING: common, _STAYING: DEVICE}
        taken = (self._take(group, planes, tiers[group]) for group, planes in groups.items())
        return {place: flat for arrays in taken for place, flat in arrays.items()}

    def _group_of(self, region: Region, plane: Plane) -> str:
        """Return the group of a plane; empty for a plane in records, on disk or in model files."""
        tier = self.residence.tier(region, plane)
        if tier not in (DEVICE, HOST):
            return ""
        if tier != self.residence.common:
            return _STAYING
        if self.residence.travels(region, plane):
            return _TRAVELLING
        return _RESTING

    def _state_of(self, region: Region, memory: Mapping[tuple[Region, str], torch.Tensor]) -> RegionState:
        """Return the state of a region before the first update."""
        planes = {p.name: memory[region, p.name] for p in region.states if (region, p.name) in memory}
        tiles = {rank: self._tiles(region, planes, rank) for rank in self.sharding.partners}
        own = tiles.pop(self.sharding.owner)
        stays = frozenset(self.residence.planes_on(DEVICE, region))
        return RegionState(region, planes, own, tiles, steps=[0] * len(region.pieces), stays=stays)

    def _tiles(self, region: Region, planes: dict[str, torch.Tensor], owner: int) -> list[Tile]:
        """Return the tiles in a rank range, with the planes on this rank."""
        is_own = owner == self.sharding.owner
        tiles = []
        on_disk = [region.plane(name) for name in self.residence.planes_on(DISK, region, is_own)]
        in_files = self.residence.planes_on(FILES, region)
        for begin, end in self.residence.tiles(region, owner):
            record: Record | FileRecord | None = None
            if in_files:
                assert self._files is not None
                record = self._files.record(region, begin, end, region.states)
            elif on_disk:
                assert self._nvme is not None
                record = self._nvme.record(region, begin, end, on_disk)
            tile_planes = {}
            for plane in map(region.plane, planes):
                start = self.sharding.held_range(region, plane).start
                if is_own or not self.sharding.is_own(plane):
                    tile_planes[plane.name] = planes[plane.name][plane.cut(slice(begin - start, end - start))]
            tiles.append(Tile(begin, end, tile_planes, record, region.travelling.cut(slice(begin, end))))
        return tiles

    def hold_gradients(self, accumulated: Collection[int] = (), *, keeps_gradients: bool = True) -> None:
        """Allocate gradient planes: fp32 for the regions with indices in `accumulated`, to sum several contributions.

        The others have planes in the weight dtype, if their gradients wait in memory (always if there are sums).
        """
        waits = keeps_gradients or bool(accumulated)
        trained = [state for state in self.states.values() if state.region.trainable]
        holders = [s for s in trained if s.region.index in accumulated or (waits and not s.has_room_on_disk)]
        current = {s.region: s.sums is not None for s in trained if s.gradients is not None}
        if current == {state.region: state.region.index in accumulated for state in holders}:
            return
        for state in trained:
            state.gradients = state.sums = None
        # The old planes go before the new ones come, or both would count.
        ledger = self.device.ledger
        if self.is_below_device:
            ledger = self._host
        ledger.drop("gradients")
        if (arena := self._arenas.pop("gradients", None)) is not None:
            arena.close()
        planes = {state.region: state.region.plane("gradients") for state in holders}
        planes |= {region: summed(plane) for region, plane in planes.items() if region.index in accumulated}
        entries = [(region, plane, self.sharding.plane_bytes(region, plane)) for region, plane in planes.items()]
        for (region, _), flat in self._take("gradients", entries, self.residence.common).items():
            start = self.sharding.held_range(region, planes[region]).start
            own, shard = self.sharding.own(region), self.sharding.shard(region)
            # Stage 1 holds the whole plane, like ZeRO, although only the updated range is used.
            self.states[region].gradients = flat[own.start - start : own.stop - start]
            if region.index in accumulated:
                self.states[region].sums = flat[shard.start - start : shard.stop - start]

    def stage(self, name: str, num_bytes: int) -> torch.Tensor:
        """Allocate memory on the states' tier, replacing the allocation `name`."""
        if not self.is_below_device:
            self.device.ledger.drop(name)
            return self.device.allocate(name, num_bytes)
        self._host.drop(name)
        self._host.reserve(name, num_bytes)
        return Arena(num_bytes, self.device.pinning).take(num_bytes, torch.uint8)

    def _take(self, name: str, sized: Sequence[_Sized], tier: str) -> dict[tuple[Region, str], torch.Tensor]:
        """Allocate arrays: one arena on the host, separate allocations on the device."""
        if not sized:
            return {}
        if tier == DEVICE:
            return {
                (region, plane.name): self.device.allocate(plane.label, num_bytes).view(plane.dtype)
                for region, plane, num_bytes in sized
            }
        for _, plane, num_bytes in sized:
            self._host.reserve(plane.label, num_bytes)
        # Only copied planes: a driver that refuses one large arena would leave all of it unpinned.
        pinning = None
        if name not in _UNPINNED:
            pinning = self.device.pinning
        arena = Arena(sum(num_bytes for *_, num_bytes in sized), pinning)
        self._arenas[name] = arena
        return {
            (region, plane.name): arena.take(num_bytes // plane.dtype.itemsize, plane.dtype)
            for region, plane, num_bytes in sized
        }

    def places(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Yield (dict, key) for every array in memory with states, whole or as part of a tile. No gradients."""
        for state in self.states.values():
            for arrays in (state.planes, state.factors, *(tile.planes for tile in state.held_tiles)):
                yield from ((arrays, name) for name in arrays)
            if state.error is not None:
                yield vars(state), "error"

    @property
    def pinned_bytes(self) -> int:
        """Pinned host bytes, available for copies without staging."""
        rings = sum(each.pinned_bytes for each in self._rings)
        return rings + sum(arena.pinned_bytes for arena in self._arenas.values())

    def publish(self, region: Region, number: int, own: Lease, reads: Sequence[Ticket]) -> None:
        """Exchange updated weights, tile by tile: send tile `number` (lease `own`), after `reads`, to all ranks with a
        copy, and receive their tiles.
        """
        state = self.states[region]
        plane = region.travelling.name
        operation = f"new weights of {region.name}"
        tile = state.tiles[number]
        own_weights = own.planes[plane]
        others = {rank: tiles[number].land(plane) for rank, tiles in state.others.items()}
        # The link counts bytes per rank within a replica, and sent bytes between replicas.
        comm, lane = self.within, self.collective_lane
        num_sent = 1
        if self.sharding.spreads:
            comm, lane = self.between, self.network_lane
            num_sent = len(others)
        received = [others.get(rank, own).planes[plane] for rank in self.sharding.partners]
        self.counters.count("all_gather_elements", (tile.end - tile.begin) * len(received))
        self.counters.count("network_bytes", own_weights.nbytes * comm.num_far)
        ticket = lane.submit(
            partial(comm.all_to_all, received, [own_weights] * len(received), f"{operation}, tile {number}"),
            reads=reads,
            users=[ticket for lease in others.values() for ticket in lease.users],
            name=operation,
            num_bytes=own_weights.nbytes * num_sent,
        )
        own.done_reading(ticket)
        for lease in others.values():
            lease.done_writing(ticket)

    def gather(
        self,
        region: Region,
        whole: torch.Tensor,
        own: torch.Tensor,
        label: str,
        reads: Sequence[Ticket] = (),
        is_ahead: bool = False,
    ) -> Ticket:
        """Gather the `own` range of each rank in this replica into `whole`, flat, after `reads`. `label`: name in the
        timeline and in errors. `is_ahead`: for the next step.
        """
        self.counters.count("all_gather_elements", region.numel, is_ahead)
        self.counters.count("network_bytes", own.nbytes * self.within.num_far, is_ahead)
        work = partial(self.within.all_gather, whole, own, label)
        return self.collective_lane.submit(work, reads=reads, name=label, num_bytes=own.nbytes)

    def forgive(self) -> None:
        """Forget failed and cancelled updates before all states are written anew."""
        self.values.forget_nonfinite()
        for state in self.states.values():
            for tile in state.held_tiles:
                tile.fence.forgive()
                if tile.record is not None:
                    tile.record.fence.forgive()

    def reset(self) -> None:
        """End all leases after an interrupted step."""
        for each in self._rings:
            each.reset()

    def close(self) -> None:
        """Free all planes."""
        self.states.clear()
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
        for each in self._rings:
            each.close()
