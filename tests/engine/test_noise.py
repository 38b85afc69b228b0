"""Gradient noise scale over micro-batches and ranks, compared with plain PyTorch in float64 on each part."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from offload import AdamW, Engine, Placement
from offload.engine.gradients.noise import GradientNoise, MicroBatchNoise
from offload.layout.regions import Piece
from tests.engine.families import llama, tokens

TIERS: dict[str, dict[str, Any]] = {"device": {}, "cpu": {"parameters": "cpu", "optimizer": "cpu"}}


def expected(model: nn.Module, batch: dict[str, torch.Tensor], rows: int, names: set[str]) -> tuple[float, float]:
    """Return tr(S) and |G|^2 by the standard formula.

    Squared norms of mean gradients, over parts with n_m targets and over all N targets, are unbiased estimates for
    |G|^2 + tr(S) / n.
    """
    model, batch = copy.deepcopy(model).double(), {key: value.cpu() for key, value in batch.items()}
    counts = [int((labels[:, 1:] != -100).sum()) for labels in batch["labels"].split(rows)]
    total, whole, apart = sum(counts), dict[str, torch.Tensor](), 0.0
    for count, ids, labels in zip(counts, *(batch[key].split(rows) for key in ("input_ids", "labels")), strict=True):
        model.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        for name, parameter in model.named_parameters():
            if name in names and parameter.grad is not None:
                mean = parameter.grad.clone()
                apart += count / total * float(mean.square().sum())
                whole[name] = whole.get(name, 0) + count / total * mean
    square = sum(float(each.square().sum()) for each in whole.values())
    trace = (apart - square) / (len(counts) / total - 1 / total)
    return trace, square - trace / total


@pytest.mark.parametrize("tier", [pytest.param("device", marks=pytest.mark.slow), "cpu"])
def test_noise_is_that_of_single_micro_batches(tier: str) -> None:
    """The parts have unequal target counts. The last norm runs over the whole batch, so the estimate excludes this
    weight, and `share` says so. Break: weigh parts equally; include gradients without a part.
    """
    model = llama()
    plain = copy.deepcopy(model)
    batch = tokens(rows=6, length=12)
    batch["labels"][0, :9] = batch["labels"][3, 5:] = -100
    more = {"micro_batch_size": 2, "noise_scale": True, "max_grad_norm": None}
    with Engine(model, AdamW(lr=0.0), Placement(**TIERS[tier]), **more) as engine:
        found = [engine.step(batch).noise for _ in range(2)]
    names = {name for name, _ in plain.named_parameters() if name != "model.norm.weight"}
    sizes = {name: parameter.numel() for name, parameter in plain.named_parameters()}
    assert found[0] == found[1]
    assert isinstance(found[0], GradientNoise)
    assert found[0].share == sum(sizes[name] for name in names) / sum(sizes.values())
    assert found[0][:2] == pytest.approx(expected(plain, batch, 2, names), rel=1e-4)


class Ranks:
    """Two ranks, called one after the other. The second call sums the values from both."""

    size = 2

    def __init__(self) -> None:
        self._told: list[list[float]] = []

    def sum_in_order(self, values: list[float], _what: str) -> list[float]:
        self._told.append(values)
        return [sum(each) for each in zip(*self._told, strict=True)]


def test_ranks_and_micro_batches_are_parts_alike() -> None:
    """Four parts on one rank equal two parts on each of two ranks. A parameter seen twice on one rank is excluded."""
    infos: Any = [SimpleNamespace(trainable=index != 1) for index in range(4)]
    pieces = [Piece(index, 0, (10 * index + 1,)) for index in range(4)]
    gradients = torch.randn(4, 4, 8, generator=torch.Generator().manual_seed(0))
    targets = [5, 0, 7, 2]
    gradients[1] = 0
    squares = dict(zip(pieces, gradients.sum(0).double().square().sum(1).tolist(), strict=True))

    def shown(parts: range, twice: int | None = None) -> MicroBatchNoise:
        seen = MicroBatchNoise()
        seen.cut(len(parts))
        for number, part in enumerate(parts):
            with seen.within(number, len(parts)):
                for index in (0, 2, 3):
                    seen.record(pieces[index], gradients[part, index], False)
        if twice is not None:
            seen.record(pieces[twice], gradients[0, twice], False)
        return seen

    alone: Any = SimpleNamespace(size=1, sum_in_order=lambda values, _what: values)
    one = shown(range(4)).estimate(infos, squares, targets, alone)
    ranks: Any = Ranks()
    shown(range(2)).estimate(infos, squares, targets[:2], ranks)
    two = shown(range(2, 4)).estimate(infos, squares, targets[2:], ranks)
    assert one is not None
    assert one == pytest.approx(two, rel=1e-12)
    assert one.share == 1.0
    ranks = Ranks()
    shown(range(2), twice=3).estimate(infos, squares, targets[:2], ranks)
    less = shown(range(2, 4)).estimate(infos, squares, targets[2:], ranks)
    assert less is not None
    assert less.share == 22 / 53


@pytest.mark.slow
def test_there_is_none_of_one_part_or_of_mixed_ones() -> None:
    batch = tokens(rows=4)
    with Engine(llama(), AdamW(lr=0.0), noise_scale=True) as engine:
        assert engine.step(batch).noise is None
    with Engine(llama(), AdamW(lr=0.0), micro_batch_size=2) as engine:
        assert engine.step(batch).noise is None, "nobody asks"
    with Engine(llama(), AdamW(lr=0.0), noise_scale=True, micro_batch_size=2) as engine:
        for rows in batch["input_ids"].split(2):
            engine.backward(engine.model(input_ids=rows, labels=rows).loss / 2)
        assert engine.update().noise is None, "an own loop"
