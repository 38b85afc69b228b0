"""Updates one step late. The reference loop computes each step with the weights before the last update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from offload import AdamW, Engine, Lion, Placement
from offload.errors import ConfigError
from offload.lanes.ticket import Ticket
from offload.layout.planes import STALE
from offload.planning import disk
from offload.tiers.tile import Tile
from tests.engine.compare import assert_same, weights
from tests.engine.families import batches, build, gemma2, llama, tokens
from tests.engine.inside import parts_of
from tests.engine.reference import Reference

RULE = AdamW(lr=1e-2, groups=(("norm", {"lr_scale": 0.5}),))
HOST = {"parameters": "cpu", "optimizer": "cpu"}


class Late(Reference):
    """Plain PyTorch reference: the model shows the weights before the last update."""

    def __init__(self, *args: Any, delay_after: int = 0, **settings: Any) -> None:
        self.before: dict[str, torch.Tensor] | None = None
        super().__init__(*args, **settings)
        self.delay_after, self.number = delay_after, 0

    def update(self) -> float:
        if self.number >= self.delay_after:
            self.before = {name: master.clone() for name, master in self.masters.items()}
        self.number += 1
        return super().update()

    def _show(self, name: str) -> None:
        newest = self.masters
        if self.before is not None:
            self.masters = self.before
        super()._show(name)
        self.masters = newest


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_LARGEST_TILE", 2048)


def steps_are_equal(engine: Engine, reference: Late, seeds: Iterator[int] | range) -> None:
    for seed in seeds:
        loss, norm = reference.step(tokens(seed))
        found = engine.step(tokens(seed))
        assert (found.loss, found.grad_norm) == (loss, norm), seed


@pytest.mark.slow
@pytest.mark.parametrize(("make", "precision", "max_grad_norm"), [(llama, "fp32", 0.3), (gemma2, "bf16", None)])
def test_twenty_steps_are_those_of_a_loop_that_updates_late(make, precision, max_grad_norm):
    settings = {"precision": precision, "max_grad_norm": max_grad_norm}
    reference = Late(build(make), RULE, delay_after=2, **settings)
    engine = Engine(build(make), RULE, delay=1, delay_after=2, placement=Placement(**HOST), **settings)
    steps_are_equal(engine, reference, range(20))
    assert_same(weights(engine), reference.masters)


@pytest.mark.slow
def test_states_may_be_on_disk(tmp_path):
    reference = Late(build(llama), RULE)
    place = Placement(parameters="cpu", optimizer="nvme", gradients="cpu", nvme_dir=str(tmp_path))
    engine = Engine(build(llama), RULE, delay=1, placement=place, debug=1)
    steps_are_equal(engine, reference, range(6))
    assert_same(weights(engine), reference.masters)


def test_who_updates_in_time_goes_on_from_the_newest_weights(tmp_path):
    engine = Engine(build(llama), RULE, delay=1, placement=Placement(**HOST))
    for batch in batches(3):
        engine.step(batch)
    newest = weights(engine)
    engine.save_checkpoint(tmp_path / "saved")
    engine.close()
    other = Engine(build(llama), RULE, placement=Placement(**HOST))
    other.load_checkpoint(tmp_path / "saved")
    assert_same(weights(other), newest)
    other.step(tokens(5))


@pytest.mark.slow
def test_where_updates_are_not_late_yet_it_goes_on_from_the_newest_weights_too(tmp_path):
    settings = {"placement": Placement(**HOST), "max_grad_norm": None}
    engine = Engine(build(llama), RULE, delay=1, **settings)
    for batch in batches(3):
        engine.step(batch)
    engine.save_checkpoint(tmp_path / "saved")
    engine.close()
    soon = Engine(build(llama), RULE, delay=1, delay_after=5, **settings)
    never = Engine(build(llama), RULE, **settings)
    for seed in range(3, 5):
        results = []
        for each in (soon, never):
            if seed == 3:
                each.load_checkpoint(tmp_path / "saved")
            results.append(each.step(tokens(seed)).loss)
        assert results[0] == results[1]
        assert_same(weights(soon), weights(never))


@pytest.mark.parametrize("again", [True, False])
def test_what_was_shown_is_written_once_it_was_read(again):
    tile = Tile(0, 4, {"weights": torch.zeros(4), STALE: torch.ones(4)}, None, slice(0, 4))
    tile.show(True)
    reading = Ticket("h2d")
    tile.fetch(is_ahead=False).done_reading(reading)
    tile.show(again)
    assert reading in tile.lend("weights", STALE).users


@pytest.mark.slow
def test_it_catches_up_where_it_is_told_to():
    engine = Engine(build(llama), RULE, delay=1, placement=Placement(**HOST))
    in_time = Engine(build(llama), RULE, placement=Placement(**HOST))
    reference = Late(build(llama), RULE)
    steps_are_equal(engine, reference, range(3))
    newest = weights(engine)
    in_time.catch_up()  # does nothing
    engine.catch_up()
    assert_same(weights(engine), newest)
    resident = build(llama)
    resident.load_state_dict(newest)
    assert engine.evaluate(tokens(7)) == Engine(resident, RULE, placement=Placement(**HOST)).evaluate(tokens(7))
    reference.before = None
    for name in reference.named:
        reference._show(name)
    steps_are_equal(engine, reference, range(3, 6))


@pytest.mark.slow
def test_a_step_that_is_skipped_catches_up():
    reference = Late(build(llama), RULE)
    engine = Engine(build(llama), RULE, delay=1, placement=Placement(**HOST), on_nonfinite="skip")
    steps_are_equal(engine, reference, range(3))

    def infinite(outputs, _batch):
        return outputs.loss * float("inf")

    assert engine.step(tokens(3), infinite).skipped
    reference.before = None
    for name in reference.named:
        reference._show(name)
    steps_are_equal(engine, reference, range(4, 7))


@pytest.mark.slow
def test_a_part_that_gets_no_gradient_is_shown_as_it_is():
    model = build(llama)
    engine, reference = Engine(model, RULE, delay=1, placement=Placement(**HOST)), Late(build(llama), RULE)

    def half(outputs, _batch):
        return outputs.logits.float().square().mean()

    for seed in range(6):
        loss_fn = half if seed % 2 else None
        loss, _ = reference.step(tokens(seed), loss_fn)
        assert engine.step(tokens(seed), loss_fn).loss == loss


def test_a_delay_is_of_one_step():
    for settings in ({"delay": 2}, {"delay": 1, "delay_after": -1}):
        with pytest.raises(ConfigError, match=rf"train\.{list(settings)[-1]}"):
            Engine(build(llama), RULE, **settings)


def test_weights_on_disk_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="before and after an update in host memory.*on disk"):
        Engine(build(llama), Lion(), delay=1, placement=Placement("nvme", "nvme", nvme_dir=str(tmp_path)))


def test_what_it_costs_is_in_the_plan():
    plain = Engine(build(llama), RULE, placement=Placement(**HOST))
    late = Engine(build(llama), RULE, delay=1, placement=Placement(**HOST))
    numel = sum(region.numel for region in parts_of(late).regions)
    assert dict(parts_of(late).host.allocations) == dict(parts_of(plain).host.allocations) | {"shown": 4 * numel}
