"""Hand-written models match plain PyTorch bit for bit, with structures that no list of known models predicts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import Engine, Placement
from offload.errors import OffloadError
from tests.cases.models import batches, build, gpt_neox, llama4, opt, qwen3
from tests.engine.compare import train_both
from tests.engine.device import NO_LSTM, cpu_only
from tests.engine.handmade import (
    MODELS,
    WIDTH,
    WITHOUT_INPUTS,
    WORDS,
    Block,
    ChangesContainers,
    ListedTwice,
    ReadFromOutside,
    Recurrent,
    ScalesItsInput,
    Stack,
    UsedTwice,
    cross_entropy,
    words,
)
from tests.engine.reference import count_labels, sum_by_layer
from tests.matrix import matrix, quick

SOME = [words(seed) for seed in range(3)]


@matrix(strength=1, precision=["fp32", "bf16"], make=[qwen3, opt, gpt_neox, llama4])
def test_causal_models_are_bit_equal(make: Callable[[], nn.Module], precision: str) -> None:
    """Unmodified transformers models. Others are cases of tests/cases/features.py."""
    train_both(build(make), batches(3), precision=precision)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "precision", "recompute"),
    [(model, ("fp32", "bf16")[n % 2], ("always", "never")[n // 2 % 2]) for n, model in enumerate(MODELS)],
)
def test_streams_bit_equal(model: type[nn.Module], precision: str, recompute: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no unit has to stay on the device
        settings = {"precision": precision, "debug": True, "recompute": recompute}
        train_both(build(model), SOME, loss_fn=cross_entropy, group=sum_by_layer, **settings)


@pytest.mark.parametrize(("recompute", "rows"), quick([("always", None), ("never", 2)], [("always", None)]))
def test_containers_that_units_change_are_the_callers(recompute: str, rows: int | None) -> None:
    """Equal within rounding: a tensor in several containers enters a unit once, and gradients are summed there."""
    settings = {"recompute": recompute, "micro_batch_size": rows, "debug": True}
    settings["whole"] = rows is not None  # the containers mix rows
    train_both(build(ChangesContainers), SOME, loss_fn=cross_entropy, count=count_labels, within=1e-5, **settings)


@pytest.mark.slow
def test_a_block_that_runs_twice_adds_its_gradients_up() -> None:
    """Gradients sum over uses in fp32. The reference lists each use, to tell them apart."""
    settings = {"precision": "bf16", "debug": True, "plain": build(ListedTwice)}
    train_both(build(UsedTwice), SOME, loss_fn=cross_entropy, **settings)


@pytest.mark.slow
@NO_LSTM
def test_lstm() -> None:
    """Without gradients, torch runs another fp32 LSTM kernel, with a difference of 3e-8. A forward with later
    recomputation must not use this kernel.
    """
    train_both(build(Recurrent), SOME, loss_fn=cross_entropy, recompute="always")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_weight_that_is_read_from_outside_stays_on_the_device(precision: str) -> None:
    with pytest.warns(UserWarning, match="embedding.*from outside"):
        train_both(build(ReadFromOutside), SOME, loss_fn=cross_entropy, precision=precision)


@pytest.mark.slow
@pytest.mark.parametrize("model", WITHOUT_INPUTS)
def test_a_unit_that_takes_no_tensor(model: type[nn.Module]) -> None:
    """In micro-batches the unit runs once for all, and gradients are summed first: the last bits differ. Batches stay
    whole if a model moves buffers and reads them.
    """
    placement = Placement(activations="cpu")
    train_both(build(model), SOME, placement=placement, debug=True, loss_fn=cross_entropy, group=sum_by_layer)
    settings = {"loss_fn": cross_entropy, "micro_batch_size": 1, "count": count_labels}
    settings["whole"] = model.__name__ in ("PromptedAndMoving", "SpectralNorm")
    engine, reference = train_both(build(model), SOME, within=2e-6, **settings)
    wanted = dict(reference.model.named_buffers())
    assert all(torch.allclose(buffer, wanted[name], atol=1e-6) for name, buffer in engine.model.named_buffers())


@dataclass
class State:
    h: Tensor
    terms: Any = None
    name: str = "state"


@dataclass(frozen=True)
class Terms:
    total: Tensor | float
    parts: list[Tensor] = field(default_factory=list)


class PassesRecords(Block):
    """Takes and returns a dataclass, new or changed in place, with another dataclass inside."""

    is_in_place = False

    def forward(self, state: Any) -> Any:  # type: ignore[override]
        h, terms = super().forward(state.h), state.terms
        terms = Terms(terms.total + h.square().mean(), [*terms.parts, h.mean()])
        if not self.is_in_place:
            return type(state)(h=h, terms=terms, name=state.name)
        state.h, state.terms = h, terms
        return None


class Records(Stack):
    block = PassesRecords

    def __init__(self, kind: Callable[..., Any], is_in_place: bool) -> None:
        super().__init__()
        self.kind = kind
        for block in self.blocks:
            block.is_in_place = is_in_place

    def forward(self, x: Tensor) -> Tensor:
        state = self.kind(h=self.embedding(x), terms=Terms(0.0), name="state")
        for block in self.blocks:
            state = block(state) or state
        assert state.name == "state"
        return self.head(state.h) * (1 + state.terms.total + sum(state.terms.parts))


@pytest.mark.parametrize(
    ("kind", "is_in_place", "recompute"),
    quick(
        [(k, p, r) for k in (State, SimpleNamespace) for p in (False, True) for r in ("always", "never")],
        [(State, False, "always"), (SimpleNamespace, True, "never")],
    ),
)
def test_dataclasses_pass_between_units(kind: Callable[..., Any], is_in_place: bool, recompute: str) -> None:
    make = partial(Records, kind, is_in_place)
    train_both(build(make), SOME[:2], loss_fn=cross_entropy, recompute=recompute)


class ChangesAView(Stack):
    """A unit changes part of the caller's tensor in place."""

    block = ScalesItsInput

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x).clone()
        for block in self.blocks:
            h = h + block(h[:, :3]).mean()
        return self.head(h)


class SparseEmbedding(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, sparse=True)


NO_SPARSE = pytest.param(
    SparseEmbedding, "embedding", marks=cpu_only("the simulated accelerator has no sparse tensors")
)


@pytest.mark.parametrize(("model", "name"), [(ChangesAView, r"blocks\.0"), NO_SPARSE])
def test_what_cannot_stream_is_refused_by_the_units_name(model: type[nn.Module], name: str) -> None:
    with pytest.raises(OffloadError, match=name):
        Engine(build(model)).step(words(), loss_fn=cross_entropy)
