"""Weights in FP8 while their unit is in use: each is cast once, for all its micro-batches.

The product with a weight is an operation in torch's library. A traced block keeps it as one node, with the bf16 weight
as an input, so its graph casts no weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from offload.accelerators import multiplies_fp8
from offload.extras.quant.casts import ScaledMatrix, to_fp8
from offload.layout.regions import align

_ALIGNMENT = 16
"""Bytes: FP8 products read operands in such pieces."""
_SCALE_BYTES = 4
_library = torch.library.Library("offload", "FRAGMENT")
_library.define(
    "fp8_product(Tensor values, Tensor scale, Tensor weight, bool by_row, bool is_transposed) -> Tensor",
    tags=torch.Tag.flexible_layout,  # with a fixed layout inductor writes codes by row once for each product
)
PRODUCT = torch.ops.offload.fp8_product
"""(values, scale, weight, by_row, is_transposed) -> result, bf16 [M, N].

values: float8 [M, K], and scale: fp32 [M, 1] or [1, 1]. weight: bf16 [N, K], or with `is_transposed` [K, N], for the
input gradient. by_row: the recipe, as in `products.py`.
"""


def multiply(left: ScaledMatrix, right: ScaledMatrix, *, is_fast: bool) -> Tensor:
    """Return left times right', bf16 [M, N], for left [M, K] and right [N, K].

    `is_fast`: the device may sum with fewer bits (`use_fast_accum`). Devices without FP8 products multiply in fp32.
    """
    columns = right.values.t()
    if not multiplies_fp8(left.values.device.type):
        return ((left.values.float() @ columns.float()) * left.scale * right.scale.t()).bfloat16()
    # A product takes scales by row on both sides, or one number on both.
    scales = left.scale, right.scale.t()
    if left.scale.numel() > 1 or right.scale.numel() > 1:  # both by row, or both for the matrix
        shape = len(left.values), columns.shape[1]
        scales = scales[0].expand(shape[0], 1).contiguous(), scales[1].expand(1, shape[1]).contiguous()
    return torch._scaled_mm(left.values, columns, *scales, out_dtype=torch.bfloat16, use_fast_accum=is_fast)


def transposed(matrix: ScaledMatrix) -> ScaledMatrix:
    """Return the transposed matrix. It has one scale."""
    return ScaledMatrix(matrix.values.t().contiguous(), matrix.scale)


# -- codes in use --------------------------------------------------------------------------------------------

_open: dict[int, WeightCodes] = {}
"""Codes by the address where a weight in use begins. Other weights, as in plain PyTorch, are cast for each product."""


def code_bytes(shapes: Sequence[tuple[int, int]], *, by_row: bool) -> int:
    """Return the bytes for codes if a unit has weights with these shapes, [N, K]."""
    num_bytes = sum(2 * align(rows * columns, _ALIGNMENT) for rows, columns in shapes)
    if not by_row:
        return num_bytes + len(shapes) * align(_SCALE_BYTES, _ALIGNMENT)
    num_bytes += sum(align(_SCALE_BYTES * rows, _ALIGNMENT) + align(_SCALE_BYTES, _ALIGNMENT) for rows, _ in shapes)
    # The transposed codes have one scale: they transpose another cast, which one weight needs at a time.
    return num_bytes + max((align(rows * columns, _ALIGNMENT) for rows, columns in shapes), default=0)


def cast_bytes(weight: Tensor, by_row: bool, is_transposed: bool) -> int:
    """Return the bytes that kernels read and write to cast a weight, once in a use."""
    if is_transposed:  # one scale, then the transpose: where the forward does not run again, there is no other cast
        return 7 * weight.numel()
    if by_row:
        return 3 * weight.numel()
    return 5 * weight.numel()


class WeightCodes:
    """Codes for the weights in use: for the result, and transposed ones for the input gradient.

    The first product with a weight casts it, in the order of compute, so its memory needs no other order.
    """

    def __init__(self, memory: Tensor, *, by_row: bool) -> None:
        """`memory`: uint8, the most `code_bytes` that a unit has. `by_row`: the recipe."""
        self._memory = memory
        self._by_row = by_row
        self._end = 0  # where free memory begins
        self._found: dict[tuple[int, bool], ScaledMatrix] = {}  # by address, and whether transposed

    def open(self, weights: Iterable[Tensor]) -> None:
        """Begin a use with these weights, which stay as they are until `close`."""
        self.close()
        for weight in weights:
            _open[weight.data_ptr()] = self

    def close(self) -> None:
        """End the use: other weights come to the same addresses."""
        for address in [address for address, codes in _open.items() if codes is self]:
            del _open[address]
        self._found.clear()
        self._end = 0

    def free(self) -> None:
        """Give the memory back."""
        self.close()
        self._memory = self._memory[:0].clone()

    def of(self, weight: Tensor, *, is_transposed: bool) -> ScaledMatrix:
        """Return the codes for a weight in use."""
        key = weight.data_ptr(), is_transposed
        if key not in self._found:
            self._found[key] = self._transpose(weight) if is_transposed else self._cast(weight)
        return self._found[key]

    def _cast(self, weight: Tensor) -> ScaledMatrix:
        rows, columns = weight.shape
        num_scales = 1
        if self._by_row:
            num_scales = rows
        values = self._take(rows * columns).view(torch.float8_e4m3fn).view(rows, columns)
        scale = self._take(_SCALE_BYTES * num_scales).view(torch.float32).view(-1, 1)
        return to_fp8(weight, by_row=self._by_row, out=ScaledMatrix(values, scale))

    def _transpose(self, weight: Tensor) -> ScaledMatrix:
        rows, columns = weight.shape
        if self._by_row:
            values = self._memory[len(self._memory) - rows * columns :].view(torch.float8_e4m3fn).view(rows, columns)
            scale = self._take(_SCALE_BYTES).view(torch.float32).view(1, 1)
            cast = to_fp8(weight, by_row=False, out=ScaledMatrix(values, scale))
        else:
            cast = self.of(weight, is_transposed=False)
        turned = self._take(rows * columns).view(columns, rows)
        turned.copy_(cast.values.view(torch.uint8).t())
        return ScaledMatrix(turned.view(torch.float8_e4m3fn), cast.scale)

    def _take(self, num_bytes: int) -> Tensor:
        begin = self._end
        self._end = begin + align(num_bytes, _ALIGNMENT)
        assert self._end <= len(self._memory), "the plan counts these bytes"
        return self._memory[begin : begin + num_bytes]


# -- the operation -------------------------------------------------------------------------------------------


def _product(values: Tensor, scale: Tensor, weight: Tensor, by_row: bool, is_transposed: bool) -> Tensor:
    codes = _open.get(weight.data_ptr())
    if codes is not None:
        found = codes.of(weight, is_transposed=is_transposed)
    else:
        found = to_fp8(weight, by_row=by_row and not is_transposed)
        if is_transposed:
            found = transposed(found)
    # As in the recipes: `tensorwise` gradients alone are summed with all bits.
    return multiply(ScaledMatrix(values.contiguous(), scale), found, is_fast=by_row or not is_transposed)


def _shape(values: Tensor, scale: Tensor, weight: Tensor, by_row: bool, is_transposed: bool) -> Tensor:  # noqa: ARG001
    return values.new_empty(len(values), weight.shape[int(is_transposed)], dtype=torch.bfloat16)


@register_flop_formula(PRODUCT)
def _flops(values: Any, scale: Any, weight: Any, *_: Any, **__: Any) -> int:  # noqa: ARG001
    """Return two operations for each token and weight element."""
    return int(2 * values[0] * weight[0] * weight[1])


_library.impl("fp8_product", _product, "CompositeExplicitAutograd")
torch.library.register_fake("offload::fp8_product", _shape, lib=_library)
