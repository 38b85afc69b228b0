"""The lanes for the device that there is."""

from __future__ import annotations

from collections.abc import Mapping

from offload.accelerators import Accelerator
from offload.lanes.lanes import Lanes
from offload.lanes.streams import StreamLanes
from offload.lanes.throttle import Throttle


def overlaps(has_accelerator: bool, throttle: Mapping[str, Throttle], delay_seed: int | None) -> bool:
    """True where copies and updates run beside compute: on an accelerator, and where a link is played or delayed."""
    return has_accelerator or bool(throttle) or delay_seed is not None


def open_lanes(
    accelerator: Accelerator | None,
    throttle: Mapping[str, Throttle],
    delay_seed: int | None,
    overlap: bool,
    has_peers: bool = False,
) -> Lanes:
    """Return the lanes for a device, None for the CPU. `delay_seed`: wait at random, by this seed. `overlap`: beside
    compute on a CPU too. `has_peers`: other ranks wait for this one's exchanges.
    """
    if accelerator is not None:
        return StreamLanes(accelerator, throttle=throttle, delay_seed=delay_seed, has_peers=has_peers)
    return Lanes(overlap=overlap, throttle=throttle, delay_seed=delay_seed, has_peers=has_peers)
