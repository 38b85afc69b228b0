"""Loops that call parts of a model: the weights of the same loop in plain PyTorch, or a refusal by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import offload
from offload import SGD, Engine
from offload.errors import ConfigError
from tests.engine.compare import assert_same
from tests.engine.device import TWO_KERNELS, own_device, twin
from tests.engine.handmade import WIDTH, Stack, cross_entropy, words
from tests.matrix import quick

pytestmark = TWO_KERNELS
Losses = Callable[[Any, int], Iterable[Tensor]]
"""Losses of a step, by number; each has a backward before the next."""
Trained = tuple[list[float], dict[str, Tensor]]
"""Losses and weights."""


class Nested(nn.Module):
    """A backbone below a head, with a scale of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale, self.head = Stack(depth=2), nn.Parameter(torch.ones(())), nn.Linear(32, 32)

    def encode(self, x: Tensor) -> Tensor:
        """A way in that is no forward."""
        return self.body.blocks[0](self.body.embedding(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x) * self.scale)


def x_of(step: int) -> Tensor:
    return words(step)["x"]


def whole(model: Any, step: int) -> Tensor:
    return cross_entropy(model(x_of(step)), words(step))


def part(model: Any, step: int) -> Tensor:
    return model.body(x_of(step)).square().mean()


def distilled(model: Any, step: int) -> Tensor:
    with torch.no_grad():
        target = model.body(x_of(step + 1))
    return (model.body(x_of(step)) - target).square().mean()


def block(model: Any, step: int, number: int = 0) -> Tensor:
    return model.body.blocks[number](model.body.embedding(x_of(step))).square().mean()


def after_an_error(model: Any, step: int) -> list[Tensor]:
    with pytest.raises(IndexError):
        model.body(x_of(step) + 1000)
    return [part(model, step), whole(model, step)]


LOOPS: dict[str, Losses] = {
    "the part alone": lambda model, step: [part(model, step)],
    "the part, then the whole": lambda model, step: [part(model, step), whole(model, step)],
    "the whole, then the part": lambda model, step: [whole(model, step), part(model, step)],
    "two parts in a loss": lambda model, step: [part(model, step) + block(model, step, 1)],
    "a block alone": lambda model, step: [block(model, step)],
    "a block, then another": lambda model, step: [block(model, step + number, number) for number in range(2)],
    "another order in each step": lambda model, step: [
        f(model, step) for f in ((part, whole), (whole, block))[step % 2]
    ],
    "the head alone": lambda model, step: [model.head(torch.ones(2, 32, device=own_device())).square().mean()],
    "the part under no_grad": lambda model, step: [distilled(model, step)],
    "a method": lambda model, step: [model.encode(x_of(step)).square().mean(), whole(model, step)],
    "after an error": after_an_error,
    "a weight by itself": lambda model, step: [whole(model, step), model.scale.square()],
}
QUICK_LOOPS = (
    "two parts in a loss",
    "another order in each step",
    "the part under no_grad",
    "a method",
    "after an error",
    "a weight by itself",
)


def rate(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train_plainly(model: Any, optimizer: Any, losses: Losses) -> Trained:
    """Train in a loop that knows nothing of an engine, also over one."""
    seen = []
    for step in range(2):
        for loss in losses(model, step):
            loss.backward()
            seen.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return seen, dict(model.state_dict())


def train_wrapped(model: nn.Module, losses: Losses) -> Trained:
    return train_plainly(*offload.wrap(model, rate(model)), losses)


def train_engine(model: Any, losses: Losses, **settings: Any) -> Trained:
    engine, seen = Engine(model, SGD(lr=0.1), max_grad_norm=None, **settings), []
    for step in range(2):
        for loss in losses(engine.model, step):
            engine.backward(loss)
            seen.append(loss.item())
        engine.update()
    return seen, dict(engine.named_parameters())


def assert_alike(found: Trained, wanted: Trained) -> None:
    assert found[0] == wanted[0]
    assert_same(found[1], wanted[1])


@pytest.mark.parametrize("way", [train_wrapped, pytest.param(train_engine, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", quick(LOOPS, QUICK_LOOPS))
def test_a_loop_may_call_any_part_in_any_order(name: str, way: Callable[..., Trained]) -> None:
    losses = LOOPS[name]
    torch.manual_seed(0)
    model = Nested()
    plain = twin(model)
    assert_alike(way(model, losses), train_plainly(plain, rate(plain), losses))


def test_a_gradient_before_any_forward_is_refused() -> None:
    """The step begins with a forward, and would drop it."""
    model, optimizer = offload.wrap(model := Nested(), rate(model))
    for _ in range(2):
        with pytest.raises(ConfigError, match="scale in unit .* received a gradient outside a step"):
            model.scale.square().backward()
        whole(model, 0).backward()
        optimizer.zero_grad()  # gives the step up


def test_a_module_inside_a_block_is_no_way_in() -> None:
    model, _ = offload.wrap(model := Nested(), rate(model))
    with pytest.raises(ConfigError, match=r"blocks.0.down.* was read outside the model's forward"):
        model.body.blocks[0].down(torch.ones(2, 24, device=own_device())).sum().backward()


def test_a_part_refuses_copies_and_has_no_hooks_after_close() -> None:
    engine = Engine(Nested(), SGD(lr=0.1))
    body: Any = engine.model.body
    with pytest.raises(ConfigError, match=r"copy\.deepcopy"):
        copy.deepcopy(body)
    engine.close(restore=True)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in body.modules())


def test_a_forward_of_a_frozen_model_has_gradients_of_inputs_alone() -> None:
    torch.manual_seed(0)
    plain = twin(model := Nested())
    wanted = torch.ones(2, WIDTH, device=own_device(), requires_grad=True)
    plain.body.blocks[0](wanted).sum().backward()
    model, optimizer = offload.wrap(model, rate(model))
    for _ in range(2):
        model.requires_grad_(False)
        assert not whole(model, 0).requires_grad
        h = torch.ones(2, WIDTH, device=own_device(), requires_grad=True)
        model.body.blocks[0](h).sum().backward()
        assert torch.equal(h.grad, wanted.grad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="every parameter is now frozen"):
        optimizer.engine.backward(whole(model, 0))
    model.requires_grad_(True)
    plain.zero_grad()
    loop = LOOPS["the part, then the whole"]
    assert_alike(train_plainly(model, optimizer, loop), train_plainly(plain, rate(plain), loop))


def functional_loss(model: Any) -> Any:
    def loss(weights: dict[str, Tensor]) -> Tensor:
        result: Tensor = torch.func.functional_call(model, weights, (x_of(0),))
        return result.square().mean()

    return torch.func.grad(loss)(dict(model.named_parameters()))


def forward_derivative(model: Any) -> Any:
    with torch.no_grad(), forward_ad.dual_level():
        return model.body.blocks[0](forward_ad.make_dual(ones(), ones()))


def ones() -> Tensor:
    return torch.ones(2, WIDTH, device=own_device())


GRADIENT, TRANSFORM = (
    r"asked for the gradient of body\..*Call loss.backward\(\)",
    "inside a transform.*call the model outside",
)
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "of all weights": (
        lambda m: torch.autograd.grad(whole(m, 0), inputs=[*m.parameters()], allow_unused=True),
        GRADIENT,
    ),
    "func.grad of weights": (functional_loss, TRANSFORM),
    "func.vmap": (lambda m: torch.func.vmap(lambda h: m.body.blocks[0](h).sum())(ones()), TRANSFORM),
    "func.jvp": (lambda m: torch.func.jvp(m.body.blocks[0], (ones(),), (ones(),)), TRANSFORM),
    "forward_ad": (forward_derivative, TRANSFORM),
}


@pytest.mark.parametrize(("ask", "match"), REFUSED.values(), ids=REFUSED)
def test_derivatives_other_than_a_backward_are_refused_by_name(ask: Callable[[Any], Any], match: str) -> None:
    """The loop goes on after the refusal."""
    model, optimizer = offload.wrap(model := Nested(), rate(model))
    with pytest.raises(ConfigError, match=match):
        ask(model)
    whole(model, 0).backward()
    optimizer.step()


def test_a_wrap_of_the_whole_tells_that_it_ends_the_engine_of_a_part() -> None:
    torch.manual_seed(0)
    plain = twin(model := Nested())
    offload.wrap(model.body, rate(model.body))
    with pytest.warns(UserWarning, match="Nested are partly in an engine over Stack, which is closed here"):
        model, optimizer = offload.wrap(model, rate(model))
    loop = LOOPS["the part, then the whole"]
    assert_alike(train_plainly(model, optimizer, loop), train_plainly(plain, rate(plain), loop))
