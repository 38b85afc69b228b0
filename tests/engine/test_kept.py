"""Saved autograd graphs: the same bits as recomputation and plain PyTorch, counted in the budget, and freed
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import Engine, Placement
from offload.errors import DoesNotFitError
from tests.cases.models import batches, build, llama
from tests.engine.compare import assert_same, train_both, weights
from tests.engine.device import LEDGER
from tests.engine.handmade import Block, Log, Normalised, ScalesItsInput, Stack, cross_entropy, words
from tests.engine.sizes import held_in_step, tier_bytes
from tests.matrix import quick


def counting(block: type[nn.Module] = Block) -> Callable[[], nn.Module]:
    """Return a constructor for a stack of blocks that log their forwards."""

    class Counts(block):  # type: ignore[valid-type, misc]
        runs = Log()

        def forward(self, h: Tensor) -> Tensor:
            self.runs.append(True)
            return super().forward(h)

    return lambda: Stack(Counts)


def calls_in_step(engine: Engine, seed: int = 1) -> list[int]:
    """Run two steps. Return the number of forwards per block in the second."""
    engine.step(words(0), loss_fn=cross_entropy)
    for block in engine.model.blocks:
        block.runs.clear()
    engine.step(words(seed), loss_fn=cross_entropy)
    return [len(block.runs) for block in engine.model.blocks]


@LEDGER
def test_what_is_kept_is_accounted_to_the_byte() -> None:
    """The count equals the storages saved by plain PyTorch, weights excluded, each storage once. The loss is not a
    unit.
    """
    model = build(Stack)
    own = {p.data_ptr() for p in model.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(words()["x"])
    wanted = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    engine = Engine(model, recompute="never")
    held = held_in_step(engine, words(), cross_entropy)
    assert held["kept tensors"] == wanted
    assert "unit inputs" not in held
    assert engine.counters.peak_device_bytes >= sum(held.values())
    assert not {"kept tensors", "unit inputs"} & set(tier_bytes(engine, "device"))


BATCH = words(0, rows=16, length=12)
"""Large enough for graphs above the size of the weights."""


def budgets(precision: str = "fp32") -> tuple[int, int]:
    """Return the peak device bytes of a step with full recomputation and of a step with all graphs saved."""
    peaks = []
    for recompute in ("always", "never"):
        engine = Engine(build(Stack), recompute=recompute, precision=precision)
        engine.step(BATCH, loss_fn=cross_entropy)
        peaks.append(engine.counters.peak_device_bytes)
    return peaks[0], peaks[1]


@LEDGER
def test_never_beyond_the_budget_says_which_key_to_change() -> None:
    always, never = budgets()
    engine = Engine(build(Stack), recompute="never", placement=Placement(device_memory=(always + never) // 2))
    with pytest.raises(DoesNotFitError, match=r"kept tensors.*--train\.recompute (auto|always)"):
        engine.step(BATCH, loss_fn=cross_entropy)
    assert not {"kept tensors", "unit inputs"} & set(tier_bytes(engine, "device"))
    engine.step(words(), loss_fn=cross_entropy)  # a smaller batch fits


def blocks_run(engine: Engine) -> int:
    """Run one more step and return the number of block forwards, two per recomputed block."""
    for block in engine.model.blocks:
        block.runs.clear()
    engine.step(BATCH, loss_fn=cross_entropy)
    return sum(len(block.runs) for block in engine.model.blocks)


@pytest.mark.slow
@LEDGER
def test_auto_keeps_what_fits() -> None:
    always, never = budgets("bf16")
    num_runs = []
    for share in (0.0, 0.6, 2.0):
        device_memory = int(always + share * (never - always))
        settings: dict[str, Any] = {"precision": "bf16", "recompute": "auto", "debug": True}
        engine, _ = train_both(
            build(counting()),
            [words(seed, rows=16, length=12) for seed in range(4)],
            loss_fn=cross_entropy,
            placement=Placement(device_memory=device_memory),
            **settings,
        )
        num_runs.append(blocks_run(engine))
        assert engine.counters.peak_device_bytes <= device_memory
    assert num_runs[0] == 6, "no room beside what a step that recomputes needs"
    assert 3 < num_runs[1] < 6, "some fit"
    assert num_runs[2] == 3, "all fit"


@LEDGER
@pytest.mark.parametrize("recompute", ["auto", "never"])
def test_all_is_kept_where_never_fits(recompute: str) -> None:
    engine = Engine(build(counting()), recompute=recompute, placement=Placement(device_memory=budgets()[1]))
    engine.step(BATCH, loss_fn=cross_entropy)
    assert blocks_run(engine) == 3


class WidensItsWeights(Block):
    """Compute in fp32 with a copy of the weights, as stacked expert tensors often do."""

    def forward(self, h: Tensor) -> Tensor:
        hidden = torch.tanh(nn.functional.linear(h.float(), self.up.weight.float()))
        return h + nn.functional.linear(hidden, self.down.weight.float()).to(h.dtype)


@pytest.mark.parametrize(
    ("block", "precision", "num_calls"),
    quick(
        [
            (WidensItsWeights, "fp32", 1),  # `.float()` makes no copy
            (WidensItsWeights, "bf16", 2),
            (ScalesItsInput, "fp32", 2),
            (Normalised, "fp32", 2),
        ],
        [(WidensItsWeights, "fp32", 1)],
    ),
)
def test_a_unit_that_changes_its_input_or_buffers_or_saves_copies_of_its_weights_recomputes(
    block: type[nn.Module], precision: str, num_calls: int
) -> None:
    make, settings = counting(block), {"precision": precision, "recompute": "never", "debug": True}
    train_both(build(make), [words(s) for s in range(3)], loss_fn=cross_entropy, **settings)
    assert calls_in_step(Engine(build(make), **settings)) == [num_calls] * 3


class Growing(Block):
    """Save a graph that depends on more than shapes."""

    depth = 1

    def forward(self, h: Tensor) -> Tensor:
        for _ in range(self.depth):
            h = super().forward(h)
        return h


@pytest.mark.slow
@LEDGER
@pytest.mark.parametrize("depths", [[1, 1, 6, 1, 8], [1, 1, 2, 1, 2]])
def test_a_graph_that_outgrows_its_room_is_given_up(depths: list[int]) -> None:
    """The graph is dropped during the forward and the unit is recomputed: the same bits, within the budget."""
    always, never = budgets()
    device_memory = always + int(1.4 * (never - always))
    rows = [words(seed, rows=16, length=12) for seed in range(len(depths))]

    placement = Placement(device_memory=device_memory)
    engine = Engine(build(lambda: Stack(Growing)), recompute="auto", placement=placement)
    recomputing = Engine(build(lambda: Stack(Growing)))
    for depth, batch in zip(depths, rows, strict=True):
        for block in (*engine.model.blocks, *recomputing.model.blocks):
            block.depth = depth
        result, wanted = (e.step(batch, loss_fn=cross_entropy) for e in (engine, recomputing))
        assert (result.loss.item(), result.grad_norm) == (wanted.loss.item(), wanted.grad_norm)
        assert engine.counters.peak_device_bytes <= device_memory
        assert not {"kept tensors", "unit inputs"} & set(tier_bytes(engine, "device"))
    assert_same(weights(engine), weights(recomputing))


def test_a_loss_that_is_dropped_gives_its_graphs_back() -> None:
    engine = Engine(build(llama), recompute="never")
    batch = batches(1)[0]
    loss = engine.model(**batch).loss
    assert tier_bytes(engine, "device")["kept tensors"] > 0
    del loss
    assert "kept tensors" not in tier_bytes(engine, "device")
    engine.backward(engine.model(**batch).loss)
    engine.update()
