"""Gradients, from autograd to the update: sums, the norm, clipping."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import pytest

from offload.engine.gradients import policies, updates
from offload.engine.gradients.flow import GradientFlow
from offload.engine.gradients.tile_updates import TileUpdates
from offload.engine.loss import parts as losses
from offload.lanes.ticket import Fence
from offload.layout.regions import Piece
from tests.mutations import enter_as, mutation, replaced

# Of a batch's parts, and of ranks, all count the same, whatever their targets.
enter_as(
    "micro-batches-weighted-alike",
    replaced(losses, "_scaled", lambda loss, share, _: loss * (0.5 if share != 1.0 else 1.0)),
    "tests/engine/test_ranks.py",
    fuzzed=True,
)


@mutation("tests/engine/test_against_torch.py", fuzzed=True)
def norm_without_the_last_parameter(patch: pytest.MonkeyPatch) -> None:
    total = updates.total_norm
    for module in (policies, updates):
        patch.setattr(module, "total_norm", lambda squares: total(list(squares)[:-1] if len(squares) > 1 else squares))


@mutation("tests/engine/test_placements.py", fuzzed=True)
def norm_in_single_precision(patch: pytest.MonkeyPatch) -> None:
    def total(squares: Sequence[float]) -> float:
        found = 0.0
        for value in squares:
            found = struct.unpack("f", struct.pack("f", found + value))[0]
        return float(found**0.5)

    for module in (policies, updates):
        patch.setattr(module, "total_norm", total)


@mutation("tests/engine/test_against_torch.py", fuzzed=True)
def clip_coefficient_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    coefficient, last = policies.clip_coefficient, [1.0]

    def stale(norm: float, limit: float | None) -> float:
        last.append(coefficient(norm, limit))
        return last.pop(0)

    patch.setattr(policies, "clip_coefficient", stale)


@mutation("tests/engine/test_clipping.py", fuzzed=True)
def correction_skipped_for_one_region(patch: pytest.MonkeyPatch) -> None:
    """Of the speculative updates of a step, the one of region 1 stays as it was."""
    correct = TileUpdates.correct

    def corrected(self: TileUpdates, landed: Any, touched: Sequence[bool], scale: float) -> None:
        if landed.region.index != 1:
            correct(self, landed, touched, scale)

    patch.setattr(TileUpdates, "correct", corrected)


@mutation("tests/engine/test_against_torch.py", fuzzed=True)
def second_contribution_added_twice(patch: pytest.MonkeyPatch) -> None:
    take = GradientFlow.take

    def taken(self: GradientFlow, piece: Piece, parameter: Any) -> None:
        region, position, _ = self._places[piece]
        if parameter.grad is not None and self.measures.touched[region.index][position]:
            parameter.grad = parameter.grad * 2
        take(self, piece, parameter)

    patch.setattr(GradientFlow, "take", taken)


@mutation("tests/engine/test_against_torch.py", fuzzed=True)
def tied_gradient_landed_early(patch: pytest.MonkeyPatch) -> None:
    """Gradients with several contributions land after the first one; the others come too late."""
    close, rest = GradientFlow.close, GradientFlow.land_rest

    def closed(self: GradientFlow, regions: Any) -> None:
        close(self, regions)
        for region in regions:
            early = region.index in self._lasting and region.index not in self.landing._landed and not self.accumulates
            if early and any(self.measures.touched[region.index]):
                lasting = self._lasting[region.index].clone()
                self.landing.land(region, lasting, Fence("lasting gradients"), is_final=True)

    def landed_rest(self: GradientFlow) -> None:
        kept = dict(self._lasting)
        for index in self.landing._landed:
            if not self.accumulates:
                self._lasting.pop(index, None)
        rest(self)
        self._lasting = kept

    patch.setattr(GradientFlow, "close", closed)
    patch.setattr(GradientFlow, "land_rest", landed_rest)


@mutation("tests/engine/test_placements.py", fuzzed=True)
def padding_not_zeroed(patch: pytest.MonkeyPatch) -> None:
    begin = GradientFlow.begin_step

    def begun(self: GradientFlow) -> None:
        begin(self)
        self._ragged = {index: [] for index in self._ragged}

    patch.setattr(GradientFlow, "begin_step", begun)
