"""Estimate update times, and plan updates on the device for optimizer states stored on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from offload.distributed.comm import Comm
from offload.lanes.timeline import Throttle
from offload.layout.planes import CODES, STALE
from offload.layout.regions import SHARD_MULTIPLE, ParameterInfo, Region, align, alike
from offload.layout.residence import DEVICE, Residence, Row
from offload.layout.sharding import Sharding
from offload.planning.machines import Speeds
from offload.tiers.nvme import RING_TILES

# Updates below both limits do not justify measuring the machine.
_SMALL_BYTES = 1 << 28
_SMALL_S = 0.02
_DISPATCH_S = 3e-4
"""Python time to dispatch the forward of one block, independent of the token count."""


def is_small_update(regions: Sequence[Region], sharding: Sharding, throttles: Mapping[str, Throttle]) -> bool:
    """Return True if the update is too small for alternatives to matter."""
    num_bytes = update_bytes(regions, sharding)
    return num_bytes < _SMALL_BYTES and throttles.get("update", Throttle()).seconds(num_bytes) < _SMALL_S


def slowest_throttles(comm: Comm, throttles: Mapping[str, Throttle]) -> Mapping[str, Throttle]:
    """Return the throttles of the rank with the slowest lanes, so that all ranks choose alike. Collective."""
    by_rank = comm.gather_objects(throttles, "throttles of the lanes")
    return max(by_rank, key=lambda each: sum(throttle.seconds(_SMALL_BYTES) for throttle in each.values()))


def update_bytes(regions: Iterable[Region], sharding: Sharding) -> int:
    """Return the bytes this rank reads and writes in updates: states twice, and gradients once."""
    total_bytes = 0
    for region, count in alike(regions):
        if region.trainable:
            numel = region.numel // sharding.num_ranges
            total_bytes += count * (region.update_bytes(numel) + region.plane("gradients").num_bytes(numel))
    return total_bytes


def host_update_bytes(regions: Iterable[Region], residence: Residence) -> int:
    """Return the bytes this rank reads and writes in host updates."""
    elsewhere = residence.updated_on_device
    return update_bytes([region for region in regions if region.index not in elsewhere], residence.sharding)


def streamed_bytes(regions: Iterable[Region], residence: Residence) -> tuple[int, int]:
    """Return the (H2D, D2H) bytes for updates on the device.

    Both count states not stored on the device; H2D also counts gradients.
    """
    up = down = 0
    for region, count in residence.alike(regions):
        row = residence.row(region)
        if row.update == DEVICE:
            numel = region.numel // residence.sharding.num_ranges
            moved = [p for p in region.states if row.tiers.get(p.name) != DEVICE and p.name != STALE]
            down += count * sum(plane.num_bytes(numel) for plane in moved)
            # Codes are made by the update, so they only come down.
            up += count * sum(plane.num_bytes(numel) for plane in moved if plane.name != CODES)
            up += count * region.plane("gradients").num_bytes(numel)
    return up, down


def update_seconds(
    regions: Sequence[Region],
    residence: Residence,
    throttles: Mapping[str, Throttle],
    speeds: Speeds,
    beside_s: float = 0.0,
) -> float:
    """Estimate the update time for this rank in seconds, with host and device updates in parallel.

    The lanes of a device update run in parallel too, so their time is the longest. Without an accelerator, copies take
    only throttle time. beside_s: seconds of other copies over the link, before states updated on the device.
    """
    # Threads on the host and the device work at the same time, so the slower place counts.
    host_bytes = host_update_bytes(regions, residence)
    on_host = _update_seconds(host_bytes, throttles, speeds, on_device=False)
    if not residence.updated_on_device:
        return on_host
    num_bytes = update_bytes(regions, residence.sharding) - host_bytes
    links = _link_seconds(*streamed_bytes(regions, residence), throttles, speeds)
    return max(on_host, beside_s + max(_update_seconds(num_bytes, throttles, speeds, on_device=True), *links))


def _update_seconds(num_bytes: int, throttles: Mapping[str, Throttle], speeds: Speeds, *, on_device: bool) -> float:
    if not num_bytes:
        return 0.0
    return max(num_bytes / speeds.update(on_device=on_device), throttles.get("update", Throttle()).seconds(num_bytes))


def weight_seconds(
    regions: Sequence[Region],
    sharding: Sharding,
    throttles: Mapping[str, Throttle],
    speeds: Speeds,
) -> float:
    """Estimate the link time for weights (two H2D copies) and gradients (one D2H copy) per step, in seconds."""
    up = down = 0
    for region, count in alike(regions):
        up += 2 * count * sharding.plane_bytes(region, region.travelling)  # for forward and backward
        if region.trainable:
            down += count * region.plane("gradients").num_bytes(region.numel)
    return max(_link_seconds(up, down // min(sharding.num_ranges, sharding.size), throttles, speeds))


def _link_seconds(up: int, down: int, throttles: Mapping[str, Throttle], speeds: Speeds) -> tuple[float, float]:
    seconds = []
    for name, num_bytes in (("h2d", up), ("d2h", down)):
        rate = speeds.link(is_up=name == "h2d") if num_bytes else None  # None on a CPU: nothing is copied
        measured = 0.0 if rate is None else num_bytes / rate
        seconds.append(max(measured, throttles.get(name, Throttle()).seconds(num_bytes)))
    return seconds[0], seconds[1]


def forward_seconds(
    infos: Sequence[ParameterInfo],
    regions: Sequence[Region],
    num_units: int,
    tokens: int,
    sharding: Sharding,
    throttles: Mapping[str, Throttle],
    speeds: Speeds,
) -> float:
    """Estimate the time for a forward pass over `tokens` tokens: the longer of products and weight fetches."""
    numel = sum(info.numel for info in infos)
    precision = next((info.compute for info in infos if info.compute != "fp32"), "fp32")
    # A multiplication and an addition for each weight and token.
    products = 2 * numel * tokens / speeds.flops(precision) + _DISPATCH_S * num_units
    fetched = sum(sharding.plane_bytes(region, region.travelling) for region in regions)
    return max(products, throttles.get("h2d", Throttle()).seconds(fetched))


UPDATE_RING = "update ring"
PLANE_ALIGNMENT = 512
"""Alignment in bytes for tile planes in the ring."""
_LARGEST_TILE = 1 << 22
SMALLEST_TILE = 1 << 13
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
    moved = weight_seconds(regions, residence.sharding, throttles, speeds)
    return update_seconds(regions, residence, throttles, speeds, moved)


def tile_numel(regions: Sequence[Region], device_bytes: int | None, sharding: Sharding) -> int:
    """Return the tile size in elements for a ring within the device budget. device_bytes None: no limit."""
    kinds = [region for region, _ in alike(regions) if region.trainable]
    return fit_tile(
        _LARGEST_TILE,
        lambda tile: _RING_SHARE * ring_bytes(all_on_device(kinds, tile, sharding), kinds),
        device_bytes,
        [region.numel // sharding.num_ranges for region in kinds],
    )


def fit_tile(
    largest: int, ring_bytes: Callable[[int], int], room_bytes: int | None, lengths: Iterable[int] | None = None
) -> int:
    """Return the largest tile size in elements, up to `largest`, with `ring_bytes` of a tile within `room_bytes` (None:
    no limit), or the smallest tile size. lengths: elements per region; the longest region has at least as many tiles as
    a ring.
    """
    tile = largest
    # In halves: below the smallest tile, the calls for a tile would take longer than the bytes.
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
    for region, _ in residence.alike(regions):
        row = residence.row(region)
        if row.update == DEVICE:
            numel = min(row.tile_numel, region.numel // residence.sharding.num_ranges)
            moving = [plane for plane in region.planes if row.tiers.get(plane.name) != DEVICE]
            tile_bytes = max(tile_bytes, sum(align(plane.num_bytes(numel), PLANE_ALIGNMENT) for plane in moving))
    return RING_TILES * tile_bytes
