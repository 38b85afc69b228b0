"""Update policies during the backward: norm only, immediate, and speculative clipping."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from offload.engine.gradients.norms import Measures
from offload.engine.gradients.policies import COARSE_RATIO, UpdatePolicy, UpdateResult, _as_float32, refuse_gradients
from offload.engine.gradients.tile_updates import Correction, RegionUpdate, TileUpdates
from offload.lanes.ticket import Fence
from offload.layout.regions import Piece, Region
from offload.optim.update import clip_coefficient, total_norm


class NormOnlyPolicy(UpdatePolicy):
    """Norm only: a second backward makes the updates, because this update rule keeps no gradients."""

    drops = True


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
        self, tiles: TileUpdates, measures: Measures, limit: float | None, norm: float | None, is_inline: bool
    ) -> None:
        """`is_inline`: updates run on the compute stream and need not wait for the measures."""
        self._tiles, self._measures, self._limit, self._norm = tiles, measures, limit, norm
        self._has_to_know = limit is not None or not is_inline
        self._updates: list[RegionUpdate] = []
        self.arrived: list[Piece] = []
        self._running_norm = RunningNorm(measures)

    def receive(self, region: Region, gradients: torch.Tensor | None, fence: Fence) -> None:
        self.arrived += region.pieces
        squares, touched = self._measures.squares, self._measures.touched[region.index]
        # Several ranks check together, in `finish`. On a GPU the squares are not on the host yet.
        if not self._measures.has_peers and not all(math.isfinite(squares[piece]) for piece in region.pieces):
            refuse_gradients(self._tiles, self._measures, math.nan, self.arrived)

        arrival = self._tiles, region, gradients, fence, touched
        if self._has_to_know:
            norms = self._running_norm, self._limit, self._norm
            update: RegionUpdate = UpdateAtArrival(*norms, *arrival, is_final=self.is_final)
        else:
            update = RegionUpdate(*arrival)
        self._updates.append(update)
        update.submit()

    def finish(self, norm: float, limit: float | None, first_use: Callable[[Region], float]) -> UpdateResult:  # noqa: ARG002
        return UpdateResult(norm)


class UpdateAtArrival(RegionUpdate):
    """An update with a coefficient from the norm of all gradients so far, or from the known norm."""

    def __init__(
        self, running_norm: RunningNorm, limit: float | None, norm: float | None, *update: Any, is_final: bool
    ) -> None:
        super().__init__(*update, is_final=is_final)
        self._running_norm, self._limit, self._norm = running_norm, limit, norm
        self._number, self._arrival = running_norm.append(self.region), self.fence.before_read()

    def choose_scale(self) -> None:
        for ticket in self._arrival:  # the stream may be behind, and the host reads earlier results
            ticket.synchronize()
        so_far = self._running_norm.total(self._number)
        norm = total_norm([so_far]) if self._norm is None else self._norm
        # `finish` raises the error for a non-finite step, with the unit name.
        self.scale = clip_coefficient(norm, self._limit) if math.isfinite(so_far) else None


class SpeculativePolicy(ImmediatePolicy):
    """Updates a region as soon as the gradients arrive, with the coefficient from the norm so far.

    The update is corrected to the true coefficient before the next fetch.
    """

    is_final = False

    def finish(self, norm: float, limit: float | None, first_use: Callable[[Region], float]) -> UpdateResult:
        scale, total, worst, wrong = clip_coefficient(norm, limit), 0.0, 1.0, []
        for update in self._updates:  # the same sums as on the lane, which may be behind
            total += sum(map(self._measures.squares.__getitem__, update.region.pieces))
            applied_scale = clip_coefficient(total_norm([total]), limit)
            if _as_float32(applied_scale) != _as_float32(scale):
                worst = max(worst, applied_scale / scale if scale else math.inf)
                wrong.append(update)
        for update in sorted(wrong, key=lambda update: first_use(update.region)):
            Correction(update, scale).submit()
        for update in sorted(self._updates, key=lambda update: first_use(update.region)):
            self._tiles.publish(update.region)
        return UpdateResult(norm, corrected=len(wrong), coarse=worst > COARSE_RATIO)
