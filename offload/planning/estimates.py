"""What parts of a step take, estimated from what the machine was measured to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from offload.lanes.throttle import Throttle
from offload.layout.regions import ParameterInfo, Region, Sharding
from offload.machine.rates import flops_per_second
from offload.optim.rule import UpdateRule
from offload.planning.machines import Speeds

_DISPATCH_S = 3e-4
"""What Python takes to dispatch a block's forward, however few its tokens."""


def update_seconds(
    rule: UpdateRule,
    regions: Sequence[Region],
    sharding: Sharding,
    throttles: Mapping[str, Throttle],
    speeds: Speeds,
    *,
    on_device: bool = False,
) -> float:
    """Estimate what the update of all that this rank updates takes, where its states are on the host, or the device."""
    seconds, total_bytes = 0.0, 0
    for number, part in enumerate(rule.parts):
        its = [region for region in regions if region.trainable and region.rule == number]
        num_bytes = sum(region.update_bytes(region.numel // sharding.num_ranges) for region in its)
        if num_bytes:
            seconds += num_bytes / speeds.update(part, part.moments, on_device=on_device)
            total_bytes += num_bytes
    return max(seconds, throttles.get("update", Throttle()).seconds(total_bytes))


def streamed_update_seconds(
    rule: UpdateRule,
    regions: Sequence[Region],
    sharding: Sharding,
    throttles: Mapping[str, Throttle],
    speeds: Speeds,
) -> float:
    """Estimate what the update on the device of states of the host takes, whose lanes work side by side: the longest of
    them. Without an accelerator copies take no time but that of a throttle.
    """
    down = sum(region.update_bytes(region.numel // sharding.num_ranges) // 2 for region in regions if region.trainable)
    gradients = (region.plane("gradients").num_bytes(region.numel) for region in regions if region.trainable)
    up = down + sum(gradients) // sharding.num_ranges
    on_device = update_seconds(rule, regions, sharding, throttles, speeds, on_device=True)
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
    device: torch.device,
) -> float:
    """Estimate what a forward pass over so many tokens takes: its products, or its fetches."""
    numel = sum(info.numel for info in infos)
    dtype = torch.bfloat16 if any(info.compute == "bf16" for info in infos) else torch.float32
    products = 2 * numel * tokens / flops_per_second(device, dtype) + _DISPATCH_S * num_units
    fetched = sum(sharding.share(region.plane("weights"), region.weight_bytes) for region in regions)
    return max(products, throttles.get("h2d", Throttle()).seconds(fetched))
