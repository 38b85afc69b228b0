"""Streamed experts: the host waits once a layer and pass, for any number of experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from offload import AdamW, Engine
from offload.extras.large import cut_experts
from offload.extras.large.expert_rows import ExpertForward, ExpertRows
from offload.extras.large.streamed_experts import StreamedExperts
from tests.accelerator.control import Control
from tests.cases.models import build, tokens
from tests.engine.test_adapted_experts import adapted
from tests.engine.test_streamed_experts import FAMILIES, mixture, streamed

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("sim")]


def count_waits(sim: Control, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the waits of each pass over a layer of experts."""
    monkeypatch.setattr(cut_experts, "RECORD_BYTES", 1)
    waits: list[int] = []

    def counted(run: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*given: Any, **more: Any) -> Any:
            before = sim.counters()["operation_waits"]
            found = run(*given, **more)
            waits.append(sim.counters()["operation_waits"] - before)
            return found

        return counting

    for name in ("result", "backward"):
        monkeypatch.setattr(StreamedExperts, name, counted(getattr(StreamedExperts, name)))
    return waits


def of_family(family: str, num_experts: int) -> torch.nn.Module:
    sizes = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), num_experts)
    return build(mixture(family, **sizes))


@pytest.mark.parametrize(
    ("make", "codec", "num_experts"),
    [
        *((partial(of_family, "qwen3_moe", number), "exact", number) for number in (4, 32)),
        *((partial(of_family, family, 8), "exact", 8) for family in FAMILIES),
        *((partial(adapted, "qwen3_moe"), codec, 8) for codec in ("exact", "nf4")),
    ],
    ids=lambda value: str(getattr(value, "args", value)),
)
def test_the_host_waits_once_a_layer_and_pass(
    sim: Control, make: Callable[[], Any], codec: str, num_experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also under an adapter. Break: ask for the rows of each expert; run the family's own forward; read a value of the
    factors of an expert."""
    waits = count_waits(sim, monkeypatch)
    with Engine(make(), AdamW(), streamed(), frozen_weights=codec, recompute="always") as engine:
        engine.step(tokens(0, device="cpu"))  # compares the forward of an expert with the family's
        waits.clear()
        engine.step(tokens(1, device="cpu"))
        assert engine.counters.experts_fetched >= num_experts
    assert waits.count(1) == 2 * 2  # passes, layers
    assert set(waits) <= {0, 1}  # 0: a recompute takes the outputs of the forward


@pytest.mark.parametrize("place", ["cpu", "sim"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_tokens", [0, 1, 57])
def test_rows_are_in_the_order_of_the_family(num_tokens: int, dtype: torch.dtype, place: str) -> None:
    """Some experts have no row, and number 6 is no expert."""
    random = torch.Generator().manual_seed(num_tokens)
    index = torch.randint(0, 7, (num_tokens, 3), dtype=dtype, generator=random)
    index[index == 4] = 1
    weights = torch.randn(num_tokens, 3, generator=random)
    rows = ExpertRows(index.to(place), 6)
    assert 4 not in rows.spans
    assert 6 not in rows.spans
    in_order, found = rows.sort(weights.to(place)), torch.zeros_like(weights)
    for expert, span in rows.spans.items():
        choices, tokens_ = torch.where((index == expert).t())
        assert torch.equal(rows.tokens[span].cpu(), tokens_)
        assert torch.equal(in_order[span].cpu(), weights[tokens_, choices])
        found[tokens_, choices] = weights[tokens_, choices]
    assert torch.equal(rows.unsort(in_order).cpu(), weights)
    assert torch.equal(found != 0, index != 6)


class Odd(torch.nn.Module):
    """Experts with another order of operations than they describe."""

    has_gate, has_bias, is_transposed, has_post_expert_norm = False, False, False, False
    act_fn = torch.nn.SiLU()

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = torch.nn.Parameter(torch.randn(1, 24, 16))
        self.down_proj = torch.nn.Parameter(torch.randn(1, 16, 24))

    def own(self, rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        assert not index.any()
        return torch.nn.functional.linear(
            torch.nn.functional.silu(rows @ self.up_proj[0].t()) * weights, self.down_proj[0]
        )


def test_a_family_that_describes_itself_wrongly_runs_its_own_forward() -> None:
    torch.manual_seed(0)
    module = Odd()
    forward = ExpertForward(module, Odd.own)
    rows, weights = torch.randn(5, 16), torch.rand(5)
    index = torch.zeros(5, 1, dtype=torch.int64)
    assert torch.equal(forward(rows, weights), module.own(rows, index, weights[:, None]))
    assert forward._is_described is False
    module.has_gate = True  # and has no gate_up_proj
    assert torch.equal(ExpertForward(module, Odd.own)(rows, weights), module.own(rows, index, weights[:, None]))
