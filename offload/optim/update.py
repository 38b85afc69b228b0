"""Run AdamW over a region: one kernel call for every run of neighbouring parameters that are updated alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload import native
from offload.optim.adamw import AdamW
from offload.partition.layout import ParameterInfo
from offload.tiers.store import RegionState


def update_region(
    state: RegionState,
    gradients: torch.Tensor,
    touched: Sequence[bool],
    rule: AdamW,
    infos: Sequence[ParameterInfo],
    *,
    lr: float,
    scale: float,
) -> int:
    """Update the parameters of a region that received a gradient; return how many weights are no longer finite.

    `gradients` is flat over the region (fp32, or bf16); `scale` multiplies it (the clipping coefficient). A parameter
    that was not `touched` keeps its weights, its moments and its step count, as in torch.
    """
    non_finite = 0
    first = 0
    while first < len(touched):
        if not touched[first]:
            first += 1
            continue
        alike = _alike(state, infos, first)
        last = first
        while last + 1 < len(touched) and touched[last + 1] and _alike(state, infos, last + 1) == alike:
            last += 1
        span = slice(state.span(first).start, state.span(last).stop)
        steps, lr_scale, weight_decay = alike
        assert state.exp_avg is not None
        assert state.exp_avg_sq is not None
        non_finite += int(
            native.adamw(
                state.weights[span] if state.low is None else (state.weights[span], state.low[span]),
                state.exp_avg[span],
                state.exp_avg_sq[span],
                gradients[span],
                step=steps + 1,
                lr=lr * lr_scale,
                betas=rule.betas,
                eps=rule.eps,
                weight_decay=weight_decay,
                grad_scale=scale,
            )
        )
        for position in range(first, last + 1):
            state.steps[position] += 1
        first = last + 1
    return non_finite


def _alike(state: RegionState, infos: Sequence[ParameterInfo], position: int) -> tuple[int, float, float]:
    info = infos[state.region.parameters[position]]
    return state.steps[position], info.lr_scale, info.weight_decay
