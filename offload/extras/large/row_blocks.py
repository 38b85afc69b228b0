"""Weights above the device memory limit, cut into row blocks.

This is the memory-centric tiling of ZeRO-Infinity (arXiv:2104.07857, section 5.1.3). Each block is a separate unit with
separate fetch and gradient reduction. The placeholder in the model delegates `linear` and `embedding` to the blocks:
module code runs unchanged, and shared weights are cut once. Result rows come from the same products as uncut. The input
gradient is a sum over blocks, last to first, in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from offload.errors import ConfigError


class RowBlock(nn.Module):
    """Some rows of a large weight, with the same part of the bias. The block is fetched as one unit."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias

    def forward(
        self, *, inputs: torch.Tensor | None = None, rows: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        """Return `inputs` [..., width] times the block rows, or embeddings for `rows` (indices in the block)."""
        if rows is not None:
            return functional.embedding(rows, self.weight, **options)
        assert inputs is not None
        bias = None
        if options["has_bias"]:  # a layer may share the weight and pass no bias
            bias = self.bias
        return functional.linear(inputs, self.weight, bias)


class RowBlocks:
    """A weight [rows, width] in row blocks, with the bias cut alike, if any."""

    def __init__(
        self, name: str, parameters: Mapping[str, int], blocks: Sequence[RowBlock], borders: Sequence[int]
    ) -> None:
        """`parameters`: model indices of weight and bias, by name. `borders`: row borders, one more than blocks."""
        self.name = name
        self.parameters = dict(parameters)
        self.blocks = tuple(blocks)
        self._borders = tuple(borders)
        self._only_block: int | None = None  # set by a head that passes over the vocabulary block by block
        self.functions: Mapping[Any, Callable[..., torch.Tensor]] = {
            functional.linear: self.linear,
            functional.embedding: self.embedding,
        }
        """For `OffloadedTensor.functions` of weight and bias."""

    def span(self, number: int) -> slice:
        """Return the row range for a block."""
        return slice(*self._borders[number : number + 2])

    def inside(self, number: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a mask for the rows in a block, and the indices within the block (0 for other rows).

        Invalid indices are assigned to the first or last block, so the lookup raises there as with an uncut weight.
        """
        span, is_last = self.span(number), number == len(self.blocks) - 1
        is_inside = ((rows >= span.start) | (number == 0)) & ((rows < span.stop) | is_last)
        return is_inside, (rows - span.start).masked_fill(~is_inside, 0)

    @property
    def num_rows(self) -> int:
        """Total weight rows."""
        return self._borders[-1]

    @property
    def most_rows(self) -> int:
        """Rows in the largest block."""
        return max(end - begin for begin, end in zip(self._borders, self._borders[1:], strict=False))

    @contextmanager
    def only(self, number: int) -> Iterator[None]:
        """Restrict products to one block during the context."""
        self._only_block = number
        try:
            yield
        finally:
            self._only_block = None

    def linear(self, input: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:  # noqa: A002 (torch's)
        """Compute `functional.linear` with the full weight."""
        only = self._only_block
        numbers: Sequence[int] = range(len(self.blocks))
        if only is not None:
            numbers = [only]
        has_own = getattr(bias, "functions", None) is self.functions  # the placeholder of the bias in the blocks
        sums = _GradientSum(len(numbers))
        parts = [self.blocks[n](inputs=_SharedInput.apply(input, sums), has_bias=has_own) for n in numbers]
        output = parts[0]
        if len(parts) > 1:  # `cat` would copy a single part
            output = torch.cat(parts, -1)
        if bias is None or has_own:
            return output
        if only is not None:
            bias = bias[self.span(only)]
        return output + bias

    def embedding(
        self,
        input: torch.Tensor,  # noqa: A002 (torch's)
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> torch.Tensor:
        """Compute `functional.embedding` with the full weight.

        Raises ConfigError for max_norm, which writes to the weight, for scale_grad_by_freq, which would count the
        index 0 that a block reads for rows of other blocks, and for sparse, whose gradients have another layout.
        """
        del norm_type  # read with max_norm alone
        if max_norm is not None or scale_grad_by_freq or sparse:
            raise ConfigError(
                f"{self.name} is larger than the device memory per unit and must be split into row blocks, but its "
                "module has max_norm (its forward writes to the weight), scale_grad_by_freq (it would "
                "count the rows of other blocks too) or sparse (its gradients are not dense), which row blocks do not "
                "support. Build the module without them, or raise --offload.device_memory until the whole of it fits."
            )
        if padding_idx is not None and padding_idx < 0:
            padding_idx += self._borders[-1]
        output: torch.Tensor | None = None
        for number, block in enumerate(self.blocks):
            span = self.span(number)
            is_inside, rows = self.inside(number, input)
            padding = None
            if padding_idx is not None and span.start <= padding_idx < span.stop:
                padding = padding_idx - span.start
            part = block(rows=rows, padding_idx=padding)
            # The first part needs no mask: later blocks replace all its rows of other blocks.
            output = part if output is None else torch.where(is_inside[..., None], part, output)
        assert output is not None
        return output


def blocks_of(weight: Any) -> RowBlocks | None:
    """Return the row blocks of a weight. None: not cut."""
    function = getattr(weight, "functions", {}).get(functional.linear)
    blocks: RowBlocks | None = getattr(function, "__self__", None)  # of `RowBlocks.linear`
    return blocks


class _GradientSum:
    """Sum of the input gradients from the blocks so far."""

    def __init__(self, num_terms: int) -> None:
        self.num_terms = num_terms
        self.num_missing = num_terms
        self.total: torch.Tensor | None = None


class _SharedInput(torch.autograd.Function):
    """An input shared by several blocks: gradients are summed in fp32 and rounded once."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, sums: _GradientSum) -> torch.Tensor:
        ctx.sums = sums
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        sums = ctx.sums
        if sums.num_terms == 1:
            return gradient, None
        if sums.total is None:
            sums.total = gradient.to(torch.float32, copy=True)  # autograd may hand this gradient to others too
        else:
            sums.total.add_(gradient)
        sums.num_missing -= 1
        if sums.num_missing:
            return None, None
        total = sums.total
        # A retained graph may run once more.
        sums.total = None
        sums.num_missing = sums.num_terms
        return total.to(gradient.dtype), None
