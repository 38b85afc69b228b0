"""Spare device memory keeps units on the device, and is released as soon as a step needs the room."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload import Engine, Placement
from offload.errors import DoesNotFitError
from tests.cases.models import build, tokens
from tests.engine.compare import assert_same, weights
from tests.engine.device import LEDGER
from tests.engine.sizes import Elements, elements, tier_bytes
from tests.engine.test_overlap import deep

pytestmark = pytest.mark.slow
SETTLES = 3  # steps before the engine assigns spare memory


@pytest.mark.parametrize(("recompute", "debug"), [("always", 0), ("never", 2), ("auto", 0)])
def test_a_model_that_fits_is_fetched_once_per_update(recompute: str, debug: int) -> None:
    total = Elements(build(deep)).all_trained
    engine = Engine(build(deep), placement=Placement(device_memory="8MiB"), recompute=recompute, debug=debug)
    for seed in range(SETTLES + 4):
        engine.step(tokens(seed))
        if seed > SETTLES + 1:
            assert engine.counters.h2d_bytes == 4 * total
            assert engine.counters.d2h_bytes == 4 * total
    assert engine.counters.peak_device_bytes <= 8 << 20
    engine.close()


def test_what_no_update_changes_is_not_fetched_again() -> None:
    model = build(deep)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = ".layers.1." in name or ".layers.3." in name
    learning = sum(elements(model.model.layers[number]) for number in (1, 3))
    engine = Engine(model, placement=Placement(device_memory="8MiB"))
    for seed in range(SETTLES + 4):
        engine.step(tokens(seed))
    assert engine.counters.h2d_bytes == 4 * learning
    engine.evaluate(tokens(9))
    engine.step(tokens(10))
    assert engine.counters.h2d_bytes in (0, 4 * learning), "the evaluation may have brought them up"
    engine.close()


@LEDGER
def test_a_unit_that_has_to_stay_takes_the_room_back() -> None:
    """Other units had occupied the spare memory. Without room for the whole unit, no part stays."""

    def penalty(outputs: Any, _batch: Any) -> torch.Tensor:
        return outputs.loss + models["now"].lm_head.weight.pow(2).sum()

    models, short = {"now": build(deep)}, [tokens(seed, rows=1, length=4) for seed in range(SETTLES + 3)]
    free = Engine(models["now"])
    losses = [free.step(batch).loss for batch in short[1:]]
    budget = free.counters.peak_device_bytes + 4 * 4 * elements(models["now"].lm_head)
    losses.append(free.evaluate(short[0], loss_fn=penalty))
    models["now"] = build(deep)
    engine = Engine(models["now"], placement=Placement(device_memory=budget))
    found = [engine.step(batch).loss for batch in short[1:]]
    grown = tier_bytes(engine, "device")
    found.append(engine.evaluate(short[0], loss_fn=penalty))
    assert found == losses
    assert sum(tier_bytes(engine, "device").values()) < sum(grown.values())
    engine.close()


@LEDGER
def test_a_larger_batch_takes_the_room_back() -> None:
    """The inputs need nearly the whole budget. The step equals a step without spare memory."""
    wide = tokens(7, rows=12, length=20)
    free = Engine(build(deep))
    free.step(wide)
    budget = free.counters.peak_device_bytes
    undisturbed = Engine(build(deep))
    engine = Engine(build(deep), placement=Placement(device_memory=budget))
    for seed in range(SETTLES + 2):
        assert engine.step(tokens(seed)).loss == undisturbed.step(tokens(seed)).loss
    grown = tier_bytes(engine, "device")
    assert engine.step(wide).loss == undisturbed.step(wide).loss
    assert sum(tier_bytes(engine, "device").values()) < sum(grown.values())
    for seed in range(3):
        assert engine.step(tokens(seed)).loss == undisturbed.step(tokens(seed)).loss
    assert_same(weights(engine), weights(undisturbed))
    assert engine.counters.peak_device_bytes <= budget
    with pytest.raises(DoesNotFitError, match="unit inputs"):
        engine.step(tokens(8, rows=64, length=20))
    assert engine.step(tokens(3)).loss == undisturbed.step(tokens(3)).loss
    engine.close()
