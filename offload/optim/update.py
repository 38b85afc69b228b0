"""Run an update rule over a tile of a region: one call for every run of neighbours that are updated alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import torch

from offload.layout.regions import ParameterInfo
from offload.optim.rule import UpdateRule, UpdateStep
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
    applied_scale: float | None = None,
) -> int | torch.Tensor:
    """Update the parameters of a tile of a region that received a gradient; return how many weights are no longer
    finite: of an accelerator, as a 0-dim int64 tensor there, for which nobody has waited.

    `planes` and `gradients` (fp32, or bf16) are flat over the tile; `scale` multiplies the gradients (the clipping
    coefficient). A parameter that was not `touched` keeps its weights and its moments, as in torch. With
    `applied_scale`, in a step that was counted since, bring a tile that was updated with that to where `scale` would
    have brought it.
    """
    num_wrong: int | torch.Tensor = 0
    for span, (steps, lr_scale, weight_decay) in _runs(state, tile, touched, infos):
        states = {name: flat[span] for name, flat in planes.items()}
        by = UpdateStep(steps + (applied_scale is None), lr * lr_scale, weight_decay, scale)
        if applied_scale is None:
            num_wrong += rule.update(states, gradients[span], by)
        else:
            num_wrong += rule.correct(states, gradients[span], by, applied_scale)
    return num_wrong


_Alike = tuple[int, float, float]


def _runs(
    state: RegionState, tile: Tile, touched: Sequence[bool], infos: Sequence[ParameterInfo]
) -> Iterator[tuple[slice, _Alike]]:
    """Yield the elements of a tile (counted from its beginning) over which neighbouring touched parameters are updated
    alike, and what these have in common.
    """

    def alike(position: int) -> _Alike | None:
        info = infos[state.region.parameters[position]]
        return (state.steps[position], info.lr_scale, info.weight_decay) if touched[position] else None

    for common, run in groupby(range(len(touched)), alike):
        positions = list(run)
        begin = max(state.span(positions[0]).start, tile.begin)
        end = min(state.span(positions[-1]).stop, tile.end)
        if common is not None and begin < end:
            yield slice(begin - tile.begin, end - tile.begin), common
