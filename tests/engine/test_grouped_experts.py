"""Experts in a record as grouped products, compared with plain PyTorch and PEFT, by bits and by count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from torch.utils._python_dispatch import TorchDispatchMode

from offload import Engine
from offload.extras.large import cut_experts, record_forward
from offload.extras.large.expert_rows import ExpertRows, RecordRows
from offload.extras.large.record_forward import RecordForward
from offload.extras.large.streamed_experts import StreamedExperts
from tests.cases.models import build, tokens
from tests.engine.test_adapted_experts import SIZES, adapted, beside
from tests.engine.test_frozen_weights import dequantised
from tests.engine.test_streamed_experts import FAMILIES, RULE, mixture, streamed, train
from tests.matrix import quick

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")


@pytest.fixture(autouse=True)
def half_a_layer_a_record(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Cut each layer into two records. Return the ways in which records run, with each trial."""
    monkeypatch.setattr(cut_experts, "_LEAST_RECORDS", 2)
    choose, ways = RecordForward._choose, list[str]()

    def noted(self: RecordForward, *given: Any) -> Callable[..., Tensor]:
        way = choose(self, *given)
        ways.append(way.__name__)
        return way

    monkeypatch.setattr(RecordForward, "_choose", noted)
    return ways


def with_adapter(family: str, codec: str, precision: str) -> dict[str, Any]:
    """Return a model with an adapter over experts, and keywords of `train`."""
    model: Any = adapted(family)
    plain = dequantised(model, codec, torch.bfloat16 if precision == "bf16" else torch.float32)
    return {"model": model, "frozen_weights": codec, "precision": precision, **beside(plain)}


TRAINED: dict[str, Callable[[], dict[str, Any]]] = {
    **{family: lambda family=family: {"model": build(mixture(family))} for family in FAMILIES},
    "bf16": lambda: {"model": build(mixture("qwen3_moe")), "precision": "bf16"},
    "odd": lambda: {"model": build(mixture("gpt_oss", hidden_size=36, intermediate_size=20))},
    "adapter": partial(with_adapter, "gpt_oss", "int8", "fp32"),
    "adapter, bf16": partial(with_adapter, "mixtral", "nf4", "bf16"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", TRAINED)
def test_families_have_the_bits_of_plain_pytorch(case: str, half_a_layer_a_record: list[str]) -> None:
    """Break: add all rows in a record at once in a backward; run an activation over all experts at once; sum gradients
    for biases by another operation.
    """
    train(**TRAINED[case](), count=2, optimizer=RULE, placement=streamed()).close()
    assert half_a_layer_a_record == ["_run_grouped"] * 2


class Products(TorchDispatchMode):
    """Counts the products in a context."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in PRODUCTS:
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


COUNTED: dict[str, tuple[Callable[[int], nn.Module], list[dict[str, int]]]] = {
    # forward; backward: recomputation, gradients for rows and weights
    "trained": (lambda number: of_experts("gpt_oss", number), [{"_grouped_mm": 2}, {"_grouped_mm": 6}]),
    # and the changed weights in both stacks; their gradients, and those for two factors each
    "adapter": (
        lambda number: adapted("qwen3_moe", dimensions=SIZES | {"num_experts": number}),
        [{"_grouped_mm": 2, "baddbmm": 2}, {"_grouped_mm": 6, "baddbmm": 2, "bmm": 4}],
    ),
}


def of_experts(family: str, number: int) -> nn.Module:
    return build(mixture(family, **dict.fromkeys(("num_experts", "num_local_experts"), number)))


@pytest.mark.parametrize(
    ("case", "number"), quick([(case, number) for case in COUNTED for number in (2, 16)], [("adapter", 16)])
)
def test_a_layer_in_one_record_takes_as_many_products_for_any_number_of_experts(
    case: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Break: one product an expert; recompute twice."""
    monkeypatch.setattr(cut_experts, "_LEAST_RECORDS", 1)
    found: dict[str, list[dict[str, int]]] = {"result": [], "backward": []}

    def counted(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*given: Any) -> Any:
            with Products() as products:
                result = run(*given)
            found[name].append(dict(products.counts))
            return result

        return counting

    make, wanted = COUNTED[case]
    with Engine(make(number), RULE, streamed(), recompute="always", precision="bf16") as engine:
        engine.step(tokens(0))  # with the trials
        for name in found:
            monkeypatch.setattr(StreamedExperts, name, counted(name, getattr(StreamedExperts, name)))
        engine.step(tokens(1))
    assert [each for each in found["result"] if each] == [wanted[0]] * 2  # a recomputation takes the saved results
    assert found["backward"] == [wanted[1]] * 2


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("together", [1, 3, 6])
@pytest.mark.parametrize("num_tokens", [0, 1, 57])
def test_rows_are_in_the_order_of_the_family(num_tokens: int, together: int, dtype: torch.dtype) -> None:
    """Some experts have no row, and number 7 is no expert. Break: take turns by choice instead of by expert; add in
    ascending order in a backward.
    """
    random = torch.Generator().manual_seed(num_tokens)
    index = torch.rand(num_tokens, 8, generator=random).topk(3).indices.to(dtype)
    index[index == 4] = 7
    weights, values = (torch.randn(num_tokens, 3, *more, generator=random) for more in ((), (2,)))
    rows = ExpertRows(index, 7, together)
    assert rows.hit == set(index.unique().tolist()) - {7}
    in_order, wanted, backward = rows.sort(weights), torch.zeros(num_tokens, 2), torch.zeros(num_tokens, 2)
    found, found_backward = torch.zeros_like(wanted), torch.zeros_like(wanted)
    records = [range(first, min(first + together, 7)) for first in range(0, 7, together)]
    for experts in records:
        group = rows.of_record(experts)
        places = []
        for expert, span in group.by_expert():
            choices, of_expert = torch.where((index == experts[expert]).t())
            assert torch.equal(group.tokens[span], of_expert)
            assert torch.equal(in_order[group.span][span], weights[of_expert, choices])
            assert set(group.experts[span].tolist()) == {experts[expert]}
            assert int(group.ends[expert]) == span.stop
            places.append(values[of_expert, choices])
        for turn in group.turns:
            assert len(group.tokens[turn].unique()) == len(turn)
        group.add_to(found, torch.cat([*places, values[:0, 0]]))
        assert sum(group.counts) == len(group.tokens) == sum(map(len, places))
    for experts in reversed(records):
        group = rows.of_record(experts)
        parts = [values[token, choice] for choice, token in rows_of(index, experts)]
        group.add_to(found_backward, torch.stack([*parts]) if parts else values[:0, 0], descending=True)
    for token in range(num_tokens):
        order = sorted((expert, choice) for choice, expert in enumerate(index[token].tolist()) if expert < 7)
        for total, its in ((wanted, order), (backward, order[::-1])):
            for _, choice in its:
                total[token] += values[token, choice]
    assert torch.equal(found, wanted)
    assert torch.equal(found_backward, backward)
    assert torch.equal(rows.unsort(in_order), weights)


def rows_of(index: Tensor, experts: range) -> list[tuple[int, int]]:
    """Return (choice, token) by row for some experts, by expert, choice and token."""
    by_place = [(int(expert), choice, token) for token, row in enumerate(index) for choice, expert in enumerate(row)]
    return [(choice, token) for expert, choice, token in sorted(by_place) if expert in experts]


class Described(nn.Module):
    """Two experts; with `weighs_first` they run in another order than they describe."""

    has_gate, has_bias, is_transposed, has_post_expert_norm = False, False, False, False
    act_fn = nn.SiLU()

    def __init__(self, weighs_first: bool) -> None:
        super().__init__()
        self.weighs_first = weighs_first
        self.up_proj = nn.Parameter(torch.randn(2, 24, 16))
        self.down_proj = nn.Parameter(torch.randn(2, 16, 24))

    def own(self, rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        assert not index.any()
        hidden = silu(linear(rows, self.up_proj[0]))
        if self.weighs_first:
            return linear(hidden * weights, self.down_proj[0])
        return linear(hidden, self.down_proj[0]) * weights


def unit_of(module: nn.Module) -> Any:
    """Return a stand-in for a unit."""
    names = [name for name, _ in module.named_parameters()]

    def install(parameters: dict[int, Any]) -> None:
        module._parameters.update({names[index]: value for index, value in parameters.items()})

    return SimpleNamespace(module=module, install=install, placeholders=dict(enumerate(module.parameters())))


@pytest.mark.parametrize(
    ("weighs_first", "error", "way"),
    [(False, 0.0, "_run_grouped"), (False, 1e-6, "_run_described"), (True, 0.0, "_run_own")],
)
def test_a_trial_chooses_the_way_with_the_bits_of_the_family(
    weighs_first: bool, error: float, way: str, half_a_layer_a_record: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    module = Described(weighs_first)
    unit = unit_of(module)
    grouped_mm = record_forward.grouped_mm
    monkeypatch.setattr(record_forward, "grouped_mm", lambda *given, **more: grouped_mm(*given, **more) * (1 + error))
    index = torch.tensor([[0, 1], [1, 0], [1, 1]])
    rows, weights = ExpertRows(index, 2, 2), torch.rand(3, 2)
    group: RecordRows = rows.of_record(range(2))
    hidden, chosen = torch.randn(3, 16)[group.tokens], rows.sort(weights)
    found = RecordForward(unit, Described.own)(hidden, chosen, group, unit.placeholders)
    assert half_a_layer_a_record == [way]
    for expert, span in group.by_expert():
        unit.install({number: stack[expert:][:1] for number, stack in unit.placeholders.items()})
        num_rows = span.stop - span.start
        wanted = module.own(hidden[span], torch.zeros(num_rows, 1, dtype=torch.int64), chosen[span, None])
        assert torch.equal(found[span], wanted)
