"""What parts of a step take, estimated from what the machine was measured to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offload.lanes.throttle import Throttle
from offload.layout.regions import ParameterInfo, Region, Sharding
from offload.planning.machines import Speeds

_SMALL_BYTES, _SMALL_S = 1 << 28, 0.02
"""An update of fewer bytes, or seconds, is not worth that a machine is measured."""
_DISPATCH_S = 3e-4
"""What Python takes to dispatch a block's forward, however few its tokens."""


def is_small(regions: Sequence[Region], sharding: Sharding, throttles: Mapping[str, Throttle]) -> bool:
    """Return True if an update is too small to be worth a look at what else could be made of it."""
    num_bytes = update_bytes(regions, sharding)
    return num_bytes < _SMALL_BYTES and throttles.get("update", Throttle()).seconds(num_bytes) < _SMALL_S


def update_bytes(regions: Sequence[Region], sharding: Sharding) -> int:
    """Return the bytes that the update of all that this rank updates reads and writes."""
    return sum(region.update_bytes(region.numel // sharding.num_ranges) for region in regions if region.trainable)


def update_seconds(
    regions: Sequence[Region],
    sharding: Sharding,
    throttles: Mapping[str, Throttle],
    speeds: Speeds,
    *,
    on_device: bool = False,
) -> float:
    """Estimate what the update of all that this rank updates takes, where its states are on the host, or the device."""
    num_bytes = update_bytes(regions, sharding)
    return max(num_bytes / speeds.update(on_device=on_device), throttles.get("update", Throttle()).seconds(num_bytes))


def streamed_update_seconds(
    regions: Sequence[Region],
    sharding: Sharding,
    throttles: Mapping[str, Throttle],
    speeds: Speeds,
) -> float:
    """Estimate what the update on the device of states of the host takes, whose lanes work side by side: the longest of
    them. Without an accelerator copies take no time but that of a throttle.
    """
    down = update_bytes(regions, sharding) // 2
    gradients = (region.plane("gradients").num_bytes(region.numel) for region in regions if region.trainable)
    up = down + sum(gradients) // sharding.num_ranges
    on_device = update_seconds(regions, sharding, throttles, speeds, on_device=True)
    return max(on_device, *_link_seconds(up, down, throttles, speeds))


def weight_seconds(
    regions: Sequence[Region],
    sharding: Sharding,
    throttles: Mapping[str, Throttle],
    speeds: Speeds,
) -> float:
    """Estimate what weights and gradients take over the link in a step: up twice, down once."""
    up = 2 * sum(sharding.share(region.plane("weights"), region.weight_bytes) for region in regions)
    down = sum(region.plane("gradients").num_bytes(region.numel) for region in regions if region.trainable)
    return max(_link_seconds(up, down // sharding.num_ranges, throttles, speeds))


def _link_seconds(up: int, down: int, throttles: Mapping[str, Throttle], speeds: Speeds) -> tuple[float, float]:
    seconds = []
    for name, num_bytes in (("h2d", up), ("d2h", down)):
        rate = speeds.link(is_up=name == "h2d") if num_bytes else None
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
    """Estimate what a forward pass over so many tokens takes: its products, or its fetches."""
    numel = sum(info.numel for info in infos)
    precision = "bf16" if any(info.compute == "bf16" for info in infos) else "fp32"
    products = 2 * numel * tokens / speeds.flops(precision) + _DISPATCH_S * num_units
    fetched = sum(sharding.share(region.plane("weights"), region.weight_bytes) for region in regions)
    return max(products, throttles.get("h2d", Throttle()).seconds(fetched))
