"""Step result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from offload.lanes.timeline import LaneTime


@dataclass(frozen=True)
class StepResult:
    """Result from one step."""

    loss: torch.Tensor
    """0-dim fp32 CPU tensor; NaN in an own loop without losses from `engine.backward`."""
    grad_norm: float
    """Gradient norm before clipping; without gradients, the root mean square of the measured slopes."""
    tokens: int | None
    """Number of targets: labels not ignored, shifted for a causal model, or all numbers for a regression.

    Without labels: the batch's rows; with a loss_fn and only tensors [rows, ...]: the first tensor's elements. None in
    own loops.
    """
    skipped: bool
    """True if the update was skipped for non-finite gradients."""
    loss_scale: float = 1.0
    """Factor on the loss in the backward; `grad_norm` and the update are without it. 1 except in fp16."""
    corrected: int = 0
    """Number of regions speculative clipping first updated with another coefficient."""
    coarse: bool = False
    """True if a correction was less exact than stated in docs/reference/numerics.md."""
    seconds: float = 0.0
    """Step duration on this thread, in seconds."""
    lanes: Mapping[str, LaneTime] = field(default_factory=dict)
    """For each lane: busy time, and time compute waited for the lane."""
    measured: Any = None
    """Record for a replay, from a step without gradients; None: the step was skipped."""
