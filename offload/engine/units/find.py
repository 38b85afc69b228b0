"""Split a model into units by module structure, without lists of names or model families.

Blocks are the elements in the outermost module lists. Every other module with parameters becomes a separate unit. Small
modules (final norms, biases in a parent module) stay on the device. If a block exceeds the device memory for one unit,
its modules become units; larger layers are cut into row blocks, each a unit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from offload.doors import Door
from offload.engine.companions import companions_of, without_companions
from offload.errors import ConfigError, untrainable_error
from offload.layout.codecs import CODECS, EXACT, LEAST_NUMEL, LINK_CODECS, Codec
from offload.layout.regions import ParameterInfo, Piece, Region
from offload.optim.rule import ParameterTraits, UpdateRule

_FILTERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LISTS = (nn.ModuleList, nn.ModuleDict)
_RESIDENT_SHARE = 16
"""A module outside the blocks stays on the device if smaller than (largest block bytes) / this number."""


@dataclass(frozen=True)
class ParameterPlace:
    """The place where a module holds a parameter."""

    module: nn.Module
    """Owner module."""
    key: str
    """Key in `module._parameters`."""
    parameter: int
    """Parameter index in the model."""


@dataclass
class UnitCandidate:
    """A unit before memory allocation.

    If the children of a module are separate units, the module's own unit keeps only the directly registered parameters
    and stays on the device.
    """

    name: str
    """Module name in the model."""
    module: nn.Module
    """Unit module."""
    places: list[ParameterPlace]
    """Places for all unit parameters."""
    whole: bool
    """True if the unit owns all module parameters, including child modules.

    False for a parent whose children have separate units.
    """
    resident: bool
    """True if the weights stay on the device."""
    is_block: bool = False
    """True if the module is an element of an outermost module list."""
    records: tuple[tuple[Piece, ...], ...] = ()
    """Streamed experts only: parameter pieces per record (experts fetched together).

    Empty: the unit is fetched as a whole.
    """
    blocks: Any = None
    """A split layer and each unit with a part of the layer: the object of `Splitting.blocks`. None: whole."""
    layer: str = ""
    """Part of a split layer only: name of the layer; otherwise empty."""
    rows: tuple[Piece, ...] = ()
    """Part of a split layer only: layer parameter pieces in this unit."""

    @property
    def is_cut(self) -> bool:
        """True for a split layer, without own weights."""
        return self.blocks is not None and not self.layer

    @property
    def parameters(self) -> list[int]:
        """Parameter indices in module order, without duplicates."""
        return list(dict.fromkeys(place.parameter for place in self.places))

    @property
    def cargoes(self) -> dict[str, Sequence[int | Piece]]:
        """Parameter indices or pieces fetched together, keyed by unit name as in `Region.units`.

        One entry for the unit, or one per record; empty for a split layer.
        """
        if self.is_cut:
            return {}
        if not self.records:
            return {self.name: self.rows or self.parameters}
        return {f"{self.name} [{number}]": pieces for number, pieces in enumerate(self.records)}


def regions_of(unit: UnitCandidate, regions: Iterable[Region]) -> tuple[Region, ...]:
    """Return the regions with parameters of this unit."""
    names = unit.cargoes.keys()
    return tuple(region for region in regions if not names.isdisjoint(region.units))


@dataclass(frozen=True)
class Splitting:
    """Whole layers: nothing is split. Base class of all splittings."""

    share_bytes: float = math.inf
    """Maximum weight bytes of a unit, as far as a unit can be split."""
    blocks: Mapping[nn.Module, Any] = field(default_factory=dict)
    """Split layers. Layers with a shared weight have the same object."""

    def units_of(self, layer: str, block: Any) -> Iterable[UnitCandidate]:  # noqa: ARG002
        """Return the units for the parts of a layer, in model order. `block`: an object of `blocks`."""
        return ()

    @property
    def description(self) -> str:
        """Report text about split layers. Empty: none."""
        return ""

    @property
    def whole_description(self) -> str:
        """Report sentence about oversized parameters left whole, with reasons. Empty: none."""
        return ""

    @property
    def functions(self) -> Mapping[int, Mapping[Any, Callable[..., torch.Tensor]]]:
        """Replacements for torch functions over a split weight or bias, by parameter index; see `OffloadedTensor`."""
        return {}

    def heads(self, whole: Any) -> Sequence[Any]:  # noqa: ARG002
        """Return variants of the `ChunkedHead` `whole` with a split weight, the most probable first."""
        return ()


SPLITTINGS: Door[Any] = Door("splitting", {})
"""rows: class of a `Splitting` with a method `of(model, infos, rule, share_bytes)`.
experts: function (candidates, infos, rule, num_replicas) -> candidates.
"""


def describe_parameters(
    model: nn.Module,
    optimizer: UpdateRule,
    precision: str,
    frozen_weights: str = EXACT.name,
    quantized: Mapping[nn.Parameter, Codec] | None = None,
    link_weights: str = EXACT.name,
) -> list[ParameterInfo]:
    """Describe all parameters in torch order, tied parameters once. Raises ConfigError for an untrainable model.

    `frozen_weights`: codec name for frozen matrices in blocks. `quantized`: codecs for parameters stored quantized in
    the model files. `link_weights`: codec name for transferring trainable matrices.
    """
    named = list(model.named_parameters())
    if not named:
        raise ConfigError("the model has no parameters: there is nothing to train.")
    if not any(p.requires_grad for _, p in named):
        raise ConfigError("every parameter of the model is frozen (requires_grad=False): there is nothing to train.")
    _check_listed(model, named)
    for pattern in [pattern for rule in optimizer.parts for pattern, _ in rule.groups]:
        if not any(re.search(pattern, name) for name, _ in named):
            raise ConfigError(
                f"optimizer.groups has {pattern!r}, which matches none of the {len(named)} parameter names, such as "
                f"{named[len(named) // 2][0]}: fix the expression, or leave it out."
            )
    companions = companions_of(model)
    of_companions = {id(parameter) for each in companions.values() for parameter in each.parameters()}
    with without_companions(model):
        kept = {number for each in (model, *companions.values()) for number in _kept_in_fp32(each)}
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    filters = {id(module._parameters.get("weight")) for module in model.modules() if isinstance(module, _FILTERS)}
    blocks = list(find_blocks(model))
    in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
    codec = CODECS[frozen_weights]
    in_codes = set(map(id, codec.choose(blocks, kept)))
    stacks = {id(stack) for module in model.modules() for stack in _stacks_of_experts(module)}
    quantized, infos = quantized or {}, []
    _check_quantized(named, quantized, frozen_weights)
    for index, (name, parameter) in enumerate(named):
        if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ConfigError(
                f"parameter {name} is {parameter.dtype}: only float32, bfloat16 and float16 weights are trained. Load "
                "the model unquantized."
            )
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ConfigError(
                f"parameter {name} has a hook (register_hook or register_post_accumulate_grad_hook), which would not "
                "run: the engine collects gradients unit by unit. Remove the hook; a hook of a module does run."
            )
        compute = precision
        if id(parameter) in kept:
            compute = "fp32"
        position_flags = id(parameter) in tables, id(parameter) in in_blocks, id(parameter) in filters
        choice = optimizer.choose(ParameterTraits(name, tuple(parameter.shape), *position_flags))
        info = ParameterInfo(
            index=index,
            name=name,
            shape=tuple(parameter.shape),
            trainable=parameter.requires_grad,
            compute=compute,
            bf16_source=parameter.dtype == torch.bfloat16,
            lr_scale=choice.lr_scale,
            weight_decay=choice.weight_decay,
            rule=choice.rule,
            by_expert=id(parameter) in stacks,
            companion=next(filter(name.startswith, companions), ""),
        )
        if id(parameter) in of_companions and not info.companion:
            raise ConfigError(
                f"parameter {name} is shared with a companion, where it would not train: give a companion with "
                "parameters of its own, such as a copy (copy.deepcopy)."
            )
        if parameter in quantized:
            info = replace(info, codec=quantized[parameter])
        elif info.can_be_quantized and info.trainable:
            info = replace(info, link=LINK_CODECS[link_weights])
        elif info.can_be_quantized and id(parameter) in in_codes and not position_flags[0]:  # no table
            info = replace(info, codec=codec)
        infos.append(info)
    if frozen_weights != EXACT.name and all(info.codec is EXACT for info in infos):
        raise ConfigError(
            f"offload.frozen_weights is {frozen_weights}, but the model has no frozen weights for this format: "
            f"{codec.choice}. Train an adapter over them (--lora.rank), "
            "freeze them (--optimizer.freeze; in Python requires_grad=False before Engine()), or set "
            "--offload.frozen_weights exact."
        )
    if link_weights != EXACT.name and all(info.link is EXACT for info in infos):
        raise ConfigError(
            f"offload.link_weights is {link_weights}, but the model has no trainable parameters for this format: two "
            f"dimensions or more, with {LEAST_NUMEL} elements or more. Set --offload.link_weights exact."
        )
    return infos


def is_stack_of_experts(module: nn.Module) -> bool:
    """True for a module whose forward uses the transformers experts interface."""
    return "_is_expert_parallel" in vars(module) and hasattr(type(module).forward, "__wrapped__")


def _stacks_of_experts(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of a module of experts that have one row per expert."""
    if not is_stack_of_experts(module):
        return
    for parameter in module._parameters.values():
        if parameter is not None and parameter.dim() > 1 and len(parameter) == getattr(module, "num_experts", None):
            yield parameter


def _check_listed(model: nn.Module, named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raise ConfigError for a parameter registered in a module but missing from `model.named_parameters()`."""
    listed = {id(parameter) for _, parameter in named}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in listed:
                raise ConfigError(
                    f"parameter {key} of {name or 'the model'} ({type(module).__name__}) is not in "
                    "model.named_parameters(): a module omits it, or creates it each time modules are listed (as "
                    "PEFT's LoRA over nn.MultiheadAttention does), so the engine cannot store it. Leave this module "
                    "out of target_modules, or build it from linear layers."
                )


def _check_quantized(
    named: Sequence[tuple[str, nn.Parameter]], quantized: Mapping[nn.Parameter, Codec], frozen_weights: str
) -> None:
    """Raise ConfigError for a quantized parameter with requires_grad, or with another `frozen_weights` codec."""
    for name, parameter in named:
        if parameter in quantized and parameter.requires_grad:
            raise untrainable_error(name, quantized[parameter].name)
        if parameter in quantized and frozen_weights != EXACT.name:
            raise ConfigError(
                f"offload.frozen_weights is {frozen_weights}, but {name} is already quantized in the model's folder "
                f"({quantized[parameter].name}) and stays in that format: set --offload.frozen_weights exact."
            )


def find_units(model: nn.Module, infos: list[ParameterInfo], splitting: Splitting | None = None) -> list[UnitCandidate]:
    """Split `model` into units, in module order.

    Without module lists, every module with parameters becomes a unit. `splitting`: device memory limit for a unit and
    the parts of larger layers.
    """
    splitting = splitting or Splitting()
    index_of = {id(parameter): index for index, (_, parameter) in enumerate(model.named_parameters())}
    bytes_of = [info.numel * (4 if info.compute == "fp32" else 2) for info in infos]
    names = {id(module): name for name, module in model.named_modules()}

    def places(modules: Iterator[nn.Module]) -> list[ParameterPlace]:
        return [
            ParameterPlace(module, key, index_of[id(parameter)])
            for module in modules
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]

    def num_bytes(places: Sequence[ParameterPlace]) -> int:
        return sum(bytes_of[index] for index in {place.parameter for place in places})

    units: list[UnitCandidate] = []
    inside: set[int] = set()
    for block in find_blocks(model):  # a block above the share stays out: its modules become units below
        block_places = places(block.modules())
        if id(block) not in inside and num_bytes(block_places) <= splitting.share_bytes:
            units.append(
                UnitCandidate(names[id(block)], block, block_places, whole=True, resident=False, is_block=True)
            )
            inside.update(id(module) for module in block.modules())
    largest = max((num_bytes(unit.places) for unit in units), default=0)
    if not largest and splitting.blocks:  # no block fits; units have about the share
        largest = int(splitting.share_bytes)
    for name, module in model.named_modules():
        if id(module) in inside:
            continue
        own = places(iter((module,)))
        if not own:
            continue
        if module in splitting.blocks:
            cut = splitting.blocks[module]
            is_first = all(unit.blocks is not cut for unit in units)
            units.append(UnitCandidate(name, module, own, whole=True, resident=False, blocks=cut))
            if is_first:  # layers with a shared weight have the same parts
                units += splitting.units_of(name, cut)
            continue
        submodules = [child for child in module.modules() if child is not module]
        is_small = num_bytes(own) * _RESIDENT_SHARE < largest
        whole = not any(parameter is not None for child in submodules for parameter in child._parameters.values())
        if not whole and not is_small and not any(id(child) in inside for child in submodules):
            block_places = places(module.modules())
            if num_bytes(block_places) <= splitting.share_bytes:
                # A table with an own norm, or an attention module with a projection, is one unit with all children.
                own, whole = block_places, True
                inside.update(id(child) for child in submodules)
        units.append(UnitCandidate(name or "(model)", module, own, whole, resident=not whole or is_small))
    # The parts of a cut layer stand at the place of the layer, in their own order: the sort is stable.
    order = {name: position for position, (name, _) in enumerate(model.named_modules())}
    return sorted(units, key=lambda unit: order.get(unit.layer or unit.name, 0))


def find_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the elements of the outermost module lists, nested lists flattened.

    A Sequential with at least two elements counts as a list if every element has parameters.
    """

    def has_parameters(module: nn.Module) -> bool:
        return next(module.parameters(), None) is not None

    def elements(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if isinstance(child, _LISTS):
                yield from elements(child)
            elif has_parameters(child):
                yield child

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            is_chain = isinstance(child, nn.Sequential) and len(child) > 1 and all(map(has_parameters, child))
            # A ModuleDict is often just a namespace ({"wte": ..., "h": [...]}), so the search continues inside.
            if isinstance(child, nn.ModuleList) or is_chain:
                yield from elements(child)
            else:
                yield from walk(child)

    yield from walk(model)


def _kept_in_fp32(model: nn.Module) -> set[int]:
    """Return the ids of the parameters for which the author of the model chose fp32: by name, or beside bf16."""
    named, patterns = list(model.named_parameters()), _fp32_patterns(model)
    is_mixed = any(parameter.dtype == torch.bfloat16 for _, parameter in named)
    is_fp32 = [(name, each) for name, each in named if each.dtype == torch.float32]
    return {id(each) for name, each in is_fp32 if is_mixed or any(pattern.search(name) for pattern in patterns)}


def _fp32_patterns(model: nn.Module) -> list[re.Pattern[str]]:
    """Return name patterns for parameters kept in fp32 by a transformers model in a 16-bit dtype."""
    patterns: set[str] = set()
    for module in model.modules():
        for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
            patterns.update(getattr(module, attribute, None) or ())
    return [re.compile(rf"(^|\.){pattern.replace('.*', '[^.]*')}(\.|$)") for pattern in sorted(patterns)]
