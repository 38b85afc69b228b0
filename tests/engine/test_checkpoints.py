"""Activation checkpoints on the host: unit inputs leave the device in the forward and return in the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import Engine, Placement
from offload.engine.units.activation_offload import ActivationOffload
from offload.errors import DoesNotFitError
from offload.tiers.slots import Slots
from tests.cases.models import build, llama, tokens
from tests.engine.compare import own_step_of, step_of
from tests.engine.handmade import WIDTH, Block, Stack, cross_entropy, words
from tests.engine.inside import LATE_BYTES, step_peak
from tests.engine.sizes import tier_bytes

Maker = Callable[[], nn.Module]
ROWS, LENGTH = 4, 10


def on_host(**budget: Any) -> Placement:
    return Placement(activations="cpu", **budget)


class Sharing(Stack):
    """All blocks receive the same mask."""

    class block(Block):
        def forward(self, h: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(h * mask)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        mask = torch.ones_like(h)
        mask[:, 0] = 0
        for block in self.blocks:
            h = block(h, mask)
        return self.head(h)


def test_both_micro_batches_of_a_unit_are_asked_for_ahead_of_the_weights_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the inputs for the second micro-batch wait behind a whole unit's weights."""
    settings = {"micro_batch_size": 2, "prefetch": 1, "throttle": {"h2d": {"latency_seconds": 1e-5}}}
    engine = Engine(build(lambda: Stack(depth=6)), placement=on_host(), **settings)
    engine.step(words(0), cross_entropy)  # after two steps of equal peaks, spare memory may hold all units
    asked = []

    def noted(what: str, asks: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (asked.append(what), asks(*args, **kwargs))[1]

    monkeypatch.setattr(Slots, "fetch", noted("|", Slots.fetch))
    monkeypatch.setattr(ActivationOffload, "get", noted("i", ActivationOffload.get))
    engine.step(words(1), cross_entropy)
    returns = list(filter(None, "".join(asked).split("|")))
    assert len(returns) > 3
    assert {len(each) % 2 for each in returns} == {0}, returns


def moved(engine: Engine, count: int = 2, **shape: int) -> tuple[int, int]:
    for seed in range(count):
        engine.step(tokens(seed, **shape))
    return engine.counters.h2d_bytes, engine.counters.d2h_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "precision"), [(None, "fp32"), (3, "bf16")])
def test_what_moves_is_counted(precision: str, rows: int | None) -> None:
    """Each block copies [rows, length, 32] inputs to the host once and back once, in any number of parts. Embeddings
    and heads need no inputs for recomputation.
    """
    settings = {"precision": precision, "micro_batch_size": rows}
    device = moved(Engine(build(llama), **settings))
    host = moved(Engine(build(llama), placement=on_host(), **settings))
    checkpoints = 2 * ROWS * LENGTH * 32 * (4 if precision == "fp32" else 2)
    assert host == (device[0] + checkpoints, device[1] + checkpoints)
    assert moved(Engine(build(llama), placement=on_host(), **settings), rows=8, length=20) == (
        device[0] + 4 * checkpoints,
        device[1] + 4 * checkpoints,
    )


def test_what_every_unit_receives_stays_and_is_kept_once() -> None:
    held: dict[str, dict[str, int]] = {}

    def loss_fn(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        if outputs.requires_grad:
            held.update({tier: tier_bytes(engine, tier) for tier in ("device", "cpu")})
        return cross_entropy(outputs, batch)

    engine = Engine(build(Sharing), placement=on_host())
    for seed in range(2):
        engine.step(words(seed), loss_fn=loss_fn)
    hidden = 4 * words()["x"].numel() * WIDTH
    assert held["device"]["unit inputs"] == hidden, "one mask, however many blocks"
    assert held["cpu"]["activation checkpoints"] == 3 * hidden


def deep(num_layers: int) -> Maker:
    return lambda: llama(num_hidden_layers=num_layers)


@pytest.mark.slow
def test_the_device_holds_as_much_for_12_layers_as_for_4() -> None:
    peaks: dict[str, list[int]] = {"cpu": [], "device": []}
    host = {}
    for num_layers in (4, 12):
        for activations, found in peaks.items():
            engine = Engine(build(deep(num_layers)), placement=Placement(activations=activations))
            found.append(step_peak(engine, lambda engine=engine: engine.step(tokens())))
            if activations == "cpu":
                host[num_layers] = tier_bytes(engine, "cpu")["activation checkpoints"]
            engine.close()
    growth = {activations: found[1] - found[0] for activations, found in peaks.items()}
    assert abs(growth["cpu"]) <= LATE_BYTES
    assert growth["device"] >= 8 * ROWS * LENGTH * 32 * 2 - LATE_BYTES, "a check of the checker"
    assert host[12] == 3 * host[4]


@pytest.mark.slow
def test_buffers_are_used_again() -> None:
    engine = Engine(build(llama), placement=on_host())
    engine.step(tokens())
    held = tier_bytes(engine, "cpu")
    assert held["activation checkpoints"] == 2 * ROWS * LENGTH * 32 * 4

    def fails(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        raise ZeroDivisionError

    for seed in range(5):
        engine.model(**tokens())  # a loss without a backward gives its buffers back
        with pytest.raises(ZeroDivisionError):
            engine.step(tokens(seed), loss_fn=fails)
        engine.step(tokens(seed))
    own_step_of(engine, lambda model: model(**tokens()).loss)
    assert tier_bytes(engine, "cpu")["activation checkpoints"] == held["activation checkpoints"]
    assert "unit inputs" not in tier_bytes(engine, "device")
    engine.close()
    assert not engine.allocations


@pytest.mark.slow
def test_a_host_that_has_no_room_for_them_ends_the_step_and_a_smaller_batch_goes_on() -> None:
    free = Engine(build(llama), placement=on_host())
    room = sum(tier_bytes(free, "cpu").values()) + 2 * LENGTH * 32 * 4
    engine, undisturbed = Engine(build(llama), placement=on_host(host_memory=room)), Engine(build(llama))
    for seed in range(2):
        with pytest.raises(DoesNotFitError, match=r"offload\.host_memory.*activation checkpoints"):
            engine.step(tokens(seed))
        assert "unit inputs" not in tier_bytes(engine, "device")
        assert step_of(engine, tokens(seed, rows=1)) == step_of(undisturbed, tokens(seed, rows=1))
