"""How fast the machine is, measured once for all engines of a process.

Each engine measures for itself what its settings leave to it, in 50 ms, which are half of what a test with a tiny model
takes. What is measured decides no bit of these tests, which state what they depend on.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch


def measure_once(patch: pytest.MonkeyPatch) -> None:
    """From now on rates that were measured once are told again."""
    from offload.machine import rates
    from offload.planning import estimates, machines

    known: dict[Any, float] = {}

    def update_rate(update: partial[object], moments: Any, device: torch.device) -> float:
        key = type(update.func.__self__), *((plane.name, plane.dtype) for plane in moments), device  # type: ignore[attr-defined]
        if key not in known:
            known[key] = rates.update_bytes_per_second(update, moments, device)
        return known[key]

    patch.setattr(machines, "update_bytes_per_second", update_rate)
    patch.setattr(estimates, "flops_per_second", cache(rates.flops_per_second))
