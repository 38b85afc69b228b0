"""Update policies other than the default: norm only, delayed, immediate, and speculative clipping."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping

import torch

from offload.engine.gradients.norms import Measures
from offload.engine.gradients.policies import (
    COARSE_RATIO,
    DeferredPolicy,
    UpdatePolicy,
    UpdateResult,
    _as_float32,
    refuse_gradients,
)
from offload.engine.gradients.tile_updates import RegionGradients, TileUpdates
from offload.lanes.ticket import Fence
from offload.layout.regions import Piece, Region
from offload.optim.update import clip_coefficient, total_norm


class NormOnlyPolicy(UpdatePolicy):
    """Norm only: a second backward makes the updates, because this update rule keeps no gradients."""

    drops = True


class DelayedPolicy(DeferredPolicy):
    """Like DeferredPolicy, but the updates run beside the next step, whose weights are one step old."""

    is_delayed = True


class RunningNorm:
    """Running sum of gradient squares, in arrival order, for lanes with queries in any order.

    Queries come out of order because host and device update regions at the same time.
    """

    def __init__(self, measures: Measures) -> None:
        self._measures, self._lock = measures, threading.Lock()
        self._regions: list[tuple[Region, Mapping[Piece, float]]] = []
        self._totals: list[float] = []

    def append(self, region: Region) -> int:
        """Append a region with gradients on their way and return its number."""
        self._regions.append((region, self._measures.squares))  # this step's mapping: a lane may be one step behind
        return len(self._regions) - 1

    def total(self, number: int) -> float:
        """Return the sum up to region `number`. The region's gradients must have arrived.

        Earlier regions have then arrived too, because all use the same lane.
        """
        with self._lock:
            for region, squares in self._regions[len(self._totals) : number + 1]:
                self._measures.complete(region)
                before = self._totals[-1] if self._totals else 0.0
                self._totals.append(before + sum(map(squares.__getitem__, region.pieces)))
            return self._totals[number]


class ImmediatePolicy(UpdatePolicy):
    """Updates a region as soon as the gradients arrive: without clipping, or with a known `norm`."""

    updates_at_arrival = is_final = True

    def __init__(
        self, updates: TileUpdates, measures: Measures, limit: float | None, norm: float | None, is_inline: bool
    ) -> None:
        """`is_inline`: updates run on the compute stream and need not wait for the measures."""
        self._updates, self._measures, self._limit, self._norm = updates, measures, limit, norm
        self._has_to_know = limit is not None or not is_inline
        self._updated: list[RegionGradients] = []
        self.arrived: list[Piece] = []
        self._running_norm = RunningNorm(measures)

    def receive(self, region: Region, gradients: torch.Tensor | None, fence: Fence) -> None:
        region_gradients = RegionGradients(region, gradients, fence)
        self._updated.append(region_gradients)
        self.arrived += region.pieces
        squares, landing = self._measures.squares, fence.before_read()
        # Several ranks check together, in `finish`. On a GPU the squares are not on the host yet.
        if self._updates.store.comm.size == 1 and not all(math.isfinite(squares[piece]) for piece in region.pieces):
            refuse_gradients(self._updates, self._measures, math.nan, self.arrived)

        number = self._running_norm.append(region)

        def choose_scale() -> float | None:
            for ticket in landing:  # the stream may be behind, and the host reads earlier results
                ticket.synchronize()
            so_far = self._running_norm.total(number)
            # `finish` raises the error for a non-finite step, with the unit name.
            return clip_coefficient(self._norm_at(so_far), self._limit) if math.isfinite(so_far) else None

        touched, choose = self._measures.touched[region.index], choose_scale if self._has_to_know else None
        self._updates.update(region_gradients, touched, choose, self.is_final)

    def _norm_at(self, _so_far: float) -> float:
        return self._norm or 0.0

    def finish(self, norm: float, limit: float | None, first_use: Callable[[Region], float]) -> UpdateResult:  # noqa: ARG002
        return UpdateResult(norm)


class SpeculativePolicy(ImmediatePolicy):
    """Updates a region as soon as the gradients arrive, with the coefficient from the norm so far.

    The update is corrected to the true coefficient before the next fetch.
    """

    is_final = False

    def _norm_at(self, so_far: float) -> float:
        return total_norm([so_far])

    def finish(self, norm: float, limit: float | None, first_use: Callable[[Region], float]) -> UpdateResult:
        scale, total, worst, wrong = clip_coefficient(norm, limit), 0.0, 1.0, []
        for region_gradients in self._updated:  # the same sums as on the lane, which may be behind
            total += sum(map(self._measures.squares.__getitem__, region_gradients.region.pieces))
            applied_scale = clip_coefficient(total_norm([total]), limit)
            if _as_float32(applied_scale) != _as_float32(scale):
                worst = max(worst, applied_scale / scale if scale else math.inf)
                wrong.append(region_gradients)
        for region_gradients in sorted(wrong, key=lambda region_gradients: first_use(region_gradients.region)):
            self._updates.correct(region_gradients, self._measures.touched[region_gradients.region.index], scale)
        for region_gradients in sorted(self._updated, key=lambda region_gradients: first_use(region_gradients.region)):
            self._updates.publish(region_gradients.region)
        return UpdateResult(norm, corrected=len(wrong), coarse=worst > COARSE_RATIO)
