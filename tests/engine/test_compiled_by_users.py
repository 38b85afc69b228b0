"""Models compiled by the user, or calling compiled functions: each form, and how the engine treats this form."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from offload import Engine, Placement
from offload.errors import ConfigError
from tests.cases.models import build, llama, tokens
from tests.engine.compare import assert_same, own_step_of, step_of, weights
from tests.engine.device import own_device
from tests.engine.handmade import Block, Stack, cross_entropy, words
from tests.engine.reference import Reference
from tests.engine.test_compiled import backend

BACKEND = backend(1 + 2**-18, 1 + 2**-18)
"""Gives bits unlike an uncompiled forward."""
FAR = backend(1 + 2**-6, 1 + 2**-6)
"""Differs visibly even in bf16."""
STEPS = 2


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# -- compilation removed by the engine ---------------------------------------------------------------------------------


def whole(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend=BACKEND)  # type: ignore[return-value]


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend=BACKEND)
    return model


def parts_of_layers(model: nn.Module) -> nn.Module:
    for each in model.model.layers:
        each.mlp, each.self_attn.q_proj = whole(each.mlp), whole(each.self_attn.q_proj)
    return whole(model)


def forward(model: nn.Module) -> nn.Module:
    layer = model.model.layers[1]
    layer.forward = torch.compile(layer.forward, backend=BACKEND)
    return model


def foreign_forward(model: nn.Module) -> nn.Module:
    """Compile a function other than a method of the class."""
    layer = model.model.layers[1]
    own = layer.forward
    layer.forward = torch.compile(lambda *args, **kwargs: own(*args, **kwargs), backend=BACKEND)
    return model


TAKEN_OFF: dict[Callable[[nn.Module], nn.Module], str] = {
    whole: "the model",
    in_place: "the model",
    parts_of_layers: "the model, model.layers.0.mlp, model.layers.0.self_attn.q_proj and ",
    forward: "model.layers.1",
    foreign_forward: "model.layers.1",
}


@pytest.mark.slow
@pytest.mark.parametrize("how", TAKEN_OFF)
def test_what_torch_compile_has_put_around_is_taken_off_and_said(how: Callable[[nn.Module], nn.Module]) -> None:
    """Steps and model calls have the bits of an uncompiled model. Parameter names have no prefix."""
    plain, compiled = Engine(build(llama)), how(build(llama))
    with pytest.warns(UserWarning, match=f"torch.compile was removed from {TAKEN_OFF[how]}.*compile=always compiles"):
        engine = Engine(compiled)
    for step in range(STEPS):
        assert step_of(plain, tokens(step)) == step_of(engine, tokens(step))
    own_step_of(plain, lambda model: model(**tokens()).loss)
    own_step_of(engine, lambda _model: compiled(**tokens()).loss)
    wanted = weights(plain)
    assert_same(weights(engine), wanted)
    engine.close(restore=True)
    assert_same(dict(engine.model.state_dict()), wanted)


def test_a_forward_that_is_never_compiled_is_left_as_it_is() -> None:
    model = build(llama)
    layer = model.model.layers[1]
    layer.forward = torch.compiler.disable(layer.forward)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Engine(model).step(tokens()).loss.isfinite()
    assert "forward" in vars(layer)


# -- compilation kept by the engine ------------------------------------------------------------------------------------


class CallsAFunction(Block):
    """Call a compiled function with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.activation = torch.compile(lambda h: functional.dropout(torch.tanh(h), 0.1), backend=FAR)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(self.activation(self.up(self.norm(h))))


class CompiledClass(Block):
    """Compile the unit's own forward."""

    @torch.compile(backend=FAR)
    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(torch.tanh(self.up(self.norm(h))))


class GivesWeights(Block):
    """Pass a weight, a slot view, to a compiled function."""

    def __init__(self) -> None:
        super().__init__()
        self.product = torch.compile(lambda h, weight: functional.linear(h, weight), backend=FAR)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(torch.tanh(self.product(self.norm(h), self.up.weight)))


WAYS: list[dict[str, Any]] = [
    {"recompute": "always"},
    {"recompute": "never"},
    {"recompute": "never", "precision": "bf16", "placement": Placement(parameters="cpu", graphs="cpu")},
]


@pytest.mark.slow
@pytest.mark.parametrize(("block", "way"), list(zip((CallsAFunction, CompiledClass, GivesWeights), WAYS, strict=True)))
def test_what_a_forward_calls_stays_compiled(block: type[nn.Module], way: dict[str, Any]) -> None:
    """Bits equal plain PyTorch, although the recording pass is the first to call the function. No warning is given.
    Break: record without the stance that runs compiled functions eagerly (`WatchingMode`).
    """
    model = build(lambda: Stack(block))
    plain, eager = copy.deepcopy(model), Engine(build(lambda: Stack(block)), **way)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="torch.compile")
        engine = Engine(model, **way)
    reference = Reference(plain, precision=way.get("precision", "fp32"))

    def steps(trainer: Engine | Reference) -> list[Any]:
        return [step_of(trainer, words(seed), cross_entropy, seed=seed) for seed in range(STEPS)]

    found = steps(engine)
    assert found == steps(reference)
    assert_same(weights(engine), reference.masters)
    with torch.compiler.set_stance("force_eager"):
        assert found != steps(eager), "it says something"


@pytest.mark.slow
def test_a_compiled_loss_is_taken() -> None:
    compiled = torch.compile(cross_entropy, backend=FAR)
    loss = Engine(build(Stack)).step(words(), compiled).loss.item()
    outputs = build(Stack).to(own_device())(words()["x"])
    assert loss == compiled(outputs, words()).item() != cross_entropy(outputs, words()).item()


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo does not know")
@pytest.mark.parametrize("how", [whole, in_place], ids=lambda how: how.__name__)
def test_a_model_is_not_compiled_later(how: Callable[[nn.Module], nn.Module]) -> None:
    engine = Engine(build(llama))
    compiled = how(engine.model)
    with pytest.raises(ConfigError, match=r"torch\.compile was applied"):
        compiled(**tokens())
    if compiled is not engine.model:
        engine.step(tokens())
