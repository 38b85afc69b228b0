"""Attention with sinks as one torch operation with a backward, in memory linear in the tokens of a row.

A sink is a learned logit by head without a value (arXiv:2309.17453; gpt-oss, arXiv:2508.10925): a softmax over [scores,
sink] whose last weight meets nothing. With L the logarithm of a row's sum without the sink, T = log(exp L + exp sink)
the one with it, and O the result without it, the result is O exp(L - T).

FlashAttention's backward (arXiv:2307.08691, algorithm 2) reads a result and a logarithm: P = exp(S - L), and dS =
P (dP - rowsum(dO O)). With the scaled result and T in their place, P has the weights beside the sink, and the row sum
is the one over all columns, since the sink's value is 0. So the same kernel gives the exact gradients. The sink's own
is -exp(sink - T) rowsum(dO O), summed over tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula, sdpa_flop_count

from offload.extras.large.document_operation import (
    Documents,
    backward_by_kernel,
    backward_shapes,
    by_kernel,
    has_kernel,
    save_operands,
)

_MOST_QUERIES = 256
"""Queries of a chunk: its scores [heads, queries, keys] are in memory."""
_library = torch.library.Library("offload", "FRAGMENT")
_library.define(
    "sink_attention(Tensor query, Tensor key, Tensor value, Tensor sinks, Tensor? mask, float? scaling) -> "
    "(Tensor, Tensor)"
)
_library.define(
    "sink_attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor sinks, Tensor? mask, "
    "Tensor result, Tensor sums, float? scaling) -> (Tensor, Tensor, Tensor, Tensor)"
)
SINK_ATTENTION = torch.ops.offload.sink_attention
"""(query, key, value, sinks, mask, scaling) -> (result, sums).

Query [rows, heads, queries, width], key and value [rows, key heads, tokens, width], sinks [heads]. The result is [rows,
queries, heads, width], sums the logarithms T, [heads, all queries] in fp32 (fp64 for fp64). The mask is `starts` (int32
[rows, tokens] on the host: causal, by documents and window), bool or added, [rows, 1 or heads, queries, tokens]; None:
each query attends to all keys.
"""


def _runs_kernel(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    return _has_starts(mask) and has_kernel(query, value)


def _has_starts(mask: Tensor | None) -> bool:
    return mask is not None and mask.dtype == torch.int32


# -- chunks of queries ---------------------------------------------------------------------------------------


class _Chunk(NamedTuple):
    """Some queries and all keys that one of them attends to. `mask`: [..., queries, keys], bool or added."""

    rows: slice
    queries: slice
    keys: slice
    mask: Tensor | None


def _chunks(query: Tensor, key: Tensor, mask: Tensor | None) -> Iterator[_Chunk]:
    num_queries, num_keys = query.shape[2], key.shape[2]
    if mask is None or not _has_starts(mask):
        for begin in range(0, num_queries, _MOST_QUERIES):
            queries = slice(begin, min(begin + _MOST_QUERIES, num_queries))
            part = None
            if mask is not None:
                part = mask.expand(*mask.shape[:2], num_queries, num_keys)[..., queries, :]
            yield _Chunk(slice(None), queries, slice(None), part)
        return
    documents = Documents.of(mask)
    places = torch.arange(num_queries, device=query.device)
    for border, length in zip(documents.borders, documents.lengths, strict=False):
        row, first = divmod(border, documents.tokens)
        for begin in range(first, first + length, _MOST_QUERIES):
            queries = slice(begin, min(begin + _MOST_QUERIES, first + length))
            keys = slice(max(first, begin + 1 - documents.window), queries.stop)
            distance = places[queries, None] - places[keys]
            yield _Chunk(slice(row, row + 1), queries, keys, (distance >= 0) & (distance < documents.window))


class _Heads:
    """Attention's operands, with the query heads of a key head beside it. Sums are in fp32 (fp64 for fp64).

    A chunk of queries is [rows, key heads, group * queries, width]: so no key is copied for the heads of its group.
    """

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, scaling: float | None) -> None:
        self.dtype = _exact(query.dtype)
        self._operands = _operand_dtype(query)
        self.group = query.shape[1] // key.shape[1]
        self.query = self.grouped(query)
        self.key = key.to(self._operands)
        self.value = value.to(self._operands)
        self.sinks = sinks.to(self.dtype).view(-1, 1)
        self.scaling = query.shape[-1] ** -0.5 if scaling is None else scaling

    def grouped(self, tensor: Tensor) -> Tensor:
        """Return [rows, key heads, group, queries, width] for [rows, heads, queries, width]."""
        return tensor.to(self._operands).unflatten(1, (-1, self.group))

    def part(self, grouped: Tensor, chunk: _Chunk) -> Tensor:
        """Return the queries of a chunk."""
        return grouped[chunk.rows, :, :, chunk.queries].flatten(2, 3)

    def scores(self, chunk: _Chunk) -> Tensor:
        """Return the masked scores of a chunk, [rows, heads, queries, keys]."""
        products = self.part(self.query, chunk) @ self.key[chunk.rows, :, chunk.keys].mT
        scores = self.by_head(products.to(self.dtype), chunk) * self.scaling
        if chunk.mask is None:
            return scores
        if chunk.mask.dtype == torch.bool:
            return scores.masked_fill_(~chunk.mask, -torch.inf)
        return scores.add_(chunk.mask)

    def by_head(self, products: Tensor, chunk: _Chunk) -> Tensor:
        """Return [rows, heads, queries, any] for a product's [rows, key heads, group * queries, any]."""
        num_queries = chunk.queries.stop - chunk.queries.start
        return products.unflatten(2, (self.group, num_queries)).flatten(1, 2)

    def of_keys(self, by_head: Tensor) -> Tensor:
        """Return an operand [rows, key heads, group * queries, any] for [rows, heads, queries, any]."""
        return by_head.to(self._operands).unflatten(1, (-1, self.group)).flatten(2, 3)


def _operand_dtype(query: Tensor) -> torch.dtype:
    """Return the dtype that products take: fp32 on a CPU. On a GPU that has no fast kernel, so the query's, as in eager
    attention.
    """
    return _exact(query.dtype) if query.is_cpu else query.dtype


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


# -- the operation -------------------------------------------------------------------------------------------


def _forward(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor | None, scaling: float | None
) -> tuple[Tensor, Tensor]:
    if mask is not None and _runs_kernel(query, value, mask):
        result, without = by_kernel(query, key, value, Documents.of(mask), scaling)
        sums = torch.logaddexp(without, sinks.float().view(-1, 1))
        return result.mul_(_by_token((without - sums).exp(), result).unsqueeze(-1)), sums
    with torch.autocast(query.device.type, enabled=False):
        heads = _Heads(query, key, value, sinks, scaling)
        rows, num_heads, num_queries, _ = query.shape
        result = query.new_empty(rows, num_queries, num_heads, value.shape[-1])
        sums = torch.empty(num_heads, rows, num_queries, dtype=heads.dtype, device=query.device)
        for chunk in _chunks(query, key, mask):
            scores = heads.scores(chunk)
            total = torch.logaddexp(scores.logsumexp(-1), heads.sinks)
            weights = scores.sub_(total.unsqueeze(-1)).exp_()
            products = heads.of_keys(weights) @ heads.value[chunk.rows, :, chunk.keys]
            result[chunk.rows, chunk.queries] = heads.by_head(products, chunk).transpose(1, 2).to(result.dtype)
            sums[:, chunk.rows, chunk.queries] = total.transpose(0, 1)
    return result, sums.flatten(1)


def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    mask: Tensor | None,
    result: Tensor,
    sums: Tensor,
    scaling: float | None,
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key, value and sinks."""
    # Row by row: products in fp32 have twice the bytes of the result.
    pairs = zip(gradient, result, strict=True)
    dots = torch.stack([(its * row.to(sums.dtype)).sum(-1) for its, row in pairs])  # [rows, queries, heads]
    weights = (sinks.to(sums.dtype).view(-1, 1) - sums).exp()
    of_sinks = (weights * dots.permute(2, 0, 1).flatten(1)).sum(1).neg().to(sinks.dtype)
    if mask is not None and _runs_kernel(query, value, mask):
        documents = Documents.of(mask)
        return *backward_by_kernel(gradient, query, key, value, result, sums, documents, scaling), of_sinks
    with torch.autocast(query.device.type, enabled=False):
        heads = _Heads(query, key, value, sinks, scaling)
        gradients = heads.grouped(gradient.transpose(1, 2))
        of_query = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
        of_key, of_value = (torch.zeros_like(each, dtype=heads.dtype) for each in (heads.key, heads.value))
        totals = sums.view(len(sums), len(query), -1).transpose(0, 1).unsqueeze(-1)  # [rows, heads, queries, 1]
        deltas = dots.transpose(1, 2).unsqueeze(-1)
        for chunk in _chunks(query, key, mask):
            weights = heads.scores(chunk).sub_(totals[chunk.rows, :, chunk.queries]).exp_()
            its = heads.part(gradients, chunk)
            of_value[chunk.rows, :, chunk.keys] += heads.of_keys(weights).mT @ its
            of_weights = heads.by_head((its @ heads.value[chunk.rows, :, chunk.keys].mT).to(heads.dtype), chunk)
            of_scores = heads.of_keys(weights * (of_weights - deltas[chunk.rows, :, chunk.queries]) * heads.scaling)
            of_queries = heads.by_head(of_scores @ heads.key[chunk.rows, :, chunk.keys], chunk)
            of_query[chunk.rows, chunk.queries] = of_queries.transpose(1, 2).to(query.dtype)
            of_key[chunk.rows, :, chunk.keys] += of_scores.mT @ heads.part(heads.query, chunk)
    by_token = [each.transpose(1, 2).to(query.dtype).contiguous() for each in (of_key, of_value)]
    return *(each.transpose(1, 2) for each in (of_query, *by_token)), of_sinks


def _by_token(by_head: Tensor, result: Tensor) -> Tensor:
    """Return [rows, queries, heads] for [heads, all queries]."""
    return by_head.view(len(by_head), len(result), -1).permute(1, 2, 0)


def _forward_shapes(query: Tensor, key: Any, value: Tensor, sinks: Any, mask: Any, scaling: Any) -> Any:  # noqa: ARG001
    rows, heads, tokens, _ = query.shape
    result = query.new_empty(rows, tokens, heads, value.shape[-1])
    return result, query.new_empty(heads, rows * tokens, dtype=_exact(query.dtype))


def _backward_shapes(gradient: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, *_: Any) -> Any:
    return *backward_shapes(gradient, query, key, value), torch.empty_like(sinks)


def _gradients(ctx: Any, gradient: Tensor | None, _: None) -> Any:
    if gradient is None:
        return (None,) * 6
    found = torch.ops.offload.sink_attention_backward(gradient, *ctx.saved_tensors, ctx.scaling)
    return *found, None, None


for _name, _function, _shapes in (
    ("sink_attention", _forward, _forward_shapes),
    ("sink_attention_backward", _backward, _backward_shapes),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"offload::{_name}", _shapes, lib=_library)
torch.library.register_autograd("offload::sink_attention", _gradients, setup_context=save_operands, lib=_library)


# -- work ----------------------------------------------------------------------------------------------------


def computed_share(query: Tensor, key: Tensor, mask: Tensor | None) -> float:
    """Return the pairs of a query and a key that `starts` allow, as a share of all pairs. Another mask allows all."""
    if mask is None or not _has_starts(mask):
        return 1.0
    documents = Documents.of(mask)
    widths = [(length, min(length, documents.window)) for length in documents.lengths]
    pairs = sum(width * length - width * (width - 1) // 2 for length, width in widths)
    return pairs / (len(query) * query.shape[2] * key.shape[2])


@register_flop_formula(SINK_ATTENTION, get_raw=True)
def _forward_flops(query: Tensor, key: Tensor, value: Tensor, sinks: Any, mask: Any, *_: Any, **__: Any) -> float:  # noqa: ARG001
    """Return the FLOPs for scores and sums of values."""
    return sdpa_flop_count(query.shape, *(_as_query(each, query) for each in (key, value))) * computed_share(
        query, key, mask
    )


@register_flop_formula(torch.ops.offload.sink_attention_backward, get_raw=True)
def _backward_flops(_: Any, *args: Any, **__: Any) -> float:
    """Return the FLOPs of five products, where the forward has two."""
    return 2.5 * _forward_flops(*args)


def _as_query(key: Tensor, query: Tensor) -> tuple[int, ...]:
    return (*query.shape[:2], *key.shape[2:])
