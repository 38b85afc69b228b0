"""When the gradients of a step become updates, and with which coefficient: a policy a step."""

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
from offload.engine.gradients.tile_updates import Landed, TileUpdates
from offload.errors import NonFiniteError
from offload.lanes.ticket import Fence
from offload.layout.regions import Piece, Region
from offload.optim.update import clip_coefficient, total_norm
from offload.tiers.due import Due

COARSE_RATIO = 8.0
"""Above this c_s / c the correction of a speculative update loses more than 1e-5 of the largest update."""


@dataclass(frozen=True)
class Applied:
    """What became of a step's gradients."""

    norm: float
    """The norm of all gradients, before clipping."""
    skipped: bool = False
    """True if the gradients were not finite, and nothing was updated."""
    num_corrected: int = 0
    """How many regions were updated with another coefficient first, and corrected."""
    is_coarse: bool = False
    """True if a correction was farther from the exact update than the order of sums is."""


class Policy:
    """What becomes of gradients; this one: they land, and that is all.

    drops: they are measured, and land nowhere. updates_landed: each region is updated as it lands, so that ranks have
    to agree on its norm there. is_final: such an update is not corrected, and weights may come up for the next step.
    arrived: the pieces of these regions, in the order in which they landed.
    """

    drops = updates_landed = is_final = False
    arrived: Sequence[Piece] = ()

    def open(self) -> None:
        """The backward of a unit is about to begin."""

    def landed(self, region: Region, gradients: torch.Tensor | None, fence: Fence) -> None:
        """Gradients of a region, as far as this rank updates it, are on their way to memory, or to disk (None)."""

    def finish(self, norm: float, limit: float | None, rank: Callable[[Region], float]) -> Applied:
        """The norm over all gradients is known, and they are to be clipped to `limit`. `rank`: when the next step needs
        a region.
        """
        raise NotImplementedError


class LearnFirst(Policy):
    """The norm is all that is wanted: a second backward updates, since gradients of this rule do not wait."""

    drops = True


class Deferred(Policy):
    """Regions are updated once the norm over all of them is known, in the order in which the next step needs them."""

    is_late = False

    def __init__(self, updates: TileUpdates, measures: Measures, due: Due, reads_early: bool) -> None:
        """`reads_early`: states come up from disk while the backward goes on."""
        self._updates, self._measures, self._due, self._reads_early = updates, measures, due, reads_early

    def open(self) -> None:
        if self._reads_early:
            self._reads_early = False
            self._updates.early.begin()

    def finish(self, norm: float, limit: float | None, rank: Callable[[Region], float]) -> Applied:
        updates, due, touched, early = self._updates, self._due, self._measures.touched, self._updates.early
        scale, has_peers = clip_coefficient(norm, limit), updates.store.comm.size > 1
        if not has_peers:  # others may have updated theirs
            early.check()
        waiting = [state for state in updates.store.states if state.keeps_gradients]
        # Late updates begin with what the next backward needs first: room for its gradients.
        waiting.sort(key=lambda state: rank(state.region), reverse=self.is_late)
        early.follow([state.region for state in waiting])
        for state in waiting:
            # Of several ranks another may have what this one lacks.
            if has_peers or any(touched[state.region.index]):
                landed = Landed(state.region, state.gradients, state.landing, scale)
                due.submissions[state.region] = partial(updates.submit, landed, touched[state.region.index])
            else:
                early.give_back(state.tiles)
        updates.slots.invalidate(due.submissions)
        updates.show(due.submissions.keys() if self.is_late else ())
        return Applied(norm)


class Delayed(Deferred):
    """As deferred, beside the next step, which computes with the weights from before (one step late)."""

    is_late = True


class NormSoFar:
    """The sum of the squares of all gradients up to one region's, in the order in which they landed, for lanes that ask
    for it in any order: regions are updated on the host and on the device at once.
    """

    def __init__(self, measures: Measures) -> None:
        self._measures, self._lock = measures, threading.Lock()
        self._landed: list[tuple[Region, Mapping[Piece, float]]] = []
        self._totals: list[float] = []

    def landed(self, region: Region) -> int:
        """A region's gradients are on their way; return which number it has."""
        self._landed.append((region, self._measures.squares))  # of this step: a lane may be behind its end
        return len(self._landed) - 1

    def total(self, number: int) -> float:
        """Return the sum up to a region's, by its number, whose gradients are there: so are those before, which have
        come by the same lane.
        """
        with self._lock:
            for region, squares in self._landed[len(self._totals) : number + 1]:
                self._measures.measured(region)
                before = self._totals[-1] if self._totals else 0.0
                self._totals.append(before + sum(map(squares.__getitem__, region.pieces)))
            return self._totals[number]


class AtOnce(Policy):
    """A region is updated as soon as its gradients have landed: no norm is asked for, or `norm` is known."""

    updates_landed = is_final = True

    def __init__(
        self, updates: TileUpdates, measures: Measures, limit: float | None, norm: float | None, is_inline: bool
    ) -> None:
        """`is_inline`: compute itself updates, and does not wait for what is known of the gradients."""
        self._updates, self._measures, self._limit, self._norm = updates, measures, limit, norm
        self._has_to_know = limit is not None or not is_inline
        self._updated: list[Landed] = []
        self.arrived: list[Piece] = []
        self._so_far = NormSoFar(measures)

    def landed(self, region: Region, gradients: torch.Tensor | None, fence: Fence) -> None:
        landed = Landed(region, gradients, fence)
        self._updated.append(landed)
        self.arrived += region.pieces
        squares, landing = self._measures.squares, fence.before_read()
        # Several ranks find out together, in `finish`; and on a GPU the squares are not there yet.
        if self._updates.store.comm.size == 1 and not all(math.isfinite(squares[piece]) for piece in region.pieces):
            refuse_gradients(self._updates, self._measures, math.nan, self.arrived)

        number = self._so_far.landed(region)

        def prepare() -> None:
            if self._has_to_know:
                for ticket in landing:  # a stream may not have come to it, and the host reads what came before it
                    ticket.synchronize()
                so_far = self._so_far.total(number)
                # `finish` refuses a step that is not finite, and names the unit.
                landed.decide(clip_coefficient(self._norm_at(so_far), self._limit), counts=math.isfinite(so_far))

        self._updates.submit(landed, self._measures.touched[region.index], prepare, self.is_final)

    def _norm_at(self, _so_far: float) -> float:
        return self._norm or 0.0

    def finish(self, norm: float, limit: float | None, rank: Callable[[Region], float]) -> Applied:  # noqa: ARG002
        return Applied(norm)


class Speculative(AtOnce):
    """A region is updated as it lands, with the coefficient that the norm so far gives, and corrected to the true one
    before it is fetched again.
    """

    is_final = False

    def _norm_at(self, so_far: float) -> float:
        return total_norm([so_far])

    def finish(self, norm: float, limit: float | None, rank: Callable[[Region], float]) -> Applied:
        scale, total, worst, wrong = clip_coefficient(norm, limit), 0.0, 1.0, []
        for landed in self._updated:  # the same sums as on the lane, which may be behind
            total += sum(map(self._measures.squares.__getitem__, landed.region.pieces))
            applied = clip_coefficient(total_norm([total]), limit)
            if _as_float32(applied) != _as_float32(scale):
                worst = max(worst, applied / scale if scale else math.inf)
                wrong.append(landed)
        for landed in sorted(wrong, key=lambda landed: rank(landed.region)):
            self._updates.correct(landed, self._measures.touched[landed.region.index], scale)
        for landed in sorted(self._updated, key=lambda landed: rank(landed.region)):
            self._updates.publish(landed.region)
        return Applied(norm, num_corrected=len(wrong), is_coarse=worst > COARSE_RATIO)


def refuse_gradients(updates: TileUpdates, measures: Measures, norm: float, order: Sequence[Piece] = ()) -> NoReturn:
    """Raise NonFiniteError for the first piece, in this order, whose gradient is not finite: the rest follows."""
    infos, squares = updates.infos, measures.squares
    bad = [piece for piece in (order or squares) if not math.isfinite(squares[piece])]
    advice = updates.store.values.why_not_finite(
        "Lower --optimizer.lr or look at the data of this step; --train.on_nonfinite skip goes on without such steps."
    )
    if not bad:
        largest = max(squares, key=squares.__getitem__)
        raise NonFiniteError(
            f"the norm of the gradients is {norm}, although each parameter's is finite; the largest is that of "
            f"{infos[largest.parameter].name}. {advice}"
        )
    unit = next(state.region.name for state in updates.store.states if bad[0] in state.region.pieces)
    num_bad = len({piece.parameter for piece in bad})
    raise NonFiniteError(
        f"the gradient of {infos[bad[0].parameter].name} in unit {unit} is not finite ({num_bad} of {len(infos)} "
        f"parameters). {advice}"
    )


def _as_float32(value: float) -> float:
    """Return the value as the kernels see it."""
    return float(struct.unpack("f", struct.pack("f", value))[0])
