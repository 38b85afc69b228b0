"""Clipping by the global norm: the norm of all gradients, or of those so far, and the coefficient that it gives."""

from __future__ import annotations

import math
from collections.abc import Sequence

_EPSILON = 1e-6


def total_norm(squares: Sequence[float]) -> float:
    """Return the square root of the fp64 sum, in order, of the parameters' sums of squares."""
    total = 0.0
    for value in squares:
        total += value
    return math.sqrt(total) if total == total and total >= 0.0 else math.nan


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """Return c = min(1, max_norm / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_` defines it; 1 without a
    limit.
    """
    if max_norm is None:
        return 1.0
    return min(1.0, max_norm / (norm + _EPSILON))
