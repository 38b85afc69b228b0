"""Mutations in parameter states and update rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from offload.engine import prepare
from offload.engine.gradients import tile_updates
from offload.engine.gradients.updates import Updates
from offload.engine.units.unit import Unit
from offload.layout.regions import Region
from offload.optim import update
from offload.tiers.tile import RegionState
from tests.mutations import enter_as, mutation, replaced

# Parameters frozen or thawed between steps train as in the first step.
enter_as(
    "frozen-parameters-not-seen",
    replaced(Unit, "freeze", lambda self, frozen: None),
    "tests/engine/test_parameters.py",
    fuzzed=True,
)
# Readers, checkpoints and the next step use the weights before the last step.
enter_as(
    "update-that-was-put-off-dropped",
    replaced(Updates, "flush", lambda self: self._deferred.in_slot.clear()),
    "tests/engine/test_zeroth_order.py",
    fuzzed=True,
)


@mutation("tests/engine/test_against_torch.py", fuzzed=True)
def steps_of_first_parameters_not_counted(patch: pytest.MonkeyPatch) -> None:
    count = RegionState.count

    def counted(self: RegionState, touched: Sequence[bool]) -> None:
        count(self, [False, *touched[1:]] if len(touched) > 1 else touched)

    patch.setattr(RegionState, "count", counted)


@mutation("tests/engine/test_tiles.py::test_steps_are_those_of_plain_torch", "tests/engine/test_nvme.py", fuzzed=True)
def shard_cut_short(patch: pytest.MonkeyPatch) -> None:
    """If a region is cut over ranks or in tiles, the last block of every piece but the final one is not updated."""
    runs = update.alike_runs

    def cut(state: Any, part: Any, touched: Sequence[bool], infos: Any, one_by_one: bool) -> Iterator[Any]:
        for span, alike in runs(state, part, touched, infos, one_by_one):
            end = min(span.stop, part.end - part.begin - 8) if part.end < state.region.numel else span.stop
            if span.start < end:
                yield slice(span.start, end), alike

    patch.setattr(update, "alike_runs", cut)


@mutation("tests/engine/test_against_torch.py")
def corrections_of_biases_one_step_late(patch: pytest.MonkeyPatch) -> None:
    step = update.UpdateStep
    patch.setattr(update, "UpdateStep", lambda count, *rest, **more: step(count + 1, *rest, **more))


@mutation("tests/engine/test_against_torch.py")
def weight_decay_of_all_parameters(patch: pytest.MonkeyPatch) -> None:
    """Groups without weight decay get it as well."""
    runs = update.alike_runs

    def decayed(state: Any, tile: Any, touched: Any, infos: Any, one_by_one: bool) -> Iterator[Any]:
        most = max(info.weight_decay for info in infos)
        for span, (steps, lr_scale, _, position) in runs(state, tile, touched, infos, one_by_one):
            yield span, (steps, lr_scale, most, position)

    patch.setattr(update, "alike_runs", decayed)


@mutation("tests/contracts/test_contracts.py")
def low_halves_of_masters_rounded_off(patch: pytest.MonkeyPatch) -> None:
    """bf16 weights' masters lose the low 16 bits."""
    update_tile = tile_updates.update_tile

    def rounded(state: Any, tile: Any, planes: Any, *rest: Any, **more: Any) -> Any:
        num_wrong = update_tile(state, tile, planes, *rest, **more)
        if "low" in planes:
            planes["low"].zero_()
        return num_wrong

    patch.setattr(tile_updates, "update_tile", rounded)


@mutation("tests/integrations/test_fp16.py")
def learning_rate_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    begin_step = Updates.begin_step

    def late(self: Updates, lr: float, *rest: Any, **more: Any) -> None:
        begin_step(self, vars(self).get("_mutated", self.tiles.settings.lr), *rest, **more)
        vars(self)["_mutated"] = lr

    patch.setattr(Updates, "begin_step", late)


@mutation("tests/engine/test_fp16.py")
def frozen_fp16_weights_with_a_master(patch: pytest.MonkeyPatch) -> None:
    build = prepare.build_regions

    def built(*how: Any, **more: Any) -> tuple[Region, ...]:
        return tuple(
            replace(region, has_low=region.has_low or (region.compute == "fp16" and not region.codec.decodes))
            for region in build(*how, **more)
        )

    patch.setattr(prepare, "build_regions", built)
