"""The lanes for the device that there is."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from offload.lanes.cuda import CudaLanes
from offload.lanes.lanes import Lanes
from offload.lanes.throttle import Throttle


def overlaps(throttle: Mapping[str, Throttle], delay_seed: int | None) -> bool:
    """True where copies and updates run beside compute: on a GPU, and where a link is played or delayed."""
    return torch.cuda.is_available() or bool(throttle) or delay_seed is not None


def open_lanes(
    throttle: Mapping[str, Throttle], delay_seed: int | None, overlap: bool, has_peers: bool = False
) -> Lanes:
    """Return the lanes for the device that there is. `delay_seed`: wait at random, by this seed. `overlap`: beside
    compute on a CPU too. `has_peers`: other ranks wait for this one's exchanges.
    """
    if torch.cuda.is_available():
        return CudaLanes(throttle=throttle, delay_seed=delay_seed, has_peers=has_peers)
    return Lanes(overlap=overlap, throttle=throttle, delay_seed=delay_seed, has_peers=has_peers)
