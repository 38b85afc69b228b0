"""Whatever the timing, the bits are the same: prefetch, throttles, random delays, where activations wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import Engine, Placement
from tests.engine.compare import assert_same, weights
from tests.engine.families import build, gpt2, llama, t5, tokens
from tests.engine.inside import parts_of
from tests.matrix import matrix

NUM_STEPS = 3
MODES: dict[str, dict[str, Any]] = {
    "no clipping": {"max_grad_norm": None},
    "deferred": {"max_grad_norm": 0.2, "clip": "deferred"},
    "speculative": {"max_grad_norm": 0.2, "clip": "speculative"},
}
SLOW = {"h2d": {"bandwidth": "40MiB"}, "d2h": {"latency_seconds": 0.002}, "update": {"bandwidth": "80MiB"}}


def deep() -> nn.Module:
    return llama(num_hidden_layers=5)


def train(make: Callable[[], nn.Module], **settings: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses, norms and final weights of a few steps, an evaluation among them."""
    engine = Engine(build(make), **settings)
    numbers: list[float] = []
    for seed in range(NUM_STEPS):
        torch.manual_seed(seed)
        result = engine.step(tokens(seed))
        numbers += [result.loss.item(), result.grad_norm]
        if seed == 1:
            numbers.append(engine.evaluate(tokens(9)).item())
    found = weights(engine)
    engine.close()
    return numbers, found


@cache
def serial(make: Callable[[], nn.Module], mode: str, precision: str) -> tuple[list[float], dict[str, Tensor]]:
    return train(make, precision=precision, prefetch=0, **MODES[mode])


def assert_as_serial(make: Callable[[], nn.Module], mode: str, precision: str = "fp32", **settings: Any) -> None:
    wanted, wanted_weights = serial(make, mode, precision)
    found, found_weights = train(make, precision=precision, **settings, **MODES[mode])
    assert found == wanted
    assert_same(found_weights, wanted_weights)


@pytest.mark.slow
@matrix(strength=1, prefetch=[0, 1, 8], throttle={"": None, "throttled": SLOW}, mode=list(MODES))
def test_prefetch_and_throttles_change_no_bit(prefetch: int, throttle: Mapping[str, Any] | None, mode: str) -> None:
    assert_as_serial(deep, mode, prefetch=prefetch, throttle=throttle)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "mode"),
    [
        pytest.param(seed, mode, marks=[] if seed < 2 and seed % 4 == number else pytest.mark.slow)
        for seed in range(8)
        for number, mode in enumerate(MODES)
        if seed % 4 == number or seed % 4 == 3
    ],
)
def test_delays_change_no_bit(seed: int, mode: str) -> None:
    """Every lane waits at random before every piece of work, and whatever is freed is poisoned. The quick run has each
    seed, and each number of units ahead with each mode (3 and 4 have no common factor)."""
    precision = ("fp32", "bf16")[seed % 2]
    assert_as_serial(deep, mode, precision, prefetch=("auto", 1, 2, 0)[seed % 4], debug=seed)


@pytest.mark.slow
@matrix(strength=1, settings=[{"throttle": SLOW}, {"debug": 3}, {"debug": 4, "micro_batch_size": 2}], mode=list(MODES))
def test_activations_on_the_host_change_no_bit(settings: dict[str, Any], mode: str) -> None:
    placed = Placement(activations="cpu")
    if "micro_batch_size" in settings:
        numbers, wanted = train(deep, prefetch=0, micro_batch_size=2, **MODES[mode])
        found = train(deep, placement=placed, **settings, **MODES[mode])
        assert found[0] == numbers
        assert_same(found[1], wanted)
    else:
        assert_as_serial(deep, mode, placement=placed, **settings)


@pytest.mark.slow
@matrix(strength=1, make=[gpt2, t5], recompute=["always", "never", "auto"], mode=list(MODES))
def test_tied_weights_dropout_and_kept_graphs(make: Callable[[], nn.Module], recompute: str, mode: str) -> None:
    assert_as_serial(make, mode, debug=11, recompute=recompute)


ROOM = [{"device_memory": "120KiB"}, {"device_memory": "400KiB"}, {"parameters": "device"}, {"device_memory": "8MiB"}]


@pytest.mark.slow
@matrix(strength=1, placement=ROOM, mode=list(MODES))
def test_room_on_the_device_changes_no_bit(placement: dict[str, Any], mode: str) -> None:
    assert_as_serial(deep, mode, placement=Placement(**placement), debug=5)


@pytest.mark.slow
def test_own_loops_with_delays() -> None:
    def loop(**settings: Any) -> tuple[list[float], dict[str, Tensor]]:
        engine = Engine(build(deep), **settings)
        norms = []
        for seed in range(3):
            for part in range(2):
                engine.backward(engine.model(**tokens(10 * seed + part)).loss)
            norms.append(engine.update().grad_norm)
        found = weights(engine)
        engine.close()
        return norms, found

    wanted, wanted_weights = loop(prefetch=0)
    for seed in range(3):
        norms, found = loop(debug=seed)
        assert norms == wanted
        assert_same(found, wanted_weights)


@pytest.mark.slow
def test_another_order_departs_and_is_learned_anew() -> None:
    """Batches of two shapes in turn, an evaluation in between: each kind of pass has its own order."""

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
