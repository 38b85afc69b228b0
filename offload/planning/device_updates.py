"""Whether states of the host are updated on the device, and the memory there through which they stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from offload.lanes.throttle import Throttle
from offload.layout.regions import SHARD_MULTIPLE, DiskLayout, Region, Sharding, align
from offload.planning.estimates import host_update_seconds, streamed_update_seconds, weight_seconds
from offload.planning.machines import Speeds
from offload.tiers.nvme import RING_TILES

UPDATE_RING = "update ring"
PLANE_ALIGNMENT = 512
"""Bytes: where a plane of a tile may begin in the ring."""
_LARGEST_TILE, _SMALLEST_TILE = 1 << 22, 1 << 13
"""Elements. A tile costs some 300 microseconds of Python and of launches, in which a link moves as many megabytes as a
tile of the largest size has; a fetch that comes in between waits for one tile."""
_RING_SHARE = 8
"""The ring takes at most this part of the device's budget, if smaller tiles can make it that small."""


def trained(regions: Iterable[Region]) -> frozenset[int]:
    """Return the indices of the regions that are trained."""
    return frozenset(region.index for region in regions if region.trainable)


def seconds(regions: Sequence[Region], layout: DiskLayout, throttles: Mapping[str, Throttle], speeds: Speeds) -> float:
    """Estimate what updates take where a layout has them: on the host, and beside that on the device, with the way of
    the states there and back, over the link that weights and gradients share. Compute is assumed to take no time.
    """
    on_host = host_update_seconds(regions, layout, throttles, speeds)
    if not layout.streamed:
        return on_host
    moved = weight_seconds(regions, layout.sharding, throttles, speeds)
    return max(on_host, moved + streamed_update_seconds(regions, layout, throttles, speeds))


def tile_numel(regions: Sequence[Region], device_bytes: int | None, sharding: Sharding) -> int:
    """Return the elements of a tile, as far as the device's budget (None: without end) has room for a ring of them."""
    tile = _LARGEST_TILE
    while device_bytes is not None and tile > _SMALLEST_TILE:
        layout = DiskLayout(tile_numel=tile, sharding=sharding, streamed=trained(regions))
        if ring_bytes(layout, regions) * _RING_SHARE <= device_bytes:
            break
        tile //= 2
    largest = max((region.numel // sharding.num_ranges for region in regions if region.trainable), default=0)
    return min(tile, align(max(1, largest // RING_TILES), SHARD_MULTIPLE))


def ring_bytes(layout: DiskLayout, regions: Sequence[Region]) -> int:
    """Return the bytes of the ring: one tile goes up, one is updated, one comes down, and one is on hand."""
    most = 0
    for region in regions:
        if region.index in layout.streamed:
            numel = min(layout.tile_numel, region.numel // layout.sharding.num_ranges)
            moving = [plane for plane in region.planes if not layout.stays(region, plane)]
            most = max(most, sum(align(plane.num_bytes(numel), PLANE_ALIGNMENT) for plane in moving))
    return RING_TILES * most
