"""The choice of how a use of a unit is kept between forward and backward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from offload import AdamW, Engine, Placement
from offload.engine.units import keep
from offload.engine.units.activation_offload import HostActivationOffload
from offload.engine.units.recompute_policy import GraphChoice
from offload.engine.units.traits import GraphTraits, UnitTraits
from tests.engine.device import own_device
from tests.engine.handmade import Block, Stack, cross_entropy, words
from tests.engine.inside import parts_of

NEEDS_TENSORS = GraphTraits()
SAVES_NOTHING = GraphTraits(keeps_nothing=True)
KEY = ("unit",)


def policy(mode: str, *, is_measured: bool = True, fits: bool = False, offloads: bool = False, pool: Any = None) -> Any:
    choice = GraphChoice(mode, has_budget=True, can_offload=pool is not None)
    return SimpleNamespace(
        choice=choice,
        on_device={KEY} if fits else set(),
        is_measured=lambda _: is_measured,
        keeps_products=lambda _: fits,
        offloads=lambda _: choice.leaves(offloads),
    )


@pytest.mark.parametrize(
    ("chosen_by", "expected"),
    [
        (policy("always", fits=True), keep.Inputs),
        (policy("always", offloads=True, pool="cpu"), keep.OffloadedGraph),
        (policy("never"), keep.SavedGraph),
        (policy("never", pool="cpu"), keep.OffloadedGraph),
        (policy("auto", fits=True), keep.SavedGraph),
        (policy("auto"), keep.Inputs),
        (policy("auto", offloads=True, pool="cpu"), keep.OffloadedGraph),
        (policy("products", fits=True), keep.Products),
        (policy("products"), keep.Inputs),
        (policy("products", is_measured=False), keep.MeasuredProducts),
    ],
)
def test_mode_and_room_choose(chosen_by: Any, expected: type) -> None:
    unit: Any = SimpleNamespace(traits=UnitTraits(), weight_bytes=100)
    assert keep.keep_for(chosen_by, unit, KEY, NEEDS_TENSORS) is expected


@pytest.mark.parametrize(
    ("traits", "graph", "expected"),
    [
        (UnitTraits(keeps=True), SAVES_NOTHING, keep.InputsAndTensors),
        (UnitTraits(mutated={0}), SAVES_NOTHING, keep.SavedGraph),
        (UnitTraits(rewrites=True), NEEDS_TENSORS, keep.Inputs),
        (UnitTraits(mutated={0}), NEEDS_TENSORS, keep.Inputs),
        (UnitTraits(copied_bytes=11), NEEDS_TENSORS, keep.Inputs),
        (UnitTraits(copied_bytes=10), NEEDS_TENSORS, keep.OffloadedGraph),
    ],
)
def test_traits_go_before_the_mode(traits: UnitTraits, graph: GraphTraits, expected: type) -> None:
    unit: Any = SimpleNamespace(traits=traits, weight_bytes=100)
    assert keep.keep_for(policy("never", pool="cpu"), unit, KEY, graph) is expected


class Counting(Block):
    """With `halves`, the block changes a buffer, and without it only reads the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, h: Tensor, halves: bool | None = None) -> Tensor:
        if halves is not None:
            self.seen.mul_(0.5).add_(h.detach().abs().mean() + 1)
        return super().forward(h * (1 + self.seen))


class CountsWhereTold(Stack):
    block = Counting

    def forward(self, x: Tensor, halves: bool | None = None) -> Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h) if halves is None else block(h, halves=halves)
        return self.head(h)


def test_a_backward_keeps_the_traits_of_its_own_call() -> None:
    """Calls with and without an argument, then one backward: a later call has other traits."""
    torch.manual_seed(0)
    model = CountsWhereTold()
    torch.manual_seed(0)
    plain = CountsWhereTold().to(own_device())
    engine = Engine(model, AdamW(lr=1e-3))

    def loss(of: nn.Module) -> Tensor:
        calls = ((0, {"halves": True}), (1, {"halves": True}), (1, {}))
        return sum(
            (cross_entropy(of(words(seed)["x"], **given), words(seed)) for seed, given in calls), torch.zeros(())
        )

    loss(plain).backward()
    engine.backward(loss(engine.model))
    engine.update()
    for name, buffer in plain.named_buffers():
        assert torch.equal(engine.model.get_buffer(name), buffer), name


class AddsThree(Block):
    def forward(self, h: Tensor, more: Tensor, last: Tensor) -> Tensor:
        return super().forward(h + more + last)


class RewritesInputs(Stack):
    """Changes all inputs of a block after the block has run."""

    block = AddsThree

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            inputs = [h * share for share in (0.5, 0.3, 0.2)]
            h = block(*inputs)
            for tensor in inputs:
                tensor.zero_()
        return self.head(h)


def test_an_input_that_cannot_be_offloaded_leaves_no_other_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second input of a block finds no memory: the copy of the first is released."""
    engine = Engine(RewritesInputs(), AdamW(lr=1e-3), placement=Placement(activations="cpu"))
    engine.backward(cross_entropy(engine.model(words(0)["x"]), words(0)))
    engine.update()
    runner = parts_of(engine).runner
    pool = runner.saved._offload
    put, taken = pool.put, []

    def fails_once(tensor: Tensor) -> Tensor:
        taken.append(tensor)
        if len(taken) == 4:
            raise MemoryError
        return put(tensor)

    monkeypatch.setattr(pool, "put", fails_once)
    with pytest.raises(MemoryError):
        engine.model(words(0)["x"])
    taken.clear()
    monkeypatch.undo()
    runner.collect()
    assert not pool.buffers_in_use


@pytest.mark.skipif(own_device().type != "cpu", reason="a lane with a thread holds a copy until it has left the device")
def test_copies_of_rewritten_inputs_leave_the_device_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    leaving: list[ref[Tensor]] = []
    num_held: list[int] = []
    copy_out = HostActivationOffload._copy_out

    def watched(self: HostActivationOffload, tensor: Tensor, *others: Any) -> Any:
        leaving.append(ref(tensor))
        num_held.append(sum(each() is not None for each in leaving))
        return copy_out(self, tensor, *others)

    monkeypatch.setattr(HostActivationOffload, "_copy_out", watched)
    placement = Placement(parameters="cpu", optimizer="cpu", activations="cpu")
    engine = Engine(RewritesInputs(), AdamW(lr=1e-3), placement=placement, recompute="always")
    engine.step(words(0), cross_entropy)
    num_copies = 3 * len(engine.model.blocks)
    assert len(num_held) >= num_copies
    assert set(num_held) == {1}
