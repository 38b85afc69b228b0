"""Probing the model's own loss must not depend on the confidence of the model or on the first batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from offload import Engine
from offload.engine.loss.label_trials import LabelTrials, probe_loss
from offload.engine.loss.loss import LossRule
from tests.engine.handmade import Block, cross_entropy

CLASSES = 8


class Told(nn.Module):
    """Token classifier with the token as the class. `margin` sets the confidence."""

    def __init__(self, margin: float, *, shifts: bool, counts: bool = False, extra: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, CLASSES)
        self.layers = nn.ModuleList([nn.Linear(CLASSES, CLASSES, bias=False)])
        with torch.no_grad():
            self.embedding.weight.copy_(torch.eye(CLASSES))
            self.layers[0].weight.copy_(margin * torch.eye(CLASSES))
        self.shifts, self.counts, self.extra = shifts, counts, extra

    def forward(self, x: Tensor, labels: Tensor | None = None, num_items_in_batch: int | None = None) -> dict[str, Any]:
        logits = self.layers[0](self.embedding(x))
        assert labels is not None
        targets = logits, labels
        if self.shifts:
            targets = logits[:, :-1], labels[:, 1:]
        own = [value.flatten(0, 1) for value in targets]
        if self.counts and num_items_in_batch:
            loss = functional.cross_entropy(*own, reduction="sum") / num_items_in_batch
        else:
            loss = functional.cross_entropy(*own)
        return {"loss": loss + self.extra, "logits": logits}


def right(rows: int = 2, columns: int = 8) -> dict[str, Tensor]:
    """Return tokens with labels equal to the tokens."""
    x = torch.arange(rows * columns).reshape(rows, columns) % CLASSES
    return {"x": x, "labels": x.clone()}


def probed(model: nn.Module, batch: dict[str, Tensor], loss_fn: Any = None) -> LossRule | None:
    def run(inputs: dict[str, Tensor], **more: int) -> Any:
        with torch.no_grad():
            return model(**inputs, **more)

    return probe_loss(model, batch, LabelTrials(model, run), loss_fn)


@pytest.mark.parametrize("columns", [1, 8])
@pytest.mark.parametrize("extra", [0.0, 0.01])
@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("margin", [0.0, 2.0, 40.0, 200.0])  # equal classes; unsure; sure; beyond fp32 resolution
def test_the_shift_is_found_however_sure_the_model_is(margin: float, counts: bool, extra: float, columns: int) -> None:
    for shifts in (False, True):
        rule = probed(Told(margin, shifts=shifts, counts=counts, extra=extra), right(columns=columns))
        assert rule is None or rule.shifts == shifts
        if columns > 1:
            assert rule is not None
            assert rule.takes_count == (counts and not extra)


def test_a_loss_that_cannot_be_computed_without_targets_is_probed() -> None:
    def strict(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        has = batch["labels"] != -100
        assert bool(has.any())
        return functional.cross_entropy(outputs["logits"][has], batch["labels"][has])

    assert probed(Told(40.0, shifts=False), right(), strict) == LossRule(shifts=False)


@pytest.mark.parametrize("micro_batch_size", [None, 1])
def test_the_targets_of_a_sure_model_are_counted(micro_batch_size: int | None) -> None:
    batch = right()
    batch["labels"][1, 1:] = -100
    model = Told(40.0, shifts=False)
    wanted = model(**batch)["loss"].item()
    engine = Engine(model, micro_batch_size=micro_batch_size)
    result = engine.step(batch)
    assert (result.loss.item(), result.tokens) == (wanted, 9)
    engine.close()


class Breakable(nn.Module):
    """The input decides whether the loss is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block()]), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](x))


def test_a_first_batch_without_a_finite_loss_decides_nothing() -> None:
    engine = Engine(Breakable(), on_nonfinite="skip")
    batch = {"x": torch.randn(2, 4, 16), "labels": torch.randint(0, CLASSES, (2, 4))}
    assert engine.step({**batch, "x": batch["x"] * float("nan")}, loss_fn=cross_entropy).skipped
    assert engine.step(batch, loss_fn=cross_entropy).tokens == 8
    engine.close()


def closed(given: Callable[..., Any], shifts: bool) -> Callable[..., Any]:
    return lambda *args: given(*args, shifts)


@pytest.mark.parametrize("bind", [lambda given, shifts: partial(given, shifts=shifts), closed])
def test_one_function_with_other_switches_is_another_loss(bind: Callable[..., Any]) -> None:
    def given(outputs: dict[str, Tensor], batch: dict[str, Tensor], shifts: bool) -> Tensor:
        logits, labels = outputs["logits"], batch["labels"]
        logits = logits[:, :-1] if shifts else logits
        return functional.cross_entropy(logits.flatten(0, 1), labels[:, shifts:].flatten())

    engine = Engine(Told(2.0, shifts=False))
    for shifts in (True, False):
        assert engine.step(right(), bind(given, shifts)).tokens == right()["labels"][:, shifts:].numel()
    engine.close()


class Body(nn.Module):
    """Count the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.count = nn.Embedding(CLASSES, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.embedding(x)


class WithBody(nn.Module):
    """Base model and head. `feeds`: the base model receives the labels, as in a decoder with shifted labels."""

    def __init__(self, feeds: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base_model, self.head, self.feeds = Body(), nn.Linear(4, CLASSES), feeds

    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: int | None = None) -> dict[str, Tensor]:
        logits = self.head(self.base_model(labels.clamp(min=0) if self.feeds else x))
        losses = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return {"loss": losses / (num_items_in_batch or (labels[:, 1:] != -100).sum()), "logits": logits}


@pytest.mark.parametrize("feeds", [False, True])
def test_a_base_model_runs_again_only_where_it_sees_the_labels(feeds: bool) -> None:
    model, batch = WithBody(feeds), right()

    def run(inputs: dict[str, Tensor], **more: int) -> Any:
        with torch.no_grad():
            return model(**inputs, **more)

    trials = LabelTrials(model, run)
    trials.learn(batch)
    rule = probe_loss(model, batch, trials, None)
    runs = model.base_model.count
    assert rule == probe_loss(model, batch, LabelTrials(model, run), None) == LossRule(shifts=True, takes_count=True)
    assert (trials.output is None) == feeds
    assert runs > 6 if feeds else runs == 2, "once to learn, once with other labels"
    recorded = LabelTrials(model, run, [float(run(batch)["loss"])])
    model.base_model.count = 0
    recorded.learn(batch)
    assert rule == probe_loss(model, batch, recorded, None)
    assert (recorded.output is None) == feeds
    assert feeds or model.base_model.count == 1, "a recording has run the model with the own labels"


def test_a_model_without_a_base_model_runs_on_its_own_labels() -> None:
    """It may have fewer classes than the other labels name, and nothing is to be learned."""
    batch, seen = right(), list[Tensor]()
    LabelTrials(Told(1.0, shifts=True), lambda inputs: seen.append(inputs["labels"])).learn(batch)
    assert torch.equal(seen[0], batch["labels"])
