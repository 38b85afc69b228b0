"""Run AdamW over a region: one kernel call for every run of neighbouring parameters that are updated alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
    num_wrong = 0
    for first, last, (steps, lr_scale, weight_decay) in _runs(state, touched, infos):
        planes, span = _planes(state, first, last)
        num_wrong += int(
            native.adamw(
                *planes,
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
    return num_wrong


def correct_region(
    state: RegionState,
    gradients: torch.Tensor,
    touched: Sequence[bool],
    rule: AdamW,
    infos: Sequence[ParameterInfo],
    *,
    lr: float,
    applied_scale: float,
    scale: float,
) -> int:
    """Bring a region that `update_region` has updated with `applied_scale` to where `scale` would have brought it;
    return how many weights are no longer finite.
    """
    num_wrong = 0
    for first, last, (steps, lr_scale, _) in _runs(state, touched, infos):
        planes, span = _planes(state, first, last)
        num_wrong += int(
            native.correct_adamw(
                *planes,
                gradients[span],
                step=steps,
                lr=lr * lr_scale,
                betas=rule.betas,
                eps=rule.eps,
                applied_scale=applied_scale,
                grad_scale=scale,
            )
        )
    return num_wrong


_Alike = tuple[int, float, float]


def _runs(
    state: RegionState, touched: Sequence[bool], infos: Sequence[ParameterInfo]
) -> Iterator[tuple[int, int, _Alike]]:
    """Yield (first, last, what they have in common) of neighbouring touched parameters that are updated alike."""
    first = 0
    while first < len(touched):
        if not touched[first]:
            first += 1
            continue
        alike = _alike(state, infos, first)
        last = first
        while last + 1 < len(touched) and touched[last + 1] and _alike(state, infos, last + 1) == alike:
            last += 1
        yield first, last, alike
        first = last + 1


def _planes(
    state: RegionState, first: int, last: int
) -> tuple[
    tuple[torch.Tensor | tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor],
    slice,
]:
    span = slice(state.span(first).start, state.span(last).stop)
    assert state.exp_avg is not None
    assert state.exp_avg_sq is not None
    master = state.weights[span] if state.low is None else (state.weights[span], state.low[span])
    return (master, state.exp_avg[span], state.exp_avg_sq[span]), span


def _alike(state: RegionState, infos: Sequence[ParameterInfo], position: int) -> _Alike:
    info = infos[state.region.parameters[position]]
    return state.steps[position], info.lr_scale, info.weight_decay
