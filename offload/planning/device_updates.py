"""Plan updates on the device for optimizer states stored on the host: tile size and ring buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from offload.lanes.throttle import Throttle
from offload.layout.regions import SHARD_MULTIPLE, Region, Sharding, align
from offload.layout.residence import DEVICE, Residence, Row
from offload.planning.estimates import host_update_seconds, streamed_update_seconds, weight_seconds
from offload.planning.machines import Speeds
from offload.tiers.nvme import RING_TILES

UPDATE_RING = "update ring"
PLANE_ALIGNMENT = 512
"""Alignment in bytes for tile planes in the ring."""
_LARGEST_TILE, SMALLEST_TILE = 1 << 22, 1 << 13
"""Tile size limits in elements.

A device update of a tile costs about 300 microseconds for Python and kernel launches, a host update 200. A link moves
the largest tile in about the same time. A prefetch in between waits for one tile.
"""
_RING_SHARE = 8
"""The ring takes at most 1/8 of the device budget, unless tiles already have the smallest size."""


def trainable_indices(regions: Iterable[Region]) -> frozenset[int]:
    """Return the trainable region indices."""
    return frozenset(region.index for region in regions if region.trainable)


def estimate_seconds(
    regions: Sequence[Region], residence: Residence, throttles: Mapping[str, Throttle], speeds: Speeds
) -> float:
    """Estimate the update time for a table of residence, in seconds.

    Host updates run beside device updates. States updated on the device share the link with weights and gradients.
    Compute time is not included.
    """
    on_host = host_update_seconds(regions, residence, throttles, speeds)
    if not residence.updated_on_device:
        return on_host
    moved = weight_seconds(regions, residence.sharding, throttles, speeds)
    return max(on_host, moved + streamed_update_seconds(regions, residence, throttles, speeds))


def tile_numel(regions: Sequence[Region], device_bytes: int | None, sharding: Sharding) -> int:
    """Return the tile size in elements for a ring within the device budget. device_bytes None: no limit."""
    trainable = [region for region in regions if region.trainable]
    return fit_tile(
        _LARGEST_TILE,
        lambda tile: _RING_SHARE * ring_bytes(all_on_device(regions, tile, sharding), regions),
        device_bytes,
        [region.numel // sharding.num_ranges for region in trainable],
    )


def fit_tile(
    largest: int, ring_bytes: Callable[[int], int], room_bytes: int | None, lengths: Iterable[int] | None = None
) -> int:
    """Return the largest tile size in elements, up to `largest`, with `ring_bytes` of a tile within `room_bytes` (None:
    no limit), or the smallest tile size. lengths: elements per region; the longest region has at least as many tiles as
    a ring.
    """
    tile = largest
    while room_bytes is not None and tile > SMALLEST_TILE and ring_bytes(tile) > room_bytes:
        tile //= 2
    if lengths is None:
        return tile
    return min(tile, align(max(1, max(lengths, default=0) // RING_TILES), SHARD_MULTIPLE))


def all_on_device(regions: Sequence[Region], tile_numel: int, sharding: Sharding) -> Residence:
    """Return the table with all updates on the device, and all states below."""
    return Residence(dict.fromkeys(trainable_indices(regions), Row({}, tile_numel, DEVICE)), sharding)


def ring_bytes(residence: Residence, regions: Sequence[Region]) -> int:
    """Return the ring size in bytes: one tile each in H2D copy, update and D2H copy, and one spare."""
    tile_bytes = 0
    for region in regions:
        row = residence.row(region)
        if row.update == DEVICE:
            numel = min(row.tile_numel, region.numel // residence.sharding.num_ranges)
            moving = [plane for plane in region.planes if row.tiers.get(plane.name) != DEVICE]
            tile_bytes = max(tile_bytes, sum(align(plane.num_bytes(numel), PLANE_ALIGNMENT) for plane in moving))
    return RING_TILES * tile_bytes
