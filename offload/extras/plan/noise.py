"""The work of a device that draws MeZO's random directions by torch operations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from offload.extras.plan.op_counter import OpCounter
from offload.extras.plan.workload import Cost
from offload.extras.zeroth import directions
from offload.extras.zeroth.directions import PIECE_OF_DEVICE, NoiseRange

_NUMEL = 1 << 12
"""Weights in a count."""


@dataclass(frozen=True)
class NoiseCost:
    """Work of operations over weights, piece by piece."""

    bytes_per_weight: float
    """Bytes read and written."""
    num_operations: int
    """Launches for a piece."""

    @classmethod
    def counted(cls, cost: Cost) -> NoiseCost:
        """Return the work by the cost over `_NUMEL` weights, in one piece."""
        return cls(cost.moved_bytes / _NUMEL, cost.num_operations)

    def of(self, numel: int) -> Cost:
        """Return the cost for `numel` weights, in whole pieces."""
        num_pieces = -(-numel // PIECE_OF_DEVICE)
        return Cost(0.0, 0.0, num_pieces * self.num_operations, moved_bytes=numel * self.bytes_per_weight)


@cache
def noise_costs() -> tuple[NoiseCost, NoiseCost]:
    """Return the work to perturb bf16 weights to both sides, and to move them against the slope of one direction."""
    weights, plus, minus = (torch.empty(_NUMEL, dtype=torch.bfloat16, device="meta") for _ in range(3))
    low, of = torch.empty(_NUMEL, dtype=torch.int16, device="meta"), NoiseRange(0, 0)
    counter = OpCounter()
    with counter:
        directions.perturb(weights, plus, minus, 1e-3, of)
        perturbed = counter.cost
        directions.descend((weights, low), [1.0], of, lr=1e-6)
    return NoiseCost.counted(perturbed), NoiseCost.counted(counter.cost - perturbed)
