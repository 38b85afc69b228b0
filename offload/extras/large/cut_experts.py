"""Turn expert stacks [experts, ...] into separate units, fetched a few experts at a time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from offload.engine.units.find import ParameterPlace, UnitCandidate, is_stack_of_experts
from offload.errors import ConfigError
from offload.extras.large.adapted_experts import unsupported_reason, wrappers_over
from offload.layout.planes import DTYPES
from offload.layout.regions import ParameterInfo, Piece
from offload.optim.rule import UpdateRule

RECORD_BYTES = 16 << 20
"""Minimum weight bytes per record.

Smaller experts are fetched together, because small transfers are slower per byte, above all from disk.
"""
_LEAST_RECORDS = 4
"""Minimum records per layer. With fewer, most experts would be on the device at once."""


def cut_experts(
    candidates: Sequence[UnitCandidate], infos: Sequence[ParameterInfo], rule: UpdateRule, num_replicas: int = 1
) -> list[UnitCandidate]:
    """Return the units, with the experts of each block as a separate unit after the block.

    Other parameters in an expert module stay with the block.

    Raises ConfigError if experts cannot be cut, or with several replicas.
    """
    if num_replicas > 1:
        raise ConfigError(
            f"offload.experts is streamed, but there are {num_replicas} replicas of the model: each routes tokens to "
            "other experts, while gradients are summed over all replicas. Set --offload.replicas 1, or "
            "--offload.experts whole."
        )
    # Over all units: another unit may share the weights of an expert.
    uses = Counter(place.parameter for unit in candidates for place in unit.places)
    units = []
    for unit in candidates:
        modules_by_name = dict(unit.module.named_modules(prefix=unit.name))
        names = {module: name for name, module in modules_by_name.items()}
        expert_units: list[UnitCandidate] = []
        for module in [module for module in names if unit.is_block and is_stack_of_experts(module)]:
            own_places = [place for place in unit.places if place.module is module]
            stacks = [place for place in own_places if infos[place.parameter].by_expert]
            wrappers = wrappers_over(names[module], modules_by_name.__getitem__)
            _check(names[module], module, stacks, infos, uses, rule, wrappers)
            records = _records(stacks, infos, module.num_experts)
            expert_units.append(
                UnitCandidate(names[module], module, stacks, whole=False, resident=False, records=records)
            )
        moved_places = {id(place) for each in expert_units for place in each.places}
        units += [
            replace(unit, places=[place for place in unit.places if id(place) not in moved_places]),
            *expert_units,
        ]
    if len(units) == len(candidates):
        raise ConfigError(
            "offload.experts is streamed, but the model has no experts that are stacked in one parameter and computed "
            "through transformers' experts interface: set --offload.experts whole."
        )
    return units


def _check(
    name: str,
    module: nn.Module,
    stacks: Sequence[ParameterPlace],
    infos: Sequence[ParameterInfo],
    uses: Counter[int],
    rule: UpdateRule,
    wrappers: Sequence[Any],
) -> None:
    """Raise ConfigError if the experts of a module cannot be cut."""

    def refuse(reason: str) -> ConfigError:
        return ConfigError(
            f"offload.experts is streamed, but {name} cannot be split by expert: {reason}. Set --offload.experts whole."
        )

    if reason := unsupported_reason(wrappers, [place.key for place in stacks]):
        raise refuse(reason)
    if not stacks:
        raise refuse(f"the module itself has no parameters [{module.num_experts} experts, ...]")
    for info in (infos[place.parameter] for place in stacks):
        numel = info.numel // info.shape[0]
        rule_part = rule.parts[info.rule]
        # Elements with one scale stay in one region. A frozen stack is quantized before it is cut.
        block = math.lcm(info.link.block, *(plane.block for plane in rule_part.moments)) if info.trainable else 1
        if uses[info.index] > 1:
            raise refuse(f"{info.name} is used in {uses[info.index]} places, and shared weights cannot be split")
        if info.trainable and (rule_part.by_matrix or not rule_part.has_gradients):
            raise refuse(f"{type(rule_part).__name__} needs {info.name} as a whole")
        if numel % block:
            raise refuse(
                f"an expert has {numel} elements of {info.name}, which is no multiple of the block of {block} elements"
            )


def _records(
    stacks: Sequence[ParameterPlace], infos: Sequence[ParameterInfo], num_experts: int
) -> tuple[tuple[Piece, ...], ...]:
    """Return the pieces per record: one of each stack, with the same consecutive experts."""
    shared = [infos[place.parameter] for place in stacks]
    expert_bytes = sum(info.numel // num_experts * DTYPES[info.compute].itemsize for info in shared)
    # As many experts as fill a record, unless the layer then had too few records.
    step = min(-(-RECORD_BYTES // max(1, expert_bytes)), max(1, num_experts // _LEAST_RECORDS))
    return tuple(
        tuple(
            Piece(info.index, first * (info.numel // num_experts), (min(step, num_experts - first), *info.shape[1:]))
            for info in shared
        )
        for first in range(0, num_experts, step)
    )
