"""Mutations in training by forward passes alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from offload.engine.methods.method import Method
from offload.extras.zeroth import interleaved, slot_updates
from offload.extras.zeroth import update as zeroth_order_update
from offload.extras.zeroth.mezo import MeZO
from offload.extras.zeroth.perturbed import PerturbedWeights
from offload.extras.zeroth.slot_updates import SlotUpdates
from offload.extras.zeroth.update import ZerothOrderUpdate
from tests.mutations import enter_as, mutation, replaced

# In a unit not called by any pass, all weights are updated instead of the small ones only.
enter_as(
    "thresholds-of-what-was-called-alone",
    replaced(ZerothOrderUpdate, "_find_thresholds", lambda self, touched, thresholds: None),
    "tests/engine/test_zeroth_order.py::test_a_replay_knows_what_no_pass_used_and_what_was_frozen",
    fuzzed=True,
)
enter_as(
    "update-that-was-put-off-outlives-a-load",
    replaced(SlotUpdates, "forget", lambda self: None),
    "tests/engine/test_zeroth_order.py::test_who_looks_sees_updates_that_were_put_off",
    fuzzed=True,
)
enter_as(
    "weights-updated-in-a-slot-do-not-go-down",
    replaced(slot_updates, "copy_planes", lambda device, targets, sources: None),
    "tests/engine/test_zeroth_order.py::test_updates_in_slots_have_the_bits_of_those_on_the_host",
    fuzzed=True,
)
enter_as(
    "losses-of-each-rank-alone",
    replaced(Method, "sum", lambda self, *values: list(values)),
    "tests/contracts/test_contracts.py",
    fuzzed=True,
)


@mutation("tests/engine/test_zeroth_order.py::test_what_is_frozen_keeps_every_bit", fuzzed=True)
def frozen_parameters_moved_by_forwards(patch: pytest.MonkeyPatch) -> None:
    touched = ZerothOrderUpdate.touched
    patch.setattr(ZerothOrderUpdate, "touched", lambda self, step, seed, frozen=(): touched(self, step, seed))


@mutation("tests/engine/test_zeroth_order.py", fuzzed=True)
def update_that_was_put_off_made_twice(patch: pytest.MonkeyPatch) -> None:
    defer = SlotUpdates.defer

    def defer_twice(self: SlotUpdates, works: Any) -> None:
        for update in works.values():
            vars(update)["update_tile"] = lambda *how, run=update.update_tile: (run(*how), run(*how))[1]
        defer(self, works)

    patch.setattr(SlotUpdates, "defer", defer_twice)


@mutation("tests/engine/test_zeroth_order.py", fuzzed=True)
def update_along_the_directions_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    step = zeroth_order_update.UpdateStep
    patch.setattr(zeroth_order_update, "UpdateStep", lambda number, *rest, **more: step(number - 1, *rest, **more))


@mutation("tests/engine/test_zeroth_order.py::test_a_fraction_of_the_layers_takes_part", fuzzed=True)
def update_of_blocks_that_were_not_chosen(patch: pytest.MonkeyPatch) -> None:
    update_of = ZerothOrderUpdate.update

    def updated(self: ZerothOrderUpdate, *how: Any) -> None:
        rule, self.rule = self.rule, replace(self.rule, layer_fraction=1.0)
        try:
            update_of(self, *how)
        finally:
            self.rule = rule

    patch.setattr(ZerothOrderUpdate, "update", updated)


@mutation("tests/engine/test_zeroth_order.py::test_directions_and_quantiles", fuzzed=True)
def mask_by_weights_that_have_moved(patch: pytest.MonkeyPatch) -> None:
    """The threshold for small weights is computed from moved weights."""
    threshold = MeZO.threshold
    patch.setattr(MeZO, "threshold", lambda self, weights: threshold(self, weights + self.eps))


@mutation("tests/engine/test_zeroth_order.py::test_directions_and_quantiles", fuzzed=True)
def all_directions_are_the_first(patch: pytest.MonkeyPatch) -> None:
    """The loss is measured along one direction only."""
    fill = PerturbedWeights._fill
    patch.setattr(PerturbedWeights, "_fill", lambda self, unit, _direction, place: fill(self, unit, 0, place))


@mutation("tests/engine/test_zeroth_order.py", fuzzed=True)
def passes_draw_from_one_generator(patch: pytest.MonkeyPatch) -> None:
    put_back = interleaved._PausedPass.put_back

    def without(self: Any, now: Any) -> None:
        self._random = now._random
        put_back(self, now)

    patch.setattr(interleaved._PausedPass, "put_back", without)
