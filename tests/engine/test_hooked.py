"""The core by hooks (`offload/engine/hooked`) trains as plain PyTorch does, bit for bit.

It stands beside the present core until it has taken over all features; see docs/next-core.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offload import AdamW, Placement, Settings
from offload.engine.hooked.engine import HookedEngine
from offload.engine.hooked.parameters import AbsentParameter
from offload.errors import ConfigError, OffloadError
from tests.cases.models import build
from tests.engine import any_batch, handmade
from tests.engine.compare import assert_same, step_of
from tests.engine.device import cpu_only
from tests.engine.handmade import Block, ReadFromOutside, Stack, cross_entropy, words
from tests.engine.reference import Reference

pytestmark = cpu_only("torch gives a CPU parameter no memory of the simulated accelerator, as it would of a GPU")
STREAMED = Placement(parameters="cpu", optimizer="cpu")
RECOMPUTES = ("always", "never")
REFUSED = {("ChangesContainers", "always")}
"""A recomputation reads lists that the caller has changed since."""


def without_caches(model: nn.Module) -> nn.Module:
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is not None:
            config.use_cache = False
    return model


def hooked(model: nn.Module, precision: str = "fp32", recompute: str = "always") -> HookedEngine:
    settings = Settings(
        optimizer=AdamW(), placement=STREAMED, max_grad_norm=1.0, precision=precision, recompute=recompute, debug=True
    )
    return HookedEngine(without_caches(model), settings)


def loss_of(loss_fn: Any, model: nn.Module, batch: dict[str, Any]) -> Tensor:
    inputs = {key: value for key, value in batch.items() if loss_fn is None or key != "labels"}
    outputs = model(**inputs)
    return outputs.loss if loss_fn is None else loss_fn(outputs, batch)


def assert_trains(
    make: Callable[[], nn.Module], batches: list[Any], loss_fn: Any, precision: str = "fp32", recompute: str = "always"
) -> None:
    """Compare losses, norms, weights and buffers of plain PyTorch after each step."""
    model = build(make)
    reference = Reference(model, precision=precision, sums_uses=False)
    with closing(hooked(model, precision, recompute)) as engine:
        for number, batch in enumerate(batches):
            wanted = step_of(reference, batch, loss_fn, seed=100 + number)
            torch.manual_seed(100 + number)
            result = engine.step(batch, partial(loss_of, loss_fn))
            assert (float(result.loss), result.grad_norm) == wanted
            assert_same(engine.values(), reference.masters)
        buffers = dict(engine.model.named_buffers())
        assert all(torch.equal(buffers[name], buffer) for name, buffer in reference.model.named_buffers())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_a_stack_trains(precision: str, recompute: str) -> None:
    assert_trains(Stack, [words(seed) for seed in range(3)], cross_entropy, precision, recompute)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", RECOMPUTES)
@pytest.mark.parametrize("model", handmade.MODELS)
def test_handwritten_models_train(model: type[nn.Module], recompute: str) -> None:
    batches = [words(seed) for seed in range(3)]
    if (model.__name__, recompute) in REFUSED:
        with pytest.raises(ConfigError, match="recompute never"):
            assert_trains(model, batches, cross_entropy, recompute=recompute)
    else:
        assert_trains(model, batches, cross_entropy, recompute=recompute)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", RECOMPUTES)
@pytest.mark.parametrize("kind", any_batch.KINDS)
def test_batches_of_any_kind_train(kind: str, recompute: str) -> None:
    case = any_batch.KINDS[kind]
    assert_trains(case.make, [case.batch(seed, 4) for seed in range(2)], case.loss_fn, recompute=recompute)


@contextmanager
def opened(make: Callable[[], nn.Module], recompute: str = "always") -> Iterator[tuple[HookedEngine, nn.Module]]:
    """Yield an engine, and the model with its weights before."""
    model, plain = build(make), build(make)
    with closing(hooked(model, recompute=recompute)) as engine:
        yield engine, plain


def test_parameters_stay_the_same_objects_with_true_values() -> None:
    """A read outside of a step needs no door: the values are those of plain PyTorch, and so is their gradient."""
    with opened(Stack) as (engine, plain):
        name = "blocks.1.up.weight"
        weight, wanted = engine.model.get_parameter(name), plain.get_parameter(name)
        assert isinstance(weight, AbsentParameter)
        assert isinstance(weight, nn.Parameter)
        assert weight.shape == wanted.shape
        assert torch.equal(weight, wanted)
        assert torch.equal(weight.t() @ torch.ones(weight.shape[0]), wanted.t() @ torch.ones(weight.shape[0]))
        (gradient,) = torch.autograd.grad((weight**2).sum(), weight)
        assert torch.equal(gradient, 2 * wanted)
        view = weight.detach()
        engine.step(words(0), partial(loss_of, cross_entropy))
        assert torch.equal(view, wanted)
        assert engine.model.get_parameter(name) is weight
        assert_same(engine.model.state_dict(), engine.values())


def test_a_part_of_a_block_called_alone_trains() -> None:
    class CallsParts(Stack):
        def forward(self, x: Tensor) -> Tensor:
            h = self.embedding(x)
            for block in self.blocks:
                assert isinstance(block, Block)
                h = h + block.down(torch.tanh(block.up(block.norm(h))))
            return self.head(h)

    assert_trains(CallsParts, [words(seed) for seed in range(2)], cross_entropy)


class KeepsItsLoss(Block):
    def forward(self, h: Tensor) -> Tensor:
        h = super().forward(h)
        self.own_loss = h.square().mean()
        return h


@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_losses_that_blocks_keep_train(recompute: str) -> None:
    class AddsThem(Stack):
        block = KeepsItsLoss

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        loss = cross_entropy(model(batch["x"]), batch)
        kept: list[Tensor] = [module.own_loss for module in model.modules() if isinstance(module, KeepsItsLoss)]
        return loss + torch.stack(kept).sum()

    plain = build(AddsThem)
    loss_fn(plain, words(0)).backward()
    with opened(AddsThem, recompute) as (engine, _):
        gradients: dict[str, Tensor] = {}
        for name, parameter in engine.model.named_parameters():
            parameter.register_hook(partial(gradients.__setitem__, name))
        engine.step(words(0), loss_fn)
        wanted = {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}
        assert_same({name: gradients[name] for name in wanted}, wanted)


def test_a_value_that_changes_between_forward_and_recomputation_is_refused() -> None:
    scale = [1.0]

    class ReadsOutside(Block):
        def forward(self, h: Tensor) -> Tensor:
            return super().forward(h * scale[0])

    class Changing(Stack):
        block = ReadsOutside

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        scale[0] = 1.0
        loss = cross_entropy(model(batch["x"]), batch)
        scale[0] = 2.0
        return loss

    with opened(Changing) as (engine, _), pytest.raises(ConfigError, match=r"blocks\.2.*recompute never"):
        engine.step(words(0), loss_fn)
    with opened(Changing, "never") as (engine, _):
        engine.step(words(0), loss_fn)


def test_a_view_of_a_weight_that_outlives_the_use_is_refused() -> None:
    kept: list[Tensor] = []

    class Keeps(Block):
        def forward(self, h: Tensor) -> Tensor:
            kept.append(self.up.weight.detach()[:2])
            return super().forward(h)

    class Keeping(Stack):
        block = Keeps

    with opened(Keeping, "never") as (engine, _), pytest.raises(OffloadError, match=r"blocks\.0.*lives on"):
        engine.step(words(0), partial(loss_of, cross_entropy))


def test_a_checkpoint_of_a_script_and_weights_read_outside_train() -> None:
    class Outside(ReadFromOutside):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    assert_trains(Outside, [words(seed) for seed in range(2)], cross_entropy, recompute="never")
