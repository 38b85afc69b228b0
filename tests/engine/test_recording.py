"""Refusals by the recording pass: tensors that would silently lose their gradient when units stream."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from offload import LOMO, SGD, Engine
from offload.engine.recording import recording
from offload.errors import ConfigError
from offload.optim.rule import UpdateRule
from tests.cases.models import build, llama, mixtral, tokens
from tests.engine.compare import PROPORTIONAL, train_both, weights
from tests.engine.device import own_device, twin
from tests.engine.handmade import WORDS, Block, Stack, cross_entropy, words
from tests.engine.inside import resident_names, unit_names
from tests.engine.reference import count_labels


def collected(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    return outputs.aux_loss + outputs.hidden_states[1].square().mean() + outputs.logits.square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["always", "never"])
@pytest.mark.parametrize("loss_fn", [None, collected], ids=["own", "given"])
def test_what_transformers_collects_inside_units_has_its_gradients(recompute: str, loss_fn: Any) -> None:
    """Gradients of the router loss, over the whole batch. Without them the gate gradient is 20 times too small."""
    model = build(lambda: mixtral(output_router_logits=True, output_hidden_states=True))
    batches = [{**tokens(seed), "attention_mask": torch.ones_like(tokens()["input_ids"])} for seed in range(2)]
    parts = Engine(copy.deepcopy(model), optimizer=PROPORTIONAL, recompute=recompute, micro_batch_size=2)
    engine, _ = train_both(model, batches, loss_fn=loss_fn, within=1e-5, recompute=recompute)
    for batch in batches:
        parts.step(batch, loss_fn=loss_fn)
    for name, value in weights(parts).items():
        torch.testing.assert_close(value, weights(engine)[name], rtol=1e-5, atol=1e-6)


class Leaks(Block):
    def forward(self, h: Tensor) -> Tensor:
        self.saved = self.up(h)
        return super().forward(h)


class LeaksIntoTheLoss(Stack):
    def __init__(self) -> None:
        super().__init__(Leaks)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(block.saved.square().mean() for block in self.blocks)


class Container:
    """Not a pytree of tensors, so the engine cannot see inside."""

    def __init__(self) -> None:
        self.kept: list[Any] = []


class Through(Stack):
    """Runs each block by `call(block, h, container)`, with one container per pass."""

    def __init__(self, call: Callable[[Any, Any, Container], Any], block: type[nn.Module] = Block) -> None:
        super().__init__(block)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        h, container = self.embedding(x), Container()
        for block in self.blocks:
            h = self.call(block, h, container)
        return self.head(h)


def leaks_into_the_next(block: Any, h: Tensor, container: Container) -> Tensor:
    """Read an attribute left by the previous block."""
    h = block(h)
    for before in container.kept[-1:]:
        h = h + before.saved.mean()
    container.kept.append(block)
    return h


class PassesAContainer(Block):
    def forward(self, h: Tensor, container: Container) -> Tensor:  # type: ignore[override]
        if container.kept:
            h = h + 0.1 * container.kept[-1]
        h = super().forward(h)
        container.kept.append(h)
        return h


class CollectsByHook(Stack):
    """A forward hook inside a block collects an output, like transformers' recorders."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: list[Tensor] = []
        self.blocks[1].up.register_forward_hook(lambda module, args, output: self.collected.append(output))

    def forward(self, x: Tensor) -> Tensor:
        self.collected.clear()
        return super().forward(x) + self.collected[0].square().mean()


@dataclass(slots=True)
class Hidden:
    """Not registered with pytree either."""

    state: Tensor


class WrapsItsResult(Block):
    def forward(self, h: Tensor) -> Hidden:  # type: ignore[override]
        return Hidden(super().forward(h))


class CheckpointsReentrantly(Block):
    def forward(self, h: Tensor) -> Tensor:
        return checkpoint(super().forward, h, use_reentrant=True)


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda: Stack(CheckpointsReentrantly), r"unit blocks\.0 runs Block\.forward"),
        (lambda: Through(lambda block, h, _: checkpoint(block, h, use_reentrant=True)), "Block"),
    ],
)
def test_a_reentrant_checkpoint_is_refused_by_name(make: Callable[[], nn.Module], where: str) -> None:
    with (
        Engine(build(make)) as engine,
        pytest.raises(ConfigError, match=rf"{where} in torch.* Set use_reentrant=False"),
    ):
        engine.step(words(), cross_entropy)


@pytest.mark.parametrize(
    "model",
    [
        lambda: Through(lambda block, h, _: block(h).state, WrapsItsResult),
        LeaksIntoTheLoss,
        lambda: Through(leaks_into_the_next, Leaks),
        lambda: Through(lambda block, h, container: block(h, container), PassesAContainer),
        CollectsByHook,
    ],
    ids=["objects", "the loss", "the next unit", "a container", "a hook"],
)
def test_tensors_that_leave_a_unit_by_a_side_door_are_refused(model: Callable[[], nn.Module]) -> None:
    engine = Engine(build(model))
    with pytest.raises(ConfigError, match=r"inside unit blocks\.\d.*without being an argument"):
        engine.step(words(), loss_fn=cross_entropy)


class LeaksDetached(Stack):
    """Detached statistics cannot lose a gradient."""

    def __init__(self) -> None:
        super().__init__(Leaks)

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        self.statistics = [block.saved.detach().square().mean() for block in self.blocks]
        return result + 0.1 * sum(self.statistics)


def test_detached_tensors_may_leave_a_unit() -> None:
    train_both(build(LeaksDetached), [words(s) for s in range(2)], loss_fn=cross_entropy)


class Inner(nn.Module):
    """A module list inside a block belongs to the block."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, h: Tensor) -> Tensor:
        return h + torch.tanh(self.parts[1](torch.tanh(self.parts[0](h))))


def test_units_are_the_outermost_lists() -> None:
    engine = Engine(build(lambda: Stack(Inner)))
    assert unit_names(engine) == ["embedding", "head", "blocks.0", "blocks.1", "blocks.2"]
    assert resident_names(engine) == []


def test_units_of_a_transformers_model() -> None:
    engine = Engine(build(llama))
    assert unit_names(engine) == ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]
    assert resident_names(engine) == ["model.norm"]


class CallsOtherBlocks(Stack):
    """One block runs another in its forward."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self.blocks[0], "other", self.blocks[1])
        self.blocks[0].forward = self.nested  # type: ignore[method-assign]

    def nested(self, h: Tensor) -> Tensor:
        return Block.forward(self.blocks[0], self.blocks[0].other(h))


def test_a_unit_called_from_inside_another_stays_on_the_device() -> None:
    engine = Engine(CallsOtherBlocks())
    with pytest.warns(UserWarning, match=r"blocks\.1"):
        engine.step(words(), loss_fn=cross_entropy)
    assert resident_names(engine) == ["blocks.1"]


class Shifted(Stack):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + shift


@pytest.mark.parametrize("rule", [SGD(lr=0.0), LOMO(lr=0.0)], ids=["sgd", "lomo"])
def test_what_trains_beside_the_model_has_the_gradients_of_each_step_once(rule: UpdateRule) -> None:
    """The recording pass, and a backward for the norm alone, neither add gradients nor call hooks."""
    shift, heat = nn.Parameter(torch.zeros(1, 1, WORDS)), nn.Parameter(torch.ones(()))
    called: list[Tensor] = []
    heat.register_post_accumulate_grad_hook(called.append)
    engine, plain = Engine(build(Shifted), optimizer=rule, max_grad_norm=1.0), twin(build(Shifted))

    def loss_fn(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return cross_entropy(outputs * heat, batch)

    for seed in range(2):
        batch = words(seed)
        engine.step({**batch, "shift": shift}, loss_fn=loss_fn)
        assert len(called) == seed + 1
        found = [parameter.grad.clone() for parameter in (shift, heat)]
        wanted = torch.autograd.grad(loss_fn(plain(batch["x"], shift.to(own_device())), batch), (shift, heat))
        for one, two, parameter in zip(found, wanted, (shift, heat), strict=True):
            torch.testing.assert_close(one, two)
            parameter.grad = None


def divides(weight: Tensor) -> None:
    weight.data.div_(weight.data.norm())


def replaces(weight: Tensor) -> None:
    weight.data = functional.normalize(weight.data)


def clamps(weight: Tensor, bound: float = 9) -> None:
    """Changes no value within the bounds."""
    weight.data.clamp_(-bound, bound)


class WritesOwn(Block):
    write: Callable[[Tensor], None]

    def forward(self, h: Tensor) -> Tensor:
        self.write(self.up.weight)
        return super().forward(h)


class WritesFromAbove(Stack):
    write: Callable[[Tensor], None]

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.blocks[1].up.weight)
        return super().forward(x)


def writing(is_own: bool, write: Callable[[Tensor], None]) -> nn.Module:
    """Return a model with a write to weights, in the block itself or from above."""
    (WritesOwn if is_own else WritesFromAbove).write = staticmethod(write)
    return build(lambda: Stack(WritesOwn) if is_own else WritesFromAbove())


@pytest.mark.filterwarnings("ignore:unit blocks.1 is read from outside")
@pytest.mark.parametrize("write", [divides, replaces])
@pytest.mark.parametrize(("is_own", "copied"), [(True, 4096), (True, 0), (False, 4096)])
def test_a_forward_that_writes_to_weights_past_the_version_counter_is_refused(
    write: Callable[[Tensor], None], is_own: bool, copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next fetch or update would silently overwrite the written values."""
    monkeypatch.setattr(recording, "_COPIED", copied)  # 0: sums, as of a large weight
    with Engine(writing(is_own, write)) as engine:
        before = weights(engine)
        text = "writes to weights of unit" if is_own or write is not replaces else "cannot become"
        with pytest.raises(ConfigError, match=text):
            engine.step(words(), loss_fn=cross_entropy)
        assert all(torch.equal(value, before[name]) for name, value in weights(engine).items())


@pytest.mark.filterwarnings("ignore:unit blocks.1 is read from outside")
@pytest.mark.parametrize("is_own", [True, False])
def test_a_write_that_changes_nothing_is_told_and_the_bits_are_those_of_the_model(is_own: bool) -> None:
    """Gemma 3n clamps weights in each forward, within bounds beyond all values."""
    with pytest.warns(UserWarning, match="writes to weights of unit blocks"):
        train_both(writing(is_own, clamps), [words(0), words(1)], loss_fn=cross_entropy, count=count_labels)


RUNS: dict[str, Callable[[Engine, dict[str, Tensor]], Any]] = {
    "step": lambda engine, batch: engine.step(batch, cross_entropy),
    "evaluate": lambda engine, batch: engine.evaluate(batch, cross_entropy),
    "own loop": lambda engine, batch: (
        engine.backward(cross_entropy(engine.model(batch["x"]), batch)),
        engine.update(),
    ),
}


@pytest.mark.filterwarnings("ignore:unit blocks.1 is read from outside", "ignore:the model's forward writes")
@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("run", RUNS)
def test_a_write_that_changes_values_only_after_an_update_is_refused(run: str, is_own: bool) -> None:
    """A clamp within bounds, until an update moves weights beyond."""
    bound = max(block.up.weight.abs().max().item() for block in writing(is_own, clamps).blocks)
    with Engine(writing(is_own, partial(clamps, bound=bound)), SGD(lr=50.0), max_grad_norm=None) as engine:
        RUNS["own loop" if run == "own loop" else "step"](engine, words())
        before = weights(engine)
        assert before["blocks.1.up.weight"].abs().max() > bound
        with pytest.raises(ConfigError, match=r"forward writes to weights of unit blocks\.[012]"):
            RUNS[run](engine, words(1))
        assert all(torch.equal(value, before[name]) for name, value in weights(engine).items())
