"""Saved autograd graphs on host or disk: the same bits as graphs on the device, as recomputation and as plain PyTorch;
one forward per unit, no device memory meanwhile, no leftovers.
"""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from offload import Engine, Placement
from offload.engine.units import offloaded_graph
from offload.engine.units.recompute_policy import GraphChoice
from offload.errors import ConfigError, DoesNotFitError, OffloadError
from tests.cases.models import build, llama, tokens
from tests.engine.compare import assert_same, train_both, weights
from tests.engine.handmade import Block, CheckpointsItself, Stack, cross_entropy, words
from tests.engine.inside import memory_of, parts_of


@pytest.fixture(autouse=True)
def move_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offload even tensors below a page: the models here save nothing larger."""
    monkeypatch.setattr(offloaded_graph, "SMALLEST_BYTES", 1)


def over(block: type[nn.Module] = Block, depth: int = 3, graphs: str = "cpu", **settings: Any) -> Engine:
    """Return an engine over a stack of blocks, with graphs on a tier."""
    settings = {"recompute": "never", "placement": Placement(graphs=graphs), **settings}
    return Engine(build(lambda: Stack(block, depth)), **settings)


def graph_bytes(engine: Engine) -> int:
    """Return the host bytes allocated for graphs."""
    return memory_of(engine).host.allocations.get("graphs", 0)


RUNS = Counter[nn.Module]()
"""Forward counts of `Counting` blocks. Outside the module, since recomputation restores module state."""


class Counting(Block):
    """Count forwards in `RUNS`."""

    def forward(self, h: Tensor) -> Tensor:
        RUNS[self] += 1
        return super().forward(h)


def runs(engine: Engine, **batch: int) -> list[int]:
    """Run a step. Return the number of forwards per block."""
    RUNS.clear()
    engine.step(words(0, **batch), loss_fn=cross_entropy)
    found = [RUNS[block] for block in engine.model.blocks]
    RUNS.clear()
    return found


def test_a_forward_is_made_once() -> None:
    """With `always`, from the second step on: the first step measures the graphs."""
    for tier, num_runs in (("cpu", 1), ("device", 2)):
        engine = over(Counting, graphs=tier, recompute="always")
        found = [runs(engine) for _ in range(3)]
        assert {number for step in found[1:] for number in step} == {num_runs}


@pytest.mark.slow
def test_memory_of_what_goes_below_is_free_on_the_device() -> None:
    """Nothing in the graph keeps an offloaded storage alive, neither inputs nor results."""
    engine = over(depth=8)
    engine.step(words(0), loss_fn=cross_entropy)
    alive = []

    def loss_fn(outputs: Tensor, rows: dict[str, Tensor]) -> Tensor:
        gc.collect()
        alive.append(sum(isinstance(o, Tensor) and o.shape == hidden for o in gc.get_objects()))
        return cross_entropy(outputs, rows)

    rows = words(0)
    hidden = torch.Size([*next(iter(rows.values())).shape, build(Stack).head.in_features])
    engine.step(rows, loss_fn=loss_fn)
    deep = over(depth=16)
    deep.step(rows, loss_fn=cross_entropy)
    deep.step(rows, loss_fn=loss_fn)
    assert alive[-1] <= alive[0] + 16, "leaves have the shape, and no memory of their own"


def test_a_budget_of_the_host_takes_as_many_as_it_has_room_for() -> None:
    whole = over(depth=8)
    whole.step(words(0), loss_fn=cross_entropy)
    most, other = graph_bytes(whole), sum(memory_of(whole).host.allocations.values()) - graph_bytes(whole)
    placement = Placement(graphs="cpu", host_memory=other + most // 2)
    model, some = build(lambda: Stack(depth=8)), [words(seed) for seed in range(3)]
    engine, _ = train_both(model, some, loss_fn=cross_entropy, placement=placement, recompute="always")
    assert 0 < graph_bytes(engine) <= most // 2
    with pytest.raises(DoesNotFitError, match=r"graphs.*recompute"):
        over(depth=8, placement=placement).step(words(0), loss_fn=cross_entropy)


@pytest.mark.slow
@pytest.mark.parametrize(("tier", "rows"), [("cpu", None), ("nvme", 1)])
def test_a_limit_of_their_own_takes_as_many_as_it_has_room_for(tier: str, rows: int | None, tmp_path: Path) -> None:
    """The limit holds for every input shape. A micro-batch counts only for the share in the batch."""

    whole = over(Counting, depth=8)
    whole.step(words(0), loss_fn=cross_entropy)
    most, parts = graph_bytes(whole) // 2, 4 if rows else 1
    placement = Placement(graphs=tier, nvme_dir=str(tmp_path) if tier == "nvme" else None, graphs_memory=most)
    engine = over(Counting, depth=8, placement=placement, recompute="always", micro_batch_size=rows)
    found = [[runs(engine, length=length).count(parts) for length in (6, 5)] for _ in range(3)]
    assert found[1:] == [[4, 4], [4, 4]]
    if tier == "cpu":
        assert most * 3 // 4 < graph_bytes(engine) <= most
    with pytest.raises(ConfigError, match=r"graphs_memory.*never.*recompute"):
        over(placement=placement)


def test_lengths_may_change() -> None:
    """Buffers and measurements of one length are useless for another."""
    some = [tokens(seed, rows, length) for seed, (rows, length) in enumerate([(4, 10), (2, 16), (4, 10), (1, 3)])]
    engine, _ = train_both(build(llama), some, placement=Placement(graphs="cpu"), recompute="always")
    assert not parts_of(engine).runner.saved.policy.graph_offload.buffers_in_use, "a buffer that nobody gave back"


def test_a_forward_without_a_backward_gives_its_room_back() -> None:
    engine = Engine(build(llama), placement=Placement(graphs="cpu"), recompute="never")
    pool = parts_of(engine).runner.saved.policy.graph_offload
    loss = engine.model(**tokens(1)).loss
    assert pool.buffers_in_use
    del loss
    gc.collect()
    engine.step(tokens(2))
    assert not pool.buffers_in_use


class Slices(Block):
    """Save views into one tensor; one view is read twice."""

    def forward(self, h: Tensor) -> Tensor:
        wide = torch.cat([h, super().forward(h), h.tanh()], -1)
        one, two, three = wide.chunk(3, -1)
        return one * two + three * two + wide[:, :1].mean() * one.transpose(0, 1).contiguous().transpose(0, 1)


class Complex(Block):
    """Save a conjugate view."""

    def forward(self, h: Tensor) -> Tensor:
        rotate = torch.fft.fft(super().forward(h), dim=-1)
        return h + (rotate.conj() * rotate).real / h.shape[-1]


class Changing(Block):
    """Save a tensor for an operation without backward, change the tensor in place, and save again."""

    def forward(self, h: Tensor) -> Tensor:
        a = 2 * super().forward(h)
        is_rising = a.sin().detach() > 0
        a.mul_(3)
        return h + a.cos() * is_rising


class Splits(Block):
    """Save parts, some without rows, as for unused experts."""

    def forward(self, h: Tensor) -> Tensor:
        rows = super().forward(h).flatten(0, 1)
        parts = rows.split([0, len(rows) - 1, 0, 1])
        return h + torch.cat([part * part.sin() for part in parts]).view(h.shape)


class Product(torch.autograd.Function):
    """Read `saved_tensors` twice."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(one, other)
        return one * other

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0] * ctx.saved_tensors[1], gradients[0] * ctx.saved_tensors[0]


class AsksTwice(Block):
    def forward(self, h: Tensor) -> Tensor:
        return h + Product.apply(super().forward(h), h.tanh())


class RewritesSaved(Block):
    """Change a saved tensor without a new version number."""

    def forward(self, h: Tensor) -> Tensor:
        a = super().forward(h).tanh()
        b = a * a
        a.data.mul_(1.5)
        return h + b


SLOWER = [CheckpointsItself, Slices, Complex, Changing, Splits, AsksTwice]


@pytest.mark.parametrize("block", [RewritesSaved, *(pytest.param(b, marks=pytest.mark.slow) for b in SLOWER)])
def test_what_is_saved_may_lie_in_any_way(block: type[nn.Module]) -> None:
    """A unit that changes a saved tensor without a new version is recomputed."""
    settings = {"placement": Placement(graphs="cpu"), "recompute": "never", "debug": True}
    train_both(build(lambda: Stack(block)), [words(seed) for seed in range(3)], loss_fn=cross_entropy, **settings)


class ChangesLater(Block):
    """Change the input in place from the second step on."""

    def forward(self, h: Tensor) -> Tensor:
        if self in RUNS:
            h.mul_(2)
        return h + super().forward(h)


@pytest.mark.slow
def test_an_input_that_was_not_changed_in_place_before_may_not_be() -> None:
    """A leaf in the offloaded graph hides the change from torch, so the engine has to raise."""
    engine = over(ChangesLater)
    engine.step(words(0), loss_fn=cross_entropy)
    before = weights(engine)
    RUNS.update(engine.model.blocks)
    try:
        with pytest.raises(OffloadError, match=r"blocks\.0: an input.*changed in place"):
            engine.step(words(0), loss_fn=cross_entropy)
    finally:
        RUNS.clear()
    assert_same(weights(engine), before)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(0, 3000))
def test_what_has_room_is_spread_evenly(sizes: list[int], room: int) -> None:
    chosen = GraphChoice("auto", has_budget=True, can_offload=True).offloaded(dict(enumerate(sizes)), room)
    taken = sum(sizes[number] for number in chosen)
    assert taken <= room
    assert len(chosen) == len(sizes) or room < sum(sizes)
    for end in range(1, len(sizes) + 1):  # at each point, no more than the proportional share of the room
        so_far = sum(sizes[number] for number in chosen if number < end)
        assert so_far * sum(sizes) <= room * sum(sizes[:end])
    most = max(sizes)
    assert taken > min(room, sum(sizes)) - 2 * most, "room is left for more than one of them"
