"""Run an update rule over a tile of a region: one call for every run of neighbours that are updated alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from offload.layout.regions import ParameterInfo
from offload.optim.rule import UpdateRule
from offload.tiers.store import RegionState, Tile


def update_tile(
    state: RegionState,
    tile: Tile,
    planes: Mapping[str, torch.Tensor],
    gradients: torch.Tensor,
    touched: Sequence[bool],
    rule: UpdateRule,
    infos: Sequence[ParameterInfo],
    *,
    lr: float,
    scale: float,
) -> int:
    """Update the parameters of a tile of a region that received a gradient; return how many weights are no longer
    finite.

    `planes` and `gradients` (fp32, or bf16) are flat over the tile; `scale` multiplies the gradients (the clipping
    coefficient). A parameter that was not `touched` keeps its weights and its moments, as in torch.
    """
    num_wrong = 0
    for span, (steps, lr_scale, weight_decay) in _runs(state, tile, touched, infos):
        states = {name: flat[span] for name, flat in planes.items()}
        num_wrong += int(
            rule.update(
                states, gradients[span], step=steps + 1, lr=lr * lr_scale, weight_decay=weight_decay, scale=scale
            )
        )
    return num_wrong


def correct_tile(
    state: RegionState,
    tile: Tile,
    planes: Mapping[str, torch.Tensor],
    gradients: torch.Tensor,
    touched: Sequence[bool],
    rule: UpdateRule,
    infos: Sequence[ParameterInfo],
    *,
    lr: float,
    applied_scale: float,
    scale: float,
) -> int:
    """Bring a tile that `update_tile` has updated with `applied_scale`, in a step that was counted since, to where
    `scale` would have brought it; return how many weights are no longer finite.
    """
    num_wrong = 0
    for span, (steps, lr_scale, _) in _runs(state, tile, touched, infos):
        states = {name: flat[span] for name, flat in planes.items()}
        num_wrong += int(
            rule.correct(
                states, gradients[span], step=steps, lr=lr * lr_scale, applied_scale=applied_scale, scale=scale
            )
        )
    return num_wrong


_Alike = tuple[int, float, float]


def _runs(
    state: RegionState, tile: Tile, touched: Sequence[bool], infos: Sequence[ParameterInfo]
) -> Iterator[tuple[slice, _Alike]]:
    """Yield the elements of a tile (counted from its beginning) over which neighbouring touched parameters are updated
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
        begin, end = max(state.span(first).start, tile.begin), min(state.span(last).stop, tile.end)
        if begin < end:
            yield slice(begin - tile.begin, end - tile.begin), alike
        first = last + 1


def _alike(state: RegionState, infos: Sequence[ParameterInfo], position: int) -> _Alike:
    info = infos[state.region.parameters[position]]
    return state.steps[position], info.lr_scale, info.weight_decay
