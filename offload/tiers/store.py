"""Store: the single owner of all planes and their locations.

A plane is a flat tensor over a region (`offload.layout.planes`). Each rank holds the part defined by `Sharding`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from offload.distributed.comm import Comm
from offload.lanes.lanes import Lanes
from offload.lanes.ticket import Ticket
from offload.layout.planes import ERROR, Factor, Plane, summed
from offload.layout.regions import ParameterInfo, Region
from offload.layout.residence import DEVICE, DISK, FILES, HOST, Residence
from offload.tiers.counters import Counters
from offload.tiers.device import Device
from offload.tiers.host import Arena
from offload.tiers.lease import Lease
from offload.tiers.ledger import Ledger
from offload.tiers.model_files import FileRecord, ModelFiles
from offload.tiers.nvme import Nvme, Record
from offload.tiers.tile import RegionState, Tile
from offload.tiers.values import Values

_RESTING, _STAYING = "resting states", "states on the device"


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
        self.residence, self._device, self._host, self._lanes = residence or Residence(), device, host, lanes
        self._infos, self._nvme, self._files = infos, nvme, files
        self._rings = [each for each in (nvme, files) if each is not None]
        self.comm, self.sharding = comm or Comm(), self.residence.sharding
        self.publishes = self.sharding.publishes
        self.within, self.between = self.comm.split(self.sharding.num_replicas)
        self._counters = counters or Counters()
        # on the device only compute would wait for a lane
        compute_lanes = lanes.on_compute, lanes.on_compute, lanes.collective_on_compute
        is_below, tier = self.is_below_device, self.residence.common
        lanes_of_states = (lanes.d2h, lanes.update, lanes.collective) if is_below else compute_lanes
        self.d2h_lane, self.update_lane, self.collective_lane = lanes_of_states
        self.network_lane = lanes.network if is_below else lanes.network_on_compute
        self._arenas: dict[str, Arena] = {}
        groups: dict[str, list[tuple[Region, Plane, int]]] = {"states": [], _RESTING: [], _STAYING: []}
        for region in regions:
            for plane in region.states:
                place, size = self.residence.tier(region, plane), self.sharding.plane_bytes(region, plane)
                name = "states" if self.residence.travels(region, plane) else _RESTING
                if place in (DEVICE, HOST):
                    groups[name if place == tier else _STAYING].append((region, plane, size))
        memory: dict[tuple[Region, str], torch.Tensor] = {}
        for name, planes in groups.items():
            memory |= self._take(name, planes, DEVICE if name == _STAYING else tier)
        self.states = [
            self._state(region, {p.name: memory[region, p.name] for p in region.states if (region, p.name) in memory})
            for region in regions
        ]
        self._by_index = {state.region.index: state for state in self.states}
        comms = self.comm, self.within, self.between
        self.values = Values(self._by_index, infos, self.sharding, *comms, lanes)
        small = [(region, factor, 4 * region.factor_numel(factor)) for region in regions for factor in region.factors]
        small = [each for each in small if each[2]]
        for (region, name), flat in self._take("factors", small, tier).items() if small else ():
            self[region].factors[name] = flat
        errors = [(region, ERROR, num_bytes) for region in regions if (num_bytes := self.sharding.error_bytes(region))]
        for (region, _), flat in self._take("errors", errors, tier).items() if errors else ():
            self[region].error = flat

    def _state(self, region: Region, planes: dict[str, torch.Tensor]) -> RegionState:
        others = {rank: self._tiles(region, planes, rank) for rank in self.sharding.partners}
        tiles = others.pop(self.sharding.owner)
        stays = frozenset(self.residence.planes_on(DEVICE, region))
        return RegionState(region, planes, tiles, others, [0] * len(region.pieces), stays=stays)

    def _tiles(self, region: Region, planes: dict[str, torch.Tensor], owner: int) -> list[Tile]:
        """Return the tiles in a rank range, with the planes on this rank."""
        is_own, tiles = owner == self.sharding.owner, []
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

    @property
    def is_below_device(self) -> bool:
        """True if the common tier is the host, over a link to the device."""
        return self.residence.common != DEVICE

    @property
    def lends_early(self) -> bool:
        """True if states can be lent before their gradients exist: no record holds both."""
        return not any(state.has_room_on_disk for state in self.states)

    def hold_gradients(self, accumulates: bool, keeps_gradients: bool = True) -> None:
        """Allocate gradient planes for all trainable regions: fp32 to accumulate several passes, otherwise in the
        weight dtype. No planes for gradients that do not wait in memory.
        """
        trained = [state for state in self.states if state.region.trainable]
        planes_by_region = {
            s.region: [summed(plane) if accumulates else plane]
            for s in trained
            if accumulates or (keeps_gradients and not s.has_room_on_disk)
            for plane in [s.region.plane("gradients")]
        }
        current = {s.region: s.sums is not None for s in trained if s.gradients is not None}
        if current == dict.fromkeys(planes_by_region, accumulates):
            return
        for state in trained:
            state.gradients = state.sums = None
        (self._host if self.is_below_device else self._device.ledger).drop("gradients")
        if (arena := self._arenas.pop("gradients", None)) is not None:
            arena.close()
        planes = [
            (region, plane, self.sharding.plane_bytes(region, plane)) for region, (plane,) in planes_by_region.items()
        ]
        for (region, _), flat in self._take("gradients", planes, self.residence.common).items():
            start = self.sharding.held_range(region, *planes_by_region[region]).start
            own, shard = self.sharding.own(region), self.sharding.shard(region)
            # Stage 1 holds the whole plane, like ZeRO, although only the updated range is used.
            gradients = flat[own.start - start : own.stop - start]
            sums = flat[shard.start - start : shard.stop - start] if accumulates else None
            self[region].gradients, self[region].sums = gradients, sums

    def stage(self, name: str, num_bytes: int) -> torch.Tensor:
        """Allocate memory on the states' tier, replacing the allocation `name`."""
        if not self.is_below_device:
            self._device.ledger.drop(name)
            return self._device.allocate(name, num_bytes)
        self._host.drop(name)
        self._host.reserve(name, num_bytes)
        return Arena(num_bytes, self._device.pinning).take(num_bytes, torch.uint8)

    def count_d2h(self, num_bytes: int) -> None:
        """Count D2H bytes, if the states are on the host."""
        if self.is_below_device:
            self._counters.count("d2h_bytes", num_bytes)

    def _take(
        self, name: str, planes: Sequence[tuple[Region, Plane | Factor, int]], tier: str
    ) -> dict[tuple[Region, str], torch.Tensor]:
        """Allocate arrays: one arena on the host, separate allocations on the device."""
        if tier == DEVICE:
            return {
                (region, plane.name): self._device.allocate(plane.label, num_bytes).view(plane.dtype)
                for region, plane, num_bytes in planes
            }
        for _, plane, num_bytes in planes:
            self._host.reserve(plane.label, num_bytes)
        pinning = None if name in (_RESTING, "factors", "errors") else self._device.pinning
        arena = self._arenas[name] = Arena(sum(num_bytes for *_, num_bytes in planes), pinning)
        return {
            (region, plane.name): arena.take(num_bytes // plane.dtype.itemsize, plane.dtype)
            for region, plane, num_bytes in planes
        }

    def __getitem__(self, region: Region) -> RegionState:
        return self._by_index[region.index]

    def region(self, index: int) -> Region:
        """Return a region by index."""
        return self._by_index[index].region

    @property
    def pinned_bytes(self) -> int:
        """Pinned host bytes, available for copies without staging."""
        rings = sum(each.pinned_bytes for each in self._rings)
        return rings + sum(arena.pinned_bytes for arena in self._arenas.values())

    def publish(self, region: Region, number: int, own: Lease, reads: Sequence[Ticket]) -> None:
        """Exchange updated weights, tile by tile: send tile `number` (lease `own`), after `reads`, to all ranks with a
        copy, and receive their tiles.
        """
        state, plane, operation = self[region], region.travelling.name, f"new weights of {region.name}"
        tile, own_weights = state.tiles[number], own.planes[plane]
        comm, lane = (self.between, self.network_lane) if self.sharding.spreads else (self.within, self.collective_lane)
        others = {rank: tiles[number].land(plane) for rank, tiles in state.others.items()}
        received = [others.get(rank, own).planes[plane] for rank in self.sharding.partners]
        self._counters.count("all_gather_elements", (tile.end - tile.begin) * comm.size)
        self._counters.count("network_bytes", own_weights.nbytes * comm.num_far)
        ticket = lane.submit(
            partial(comm.all_to_all, received, [own_weights] * comm.size, f"{operation}, tile {number}"),
            reads=reads,
            users=[ticket for lease in others.values() for ticket in lease.users],
            name=operation,
            # The link counts bytes per rank within a replica, and sent bytes between replicas.
            num_bytes=own_weights.nbytes * (comm.size - 1 if self.sharding.spreads else 1),
        )
        own.done_reading(ticket)
        for lease in others.values():
            lease.done_writing(ticket)

    def forgive(self) -> None:
        """Forget failed and cancelled updates before all states are written anew."""
        self.values.forget_nonfinite()
        for state in self.states:
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
        self._by_index.clear()
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
        for each in self._rings:
            each.close()
