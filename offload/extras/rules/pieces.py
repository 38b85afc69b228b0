"""Pieces of master weights, for rules written in torch: temporaries cover one piece at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from offload.native import kernels

PIECE = 1 << 20
"""Number of elements per temporary."""


def master_piece(states: Mapping[str, torch.Tensor], piece: slice) -> torch.Tensor:
    """Return master weights in fp32: the weights plane, or both 16-bit halves joined."""
    weights = states["weights"][piece]
    if "low" in states:
        return kernels.join(weights, states["low"][piece])
    return weights


def put_piece(states: Mapping[str, torch.Tensor], piece: slice, weights: torch.Tensor) -> torch.Tensor:
    """Store master weights changed after `master_piece`. Return the number of non-finite weights, 0-dim int64."""
    if "low" in states:
        kernels.split(weights, out=(states["weights"][piece], states["low"][piece]))
    return weights.isfinite().logical_not_().sum()


def count_of(num_wrong: torch.Tensor) -> int | torch.Tensor:
    """Return a count as `update` does: an int on the CPU; on an accelerator the tensor, to avoid a synchronization."""
    if num_wrong.is_cpu:
        return int(num_wrong)
    return num_wrong
