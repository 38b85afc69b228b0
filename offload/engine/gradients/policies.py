"""Update policies: the time and the clipping coefficient for a step's gradients."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from offload.engine.gradients.norms import Measures
from offload.engine.gradients.tile_updates import RegionUpdate, TileUpdates
from offload.errors import NonFiniteError
from offload.lanes.ticket import Fence
from offload.layout.regions import Piece, Region
from offload.optim.update import clip_coefficient
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

    The base class serves between steps, until `Updates.begin_step` chooses a policy: gradients arrive, and no update
    follows.
    """

    drops = updates_at_arrival = is_final = False
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
        self._updates, self._measures, self._deferred = updates, measures, deferred
        self._reads_early, self._delays = reads_early, delays

    def open(self) -> None:
        if self._reads_early:
            self._reads_early = False
            self._updates.early.begin()

    def finish(self, norm: float, limit: float | None, first_use: Callable[[Region], float]) -> UpdateResult:
        updates, deferred, touched, early = self._updates, self._deferred, self._measures.touched, self._updates.early
        scale, has_peers = clip_coefficient(norm, limit), self._measures.has_peers
        if not has_peers:  # with peers: other ranks may already have updated theirs
            early.check()
        waiting = [state for state in updates.store.states if state.has_gradient_plane]
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
        updates.choose_weights(deferred.pending.keys() if self._delays else ())
        return UpdateResult(norm)


def refuse_gradients(updates: TileUpdates, measures: Measures, norm: float, order: Sequence[Piece] = ()) -> NoReturn:
    """Raise NonFiniteError for the first piece, in `order`, with a non-finite gradient."""
    infos, squares = updates.settings.infos, measures.squares
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
