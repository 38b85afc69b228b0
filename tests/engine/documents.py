"""Rows with several documents, and their attention beside each document alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from offload.distributed.comm import Comm
from offload.engine.units.attention import ATTENTIONS
from offload.tiers.counters import Counters
from tests.cases.models import tokens

LENGTHS = ((7, 1, 12), (20,), (3, 17))
"""Tokens of each document in each row."""


def by_document(model: nn.Module) -> nn.Module:
    """Return a model whose attention runs over each document alone."""
    ATTENTIONS["documents"].open(model, 1, Comm(), Counters()).divert()
    return model


def packed(seed: int = 0, rows: int = 3, length: int = 12, **options: Any) -> dict[str, torch.Tensor]:
    """Return tokens in rows of up to three documents; every fourth row is one document."""
    batch = tokens(seed, rows, length, **options)
    positions = torch.arange(length).repeat(rows, 1)
    for row in range(rows):
        for start in {0: (length // 3, length // 2), 1: (length - 2,), 2: (1,)}.get((row + seed) % 4, ()):
            positions[row, start:] -= positions[row, start].clone()
    return {**batch, "position_ids": positions.to(batch["labels"].device)}


def positions_of(lengths: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    """Return positions that restart in each document, int64 [rows, tokens]."""
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])


def deviations(
    model: nn.Module, lengths: tuple[tuple[int, ...], ...] = LENGTHS, first: int = 3, vocabulary: int = 64
) -> Iterator[float]:
    """Compare packed rows with each document alone by sdpa.

    Yield the distance of the logits, as a share of their norm, and of each gradient, as a share of the largest one.
    """
    generator = torch.Generator().manual_seed(1)
    shape = len(lengths), sum(lengths[0])
    ids = torch.randint(first, vocabulary, shape, generator=generator)
    alone, whole = copy.deepcopy(model), by_document(copy.deepcopy(model))
    outputs = whole(input_ids=ids, position_ids=positions_of(lengths), use_cache=False).logits
    weights = torch.randn(outputs.shape, generator=generator)
    (outputs * weights).sum().backward()
    correct = torch.empty_like(outputs)
    for row, row_lengths in enumerate(lengths):
        for part in torch.arange(shape[1]).split(list(row_lengths)):
            result = alone(input_ids=ids[row : row + 1, part], use_cache=False).logits
            (result * weights[row, part]).sum().backward()
            correct[row, part] = result[0].detach()
    outputs = outputs.detach()
    yield float((outputs - correct).norm() / correct.norm())
    pairs = [
        (mine.grad, its.grad)
        for mine, its in zip(whole.parameters(), alone.parameters(), strict=True)
        if its.grad is not None
    ]
    largest = max(float(its.norm()) for _, its in pairs)  # some gradients are only rounding, such as of key biases
    for mine, its in pairs:
        yield float((mine - its).norm()) / largest


def counted(function: Callable[[], Any], monkeypatch: Any) -> list[tuple[int, ...]]:
    """Return the shape [rows, heads, tokens, width] of the queries in each call of torch's attention."""
    shapes, attend = [], torch.nn.functional.scaled_dot_product_attention

    def counting(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        shapes.append(tuple(query.shape))
        assert kwargs.get("attn_mask") is None
        return attend(query, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", counting)
        function()
    return shapes
