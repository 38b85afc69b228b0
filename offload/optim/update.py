"""Run AdamW over a part of a region: one kernel call for every run of neighbours that are updated alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from offload import native
from offload.optim.adamw import AdamW
from offload.partition.layout import ParameterInfo
from offload.tiers.store import Part, RegionState


def update_part(
    state: RegionState,
    part: Part,
    planes: Mapping[str, torch.Tensor],
    gradients: torch.Tensor,
    touched: Sequence[bool],
    rule: AdamW,
    infos: Sequence[ParameterInfo],
    *,
    lr: float,
    scale: float,
) -> int:
    """Update the parameters of a part of a region that received a gradient; return how many weights are no longer
    finite.

    `planes` and `gradients` (fp32, or bf16) are flat over the part; `scale` multiplies the gradients (the clipping
    coefficient). A parameter that was not `touched` keeps its weights and its moments, as in torch.
    """
    num_wrong = 0
    for span, (steps, lr_scale, weight_decay) in _runs(state, part, touched, infos):
        num_wrong += int(
            native.adamw(
                *_states(planes, span),
                gradients[span],
                step=steps + 1,
                lr=lr * lr_scale,
                betas=rule.betas,
                eps=rule.eps,
                weight_decay=weight_decay,
                grad_scale=scale,
            )
        )
    return num_wrong


def correct_part(
    state: RegionState,
    part: Part,
    planes: Mapping[str, torch.Tensor],
    gradients: torch.Tensor,
    touched: Sequence[bool],
    rule: AdamW,
    infos: Sequence[ParameterInfo],
    *,
    lr: float,
    applied_scale: float,
    scale: float,
) -> int:
    """Bring a part that `update_part` has updated with `applied_scale`, in a step that was counted since, to where
    `scale` would have brought it; return how many weights are no longer finite.
    """
    num_wrong = 0
    for span, (steps, lr_scale, _) in _runs(state, part, touched, infos):
        num_wrong += int(
            native.correct_adamw(
                *_states(planes, span),
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
    state: RegionState, part: Part, touched: Sequence[bool], infos: Sequence[ParameterInfo]
) -> Iterator[tuple[slice, _Alike]]:
    """Yield the elements of a part (counted from its beginning) over which neighbouring touched parameters are updated
    alike, and what these have in common.
    """
    first = 0
    while first < len(touched):
        if not touched[first]:
            first += 1
            continue
        alike = _alike(state, infos, first)
        last = first
        while last + 1 < len(touched) and touched[last + 1] and _alike(state, infos, last + 1) == alike:
            last += 1
        begin, end = max(state.span(first).start, part.begin), min(state.span(last).stop, part.end)
        if begin < end:
            yield slice(begin - part.begin, end - part.begin), alike
        first = last + 1


def _states(
    planes: Mapping[str, torch.Tensor], span: slice
) -> tuple[torch.Tensor | tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor]:
    weights = planes["weights"][span]
    master = (weights, planes["low"][span]) if "low" in planes else weights
    return master, planes["exp_avg"][span], planes["exp_avg_sq"][span]


def _alike(state: RegionState, infos: Sequence[ParameterInfo], position: int) -> _Alike:
    info = infos[state.region.parameters[position]]
    return state.steps[position], info.lr_scale, info.weight_decay
