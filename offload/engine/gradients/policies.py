"""Update policies: the time and the clipping coefficient for a step's gradients."""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch

from offload.engine.gradients.norms import Measures
from offload.engine.gradients.tile_updates import RegionGradients, TileUpdates
from offload.errors import NonFiniteError
from offload.lanes.ticket import Fence
from offload.layout.regions import Piece, Region
from offload.optim.update import clip_coefficient, total_norm
from offload.tiers.tile import DeferredUpdates

COARSE_RATIO = 8.0
"""Above this ratio c_s / c, a speculative correction loses more than 1e-5 relative to the largest update."""


@dataclass(frozen=True)
class UpdateResult:
    """Result of a step's updates."""

    norm: float
    """Global gradient norm before clipping."""
    skipped: bool = False
    """True if gradients were not finite and nothing was updated."""
    corrected: int = 0
    """Number of regions first updated with another coefficient, then corrected."""
    coarse: bool = False
    """True if a correction was less exact than the summation order explains."""


class UpdatePolicy:
    """Decides the handling of a step's gradients.

    drops: gradients are measured, then discarded. updates_at_arrival: each region is updated as soon as the gradients
    arrive, so the ranks have to agree on the region's norm at that time. is_final: such updates are never corrected,
    and weights for the next step may be fetched. arrived: the pieces of these regions, in arrival order.
    """

    drops = updates_at_arrival = is_final = False
    arrived: Sequence[Piece] = ()

    def open(self) -> None:
        """Called before the backward of a unit."""

    def receive(self, region: Region, gradients: torch.Tensor | None, fence: Fence) -> None:
        """Called when this rank's gradients of a region are on their way to memory, or to disk (None)."""

    def finish(self, norm: float, limit: float | None, rank: Callable[[Region], float]) -> UpdateResult:
        """Clip to `limit` once the global norm is known. `rank`: order in which the next step needs the regions."""
        raise NotImplementedError


class NoPolicy(UpdatePolicy):
    """Between steps, until `Updates.begin_step` chooses a policy: gradients arrive, and no update follows."""


class NormOnlyPolicy(UpdatePolicy):
    """Norm only: a second backward makes the updates, because this update rule keeps no gradients."""

    drops = True


class DeferredPolicy(UpdatePolicy):
    """Updates regions after the global norm is known, in the order of their next use."""

    is_delayed = False

    def __init__(self, updates: TileUpdates, measures: Measures, deferred: DeferredUpdates, reads_early: bool) -> None:
        """`reads_early`: read states from disk during the backward."""
        self._updates, self._measures, self._deferred, self._reads_early = updates, measures, deferred, reads_early

    def open(self) -> None:
        if self._reads_early:
            self._reads_early = False
            self._updates.early.begin()

    def finish(self, norm: float, limit: float | None, rank: Callable[[Region], float]) -> UpdateResult:
        updates, deferred, touched, early = self._updates, self._deferred, self._measures.touched, self._updates.early
        scale, has_peers = clip_coefficient(norm, limit), updates.store.comm.size > 1
        if not has_peers:  # with peers: other ranks may already have updated theirs
            early.check()
        waiting = [state for state in updates.store.states if state.has_gradient_plane]
        # Delayed updates start with the regions the next backward needs first, to free room for gradients.
        waiting.sort(key=lambda state: rank(state.region), reverse=self.is_delayed)
        early.follow([state.region for state in waiting])
        for state in waiting:
            # Another rank may have gradients this rank lacks.
            if has_peers or any(touched[state.region.index]):
                region_gradients = RegionGradients(state.region, state.gradients, state.landing, scale)
                deferred.pending[state.region] = partial(updates.update, region_gradients, touched[state.region.index])
            else:
                early.give_back(state.tiles)
        updates.slots.invalidate(deferred.pending)
        updates.show(deferred.pending.keys() if self.is_delayed else ())
        return UpdateResult(norm)


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

    def finish(self, norm: float, limit: float | None, rank: Callable[[Region], float]) -> UpdateResult:  # noqa: ARG002
        return UpdateResult(norm)


class SpeculativePolicy(ImmediatePolicy):
    """Updates a region as soon as the gradients arrive, with the coefficient from the norm so far.

    The update is corrected to the true coefficient before the next fetch.
    """

    is_final = False

    def _norm_at(self, so_far: float) -> float:
        return total_norm([so_far])

    def finish(self, norm: float, limit: float | None, rank: Callable[[Region], float]) -> UpdateResult:
        scale, total, worst, wrong = clip_coefficient(norm, limit), 0.0, 1.0, []
        for region_gradients in self._updated:  # the same sums as on the lane, which may be behind
            total += sum(map(self._measures.squares.__getitem__, region_gradients.region.pieces))
            applied_scale = clip_coefficient(total_norm([total]), limit)
            if _as_float32(applied_scale) != _as_float32(scale):
                worst = max(worst, applied_scale / scale if scale else math.inf)
                wrong.append(region_gradients)
        for region_gradients in sorted(wrong, key=lambda region_gradients: rank(region_gradients.region)):
            self._updates.correct(region_gradients, self._measures.touched[region_gradients.region.index], scale)
        for region_gradients in sorted(self._updated, key=lambda region_gradients: rank(region_gradients.region)):
            self._updates.publish(region_gradients.region)
        return UpdateResult(norm, corrected=len(wrong), coarse=worst > COARSE_RATIO)


def refuse_gradients(updates: TileUpdates, measures: Measures, norm: float, order: Sequence[Piece] = ()) -> NoReturn:
    """Raise NonFiniteError for the first piece, in `order`, with a non-finite gradient."""
    infos, squares = updates.infos, measures.squares
    bad = [piece for piece in (order or squares) if not math.isfinite(squares[piece])]
    advice = updates.store.values.explain_nonfinite(
        "Lower --optimizer.lr or check the data of this step; --train.on_nonfinite skip skips such steps."
    )
    if not bad:
        largest = max(squares, key=squares.__getitem__)
        raise NonFiniteError(
            f"the gradient norm is {norm}, although the gradient of each parameter is finite; the largest is that of "
            f"{infos[largest.parameter].name}. {advice}"
        )
    unit = next(state.region.name for state in updates.store.states if bad[0] in state.region.pieces)
    num_bad = len({piece.parameter for piece in bad})
    raise NonFiniteError(
        f"the gradient of {infos[bad[0].parameter].name} in unit {unit} is not finite ({num_bad} of {len(infos)} "
        f"parameters). {advice}"
    )


def _as_float32(value: float) -> float:
    """Return the value rounded to fp32, as in the kernels."""
    return float(struct.unpack("f", struct.pack("f", value))[0])
