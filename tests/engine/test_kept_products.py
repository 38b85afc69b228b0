"""`recompute: products`: blocks keep outputs of products and recompute all else. The same bits, counted bytes, no kept
product computed twice, and the choice of the kept ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.plan_memory import Case, actual, planned
from offload import Engine, Placement
from offload.engine.units.activation_offload import GRAPHS
from offload.engine.units.keep import Inputs
from offload.engine.units.recompute_policy import GraphChoice
from offload.engine.units.saved_inputs import KeptOutputs
from offload.errors import ConfigError, OffloadError
from offload.extras.large.document_operation import OPERATION
from offload.extras.large.kept_products import ProductsForward
from offload.extras.plan.memory import INPUTS, KEPT
from tests.cases.models import CAUSAL, batches, bert, build, llama, t5
from tests.engine.compare import train_both
from tests.engine.device import LEDGER, cpu_only
from tests.engine.handmade import WIDTH, Block, ScalesItsInput, Stack, cross_entropy, words
from tests.engine.reference import count_labels, sum_by_layer
from tests.engine.sizes import held_in_step, tier_bytes
from tests.matrix import quick

PRODUCTS: dict[str, Any] = {"recompute": "products"}


class ChangesProducts(Block):
    """Changes the outputs of products in place, one of them by a view."""

    def forward(self, h: Tensor) -> Tensor:
        hidden = self.up(self.norm(h))
        hidden[..., :8] *= 0.5
        hidden.tanh_()
        result = self.down(hidden)
        return result.add_(h)


class ReturnsAProduct(Block):
    """The result is the output of a product. The next block changes it in place."""

    def forward(self, h: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(h))))


class Drops(Block):
    """Dropout before, between and after products."""

    def forward(self, h: Tensor) -> Tensor:
        drop = functional.dropout
        return h + drop(self.down(drop(torch.tanh(self.up(drop(self.norm(h), 0.3))), 0.3)), 0.3)


class GatesItsResult(Block):
    """The last operation's gradient reads the last product."""

    def forward(self, h: Tensor) -> Tensor:
        return h + torch.sigmoid(self.down(torch.tanh(self.up(self.norm(h)))))


class Weighted(torch.autograd.Function):
    """A product whose backward reads its output, unseen by autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.result = x @ weight.t()
        return ctx.result.view(x.shape[:-1] + weight.shape[:1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        inner = gradients[0] * ctx.result
        return inner @ weight, inner.flatten(0, -2).t() @ x.flatten(0, -2)


class ReadsUnseen(Block):
    """An own backward reads the last product."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(24, WIDTH, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return h + Weighted.apply(torch.tanh(self.up(self.norm(h))), self.down.weight)


HABITS = (ChangesProducts, ReturnsAProduct, ScalesItsInput, Drops, GatesItsResult, ReadsUnseen)


@pytest.mark.parametrize("block", HABITS)
def test_blocks_with_habits_are_bit_equal(block: type[nn.Module]) -> None:
    train_both(build(lambda: Stack(block)), [words(s) for s in range(3)], loss_fn=cross_entropy, debug=True, **PRODUCTS)


FAMILIES = [(make, ("fp32", "bf16")[number % 2]) for number, make in enumerate(CAUSAL)]


@pytest.mark.parametrize(("make", "precision"), quick(FAMILIES, FAMILIES[2::3]))
def test_causal_models_are_bit_equal(make: Callable[[], nn.Module], precision: str) -> None:
    train_both(build(make), batches(2), precision=precision, debug=True, **PRODUCTS)


def test_models_with_an_encoder_are_bit_equal() -> None:
    train_both(build(bert), batches(2), count=count_labels, **PRODUCTS)
    train_both(build(t5), batches(2), count=count_labels, group=sum_by_layer, **PRODUCTS)


class Products(TorchDispatchMode):
    """Counts products while a unit recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm") or "attention" in name:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def recomputations_watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    mode, recompute = Products(), Inputs._recompute

    def watched(self: Inputs, number: int) -> Any:
        with mode:
            return recompute(self, number)

    monkeypatch.setattr(Inputs, "_recompute", watched)
    yield mode.counts
    monkeypatch.undo()


@cpu_only("another attention kernel runs on an accelerator")
@pytest.mark.parametrize(("recompute", "expected"), [("products", {}), ("always", {"mm": 14, "attention": 2})])
def test_a_recomputation_computes_no_product(
    recompute: str, expected: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(build(llama), recompute=recompute) as engine:
        engine.step(batches(1)[0])
        with recomputations_watched(monkeypatch) as counts:
            engine.step(batches(2)[1])
    found = Counter("attention" if "attention" in name else name for name in counts.elements())
    assert found == expected, "two blocks, each with seven projections and one attention"


@LEDGER
def test_outputs_are_accounted_to_the_byte() -> None:
    held = {}
    for recompute in ("always", "products"):
        with Engine(build(Stack), recompute=recompute) as engine:
            held[recompute] = held_in_step(engine, words(rows=4, length=10), cross_entropy)
            assert not {KEPT, INPUTS} & set(tier_bytes(engine, "device"))
    up = 4 * 10 * 24 * 4
    assert held["products"][KEPT] - held["always"].get(KEPT, 0) == 3 * (up + 4), "down is read by no gradient"
    assert held["products"][INPUTS] == held["always"][INPUTS]


@LEDGER
@pytest.mark.parametrize(
    ("share", "graphs", "expected"),
    [(0.0, "device", 6), (0.1, "device", 3), (0.5, "device", 2), (2.0, "device", 0), (0.1, "cpu", 0)],
)
def test_as_many_outputs_are_kept_as_fit(
    share: float, graphs: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step measures. Later steps compute the two products of a block again only without room for them. The
    last one needs no room.
    """
    peaks = {}
    some = [words(seed, rows=16, length=12) for seed in range(3)]
    for recompute in ("always", "products", "never"):
        with Engine(build(Stack), recompute=recompute) as engine:
            engine.step(some[0], loss_fn=cross_entropy)
            peaks[recompute] = engine.counters.peak_device_bytes
    assert peaks["always"] < peaks["products"] < peaks["never"]
    budget = int(peaks["always"] + share * (peaks["products"] - peaks["always"]))
    placement = Placement(device_memory=budget, graphs=graphs)
    engine, _ = train_both(
        build(Stack), some, loss_fn=cross_entropy, count=count_labels, placement=placement, debug=True, **PRODUCTS
    )
    with recomputations_watched(monkeypatch) as counts:
        engine.step(some[0], loss_fn=cross_entropy)
    assert (sum(counts.values()), engine.counters.peak_device_bytes <= budget) == (expected, True)


@given(
    st.lists(st.tuples(st.integers(1, 12), st.sampled_from([0, 1, 3, 3, 7, 40])), min_size=1, max_size=9),
    st.integers(0, 60),
)
def test_no_other_choice_spares_more_by_a_whole_item(items: list[tuple[int, int]], room: int) -> None:
    """All choices are tried. The greedy one lacks at most the item that it had no room for first."""
    sizes = {number: size for number, (size, _) in enumerate(items) if size <= room}
    works = {number: float(items[number][1]) for number in sizes}
    chosen = GraphChoice("products", has_budget=True, can_offload=False).on_device(sizes, room, works)
    assert sum(sizes[number] for number in chosen) <= room
    subsets = chain.from_iterable(combinations(sizes, count) for count in range(len(sizes) + 1))
    fitting = (subset for subset in subsets if sum(sizes[number] for number in subset) <= room)
    best = max(sum(works[number] for number in subset) for subset in fitting)
    by_worth = sorted(sizes, key=lambda number: -works[number] / sizes[number])
    first_left = next((works[number] for number in by_worth if number not in chosen), 0.0)
    assert best <= sum(works[number] for number in chosen) + first_left


@pytest.mark.slow
@LEDGER
@pytest.mark.parametrize(
    "case",
    [
        Case(recompute="products", rows=2, length=32),
        Case(recompute="products", rows=4, length=32, micro_batch_size=1, precision="bf16"),
        Case("qwen3_moe", recompute="products", rows=2, length=32),
        Case(recompute="products", micro_batch_size=1, device_memory="6MiB"),
        Case(recompute="products", micro_batch_size=1, device_memory="4.5MiB", graphs="cpu"),
        Case("qwen3_moe", recompute="products", device_memory="6MiB", graphs="cpu", graphs_memory="1MiB"),
    ],
    ids=str,
)
def test_outputs_are_planned_to_the_byte(case: Case, tmp_path: Path) -> None:
    """Budgets leave room for some outputs, and a limit for some others on the host."""
    told, was = (tell(case, str(tmp_path)) for tell in (planned, actual))
    assert told.waiting[KEPT] == was.waiting[KEPT] > 0
    assert told.waiting.get(GRAPHS, 0) == was.waiting.get(GRAPHS, 0)
    assert (case.graphs == "cpu") == (GRAPHS in told.waiting)
    assert told.waiting[INPUTS] == was.waiting[INPUTS]
    assert told.operations == pytest.approx(was.operations, rel=0.05)


def test_inputs_wait_on_the_host_and_outputs_on_the_device() -> None:
    engine, _ = train_both(build(llama), batches(2), placement=Placement(activations="cpu"), **PRODUCTS)
    with Engine(build(llama), placement=Placement(activations="cpu"), recompute="always") as other:
        for batch in batches(2):
            other.step(batch)
        assert engine.counters.d2h_bytes == other.counters.d2h_bytes


def record(forward: Callable[..., Any], *inputs: Tensor) -> tuple[ProductsForward, KeptOutputs, list[Tensor]]:
    outputs, kept = KeptOutputs(), list[Tensor]()
    recorded = ProductsForward(forward, "layer", outputs, lambda _: None)
    with outputs.recorded_in(kept):
        recorded(*inputs)
    return recorded, outputs, kept


def test_a_recomputation_with_other_products_is_refused() -> None:
    recorded, outputs, kept = record(lambda x: x @ x, torch.eye(3))
    for other in (lambda x: torch.bmm(x[None], x[None]), lambda x: x @ x @ x):
        with outputs.replayed(kept), pytest.raises(OffloadError, match=r"unit layer made other products.*always"):
            recorded.for_recomputation(other)(torch.eye(3))


def test_attention_with_dropout_is_computed_again() -> None:
    """Later operations need the generator as the forward left it."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    query = torch.empty(1, 2, 8, 16, device="meta", dtype=torch.bfloat16)
    for dropout, num_outputs in ((0.0, True), (0.1, False)):
        _, _, kept = record(lambda q, p=dropout: attend(q, q, q, p), query)
        assert bool(kept) == num_outputs


def test_attention_of_documents_by_a_kernel_is_kept() -> None:
    """Break: leave `OPERATION` out of `_OPERATIONS`."""
    starts = torch.tensor([[8, 0, 0, 8, 0, 0, 0, 0]], dtype=torch.int32)
    query = torch.empty(1, 2, 8, 16, device="meta")
    _, _, kept = record(lambda q: OPERATION(q, q, q, starts, None), query)
    assert [tuple(each.shape) for each in kept] == [(1, 8, 2, 16), (0,)]


@pytest.mark.parametrize(
    ("settings", "placement", "key"),
    [
        ({"compile": "always"}, {}, "train.compile never"),
        ({"sequence_tile": 4}, {}, "train.sequence_tile none"),
        ({}, {"experts": "streamed"}, "offload.experts whole"),
    ],
)
def test_refused_beside(settings: dict[str, Any], placement: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"train.recompute is products, but.*--{key}"):
        Engine(build(Stack), placement=Placement(**placement), **settings, **PRODUCTS)
