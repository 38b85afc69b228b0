"""Run an update rule over a tile of a region: one call for every run of neighbours that are updated alike."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from offload.layout.planes import CODES, STALE
from offload.layout.regions import ParameterInfo, Region
from offload.optim.rule import UpdateRule, UpdateStep, parameter_key
from offload.tiers.tile import RegionState, Tile, encode


def update_tile(
    state: RegionState,
    tile: Tile,
    planes: Mapping[str, torch.Tensor],
    gradients: torch.Tensor,
    touched: Sequence[bool],
    rules: Sequence[UpdateRule],
    infos: Sequence[ParameterInfo],
    *,
    lr: float,
    scale: float,
    applied_scale: float | None = None,
    seed: int = 0,
    workspace: torch.Tensor | None = None,
) -> int | torch.Tensor:
    """Update the parameters of a tile of a region that received a gradient; return how many weights are no longer
    finite: of an accelerator, as a 0-dim int64 tensor there, for which nobody has waited.

    `planes` and `gradients` (fp32, or bf16) are flat over the tile; `scale` multiplies the gradients (the clipping
    coefficient). A parameter that was not `touched` keeps its weights and its moments, as in torch. With
    `applied_scale`, in a step that was counted since, bring a tile that was updated with that to where `scale` would
    have brought it. `rules`: by the numbers that regions have of them. `seed`: of what rules draw. `workspace`: of the
    device, for those that compute there.
    """
    if tile.stale is not None:
        planes = {**planes}
        planes["weights"].copy_(planes.pop(STALE))
    num_wrong: int | torch.Tensor = 0
    rule = rules[state.region.rule]
    one_by_one = rule.by_parameter or rule.by_matrix
    table = state.region.by_name
    flats = [(name, flat, table[name]) for name, flat in planes.items() if name != CODES]
    for span, (steps, lr_scale, weight_decay, position) in _runs(state, tile, touched, infos, one_by_one):
        states = {name: flat[span if plane.block == 1 else plane.cut(span)] for name, flat, plane in flats}
        by = UpdateStep(steps + (applied_scale is None), lr * lr_scale, weight_decay, scale)
        if position is not None:
            piece = state.region.pieces[position]
            info = infos[piece.parameter]
            element = _element(state.region, tile, span, position)
            by = replace(by, key=parameter_key(info.name, seed), element=element)
            if rule.by_matrix:
                assert (element, span.stop - span.start) == (0, info.numel), "no parameter is cut for a rule by matrix"
                states |= state.factors_of(position)
                by = replace(by, shape=piece.shape, workspace=workspace)
        if applied_scale is None:
            found = rule.update(states, gradients[span], by)
        else:
            found = rule.correct(states, gradients[span], by, applied_scale)
        encode(state.region, planes, span)
        num_wrong = found if isinstance(num_wrong, int) and not num_wrong else num_wrong + found  # 0 + is a launch
    return num_wrong


@dataclass(frozen=True)
class ZerothOrderStep:
    """A step of a rule without gradients, as it was measured; all that its update goes by, beside the weights."""

    step: int
    """Its number, counted from 1."""
    seed: int
    """Of its directions."""
    slopes: tuple[float, ...]
    """How steep the loss is along each of them."""
    lr: float
    """The learning rate."""


def descend_tile(
    state: RegionState,
    tile: Tile,
    planes: Mapping[str, torch.Tensor],
    touched: Sequence[bool],
    thresholds: Mapping[int, float],
    rules: Sequence[UpdateRule],
    infos: Sequence[ParameterInfo],
    estimate: ZerothOrderStep,
) -> int | torch.Tensor:
    """Update the parameters of a tile of a region that took part in a step without gradients; return what `update_tile`
    does. `planes` are flat over the tile. `thresholds`: of parameters, by their indices, of which some weights were
    left out.
    """
    num_wrong: int | torch.Tensor = 0
    slopes = torch.tensor(estimate.slopes, dtype=torch.float64, device="cpu")
    for span, (_, lr_scale, weight_decay, position) in _runs(state, tile, touched, infos, one_by_one=True):
        assert position is not None
        info = infos[state.region.pieces[position].parameter]
        by = UpdateStep(
            estimate.step,
            estimate.lr * lr_scale,
            weight_decay,
            scale=1.0,
            key=parameter_key(info.name, estimate.seed),
            element=_element(state.region, tile, span, position),
            threshold=thresholds.get(info.index, math.inf),
        )
        states = {name: flat[span] for name, flat in planes.items()}
        num_wrong += rules[state.region.rule].update(states, slopes, by)
    return num_wrong


def _element(region: Region, tile: Tile, span: slice, position: int) -> int:
    """Return which element of its parameter the first of a span is, which begins in a piece of the region: what rules
    draw does not depend on where parameters are cut.
    """
    return region.pieces[position].begin + tile.begin + span.start - region.offsets[position]


_Alike = tuple[int, float, float, int | None]


def _runs(
    state: RegionState, tile: Tile, touched: Sequence[bool], infos: Sequence[ParameterInfo], one_by_one: bool
) -> Iterator[tuple[slice, _Alike]]:
    """Yield the elements of a tile (counted from its beginning) over which neighbouring touched parameters are updated
    alike, and what these have in common; `one_by_one`, the place of one in its region too.
    """
    region = state.region
    alike: list[_Alike | None] = [
        (steps, infos[index].lr_scale, infos[index].weight_decay, position if one_by_one else None) if takes else None
        for position, (index, steps, takes) in enumerate(zip(region.parameters, state.steps, touched, strict=True))
    ]
    for common, run in groupby(range(len(alike)), alike.__getitem__):
        positions = list(run)
        first, last = positions[0], positions[-1]
        begin = max(region.offsets[first], tile.begin)
        end = min(region.offsets[last] + region.sizes[last], tile.end)
        if common is not None and begin < end:
            yield slice(begin - tile.begin, end - tile.begin), common


def total_norm(squares: Iterable[float]) -> float:
    """Return the square root of the fp64 sum, in order, of the sums of squares of parameters, or of their pieces."""
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
    return min(1.0, max_norm / (norm + 1e-6))
