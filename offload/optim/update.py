"""Apply update rules to a region tile, with one call for adjacent parameters with equal settings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import torch

from offload.layout.planes import CODES, STALE
from offload.layout.regions import ParameterInfo, Region
from offload.optim.rule import UpdateRule, UpdateStep, parameter_key
from offload.tiers.tile import RegionState, Tile, encode


class UpdateSettings(NamedTuple):
    """Settings for updates."""

    rules: Sequence[UpdateRule]
    """Update rules, indexed by `Region.rule`."""
    infos: Sequence[ParameterInfo]
    """Parameter settings."""
    lr: float
    """Learning rate."""
    seed: int = 0
    """Base for random bits in rules."""
    workspace: torch.Tensor | None = None
    """Device memory for rules with device compute."""
    unscale: float = 1.0
    """Factor on the gradients that takes off the loss scale."""


def update_tile(
    state: RegionState,
    tile: Tile,
    planes: Mapping[str, torch.Tensor],
    touched: Sequence[bool],
    settings: UpdateSettings,
    scale: float,
    applied_scale: float | None = None,
) -> int | torch.Tensor:
    """Update the touched parameters in a region tile. Return the number of non-finite weights: an int, or on an
    accelerator a 0-dim int64 tensor without a synchronization.

    planes: flat over the tile, gradients in a compute dtype. touched: per parameter, True if a gradient arrived; other
    parameters keep weights and moments, as in torch. scale: factor on the gradients (clipping coefficient).
    applied_scale: correct an update already made (and counted) with this scale to the result for `scale`.
    """
    if tile.stale is not None:  # the pass computes with the stale plane, and the update writes beside it
        planes = {**planes}
        planes["weights"].copy_(planes.pop(STALE))
    num_wrong: int | torch.Tensor = 0
    rules, infos, lr, seed, workspace, unscale = settings
    gradients = planes["gradients"]
    rule = rules[state.region.rule]
    one_by_one = rule.by_parameter or rule.by_matrix
    table = state.region.by_name
    # Codes are made from the new weights, below.
    flats = [(name, flat, table[name]) for name, flat in planes.items() if name != CODES]
    for span, (steps, lr_scale, weight_decay, position) in alike_runs(state, tile, touched, infos, one_by_one):
        states = {}
        for name, flat, plane in flats:
            elements = span if plane.block == 1 else plane.cut(span)
            states[name] = flat[elements]
        num_steps = steps + (applied_scale is None)  # a correction belongs to a step already counted
        by = UpdateStep(num_steps, lr * lr_scale, weight_decay, scale * unscale)
        if position is not None:
            piece = state.region.pieces[position]
            info = infos[piece.parameter]
            element = element_of(state.region, tile, span, position)
            by = replace(by, key=parameter_key(info.name, seed), element=element)
            if rule.by_matrix:
                assert (element, span.stop - span.start) == (0, info.numel), "no parameter is cut for a rule by matrix"
                states |= state.factors_of(position)
                by = replace(by, shape=piece.shape, workspace=workspace)
        if applied_scale is None:
            num_nonfinite = rule.update(states, gradients[span], by)
        else:
            num_nonfinite = rule.correct(states, gradients[span], by, applied_scale * unscale)
        encode(state.region, planes, span)
        if isinstance(num_wrong, int) and not num_wrong:  # the sum 0 + a tensor would be a launch
            num_wrong = num_nonfinite
        else:
            num_wrong = num_wrong + num_nonfinite
    return num_wrong


def element_of(region: Region, tile: Tile, span: slice, position: int) -> int:
    """Return the offset in the parameter for the first element of a span beginning in piece `position`. Random bits
    depend on this offset, so tile borders have no influence on them.
    """
    return region.pieces[position].begin + tile.begin + span.start - region.offsets[position]


_Alike = tuple[int, float, float, int | None]


def alike_runs(
    state: RegionState, tile: Tile, touched: Sequence[bool], infos: Sequence[ParameterInfo], one_by_one: bool
) -> Iterator[tuple[slice, _Alike]]:
    """Yield (slice of the tile, common settings) for each run of adjacent touched parameters with equal settings.

    With `one_by_one`, every parameter is a separate run, and the settings include the position in the region.
    """
    region = state.region
    alike: list[_Alike | None] = []
    for position, (index, steps, takes) in enumerate(zip(region.parameters, state.steps, touched, strict=True)):
        info = infos[index]
        own_position = position if one_by_one else None
        alike.append((steps, info.lr_scale, info.weight_decay, own_position) if takes else None)
    # One call of a kernel for a run: a block has many small parameters, and a call costs more than a small update.
    for common, run in groupby(range(len(alike)), alike.__getitem__):
        positions = list(run)
        first, last = positions[0], positions[-1]
        # A tile may cut a parameter. Padding inside a run is updated too, and stays zero.
        begin = max(region.offsets[first], tile.begin)
        end = min(region.offsets[last] + region.sizes[last], tile.end)
        if common is not None and begin < end:
            yield slice(begin - tile.begin, end - tile.begin), common


def total_norm(squares: Iterable[float]) -> float:
    """Return the square root of the fp64 sum, in order, over the squared norms of parameters or parameter pieces."""
    total = 0.0
    for value in squares:  # not sum(): from Python 3.12 on it compensates, and gives other bits
        total += value
    if total == total and total >= 0.0:
        return math.sqrt(total)
    return math.nan  # not the error of `math.sqrt`: the step then names the gradients at fault


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """Return c = min(1, max_norm / (norm + 1e-6)), as in `torch.nn.utils.clip_grad_norm_`; 1 without a limit."""
    if max_norm is None:
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))
