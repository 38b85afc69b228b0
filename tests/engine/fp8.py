"""FP8 products for plain PyTorch: the forward of linear layers, written apart from the engine's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

LEAST_SIZE = 32
"""Smallest sizes of FP8 layers in tests: all linear layers in blocks of the tiny families."""


def rounded(matrix: Tensor, axis: int | None, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """Return FP8 values in fp32, and their scale: one along the `axis`, or one in all."""
    magnitude = matrix.abs().float()
    largest = magnitude.max() if axis is None else magnitude.amax(axis, keepdim=True)
    scale = torch.maximum(largest, torch.tensor(1e-12, device=matrix.device)) / torch.finfo(dtype).max
    return torch.div(matrix.float(), scale).to(dtype).float(), scale


class Rowwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        (values, scale), (columns, column_scale) = rounded(x, -1), rounded(weight.t(), 0)
        return (torch.matmul(values, columns) * scale * column_scale).to(torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        (values, scale), (columns, one_scale) = rounded(gradient, -1), rounded(weight, None)
        of_x = (torch.matmul(values, columns) * scale * one_scale).to(torch.bfloat16)
        return of_x, gradient.flatten(0, -2).t().mm(x.flatten(0, -2))


class RowwiseInParts(Rowwise):
    """Computes weight gradients row by row of a batch [rows, tokens, K], and sums them in fp32."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        of_x, _ = Rowwise.backward(ctx, gradient)
        total = torch.zeros_like(ctx.saved_tensors[1], dtype=torch.float32)
        for g, x in zip(gradient, ctx.saved_tensors[0], strict=True):
            total += g.t().mm(x).float()
        return of_x, total.to(torch.bfloat16)


class Tensorwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        (values, scale), (columns, column_scale) = rounded(x, None), rounded(weight.t(), None)
        return (torch.matmul(values, columns) * scale * column_scale).to(torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        values, scale = rounded(gradient, None, torch.float8_e5m2)
        columns, column_scale = rounded(weight, None)
        of_x = (torch.matmul(values, columns) * scale * column_scale).to(torch.bfloat16)
        rows, row_scale = rounded(x, None)
        of_weight = values.flatten(0, -2).t().mm(rows.flatten(0, -2)) * scale * row_scale
        return of_x, of_weight.to(torch.bfloat16)


WAYS: dict[str, Any] = {"fp8_rowwise": Rowwise, "fp8_tensorwise": Tensorwise, "in parts": RowwiseInParts}


def multiply_in_fp8(matmul: str, model: nn.Module) -> None:
    """Give linear layers inside of module lists the FP8 forward."""

    def forward_of(layer: nn.Linear) -> Any:
        def forward(x: Tensor) -> Tensor:
            if x.dtype != torch.bfloat16:
                return functional.linear(x, layer.weight, layer.bias)
            result = WAYS[matmul].apply(x, layer.weight)
            return result if layer.bias is None else result + layer.bias

        return forward

    for blocks in model.modules():
        if isinstance(blocks, nn.ModuleList):
            for layer in blocks.modules():
                if isinstance(layer, nn.Linear) and min(layer.weight.shape) >= LEAST_SIZE:
                    layer.forward = forward_of(layer)
