"""Streamed experts: the host waits once a layer and pass, for any number of experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from offload import AdamW, Engine
from offload.extras.large import cut_experts, record_forward
from offload.extras.large.streamed_experts import StreamedExperts
from tests.accelerator.control import Control
from tests.cases.models import build, tokens
from tests.engine.test_adapted_experts import adapted
from tests.engine.test_streamed_experts import FAMILIES, mixture, streamed

BF16 = {"precision": "bf16"}
pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("sim")]


def count_waits(sim: Control, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the waits of each pass over a layer of experts."""
    monkeypatch.setattr(cut_experts, "_LEAST_RECORDS", 2)
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
    ("make", "settings", "num_experts"),
    [
        *((partial(of_family, "qwen3_moe", number), {}, number) for number in (4, 32)),
        *((partial(of_family, "qwen3_moe", number), BF16, number) for number in (4, 32)),
        *((partial(of_family, family, 8), {}, 8) for family in FAMILIES),
        *((partial(adapted, "qwen3_moe"), {"frozen_weights": codec}, 8) for codec in ("exact", "nf4")),
    ],
    ids=lambda value: str(getattr(value, "args", value)),
)
def test_the_host_waits_once_a_layer_and_pass(
    sim: Control, make: Callable[[], Any], settings: dict[str, Any], num_experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also under an adapter. Break: ask for the rows of each expert; run the family's own forward; read a value of the
    factors of an expert."""
    waits = count_waits(sim, monkeypatch)
    with Engine(make(), AdamW(), streamed(), recompute="always", **settings) as engine:
        engine.step(tokens(0, device="cpu"))  # compares the forward of an expert with the family's
        waits.clear()
        engine.step(tokens(1, device="cpu"))
        assert engine.counters.experts_fetched >= num_experts
    if settings == BF16:  # torch's stand-in for the kernel waits twice: two products in a forward, six in a backward
        assert waits == [1 + 2 * 2, 1 + 2 * 2, 0, 1 + 6 * 2, 0, 1 + 6 * 2]
        return
    assert waits.count(1) == 2 * 2  # passes, layers
    assert set(waits) <= {0, 1}  # 0: a recompute takes the outputs of the forward


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 0), (12, 1)])
def test_cards_without_a_kernel_for_groups_loop_without_waits(
    sim: Control, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own loop reads where groups end, once a product. Break: ask for the dtype alone."""
    monkeypatch.setattr(record_forward, "capability_of", lambda _: capability)
    waits = count_waits(sim, monkeypatch)
    with Engine(of_family("qwen3_moe", 4), AdamW(), streamed(), recompute="always", precision="bf16") as engine:
        engine.step(tokens(0, device="cpu"))
        waits.clear()
        engine.step(tokens(1, device="cpu"))
    assert waits.count(1) == 2 * 2
    assert set(waits) <= {0, 1}
