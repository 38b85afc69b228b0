"""States of parameters, and the rules that update them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from offload.engine.gradients.updates import Updates
from offload.engine.units.unit import Unit
from offload.optim import update
from offload.tiers.tile import RegionState
from tests.mutations import enter_as, mutation, replaced

# What is frozen or thawed between steps is trained as at first.
enter_as(
    "frozen-parameters-not-seen",
    replaced(Unit, "freeze", lambda self, frozen: None),
    "tests/engine/test_parameters.py",
    fuzzed=True,
)
# Who reads, a checkpoint too, sees the weights from before the last step, and so does the next one.
enter_as(
    "update-that-was-put-off-dropped",
    replaced(Updates, "flush", lambda self: self._due.in_slot.clear()),
    "tests/engine/test_zeroth_order.py",
    fuzzed=True,
)


@mutation("tests/engine/test_against_torch.py", fuzzed=True)
def steps_of_first_parameters_not_counted(patch: pytest.MonkeyPatch) -> None:
    count = RegionState.count

    def counted(self: RegionState, touched: Sequence[bool]) -> None:
        count(self, [False, *touched[1:]] if len(touched) > 1 else touched)

    patch.setattr(RegionState, "count", counted)


@mutation("tests/engine/test_tiles.py", "tests/engine/test_nvme.py", fuzzed=True)
def shard_cut_short(patch: pytest.MonkeyPatch) -> None:
    """Where a region is cut over ranks or in tiles, the last block of a piece that another follows is left out."""
    runs = update._runs

    def cut(state: Any, part: Any, touched: Sequence[bool], infos: Any, one_by_one: bool) -> Iterator[Any]:
        for span, alike in runs(state, part, touched, infos, one_by_one):
            end = min(span.stop, part.end - part.begin - 8) if part.end < state.region.numel else span.stop
            if span.start < end:
                yield slice(span.start, end), alike

    patch.setattr(update, "_runs", cut)
