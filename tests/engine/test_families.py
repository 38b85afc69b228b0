"""Unmodified transformers models, streamed, against plain PyTorch: loss, gradient norm and every weight, bit for
bit."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from tests.engine.compare import train_both
from tests.engine.families import CAUSAL, batches, build
from tests.matrix import matrix

NUM_STEPS = 3
Maker = Callable[[], nn.Module]


@matrix(strength=1, precision=["fp32", "bf16"], make=list(CAUSAL))
def test_causal_models_are_bit_equal(make: Maker, precision: str) -> None:
    train_both(build(make), batches(NUM_STEPS), precision=precision)
