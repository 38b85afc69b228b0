"""Fetch order, and shared settings with busy lanes for other tests."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch import nn

from offload import Engine
from tests.cases.models import build, llama, tokens
from tests.engine.inside import parts_of, steps_of

MODES: dict[str, dict[str, Any]] = {
    "no clipping": {"max_grad_norm": None},
    "deferred": {"max_grad_norm": 0.2, "clip": "deferred"},
    "speculative": {"max_grad_norm": 0.2, "clip": "speculative"},
}
SLOW = {"h2d": {"bandwidth": "40MiB"}, "d2h": {"latency_seconds": 0.002}, "update": {"bandwidth": "80MiB"}}


def deep() -> nn.Module:
    return llama(num_hidden_layers=5)


@pytest.mark.slow
def test_another_order_departs_and_is_learned_anew() -> None:
    """Batches with two shapes alternate, with evaluations in between. Each pass type has a separate order."""

    def run(**settings: Any) -> list[float]:
        engine = Engine(build(deep), **settings)
        losses = []
        for seed in range(8):
            losses.append(engine.step(tokens(seed, length=8 + 4 * (seed % 2))).loss.item())
            if seed % 3 == 2:
                losses.append(engine.evaluate(tokens(seed)).item())
        assert parts_of(engine).executor.num_departures == 0
        engine.close()
        return losses

    assert run(debug=1) == run(prefetch=0)


def test_updates_come_in_the_order_of_the_next_step() -> None:
    with Engine(build(llama)) as engine:
        engine.step(tokens())
        first_use = steps_of(engine).method._first_use()
        streamed = [unit for unit in parts_of(engine).units if not unit.resident]
        uses = [first_use(region) for unit in streamed for region in unit.regions]
    assert uses == sorted({*uses}), "one use a unit, in the order of the model"
    assert uses[-1] < math.inf
