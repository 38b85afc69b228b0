"""Find layers above the device memory limit for a unit, and cut them into row blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from offload.engine.loss.chunked_head import ChunkedHead
from offload.engine.units.find import ParameterPlace, Splitting, UnitCandidate
from offload.errors import first_names, format_bytes
from offload.extras.large.row_block_head import RowBlockHead
from offload.extras.large.row_blocks import RowBlock, RowBlocks
from offload.layout.codecs import EXACT
from offload.layout.planes import DTYPES, PARAMETER_ALIGNMENT
from offload.layout.regions import ParameterInfo, Piece, align
from offload.optim.rule import UpdateRule

_ROWS = 128
"""Preferred multiple of rows per block: other row counts have slower matrix products."""

_MOST_BLOCKS = 256
"""Maximum blocks per layer.

Each block is a unit with regions and copies; with so little device memory, transfers would dominate.
"""
_MOST_SHOWN = 3


@dataclass(frozen=True)
class RowCutting(Splitting):
    """Row cutting for models with units larger than the device memory limit.

    `blocks`: row blocks per oversized linear layer or embedding.
    """

    blocks: Mapping[nn.Module, RowBlocks] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    """Oversized parameters left whole: name and reason."""

    @classmethod
    def of(cls, model: nn.Module, infos: Sequence[ParameterInfo], rule: UpdateRule, share_bytes: int) -> RowCutting:
        """Compute the cutting for a model trained with `rule`."""
        index_of = {id(parameter): index for index, parameter in enumerate(model.parameters())}
        owners: dict[int, list[tuple[str, nn.Module]]] = {}
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    owners.setdefault(index_of[id(parameter)], []).append((key, module))
        blocks: dict[nn.Module, RowBlocks] = {}
        whole: dict[str, str] = {}
        # Largest first, as `description` shows them.
        for index, places in sorted(owners.items(), key=lambda item: -infos[item[0]].numel):
            info = infos[index]
            num_bytes = info.numel * DTYPES[info.compute].itemsize
            if num_bytes <= share_bytes:
                continue
            # One bias at most, of a layer of its own: its rows are cut and fetched with those of the weight.
            biases = [bias for _, module in places if (bias := module._parameters.get("bias")) is not None]
            reason = _reason_against_cutting(info, rule, places, share_bytes)
            if info.trainable and len(places) > 1 and rule.drops_gradients:
                reason = reason or (
                    f"{type(rule).__name__} stores no gradients, but layers that share the parameter produce several"
                )
            if len(biases) > 1 or any(len(owners[index_of[id(bias)]]) > 1 for bias in biases):
                reason = reason or "layers share the weight but not the bias, or the bias but not the weight"
            if reason:
                whole[info.name] = reason
                continue
            parameters = {"weight": index}
            if biases:
                parameters["bias"] = index_of[id(biases[0])]
            row_blocks = _cut_into_blocks(info, parameters, share_bytes)
            # Layers with one weight share the blocks, so the weight is stored and updated once.
            blocks |= dict.fromkeys([module for _, module in places], row_blocks)
        return cls(share_bytes, blocks, whole)

    @property
    def row_blocks(self) -> list[RowBlocks]:
        """Each cut weight once."""
        return list(dict.fromkeys(self.blocks.values()))

    def units_of(self, layer: str, block: RowBlocks) -> Iterator[UnitCandidate]:
        for number, part in enumerate(block.blocks):
            span = block.span(number)
            places = [ParameterPlace(part, key, index) for key, index in block.parameters.items()]
            shapes = [tuple(parameter.shape) for parameter in part.parameters()]
            rows = tuple(
                Piece(place.parameter, span.start * math.prod(shape[1:]), shape)
                for place, shape in zip(places, shapes, strict=True)
            )
            name = f"{layer}[{span.start}:{span.stop}]"
            yield UnitCandidate(name, part, places, whole=True, resident=False, blocks=block, layer=layer, rows=rows)

    @property
    def functions(self) -> dict[int, Mapping[Any, Callable[..., torch.Tensor]]]:
        return {index: cut.functions for cut in self.blocks.values() for index in cut.parameters.values()}

    def heads(self, whole: ChunkedHead) -> list[ChunkedHead]:
        # reversed: an equally large embedding precedes the head
        return [RowBlockHead(whole, cut) for cut in reversed(self.row_blocks) if cut.num_rows == whole.vocabulary]

    @property
    def description(self) -> str:
        text = (
            f"device memory allows {format_bytes(int(self.share_bytes))} per unit: larger blocks are split into modules"
        )
        shown = [f"{each.name} in {len(each.blocks)} of {each.most_rows:,} rows" for each in self.row_blocks]
        if not shown:
            return text
        listed = first_names(shown, _MOST_SHOWN, ", and {} others")
        return (
            f"{text}, and these layers into row blocks, each a unit: {listed}. Losses and gradients equal those of "
            "whole layers, up to the summation order over blocks"
        )

    @property
    def whole_description(self) -> str:
        if not self.whole:
            return ""
        shown = [f"{name} is not, because {reason}" for name, reason in self.whole.items()]
        more = f"; {len(shown) - _MOST_SHOWN} others are not" if len(shown) > _MOST_SHOWN else ""
        return f" Layers that are too large are split into row blocks, but {'; '.join(shown[:_MOST_SHOWN])}{more}."


def _reason_against_cutting(
    info: ParameterInfo, rule: UpdateRule, places: Sequence[tuple[str, nn.Module]], share_bytes: int
) -> str:
    """Return the reason against cutting a parameter into row blocks; empty if possible."""
    other = next((m for key, m in places if key != "weight" or not isinstance(m, nn.Linear | nn.Embedding)), None)
    if other is not None:
        return f"{type(other).__name__} is neither a linear layer nor an embedding"
    has_bias = any(module._parameters.get("bias") is not None for _, module in places)
    if info.shape[0] <= _least_rows(info, has_bias):
        return f"it has {info.shape[0]} rows, too few for two blocks"
    if info.numel * DTYPES[info.compute].itemsize > share_bytes * _MOST_BLOCKS:
        return f"it would need more than {_MOST_BLOCKS} blocks"
    part = rule.parts[info.rule]
    if not part.has_gradients:
        return f"{type(part).__name__} samples its random direction as a whole"
    if info.trainable and part.by_matrix:
        return f"{type(part).__name__} updates it as a whole"
    if info.codec is not EXACT:
        return f"it is stored as {info.codec.name}"
    return ""


def _least_rows(info: ParameterInfo, has_bias: bool) -> int:
    """Return the row multiple for blocks: no quantization block (elements with one scale) crosses a border."""
    if has_bias:  # cut at the same borders, with one element a row
        return PARAMETER_ALIGNMENT
    return PARAMETER_ALIGNMENT // math.gcd(PARAMETER_ALIGNMENT, info.numel // info.shape[0])


def _cut_into_blocks(info: ParameterInfo, parameters: Mapping[str, int], share_bytes: int) -> RowBlocks:
    """Return the row blocks of a weight, with parameters on the meta device."""
    has_bias, itemsize = "bias" in parameters, DTYPES[info.compute].itemsize
    rows, width = info.shape[0], info.numel // info.shape[0] + has_bias
    most, least = share_bytes // (width * itemsize), _least_rows(info, has_bias)
    step = _ROWS if most >= _ROWS else least
    most = max(step, most // step * step)
    size = align(-(-rows // -(-rows // most)), step)  # the fewest blocks, as equal as the step allows
    borders = [*range(0, rows, size), rows]

    def meta_parameter(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, device="meta"), requires_grad=info.trainable)

    blocks = [
        RowBlock(meta_parameter(end - begin, *info.shape[1:]), meta_parameter(end - begin) if has_bias else None)
        for begin, end in pairwise(borders)
    ]
    return RowBlocks(info.name, parameters, blocks, borders)
