"""Tensors that blocks keep outside their results, for the loss of a loop: the weights are those of plain PyTorch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar
from weakref import ref

import pytest
import torch
from torch import Tensor

import offload
from offload.errors import ConfigError
from tests.engine.device import TWO_KERNELS, twin
from tests.engine.handmade import Block, Stack, cross_entropy, words
from tests.integrations.test_entries import Losses, assert_alike, rate, train_engine, train_plainly, train_wrapped
from tests.matrix import quick

pytestmark = TWO_KERNELS
Keep = Callable[[Any, Tensor, Tensor], object]
LOOSE: list[Tensor] = []


class Keeps(Block):
    """A block that keeps something of its forward."""

    collected: ClassVar[list[Tensor]] = []

    def __init__(self, keep: Keep) -> None:
        super().__init__()
        self.keep, self.kept, self.log = keep, None, list[Tensor]()

    def forward(self, h: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(h)))
        if self.keep is loosely:
            LOOSE.append(hidden.square())
        self.keep(self, h, hidden)
        return h + self.down(hidden)


def loosely(*_: Any) -> None:
    """Mark a block that keeps a tensor in `LOOSE`."""


def kept(model: Any) -> Any:
    return [block.kept for block in model.blocks]


def emptied(log: list[Tensor]) -> list[Tensor]:
    tensors = list(log)
    log.clear()
    return tensors


def put(value: Callable[[Tensor, Tensor], Tensor]) -> Keep:
    return lambda block, h, hidden: setattr(block, "kept", value(h, hidden))


def retain(block: Any, _h: Tensor, hidden: Tensor) -> None:
    hidden.retain_grad()
    block.kept = hidden


WAYS_TO_KEEP: dict[str, tuple[Keep, Callable[[Any], list[Tensor]]]] = {
    "a sum": (put(lambda _, hidden: hidden.sum() / 100), kept),
    "a hidden tensor": (put(lambda _, hidden: hidden), kept),
    "a view": (put(lambda _, hidden: hidden[..., 0]), kept),
    "an input": (put(lambda h, _: h), kept),
    "a list": (
        lambda block, _, hidden: block.log.append(hidden.square()),
        lambda model: [t for block in model.blocks for t in emptied(block.log)],
    ),
    "a list of the class": (
        lambda block, _, hidden: block.collected.append(hidden.square()),
        lambda model: emptied(model.blocks[0].collected),
    ),
    "a list of the module": (loosely, lambda _: emptied(LOOSE)),
    "a tensor with its gradient": (retain, kept),
}
QUICK_WAYS = ("a view", "an input", "a list of the class", "a list of the module", "a tensor with its gradient")


def loss_of(model: Any, step: int, find: Callable[[Any], list[Tensor]]) -> Tensor:
    batch = words(step)
    loss = cross_entropy(model(batch["x"]), batch)
    return loss + sum((t.square().mean() for t in find(model)), torch.zeros(()))


def losses_of(find: Callable[[Any], list[Tensor]], gradients: list[float] | None = None) -> Losses:
    """Return the loss of each step. `gradients` gets those of the blocks' tensors."""

    def of_step(model: Any, step: int) -> Iterator[Tensor]:
        yield loss_of(model, step, find)
        if gradients is not None:
            gradients.extend(block.kept.grad.sum().item() for block in model.blocks if block.keep is retain)

    return of_step


def make(keep: Keep) -> Any:
    torch.manual_seed(0)
    Keeps.collected.clear()
    LOOSE.clear()
    return Stack(lambda: Keeps(keep), depth=2)


@pytest.mark.parametrize(
    "way", [train_wrapped, pytest.param(partial(train_engine, recompute="never"), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("is_used", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", quick(WAYS_TO_KEEP, QUICK_WAYS))
def test_a_loop_may_add_what_blocks_keep_to_its_loss(name: str, is_used: bool, way: Any) -> None:
    """Not used, it changes nothing."""
    keep, find = WAYS_TO_KEEP[name]
    model = make(keep)
    found = find if is_used else lambda _: []
    gradients: list[list[float]] = [[], []]
    plain = twin(model)
    wanted = train_plainly(plain, rate(plain), losses_of(found, gradients[0]))
    Keeps.collected.clear()
    LOOSE.clear()
    if way is train_wrapped:
        assert_alike(way(model, losses_of(found, gradients[1])), wanted)
        assert gradients[1] == gradients[0]
    else:
        assert_alike(way(model, losses_of(found)), wanted)


@pytest.mark.parametrize("collects", [list, dict])
def test_hooks_inside_blocks_may_collect_tensors(collects: type) -> None:
    def collect(model: Any) -> Callable[[Any], list[Tensor]]:
        found: Any = collects()
        for block in model.blocks:
            if collects is list:
                block.up.register_forward_hook(lambda _module, _args, output: found.append(output))
            else:
                block.up.register_forward_hook(lambda module, _args, output: found.update({id(module): output}))
        return lambda _: emptied(found) if collects is list else list(found.values())

    model = make(lambda *_: None)
    plain = twin(model)
    wanted = train_plainly(plain, rate(plain), losses_of(collect(plain)))
    assert_alike(train_wrapped(model, losses_of(collect(model))), wanted)


def test_a_loop_of_forwards_alone_holds_one_kept_tensor() -> None:
    model, _ = offload.wrap(model := make(WAYS_TO_KEEP["a hidden tensor"][0]), rate(model))
    references = []
    for step in range(4):
        model(words(step)["x"])
        references.append(ref(model.blocks[0].kept))
    gc.collect()
    assert [each() is not None for each in references] == [False, False, False, True]


def test_a_kept_view_of_weights_is_refused_in_a_loss() -> None:
    model, optimizer = offload.wrap(model := make(put_weight), rate(model))
    loss_of(model, 0, lambda _: []).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ConfigError, match=r"unit blocks\.\d keeps a view of its weights outside"):
        loss_of(model, 0, kept).backward()


def put_weight(block: Any, *_: Tensor) -> None:
    block.kept = block.up.weight[0]
