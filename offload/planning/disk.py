"""Choose the states to store on disk, and the tile size for disk transfers. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from offload.layout.planes import Plane
from offload.layout.regions import SHARD_MULTIPLE, Region, align, alike
from offload.layout.residence import DEVICE, DISK, FILES, HOST, SLOT, Residence, Row
from offload.layout.sharding import Sharding
from offload.planning.device_updates import fit_tile, trainable_indices
from offload.tiers.model_files import staging_bytes
from offload.tiers.nvme import ACTIVATION_RING, FETCH_RING, RING_TILES, UPDATE_RING

_LARGEST_TILE = 1 << 22
"""Tile size limit in elements. A record has 12 to 16 bytes per element."""
_LEAST_ACTIVATION_RING = 1 << 18
_MOST_ACTIVATION_RING = 1 << 24
_RINGS_SHARE = 4
"""The rings take at most 1/4 of the host budget, unless tiles already have the smallest size."""
_CACHED_SHARE = 0.75
"""Share of file-backed weights the page cache must hold to be useful."""
_MOST_EARLY_TILES = 12
"""Maximum number of tiles read early.

Together with the regular ring tiles, room for the states of four of the largest regions.
"""
_STATE_KINDS = ("parameters", "gradients", "optimizer")
"""Kinds in the order of priority for host memory.

Per step, weights are fetched twice and read and written once; all else is written once and read once. Gradients precede
optimizer states, to stay in memory if possible.
"""


def lay_out(
    regions: Sequence[Region],
    tiers: Mapping[str, str],
    *,
    keeps_gradients: bool,
    staging_bytes: int,
    host_bytes: int | None,
    sharding: Sharding = Sharding(),  # noqa: B008 (frozen)
    update: str = "cpu",
    most_numel: int | None = None,
    device_bytes: int = 0,
) -> Residence:
    """Return the table of residence for states below the device.

    tiers: HOST, DISK or "auto" for parameters, optimizer and gradients. "auto" uses host memory up to `host_bytes`.
    staging_bytes: host memory for gradients consumed immediately.
    host_bytes: host memory for this rank; None: no limit.
    update: place of updates for states in host memory. With "device" or "both", the states move in tiles of
        `most_numel` elements, and `device_bytes` of optimizer states may stay on the device. With SLOT, regions used by
        one unit are updated in the slot.
    """
    staying = _choose_staying(regions, sharding, device_bytes, is_spread=update == "device")
    updated = {"device": trainable_indices(regions), "both": staying}.get(update, frozenset())
    in_slots = update == SLOT
    states = _States(regions, keeps_gradients, staging_bytes, host_bytes, sharding, staying, updated, in_slots)
    left = states.left(tiers)
    # Without a need for the disk there are no rings, and no smaller tiles for them.
    if DISK not in tiers.values() and (left is None or left >= 0):
        return states.place({}, most_numel or SHARD_MULTIPLE)

    kinds = [region for region, _ in alike(regions)]

    def rings(tile: int) -> int:
        return sum(ring_bytes(_all_on_disk(kinds, tile, sharding), kinds).values())

    lengths = [region.numel // sharding.num_ranges for region in kinds]
    # The tile is chosen as if everything were on disk, because the choice of planes depends on the ring size.
    tile_numel = fit_tile(_LARGEST_TILE, lambda tile: _RINGS_SHARE * rings(tile), host_bytes, lengths)
    tile_numel = min(tile_numel, most_numel or tile_numel)
    left = states.left({state: DISK if tier == "auto" else tier for state, tier in tiers.items()})

    def place_beside(num_bytes: int) -> Residence:
        return states.distribute(tiers, None if left is None else left - num_bytes, tile_numel)

    first = place_beside(rings(tile_numel))
    # The chosen planes may need smaller rings than everything on disk; a second pass distributes the difference.
    num_bytes = sum(ring_bytes(first, regions).values())
    better = place_beside(num_bytes)
    if sum(ring_bytes(better, regions).values()) <= num_bytes:
        return better
    return first


@dataclass(frozen=True)
class _States:
    """States to place and the memory for them. Fields as in `lay_out`."""

    regions: Sequence[Region]
    """All regions."""
    keeps_gradients: bool
    """True if gradients wait for the norm."""
    staging_bytes: int
    """Host bytes for gradients consumed immediately."""
    host_bytes: int | None
    """Host memory in bytes; None: no limit."""
    sharding: Sharding
    """Region partition over ranks."""
    staying: Collection[int]
    """Indices of regions with optimizer states on the device."""
    updated: Collection[int]
    """Indices of regions updated on the device, tile by tile."""
    in_slots: bool
    """True if regions used by one unit are updated in the slot, unless a plane is on disk."""

    def left(self, tiers: Mapping[str, str]) -> int | None:
        """Return the host memory left after storing every kind not on disk. None: no limit."""
        if self.host_bytes is None:
            return None
        in_memory = [state for state in _STATE_KINDS if tiers[state] != DISK]
        staging = self.staging_bytes
        if self.keeps_gradients or tiers["gradients"] == DISK:  # their own planes, or a ring
            staging = 0
        return self.host_bytes - staging - sum(self._sizes(in_memory, self.keeps_gradients).values())

    def distribute(self, tiers: Mapping[str, str], left: int | None, tile_numel: int) -> Residence:
        """Distribute the remaining memory to the "auto" kinds and send the rest to disk."""
        on_disk: dict[int, set[str]] = {region.index: set() for region in self.regions}
        for state in _STATE_KINDS:
            if tiers[state] == HOST:  # `left` has these bytes subtracted already
                continue
            kept: Collection[Region] = ()
            if tiers[state] == "auto":
                kept, used = self._choose_kept(state, left)
                if left is not None:
                    left -= used
            for region in self.regions:
                if region not in kept:
                    on_disk[region.index].add(state)
        return self.place(on_disk, tile_numel)

    def _choose_kept(self, state: str, left: int | None) -> tuple[set[Region], int]:
        """Return the regions with one kind of state in memory, and the bytes for them. left: as in `distribute`."""
        if state != "gradients" or self.keeps_gradients:
            sizes = self._sizes((state,), True)
            kept = _spread(sizes, left)
            return kept, sum(sizes[region] for region in kept)
        # Consumed immediately: they need the staging memory alone, all regions or none.
        if left is None or left >= self.staging_bytes:
            return set(self.regions), self.staging_bytes
        return set(), 0

    def place(self, on_disk: Mapping[int, Collection[str]], tile_numel: int) -> Residence:
        """Return the table with these kinds of state on disk, by region index, in tiles of `tile_numel` elements."""
        rows: dict[int, Row] = {}
        by_key: dict[Hashable, Row | None] = {}  # regions with equal rows share one, see `Residence.alike`
        for region in self.regions:
            kinds = on_disk.get(region.index, ())
            key = region.kind, frozenset(kinds), region.index in self.staying, region.index in self.updated
            if key not in by_key:
                by_key[key] = self._row(region, kinds, tile_numel)
            if (row := by_key[key]) is not None:
                rows[region.index] = row
        return Residence(rows, self.sharding)

    def _row(self, region: Region, kinds: Collection[str], tile_numel: int) -> Row | None:
        """Return the row of a region with some kinds of state on disk; None: nothing differs from the common tier."""
        tiers = {}
        for plane in region.planes:
            if self._stays(region, plane):
                tiers[plane.name] = DEVICE
            elif plane.state in kinds:
                tiers[plane.name] = DISK
        has_records = DISK in tiers.values()  # read and written a tile at a time
        update = ""
        if region.index in self.updated:
            update = DEVICE
        if self.in_slots and region.trainable and len(region.units) == 1 and not has_records:
            update = SLOT
        if not (tiers or update):
            return None
        moves_in_tiles = has_records or update == DEVICE
        return Row(tiers, tile_numel if moves_in_tiles else 0, update)

    def _stays(self, region: Region, plane: Plane) -> bool:
        return region.index in self.staying and plane.state == "optimizer"

    def _sizes(self, states: Sequence[str], with_gradients: bool) -> dict[Region, int]:
        """Return the host bytes for some kinds of state, by region."""
        sizes: dict[Region, int] = {}
        by_key: dict[Hashable, int] = {}
        for region in self.regions:
            key = region.kind, region.index in self.staying
            if key not in by_key:
                planes = region.planes if with_gradients else region.states
                moving = [plane for plane in planes if plane.state in states and not self._stays(region, plane)]
                by_key[key] = sum(self.sharding.plane_bytes(region, plane) for plane in moving)
            sizes[region] = by_key[key]
        return sizes


def ring_bytes(residence: Residence, regions: Iterable[Region]) -> dict[str, int]:
    """Return the sizes in bytes of the rings for state tiles, by name. Empty if nothing is on disk."""
    fetch = update = 0
    for region, _ in residence.alike(regions):
        numel = residence.largest_tile(region)
        names = residence.planes_on(DISK, region)
        update = max(update, residence.record_bytes(region, numel))
        if region.travelling.name in names:
            fetch = max(fetch, region.travelling.disk_bytes(numel))
    # Tiles for all partners arrive together while own tiles occupy the other ring, and a tile may not fit at the ring
    # end.
    num = max(RING_TILES, len(residence.sharding.partners))
    sizes = {FETCH_RING: num * fetch, UPDATE_RING: RING_TILES * update}
    return {name: size for name, size in sizes.items() if size}


def read_from_files(
    sharding: Sharding, regions: Sequence[Region], host_bytes: int | None, free_bytes: int
) -> Residence:
    """Return the table with frozen regions in the model files.

    host_bytes: as in `lay_out`.
    free_bytes: host memory available to the page cache. If the cache holds most weights, a pass finds the data cached
        by the previous pass. Otherwise each pass evicts the data the next pass needs first, and uncached reads are
        faster.
    """
    frozen = [region for region in regions if not region.trainable]
    kinds = alike(frozen)

    def place(tile: int) -> Residence:
        rows = {region.kind: in_files(region, tile) for region, _ in kinds}
        return Residence({region.index: rows[region.kind] for region in frozen}, sharding)

    # Smaller tiles only for a small budget: each tile is a separate read.
    tile = fit_tile(_LARGEST_TILE, lambda tile: _RINGS_SHARE * read_ring(place(tile), frozen), host_bytes)
    sizes = (count * sharding.plane_bytes(region, region.travelling) for region, count in kinds)
    is_cached = _CACHED_SHARE * sum(sizes) <= free_bytes
    residence = place(tile)
    if is_cached:
        return residence
    return replace(residence, file_staging_bytes=staging_bytes(read_ring(residence, regions)))


def in_files(region: Region, tile_numel: int) -> Row:
    """Return the row of a region in the model files."""
    return Row(dict.fromkeys((plane.name for plane in region.states), FILES), tile_numel)


def read_ring(residence: Residence, regions: Iterable[Region]) -> int:
    """Return the size in bytes of the ring for reading model file tiles."""
    largest = 0
    for region, _ in residence.alike(regions):
        if FILES in residence.row(region).tiers.values():
            numel = residence.largest_tile(region)
            largest = max(largest, sum(plane.num_bytes(numel) for plane in region.states))
    return RING_TILES * largest


def add_early_tiles(rings: Mapping[str, int], room_bytes: int) -> dict[str, int]:
    """Return the rings, with the update ring enlarged within `room_bytes`.

    The extra tiles are needed first in the next forward, and are read before the gradient norm is known.
    """
    tile = rings.get(UPDATE_RING, 0) // RING_TILES
    if not tile:
        return dict(rings)
    return {**rings, UPDATE_RING: rings[UPDATE_RING] + min(_MOST_EARLY_TILES, max(0, room_bytes) // tile) * tile}


def activation_ring_bytes(regions: Iterable[Region], host_bytes: int | None) -> dict[str, int]:
    """Return the ring size in bytes for activation checkpoints.

    Larger units get a larger ring, because their inputs are larger too; input sizes are unknown before a step.
    """
    share = 4 * max((region.numel for region in regions), default=0)
    if host_bytes is not None:
        share = min(share, host_bytes // 16)
    return {ACTIVATION_RING: align(min(_MOST_ACTIVATION_RING, max(share, _LEAST_ACTIVATION_RING)), 1 << 16)}


def _choose_staying(
    regions: Sequence[Region], sharding: Sharding, device_bytes: int, is_spread: bool
) -> frozenset[int]:
    """Choose the regions with optimizer states on the device.

    If the other regions are updated on the host, the first regions are chosen: their gradients arrive last and their
    weights are needed first, so they would delay the next forward. Otherwise the choice is spread evenly.
    """
    if not device_bytes:
        return frozenset()
    by_kind = {region.kind: optimizer_bytes([region], sharding) for region, _ in alike(regions) if region.trainable}
    sizes = {region: size for region in regions if (size := by_kind.get(region.kind))}
    if is_spread:
        return frozenset(region.index for region in _spread(sizes, device_bytes))
    kept = set()
    for region, size in sizes.items():
        if size <= device_bytes:  # a smaller region may still fit
            kept.add(region.index)
            device_bytes -= size
    return frozenset(kept)


def optimizer_bytes(regions: Iterable[Region], sharding: Sharding) -> int:
    """Return the bytes of optimizer states this rank owns in some regions."""
    return sum(
        count * sharding.plane_bytes(region, plane)
        for region, count in alike(regions)
        for plane in region.states
        if plane.state == "optimizer"
    )


def _all_on_disk(regions: Sequence[Region], tile_numel: int, sharding: Sharding) -> Residence:
    rows = {region.index: Row(dict.fromkeys(region.by_name, DISK), tile_numel) for region in regions}
    return Residence(rows, sharding)


def _spread(sizes: Mapping[Region, int], budget_bytes: int | None) -> set[Region]:
    """Choose regions up to a budget, evenly spaced in order, so that disk and memory alternate."""
    if budget_bytes is None or sum(sizes.values()) <= budget_bytes:
        return set(sizes)
    share = min(1.0, max(0, budget_bytes) / max(1, sum(sizes.values())))
    # A region is kept while the kept bytes lag behind this share of all bytes so far.
    kept: set[Region] = set()
    used = seen = 0
    for is_second_pass in (False, True):  # the second pass takes all that still fits
        for region, size in sizes.items():
            seen += size
            limit = budget_bytes if is_second_pass else share * seen
            if region not in kept and used + size <= limit:
                kept.add(region)
                used += size
    return kept
