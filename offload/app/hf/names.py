"""Map tensor names in files to model parameters with transformers' own rules. Only this module knows these internals.

transformers renames and fuses tensors (stacks experts, joins projections) while loading a whole model, and reverses
both while saving. Here the rules and operations run on meta tensors to learn which tensors belong together, so one
group can later be converted alone. Any surprise raises CannotStream: then only transformers itself can convert, with
the whole model in memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn

from offload.errors import OffloadError, first_names

Shape = tuple[int, ...]


class CannotStream(OffloadError):
    """transformers has no rules, or unknown rules, for a separate conversion of one model part."""


class Conversion:
    """Conversion of a tensor group into other tensors.

    `sources` follow the order in which transformers consumes them; `outputs` maps each output name to a shape.
    `is_stacked`: the sources are stacked into one output. `is_cut`: a single source is cut into rows. In both cases
    `rows` is the stack length, and each row converts separately: experts are most bytes in a layer and should not be in
    memory twice.
    """

    def __init__(
        self,
        model: Any,
        first: str,
        rule: Any,
        members: Sequence[tuple[str, str | None]],
        tensors: Mapping[str, torch.Tensor],
        rename: Callable[[str], str],
    ) -> None:
        """Learn the outputs from a trial conversion of the meta tensors `tensors`.

        `members`: tensor names, each with the matching pattern of `rule`. Raises ValueError if the tensors do not fit
        each other, CannotStream if the operations take unknown arguments.
        """
        self._model = model
        self._first = first  # transformers collects the members under this name
        self._rule = rule
        self._members = members
        self.sources = tuple(name for name, _ in members)
        self.is_identity = rule is None
        indices = range(len(members))
        try:
            # On meta tensors, so a trial of all experts of a layer costs no memory.
            whole = self._convert(indices, (tensors[name] for name in self.sources))
        except (AttributeError, TypeError) as error:
            raise CannotStream(f"{first} cannot be made separately: {type(error).__name__}: {error}") from error
        except Exception as error:  # an operation rejects misfit tensors
            listed = first_names(self.sources, 1, " and {} more")
            raise ValueError(f"{listed} cannot become {first}: {type(error).__name__}: {error}") from error
        self._names = {key: rename(key) for key in whole}
        self.outputs: dict[str, Shape] = {self._names[key]: tuple(value.shape) for key, value in whole.items()}
        self._row_members: Sequence[tuple[int, ...]] = ()
        if rule is not None:
            self._row_members = _find_row_members(rule, members)
        self.is_stacked = False
        if self._row_members and len(self.outputs) == 1:
            (shape,) = self.outputs.values()
            # One row alone must have the shape of a row of the stack.
            (row,) = self._convert(self._row_members[0], (tensors[name] for name in self.row_sources(0))).values()
            self.is_stacked = (len(self._row_members), *row.shape[1:]) == shape and len(row) == 1
        self.rows = 0
        if self.is_stacked:
            self.rows = len(self._row_members)
        self.is_cut = False
        if rule is not None and len(members) == 1 and _is_row_split(rule):
            rows = len(tensors[self.sources[0]])
            parts, key = list(self._convert((0,), [tensors[self.sources[0]][:1]])), list(whole)
            if len(key) == rows * len(parts) and key[::rows] == parts:
                self.rows = rows
                self.is_cut = True

    @staticmethod
    def identity(name: str, shape: Shape) -> Conversion:
        """Return the conversion for an unchanged tensor."""
        meta = torch.empty(shape, device="meta")
        return Conversion(None, name, None, [(name, None)], {name: meta}, lambda key: key)

    def run(self, tensors: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert all sources. Tensors are consumed one at a time; an operation frees each source after use."""
        outputs = self._convert(range(len(self._members)), tensors)
        return {self._names[key]: value for key, value in outputs.items()}

    def row_sources(self, row: int) -> tuple[str, ...]:
        """Return the sources for one row in a stacked output."""
        return tuple(self.sources[number] for number in self._row_members[row])

    @property
    def joins_rows(self) -> bool:
        """True if each entry along the first axis of the merged tensor (an expert) is several whole matrices, one below
        another.
        """
        _, *rest = self._rule.operations
        return all(type(each).__name__ == "Concatenate" and each.dim == 1 for each in rest)

    def make_row(self, row: int, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return one row in the stack, from the tensors in `row_sources(row)`."""
        (value,) = self._convert(self._row_members[row], tensors).values()
        return value[0]

    def cut_row(self, row: int, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the outputs for one row in a cut stack. `tensor`: this row from the single source."""
        names = list(self._names.values())
        values = self._convert((0,), [tensor.unsqueeze(0)]).values()
        return {names[part * self.rows + row]: value for part, value in enumerate(values)}

    def _convert(self, indices: Sequence[int], tensors: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert the members with these indices, as transformers does for all members."""
        remaining = iter(tensors)
        if self._rule is None:
            return {self._first: next(remaining)}
        # A rule collects tensors in itself, and one rule serves all layers.
        rule = deepcopy(self._rule)
        for index in indices:
            name, pattern = self._members[index]
            rule.add_tensor(self._first, name, pattern, next(remaining))
        outputs = rule.convert(self._first, model=self._model, config=self._model.config)
        return {key: value[0] if isinstance(value, list) else value for key, value in outputs.items()}


@dataclass(frozen=True)
class ReadingPlan:
    """Plan for reading a folder into a model. `unexpected` maps unused tensors to the model name after renaming."""

    conversions: list[Conversion]
    unexpected: dict[str, str]


def plan_reading(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> ReadingPlan:
    """Plan the conversions in `from_pretrained` for the folder tensors `tensors` (on `meta`).

    Like transformers, record the used rules in the model, for reversal by `save_pretrained`. Raises CannotStream, and
    ValueError if tensors in a group do not fit each other.
    """
    loading, mapping = _transformers_modules()
    try:
        state = model.state_dict()
        rules = mapping.get_model_conversion_mapping(model)
        renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
        rule_by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        prefix = model.base_model_prefix
        groups: dict[str, list[tuple[str, str | None]]] = {}
        unexpected: dict[str, str] = {}
        # transformers' order: experts are stacked by number.
        for name in sorted(tensors, key=loading.dot_natural_key):
            renamed, pattern = loading.rename_source_key(name, renamings, converters, prefix, state)
            # Keep a fitting name, even if a pattern for older files matches.
            if renamed not in state and name in state:
                renamed, pattern = loading.rename_source_key(name, [], [], prefix, state)
            if renamed in state:
                groups.setdefault(renamed, []).append((name, pattern))
            else:
                unexpected[name] = renamed
        model._weight_conversions = [rule for rule in rules if rule.was_used()]  # type: ignore[assignment]
        conversions = []
        for target, members in groups.items():
            if any(pattern is None for _, pattern in members):
                members = members[:1]  # transformers takes the first tensor if several map to one name
            pattern = members[0][1]
            rule = None if pattern is None else rule_by_pattern[pattern]
            conversions.append(Conversion(model, target, rule, members, tensors, lambda key: key))
        return ReadingPlan(conversions, unexpected)
    except (AttributeError, KeyError, TypeError) as error:
        raise CannotStream(
            f"transformers {transformers.__version__} does not say how to read the weights of {type(model).__name__} "
            f"one parameter at a time: {type(error).__name__}: {error}"
        ) from error


def plan_writing(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> tuple[list[Conversion], list[str]]:
    """Plan the conversions in `save_pretrained` for a model.

    `tensors`: meta tensors without tied ones. Return the conversions in model order, and the output names in
    transformers' order, which decides the assignment to files. The plan is checked against transformers' result for all
    tensors. Raises CannotStream.
    """
    loading, _ = _transformers_modules()
    try:
        # transformers' own answer, for a comparison below.
        whole = loading.revert_weight_conversion(model, dict(tensors))
        rules = [rule.reverse_transform() for rule in reversed(_used_rules(model))]
        renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
        rule_by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        groups: dict[str, list[tuple[str, str | None]]] = {}
        final_names: dict[str, str] = {}
        for name in sorted(tensors, key=loading.dot_natural_key):
            renamed, pattern = loading.rename_source_key(name, [], converters)
            if pattern is None:
                renamed = loading.rename_source_key(name, renamings, [])[0]
                final_names[renamed] = renamed
            groups.setdefault(renamed, []).append((name, pattern))

        def rename(key: str) -> str:
            return final_names.get(key) or loading.rename_source_key(key, renamings, [])[0]

        conversions = []
        for target, members in groups.items():
            pattern = members[0][1]
            rule = None if pattern is None else rule_by_pattern[pattern]
            conversions.append(Conversion(model, target, rule, members, tensors, rename))
        shapes = {name: shape for conversion in conversions for name, shape in conversion.outputs.items()}
        # A surprise in the rules shows here, before a file is written.
        if shapes != {name: tuple(tensor.shape) for name, tensor in whole.items()}:
            raise ValueError("reading the weights in parts results in other names or shapes than reading them at once")
        order = {name: position for position, name in enumerate(tensors)}
        return sorted(conversions, key=lambda conversion: order[conversion.sources[0]]), list(whole)
    except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise CannotStream(
            f"transformers {transformers.__version__} does not say how to write the weights of {type(model).__name__} "
            f"one parameter at a time: {error}"
        ) from error


def drop_tied(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the meta tensors `tensors` without tied names dropped by `save_pretrained`.

    Raises CannotStream.
    """
    try:
        remove: Any = transformers.modeling_utils.remove_tied_weights_from_state_dict
        for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
            tensors.pop(name, None)
        return remove(dict(tensors), model)
    except (AttributeError, RuntimeError, TypeError) as error:
        raise CannotStream(f"the tied weights of {type(model).__name__} cannot be determined: {error}") from error


def untie(model: nn.Module, name: str) -> None:
    """Give a tied parameter separate, unfilled memory."""
    owner, _, key = name.rpartition(".")
    tied = model.get_parameter(name)
    values = torch.empty(tied.shape, dtype=tied.dtype)
    model.get_submodule(owner)._parameters[key] = nn.Parameter(values, tied.requires_grad)
    # Or `save_pretrained` would leave one of the two out.
    tied_names_of: Any = model.all_tied_weights_keys
    tied_names_of.pop(name)


def describe_conversions(model: nn.Module) -> dict[str, Any]:
    """Return the load decisions needed for saving, as a JSON object.

    The configuration does not contain them: conversion rules used by `plan_reading`, and tied weights with separate
    values. Raises CannotStream.
    """
    if not isinstance(model, transformers.PreTrainedModel):
        return {}
    rules: Any = getattr(model, "_weight_conversions", None)
    ties, configured_ties = tied_names(model), model.get_expanded_tied_weights_keys(all_submodels=True)
    return {
        "rules": None if rules is None else [_description(rule) for rule in rules],
        "untied": sorted(configured_ties.keys() - ties.keys()),
    }


def apply_conversions(model: nn.Module, description: Mapping[str, Any]) -> None:
    """Apply the result of `describe_conversions` from another model to a model fresh from the configuration.

    Tied weights with separate values get separate memory, and saving uses the original tensor names. Raises
    CannotStream if transformers lacks a used rule.
    """
    for name in description.get("untied", ()):
        untie(model, name)
    if description.get("rules") is None:
        return
    _, mapping = _transformers_modules()
    # By text: a rule of another process is another object, and a list does not hash.
    known = {json.dumps(_description(rule)): rule for rule in mapping.get_model_conversion_mapping(model)}
    rule_keys = [json.dumps(rule_key) for rule_key in description["rules"]]
    missing = [rule_key for rule_key in rule_keys if rule_key not in known]
    if missing:
        raise CannotStream(
            f"the weights of {type(model).__name__} were read by a conversion that transformers "
            f"{transformers.__version__} does not have: {missing[0]}."
        )
    model._weight_conversions = [known[rule_key] for rule_key in rule_keys]  # type: ignore[assignment]


def _description(rule: Any) -> list[Any]:
    return [type(rule).__name__, list(rule.source_patterns), list(rule.target_patterns), rule.scope_prefix]


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the configured ties: parameter name -> name to take the values from."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def drop_unimportant(
    model: nn.Module, missing: set[str], unexpected: dict[str, str]
) -> tuple[set[str], dict[str, str]]:
    """Return `missing` and `unexpected` (as in `ReadingPlan`) without names the model declares unimportant."""
    info = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(unexpected.values()))
    # Private: a later version may lack the method.
    adjust: Any = getattr(model, "_adjust_missing_and_unexpected_keys", None)
    if adjust is not None:
        adjust(info)
    return info.missing_keys, {name: renamed for name, renamed in unexpected.items() if renamed in info.unexpected_keys}


def stays_fp32(model: nn.Module, dtype: torch.dtype | None) -> Callable[[str], bool]:
    """Return a predicate over tensor names: kept in fp32 by `from_pretrained(dtype=dtype)`."""
    patterns = {
        pattern
        for attribute, dtypes in (
            ("_keep_in_fp32_modules", (torch.float16,)),
            ("_keep_in_fp32_modules_strict", (torch.float16, torch.bfloat16)),
        )
        if dtype in dtypes
        for pattern in getattr(model, attribute, None) or ()
    }
    if not patterns:
        return lambda _name: False
    expression = re.compile("|".join(pattern.replace("*", ".*") for pattern in sorted(patterns)))
    return lambda name: expression.search(name) is not None


def recompute_buffers(model: nn.Module) -> None:
    """Recompute non-persistent buffers in fp32, like `from_pretrained`.

    A model made in bf16 would otherwise have rounded position tables (codegen). Call under a DeferredInit, which
    records the parameter writes.
    """

    def settle(module: nn.Module, family: Any) -> None:
        if isinstance(module, transformers.PreTrainedModel):
            family = module
        if family is not None and module._non_persistent_buffers_set:
            family._init_weights(module)
        for child in module.children():
            settle(child, family)

    with torch.no_grad():
        settle(model, None)


def _transformers_modules() -> tuple[Any, Any]:
    """Return transformers' modules for conversion rules. Raises CannotStream if a needed function is missing."""
    try:
        from transformers import conversion_mapping, core_model_loading

        for name in ("WeightRenaming", "WeightConverter", "rename_source_key", "dot_natural_key"):
            getattr(core_model_loading, name)
        for module, name in (
            (core_model_loading, "revert_weight_conversion"),
            (conversion_mapping, "get_model_conversion_mapping"),
        ):
            getattr(module, name)
    except (ImportError, AttributeError) as error:
        raise CannotStream(
            f"the weight conversion of transformers {transformers.__version__} has another interface: {error}."
        ) from error
    return core_model_loading, conversion_mapping


def _used_rules(model: nn.Module) -> Sequence[Any]:
    """Return the rules reversed by `save_pretrained`: the rules used at load, or else the family rules."""
    loading, mapping = _transformers_modules()
    rules: Any = getattr(model, "_weight_conversions", None)
    if rules is not None:
        return rules
    family_rules = mapping.get_model_conversion_mapping(model, add_legacy=False)
    return [rule for rule in family_rules if not isinstance(rule, loading.PrefixChange)]


def _find_row_members(rule: Any, members: Sequence[tuple[str, str | None]]) -> tuple[tuple[int, ...], ...]:
    """Return the members for each stack row. Empty if an operation after stacking mixes rows."""
    merge, *rest = rule.operations
    if type(merge).__name__ != "MergeModulelist" or merge.dim != 0 or not all(map(_is_within_rows, rest)):
        return ()
    members_by_pattern: dict[str | None, list[int]] = {}
    for index, (_, pattern) in enumerate(members):
        members_by_pattern.setdefault(pattern, []).append(index)
    # For example gate and up: both must have all experts.
    if len({len(each) for each in members_by_pattern.values()}) != 1:
        return ()
    return tuple(zip(*members_by_pattern.values(), strict=True))


def _is_row_split(rule: Any) -> bool:
    """Return whether the rule cuts a stack into rows, with earlier operations only within rows."""
    *before, split = rule.operations
    return type(split).__name__ == "SplitModulelist" and split.dim == 0 and all(map(_is_within_rows, before))


def _is_within_rows(operation: Any) -> bool:
    name = type(operation).__name__
    if name == "Transpose":
        return not operation.check_dims and min(operation.dim0, operation.dim1) > 0
    return name in ("Concatenate", "Chunk") and operation.dim > 0 and operation.num_shards_attribute is None
