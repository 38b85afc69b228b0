"""Unmodified transformers models, streamed, against plain PyTorch: loss, gradient norm and every weight, bit for
bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from tests.engine.compare import train_both
from tests.engine.families import CAUSAL, batches, build, t5
from tests.engine.reference import count_labels
from tests.matrix import matrix

NUM_STEPS = 3
Maker = Callable[[], nn.Module]


@matrix(strength=1, precision=["fp32", "bf16"], make=list(CAUSAL))
def test_causal_models_are_bit_equal(make: Maker, precision: str) -> None:
    train_both(build(make), batches(NUM_STEPS), precision=precision)


@pytest.mark.slow
def test_t5_differs_from_plain_only_in_the_order_of_a_sum() -> None:
    train_both(build(t5), batches(NUM_STEPS), count=count_labels, within=1e-6)
