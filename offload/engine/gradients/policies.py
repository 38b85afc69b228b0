"""Update policies: the time (after the norm, or during the backward) and the clipping coefficient of updates."""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from offload.accelerators import masked_attention_fault
from offload.engine.gradients.norms import Measures
from offload.engine.gradients.tile_updates import Correction, RegionUpdate, TileUpdates
from offload.errors import NonFiniteError
from offload.lanes.ticket import Fence
from offload.layout.regions import Piece, Region
from offload.optim.update import clip_coefficient, total_norm
from offload.tiers.tile import DeferredUpdates

COARSE_RATIO = 8.0
"""Above this ratio c_s / c, a speculative correction loses more than 1e-5 relative to the largest update."""

SKIPS = (
    "--train.on_nonfinite skip skips such steps (in Python on_nonfinite='skip' of Engine or offload.wrap, and "
    "offload=dict(on_nonfinite='skip') of a Trainer or an accelerator)."
)
"""Advice to skip steps with non-finite gradients or losses, in the words of every way in."""


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

    The base class serves between steps, until `Updates.begin_step` chooses a policy: gradients arrive, and no update
    follows.
    """

    drops = False
    updates_at_arrival = False
    is_final = False
    arrived: Sequence[Piece] = ()

    def open(self) -> None:
        """Called before the backward of a unit."""

    def receive(self, region: Region, gradients: torch.Tensor | None, fence: Fence) -> None:
        """Called when this rank's gradients of a region are on their way to memory, or to disk (None)."""

    def finish(self, norm: float, limit: float | None, first_use: Callable[[Region], float]) -> UpdateResult:
        """Clip to `limit`, now with the global norm. `first_use`: sort key, a region's first use in the next step."""
        raise NotImplementedError


class DeferredPolicy(UpdatePolicy):
    """Updates regions after the global norm is known, in the order of their next use."""

    def __init__(
        self, updates: TileUpdates, measures: Measures, deferred: DeferredUpdates, *, reads_early: bool, delays: bool
    ) -> None:
        """`reads_early`: read states from disk during the backward. `delays`: the updates run beside the next step,
        whose weights are one step old.
        """
        self._updates = updates
        self._measures = measures
        self._deferred = deferred
        self._reads_early = reads_early
        self._delays = delays

    def open(self) -> None:
        if self._reads_early:
            self._reads_early = False
            self._updates.early.begin()

    def finish(self, norm: float, limit: float | None, first_use: Callable[[Region], float]) -> UpdateResult:
        updates, deferred = self._updates, self._deferred
        early = updates.early
        touched = self._measures.touched
        has_peers = self._measures.has_peers
        scale = clip_coefficient(norm, limit)
        if not has_peers:  # with peers: other ranks may already have updated theirs
            early.check()
        waiting = [state for state in updates.store.states.values() if state.has_gradient_plane]
        # Delayed updates start with the regions the next backward needs first, to free room for gradients.
        waiting.sort(key=lambda state: first_use(state.region), reverse=self._delays)
        early.follow([state.region for state in waiting])
        for state in waiting:
            # Another rank may have gradients this rank lacks.
            if has_peers or any(touched[state.region.index]):
                deferred.pending[state.region] = RegionUpdate(
                    updates, state.region, state.gradients, state.gradient_fence, touched[state.region.index], scale
                )
            else:
                early.give_back(state.tiles)
        updates.slots.invalidate(deferred.pending)
        late: Collection[Region] = ()
        if self._delays:
            late = deferred.pending.keys()
        updates.choose_weights(late)
        return UpdateResult(norm)


class NormOnlyPolicy(UpdatePolicy):
    """Norm only: a second backward makes the updates, because this update rule keeps no gradients."""

    drops = True


class RunningNorm:
    """Running sum of gradient squares, in arrival order, for lanes with queries in any order.

    Queries come out of order because host and device update regions at the same time.
    """

    def __init__(self, measures: Measures) -> None:
        self._measures = measures
        self._lock = threading.Lock()
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
                before = 0.0
                if self._totals:
                    before = self._totals[-1]
                self._totals.append(before + sum(map(squares.__getitem__, region.pieces)))
            return self._totals[number]


class ImmediatePolicy(UpdatePolicy):
    """Updates a region as soon as the gradients arrive: without clipping, or with a known `norm`."""

    updates_at_arrival = is_final = True

    def __init__(
        self, tiles: TileUpdates, measures: Measures, limit: float | None, norm: float | None, is_inline: bool
    ) -> None:
        """`is_inline`: updates run on the compute stream and need not wait for the measures."""
        self._tiles = tiles
        self._measures = measures
        self._limit = limit
        self._norm = norm
        # An inline update without clipping needs no number from the host, so nothing waits for one.
        self._has_to_know = limit is not None or not is_inline
        self._updates: list[RegionUpdate] = []
        self.arrived: list[Piece] = []
        self._running_norm = RunningNorm(measures)

    def receive(self, region: Region, gradients: torch.Tensor | None, fence: Fence) -> None:
        self.arrived += region.pieces
        squares, touched = self._measures.squares, self._measures.touched[region.index]
        # Several ranks check together, in `finish`. On a GPU the squares are not on the host yet.
        if self._tiles.store.comm.world.size == 1 and not all(math.isfinite(squares[p]) for p in region.pieces):
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
        self._running_norm = running_norm
        self._limit = limit
        self._norm = norm
        self._number = running_norm.append(self.region)
        self._arrival = self.fence.before_read()  # now: the next fill of this memory has other tickets

    def choose_scale(self) -> None:
        for ticket in self._arrival:  # the stream may be behind, and the host reads earlier results
            ticket.synchronize()
        so_far = self._running_norm.total(self._number)
        if not math.isfinite(so_far):
            self.scale = None  # `finish` raises the error, with the unit name
            return
        norm = self._norm
        if norm is None:
            norm = total_norm([so_far])
        self.scale = clip_coefficient(norm, self._limit)


class SpeculativePolicy(ImmediatePolicy):
    """Updates a region as soon as the gradients arrive, with the coefficient from the norm so far.

    The update is corrected to the true coefficient before the next fetch.
    """

    is_final = False

    def finish(self, norm: float, limit: float | None, first_use: Callable[[Region], float]) -> UpdateResult:
        scale = clip_coefficient(norm, limit)
        total, worst = 0.0, 1.0
        wrong = []
        for update in self._updates:  # the same sums as on the lane, which may be behind
            total += sum(map(self._measures.squares.__getitem__, update.region.pieces))
            applied_scale = clip_coefficient(total_norm([total]), limit)
            # The kernels round the coefficient: equal rounded coefficients mean equal updates.
            if _as_float32(applied_scale) != _as_float32(scale):
                excess = math.inf
                if scale:
                    excess = applied_scale / scale
                worst = max(worst, excess)
                wrong.append(update)
        # In the order of the next pass: its fetches wait for these.
        for update in sorted(wrong, key=lambda update: first_use(update.region)):
            Correction(update, scale).submit()
        for update in sorted(self._updates, key=lambda update: first_use(update.region)):
            self._tiles.publish(update.region)
        return UpdateResult(norm, corrected=len(wrong), coarse=worst > COARSE_RATIO)


def refuse_gradients(updates: TileUpdates, measures: Measures, norm: float, order: Sequence[Piece] = ()) -> NoReturn:
    """Raise NonFiniteError for the first piece, in `order`, with a non-finite gradient."""
    infos, squares = updates.settings.infos, measures.squares
    bad = [piece for piece in (order or squares) if not math.isfinite(squares[piece])]
    advice = f"Lower --optimizer.lr or check the data of this step; {SKIPS}"
    if fault := masked_attention_fault(updates.store.device.torch_device):
        advice = (
            f"If the model uses attention masks outside its layers, cuDNN may be the cause ({fault}): call "
            f"torch.backends.cuda.enable_cudnn_sdp(False) first. Otherwise: {advice}"
        )
    advice = updates.store.values.explain_nonfinite(advice)
    if not bad:
        largest = max(squares, key=squares.__getitem__)
        raise NonFiniteError(
            f"the gradient norm is {norm}, although the gradient of each parameter is finite; the largest is that of "
            f"{infos[largest.parameter].name}. {advice}"
        )
    unit = next(region.name for region in updates.store.states if bad[0] in region.pieces)
    num_bad = len({piece.parameter for piece in bad})
    raise NonFiniteError(
        f"the gradient of {infos[bad[0].parameter].name} in unit {unit} is not finite ({num_bad} of {len(infos)} "
        f"parameters). {advice}"
    )


def _as_float32(value: float) -> float:
    """Return the value rounded to fp32, as in the kernels."""
    return float(struct.unpack("f", struct.pack("f", value))[0])
