"""Updates one step late. The reference loop computes each step with the weights before the last update."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from offload import AdamW, Engine, Placement
from offload.errors import ConfigError
from offload.lanes.ticket import Ticket
from offload.layout.planes import STALE
from offload.tiers.tile import Tile
from tests.cases.models import batches, build, gemma2, llama, tokens
from tests.engine.compare import assert_same, step_of, weights
from tests.engine.inside import memory_of, parts_of
from tests.engine.reference import Reference

pytestmark = pytest.mark.usefixtures("small_tiles")
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
        num_skipped = len(self.skipped)
        norm = super().update()
        if len(self.skipped) > num_skipped:
            catch_up(self)
        return norm

    def _show(self, name: str) -> None:
        newest = self.masters
        if self.before is not None:
            self.masters = self.before
        super()._show(name)
        self.masters = newest


def steps_are_equal(engine: Engine, reference: Late, seeds: Iterable[int]) -> None:
    for seed in seeds:
        assert step_of(engine, tokens(seed)) == step_of(reference, tokens(seed)), seed


def catch_up(reference: Late) -> None:
    """Show the newest weights."""
    reference.before = None
    for name in reference.named:
        reference._show(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "precision", "max_grad_norm", "after", "optimizer"),
    [(llama, "fp32", 0.3, 2, "cpu"), (gemma2, "bf16", None, 2, "cpu"), (llama, "fp32", 1.0, 0, "nvme")],
)
def test_steps_are_those_of_a_loop_that_updates_late(make, precision, max_grad_norm, after, optimizer, tmp_path):
    settings = {"precision": precision, "max_grad_norm": max_grad_norm, "delay_after": after}
    reference = Late(build(make), RULE, **settings)
    place = Placement(parameters="cpu", optimizer=optimizer, gradients="cpu", nvme_dir=str(tmp_path))
    engine = Engine(build(make), RULE, delay=1, placement=place, debug=1, **settings)
    steps_are_equal(engine, reference, range(20 if after else 6))
    assert_same(weights(engine), reference.masters)


def test_a_load_goes_on_from_the_newest_weights_where_updates_are_in_time(tmp_path):
    settings = {"placement": Placement(**HOST), "max_grad_norm": None}
    engine = Engine(build(llama), RULE, delay=1, **settings)
    for batch in batches(3):
        engine.step(batch)
    newest = weights(engine)
    engine.save_checkpoint(tmp_path / "saved")
    engine.close()
    soon = Engine(build(llama), RULE, delay=1, delay_after=5, **settings)
    never = Engine(build(llama), RULE, **settings)
    for each in (soon, never):
        each.load_checkpoint(tmp_path / "saved")
        assert_same(weights(each), newest)
    for seed in range(3, 5):
        assert soon.step(tokens(seed)).loss == never.step(tokens(seed)).loss
        assert_same(weights(soon), weights(never))


@pytest.mark.parametrize("again", [True, False])
def test_what_was_shown_is_written_once_it_was_read(again):
    tile = Tile(0, 4, {"weights": torch.zeros(4), STALE: torch.ones(4)}, None, slice(0, 4))
    tile.show(True)
    reading = Ticket("h2d")
    tile.fetch("weights", is_ahead=False).done_reading(reading)
    tile.show(again)
    assert reading in tile.lend("weights", STALE).users


@pytest.mark.slow
def test_it_catches_up_where_it_is_told_to_and_where_a_step_is_skipped():
    engine = Engine(build(llama), RULE, delay=1, placement=Placement(**HOST), on_nonfinite="skip")
    reference = Late(build(llama), RULE)
    steps_are_equal(engine, reference, range(3))
    newest = weights(engine)
    engine.catch_up()
    assert_same(weights(engine), newest)
    resident = build(llama)
    resident.load_state_dict(newest)
    in_time = Engine(resident, RULE, placement=Placement(**HOST))
    in_time.catch_up()  # does nothing
    assert engine.evaluate(tokens(7)) == in_time.evaluate(tokens(7))
    catch_up(reference)
    steps_are_equal(engine, reference, range(3, 6))
    assert engine.step(tokens(6), lambda outputs, _batch: outputs.loss * float("inf")).skipped
    catch_up(reference)
    steps_are_equal(engine, reference, range(7, 10))


@pytest.mark.slow
def test_a_part_that_gets_no_gradient_is_shown_as_it_is():
    model = build(llama)
    engine, reference = Engine(model, RULE, delay=1, placement=Placement(**HOST)), Late(build(llama), RULE)

    def half(outputs, _batch):
        return outputs.logits.float().square().mean()

    for seed in range(6):
        loss_fn = half if seed % 2 else None
        assert step_of(engine, tokens(seed), loss_fn)[0] == step_of(reference, tokens(seed), loss_fn)[0]


def test_what_cannot_be_late_is_refused(tmp_path):
    disk = Placement("nvme", "nvme", nvme_dir=str(tmp_path))
    for settings, said in (
        ({"delay": 2}, r"train\.delay"),
        ({"delay": 1, "delay_after": -1}, r"train\.delay_after"),
        ({"delay": 1, "placement": disk}, "before and after an update in host memory.*on disk"),
    ):
        with pytest.raises(ConfigError, match=said):
            Engine(build(llama), RULE, **settings)


def test_what_it_costs_is_in_the_plan():
    plain = Engine(build(llama), RULE, placement=Placement(**HOST))
    late = Engine(build(llama), RULE, delay=1, placement=Placement(**HOST))
    numel = sum(region.numel for region in parts_of(late).regions)
    assert dict(memory_of(late).host.allocations) == dict(memory_of(plain).host.allocations) | {"shown": 4 * numel}
