"""Training without a backward, against MeZO in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from offload import Engine, MeZO, Placement
from tests.engine.compare import assert_same, weights
from tests.engine.families import CAUSAL, UNSHIFTED, batches, build, llama
from tests.engine.zeroth_order import PlainMeZO

RULE = MeZO(lr=1e-3, eps=1e-2, weight_decay=0.1)


def train_both(
    model: nn.Module, rule: MeZO = RULE, *, num_steps: int = 3, precision: str = "fp32", **settings: Any
) -> Engine:
    """Train with both; losses and weights have the same bits after every step."""
    plain = PlainMeZO(model, rule, precision)
    engine = Engine(model, rule, precision=precision, head_chunk_bytes=None, **settings)
    for number, batch in enumerate(batches(num_steps)):
        torch.manual_seed(number)
        wanted = plain.step(batch)
        torch.manual_seed(number)
        result = engine.step(batch)
        assert result.measured is not None
        assert list(result.measured.losses) == wanted, f"step {number}"
        assert_same(weights(engine), plain.masters, when=f"after step {number}")
    return engine


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("make", [*CAUSAL, *UNSHIFTED])
def test_it_is_plain_mezo(make: Callable[[], nn.Module], precision: str) -> None:
    train_both(build(make), precision=precision).close()


STREAMED = Placement(parameters="cpu", optimizer="cpu")


def test_each_weight_comes_up_once_a_step() -> None:
    engine = train_both(build(lambda: llama(num_hidden_layers=4)), placement=STREAMED)
    print(engine.counters.h2d_bytes, engine.counters.d2h_bytes, engine.allocations)
