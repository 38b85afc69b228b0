"""Recompute, kept graphs, and the habits of units."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload.engine.recording.judge import Judge
from offload.engine.units import call, condition, router
from offload.tiers.slots import Slots
from tests.mutations import as_it_is, enter_as, mutation, replaced

# A recompute begins from what the forward has left in attributes.
enter_as(
    "kept-numbers-counted-twice",
    replaced(condition.Condition, "attributes_again", as_it_is),
    "tests/engine/test_condition.py",
    fuzzed=True,
)
# What a unit puts into a mapping of its caller's stays in a copy.
enter_as(
    "results-written-into-arguments-lost",
    replaced(router, "deliver", lambda result, tensors, its: result.fill(tensors, containers=its)[0]),
    "tests/engine/test_handmade.py",
    fuzzed=True,
)


@mutation("tests/engine/test_generators_and_buffers.py", fuzzed=True)
def moving_buffers_not_put_back(patch: pytest.MonkeyPatch) -> None:
    """The judge would find it, and have graphs kept."""
    patch.setattr(Judge, "_compare", lambda *_, **__: "")
    patch.setattr(condition.Condition, "values_again", as_it_is)


@mutation("tests/engine/test_generators_and_buffers.py", fuzzed=True)
def generator_not_put_back_in_recompute(patch: pytest.MonkeyPatch) -> None:
    recompute = call.Call._recompute

    def without(self: call.Call, number: int) -> Any:
        self._micro_batches[number].before.random = self._runner.device.random_state()
        return recompute(self, number)

    patch.setattr(call.Call, "_recompute", without)


@mutation("tests/engine/test_kept.py", fuzzed=True)
def kept_graph_over_a_stale_offset(patch: pytest.MonkeyPatch) -> None:
    """Weights that a kept graph saved are looked for where the unit lay when it was first asked for."""
    view = Slots.view

    def stale(self: Slots, cargo: int, dtype: torch.dtype, distance: int, shape: Any, stride: Any) -> torch.Tensor:
        places = self.__dict__.setdefault("_mutated", {})
        slot = self._lying.get(cargo)
        assert slot is not None
        begin = min(places.setdefault(cargo, slot.begin), self._memory.nbytes - (slot.end - slot.begin))
        own, slot.begin, slot.end = (slot.begin, slot.end), begin, begin + slot.end - slot.begin
        try:
            return view(self, cargo, dtype, distance, shape, stride)
        finally:
            slot.begin, slot.end = own

    patch.setattr(Slots, "view", stale)
