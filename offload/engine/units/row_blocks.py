"""Weights larger than the device's share, in blocks of rows (the memory-centric tiling of ZeRO-Infinity,
arXiv:2104.07857, section 5.1.3).

Each block is a unit of its own, which comes up by itself and whose gradients land by themselves. What hangs in the
model stands for the whole weight, and hands `linear` and `embedding` on to the blocks: the modules' own code runs, and
weights that modules share are cut once. The rows of a result follow from the same products as uncut; a gradient that
goes back to the input is a sum over the blocks, from the last to the first, in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from offload.errors import ConfigError


class RowBlock(nn.Module):
    """Some rows of a weight, and of the bias beside that: one unit."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(
        self, *, inputs: torch.Tensor | None = None, rows: torch.Tensor | None = None, **how: Any
    ) -> torch.Tensor:
        """Return the products of `inputs` [..., width] with the rows; or those `rows` (numbers within the block)."""
        if rows is not None:
            return functional.embedding(rows, self.weight, **how)
        assert inputs is not None
        return functional.linear(inputs, self.weight, self.bias if how["has_bias"] else None)


class RowBlocks:
    """A weight [rows, width] in blocks of rows, with the bias that is cut as it is, if there is one."""

    def __init__(
        self, name: str, parameters: Mapping[str, int], blocks: Sequence[RowBlock], borders: Sequence[int]
    ) -> None:
        """`parameters`: the indices, in the model, of what the blocks have rows of, by its name there. `borders`: of
        the blocks, one more than there are blocks.
        """
        self.name, self.parameters, self.blocks, self._borders = name, dict(parameters), tuple(blocks), tuple(borders)
        self._chosen: int | None = None

    def span(self, number: int) -> slice:
        """Return the rows of a block."""
        return slice(*self._borders[number : number + 2])

    def inside(self, number: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which of these rows a block has, and which of its own they are; 0 for the others. Rows that the weight
        has not are outside of the first or last block: looking them up raises there, as it does with a whole weight.
        """
        span, is_last = self.span(number), number == len(self.blocks) - 1
        is_here = ((rows >= span.start) | (number == 0)) & ((rows < span.stop) | is_last)
        return is_here, (rows - span.start).masked_fill(~is_here, 0)

    @property
    def num_rows(self) -> int:
        """The rows of the weight."""
        return self._borders[-1]

    @property
    def most_rows(self) -> int:
        """The rows of the largest block."""
        return max(end - begin for begin, end in zip(self._borders, self._borders[1:], strict=False))

    @contextmanager
    def only(self, number: int) -> Iterator[None]:
        """Within, products are those with the rows of one block."""
        self._chosen = number
        try:
            yield
        finally:
            self._chosen = None

    def linear(self, input: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:  # noqa: A002 (torch's)
        """Return `functional.linear` of the whole weight."""
        numbers = range(len(self.blocks)) if self._chosen is None else [self._chosen]
        sums, has_own = _Sums(len(numbers)), getattr(bias, "blocks", None) is self
        parts = [self.blocks[n](inputs=_Shared.apply(input, sums), has_bias=has_own) for n in numbers]
        found = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        if bias is None or has_own:
            return found
        return found + (bias if self._chosen is None else bias[self.span(self._chosen)])

    def embedding(
        self,
        input: torch.Tensor,  # noqa: A002 (torch's)
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> torch.Tensor:
        """Return `functional.embedding` of the whole weight. Raises ConfigError for what needs all rows at once."""
        del norm_type
        if max_norm is not None or scale_grad_by_freq or sparse:
            raise ConfigError(
                f"{self.name} is larger than the device's share and would be cut in blocks of rows, and its module has "
                "max_norm, scale_grad_by_freq or sparse, with which rows depend on each other. Make the module without "
                "them, or raise --offload.device_memory until the whole of it fits."
            )
        if padding_idx is not None and padding_idx < 0:
            padding_idx += self._borders[-1]
        found: torch.Tensor | None = None
        for number, block in enumerate(self.blocks):
            span, (is_here, rows) = self.span(number), self.inside(number, input)
            has_padding = padding_idx is not None and span.start <= padding_idx < span.stop
            part = block(rows=rows, padding_idx=padding_idx - span.start if has_padding else None)
            found = part if found is None else torch.where(is_here[..., None], part, found)
        assert found is not None
        return found


class _Sums:
    """What the blocks give back to the input that they share, so far."""

    def __init__(self, num_terms: int) -> None:
        self.num_terms, self.num_missing = num_terms, num_terms
        self.total: torch.Tensor | None = None


class _Shared(torch.autograd.Function):
    """An input of several blocks: their gradients add up in fp32, whatever the input is, and are rounded once."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, sums: _Sums) -> torch.Tensor:
        ctx.sums = sums
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        sums = ctx.sums
        if sums.num_terms == 1:
            return gradient, None
        if sums.total is None:
            sums.total = gradient.to(torch.float32, copy=True)
        else:
            sums.total.add_(gradient)
        sums.num_missing -= 1
        if sums.num_missing:
            return None, None
        total, sums.total, sums.num_missing = sums.total, None, sums.num_terms
        return total.to(gradient.dtype), None
