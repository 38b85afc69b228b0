"""The update of the regions, beside the passes, with exact clipping: at once, deferred, or speculative."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch

from offload.engine.gradients.early import EarlyReads
from offload.engine.gradients.flow import GradientFlow
from offload.engine.gradients.update_place import InPlace, OnDevice, TileUpdate
from offload.errors import ConfigError, NonFiniteError
from offload.interrupts import interrupts
from offload.lanes.lane import Lane
from offload.lanes.lanes import Lanes
from offload.lanes.ticket import Fence
from offload.layout.regions import ParameterInfo, Region
from offload.optim.rule import UpdateRule
from offload.optim.update import clip_coefficient, total_norm, update_tile
from offload.planning.settings import Settings
from offload.tiers.slots import Slots
from offload.tiers.store import Store, Tile

COARSE_RATIO = 8.0
"""Above this c_s / c the correction of a speculative update loses more than 1e-5 of the largest update."""


Work = Callable[[Tile, Mapping[str, torch.Tensor], torch.Tensor], int | torch.Tensor]
"""Updates a tile, given its planes and gradients; returns how many of its weights are no longer finite."""


@dataclass
class Landed:
    """A region whose gradients have landed: in memory, or with its states (None) on disk. With which coefficient it is
    updated is known once the norm is; `counts` is false where it was found that it must not be.
    """

    region: Region
    gradients: torch.Tensor | None
    fence: Fence
    scale: float = 1.0
    counts: bool = True


@dataclass(frozen=True)
class Applied:
    """What became of a step's gradients."""

    norm: float
    skipped: bool = False
    num_corrected: int = 0
    is_coarse: bool = False


class Updates:
    """Submits the updates of a step to the `place` where they run.

    Without clipping a region is updated as soon as its gradients have landed. `deferred`: once the norm over all of
    them is known, in the order in which the next step needs them. `speculative`: as they land, with the coefficient
    that the norm so far gives, and corrected once the true one is known. Steps that sum over several backward passes
    are always deferred. With a rule whose gradients do not wait, a step that clips makes one backward to learn the norm
    and a second one, in which they are updated from as without clipping.
    """

    def __init__(
        self,
        store: Store,
        infos: Sequence[ParameterInfo],
        flow: GradientFlow,
        slots: Slots,
        lanes: Lanes,
        settings: Settings,
        place: InPlace | OnDevice,
        workspace: torch.Tensor | None = None,
    ) -> None:
        """`workspace`: memory of the device, for rules that compute there."""
        self._place, self._workspace = place, workspace
        self._learns = settings.judges_gradients and settings.optimizer.drops_gradients
        self._norm: float | None = None  # that of this step, as a backward of its own has found it
        self._store, self.infos, self._flow, self._slots, self._lanes = store, infos, flow, slots, lanes
        self._measures = flow.measures
        self._rules = settings.optimizer.parts
        self._max_norm = self._limit = settings.max_grad_norm  # as it was told, and of this step
        self._skips, self._debug, self._seed = settings.skips, bool(settings.debug), settings.seed
        self._delays_from = settings.delay_after if settings.delay else math.inf
        self._delays = False
        self._lane: Lane = store.updating
        # Compute itself hides nothing.
        self.clip = "deferred" if self._lane is lanes.here else settings.resolved_clip
        self._updated: list[Landed] = []
        self.lr = settings.optimizer.lr
        self._so_far = [0.0]
        self._is_updating = False  # some regions of a step are updated, or will be, and others are not yet
        self._due: dict[Region, Callable[[], None]] = {}
        """What is to be updated, and it is known how, in this order, and was not submitted yet."""
        self.flush: Callable[[], None] = lambda: None
        """Makes updates that were put off until their weights come up: somebody reads these before."""
        self._early = EarlyReads(store)
        slots.needs = self._submit_due

    @property
    def _is_speculative(self) -> bool:
        return self.clip == "speculative"

    @property
    def max_norm(self) -> float | None:
        """To which norm gradients are clipped, but in a step that says otherwise; None for no clipping."""
        return self._max_norm

    @property
    def waits(self) -> bool:
        """True where updates come after the norm."""
        is_late = self._skips or self._delays or (self._max_norm is not None and not self._is_speculative)
        return is_late and not self._learns

    def delays(self, number: int) -> bool:
        """Return whether the update of a step comes late, by the number of steps before it."""
        return number >= self._delays_from

    @property
    def learns_first(self) -> bool:
        """True where a step has a backward of its own for the norm; `begin_step` says which of them it is."""
        return self._learns and not self._flow.accumulates

    @property
    def is_immediate(self) -> bool:
        """True where, in this step, what has landed is updated once and for all."""
        return self._flow.landing.landed is not None and not self._is_speculative

    def tune(self, rule: UpdateRule, decays: Mapping[str, float]) -> None:
        """Let the next updates go by a rule with other settings, and other weight decays of parameters, by their names;
        those under way keep their own.
        """
        if [part.moments for part in rule.parts] != [part.moments for part in self._rules]:
            raise ConfigError(
                f"the rule was {self._rules[0]}, and is to be {rule}, which keeps other moments of each weight: such a "
                "setting is chosen when the engine is made."
            )
        self._rules = rule.parts
        self.infos = [replace(info, weight_decay=decays.get(info.name, info.weight_decay)) for info in self.infos]

    def begin_step(
        self, lr: float, waits: bool, number: int, *, learns: bool = False, norm: float | None = None
    ) -> None:
        """Start a step, by its number; `waits`: its updates come after the norm in any case. `learns`: the backward
        that comes is for the norm alone; `norm`: such a one has found it.
        """
        self.lr, self._norm, self._delays = lr, norm, self.delays(number)
        self._limit = self._max_norm
        self._lanes.settle()
        self._so_far = [0.0]  # a new one: updates of the step before may still be adding to theirs
        self._updated = []
        self._place.begin_step()
        reads_early = self.waits and not self._delays and not waits and self._early.are_possible
        self._flow.opens = self._early.begin if reads_early else None
        self._flow.landing.drops = learns
        self._flow.landing.landed = None if waits or learns or self.waits else self._update_at_once

    def learn(self) -> float:
        """The backward for the norm is over: return it, and forget the gradients. Raises NonFiniteError where that is
        not finite, and the step is not to be skipped for it.
        """
        self._flow.land_rest()
        self._flow.landing.finish()
        self._norm = total_norm(self._measures.squares)
        if not math.isfinite(self._norm) and not self._skips:
            self._refuse_gradients(self._norm)
        self._flow.begin_step()
        return self._norm

    def measure(self) -> float:
        """The gradients of an own loop's step are complete: return their norm, over all ranks. Collective."""
        self._flow.opens = None
        self._flow.land_rest()
        self._flow.finish()
        return total_norm(self._measures.squares)

    def apply(self, rank: Callable[[Region], float], go_on: Callable[[], None]) -> Applied:
        """Finish the gradients, clip, submit what is left to update in the order of `rank`; call `go_on` as soon as it
        is known how, and weights may come up for the next step.
        """
        self._flow.opens = None  # where there was no backward
        self._flow.land_rest()
        if self.is_immediate:
            self._slots.refresh()
            go_on()
        applied = self._clip(rank)
        if not self.is_immediate:
            self._end(go_on)
            return applied
        self._settle()
        return applied

    def descend(self, works: Mapping[Region, Work], go_on: Callable[[], None]) -> None:
        """Submit the updates of a step without gradients, in this order, and `go_on` as `apply` does."""
        for region, work in works.items():
            landed = Landed(region, torch.empty(0, device="cpu"), Fence("no gradients"))
            self._due[region] = partial(self._enter, landed, work, "update", publishes=True)
        self._slots.invalidate(self._due)
        self._end(go_on)

    def _end(self, go_on: Callable[[], None]) -> None:
        """What is left to update is due: let weights come up for the next step, and submit it."""
        self._is_updating = self._is_updating or bool(self._due)  # the step is counted, or about to be
        with interrupts.firm():
            self._slots.refresh()
            go_on()
            self._submit_due()
            self._settle()

    def _settle(self) -> None:
        self._place.check()
        self._lanes.settle()  # what is on its way belongs to a step that is over
        self._is_updating = False

    def clip_to(self, max_norm: float | None) -> None:
        """Clip the gradients of this step, whose updates wait for their norm, to another one than usual."""
        self._limit = max_norm

    def _clip(self, rank: Callable[[Region], float]) -> Applied:
        self._flow.finish()
        norm = total_norm(self._measures.squares)
        if self._norm is not None and math.isfinite(norm):
            norm = self._norm
        if not math.isfinite(norm):
            if self._skips and not self._is_updating:
                self._early.give_back()
                self._show()
                return Applied(norm, skipped=True)
            self._refuse_gradients(norm)
        scale = clip_coefficient(norm, self._limit)
        if self._flow.landing.landed is not None:
            return self._correct(norm, scale, rank)
        if self._store.comm.size == 1:  # others may have updated theirs
            self._early.check()
        waiting = sorted((s for s in self._store.states if s.keeps_gradients), key=lambda state: rank(state.region))
        if self._delays:
            waiting.reverse()  # what the next backward needs first: room for its gradients
        self._early.follow([state.region for state in waiting])
        for state in waiting:
            # Of several ranks another may have what this one lacks.
            if self._store.comm.size > 1 or any(self._measures.touched[state.region.index]):
                landed = Landed(state.region, state.gradients, state.landing, scale)
                self._due[state.region] = partial(self._submit, landed, self._measures.touched[state.region.index])
            else:
                self._early.give_back(state.tiles)
        self._slots.invalidate(self._due)
        self._show()
        return Applied(norm)

    def catch_up(self) -> None:
        """Every update is made: the next pass computes with the weights as they are now."""
        self._delays = False
        self._show()

    def _show(self) -> None:
        """Where updates are late, the next pass computes with the weights from before those that are due."""
        late = {state.region for state in self._store.states if self._delays and state.region in self._due}
        changed = [state for state in self._store.states if state.is_late or state.region in late]
        self._is_updating = self._is_updating or bool(late)
        self._slots.invalidate([state.region for state in changed])
        for state in changed:
            for tile in state.held:
                tile.show(state.region in late)

    def _submit_due(self, last: Region | None = None) -> None:
        """Submit the updates that are due: up to that of a region whose weights come up next, as those behind it would
        take the place in the ring from which they come up; or all.
        """
        if last is None or last in self._due:
            for region in list(self._due):
                self._due.pop(region)()
                if region is last:
                    break

    # -- failures --------------------------------------------------------------------------------------------

    def give_up(self) -> str | None:
        """The step ended with an exception: cancel what was not begun. Return why the states belong to no step any
        more, where they do not.
        """
        self._due.clear()
        self._early.forget()
        self._lanes.give_up()
        self._place.reset()
        return self.failure()

    def mend(self) -> None:
        """All states were written anew."""
        self._is_updating = False

    def free(self) -> None:
        """Let go of every buffer."""
        self._place.free()

    def failure(self) -> str | None:
        """Between steps: return why the states belong to no step, if they do not."""
        error = self._lanes.failure
        if error is not None:
            return f"an update failed ({type(error).__name__}: {error})"
        return "a step failed after some units were updated and before the others were" if self._is_updating else None

    # -- at once, and corrections ----------------------------------------------------------------------------

    def _update_at_once(self, region: Region, gradients: torch.Tensor | None, fence: Fence) -> None:
        landed = Landed(region, gradients, fence)
        self._updated.append(landed)
        touched, squares, so_far = self._measures.touched[region.index], self._measures.squares, self._so_far
        norm, landing = self._norm, fence.before_read()
        # Several ranks find out together, in `apply`.
        alone = self._store.comm.size == 1
        if alone and not all(math.isfinite(squares[index]) for index in region.parameters):
            self._refuse_gradients(math.nan)  # on a GPU the squares are not there yet, and `apply` does it

        def prepare() -> None:
            if self._limit is None and self._lane is self._lanes.here:
                return  # compute does not wait for the norm, which `apply` judges
            for ticket in landing:  # a stream may not have come to it, and the host reads what came before it
                ticket.synchronize()
            self._measures.measured(region)
            so_far[0] += sum(squares[index] for index in region.parameters)
            landed.scale = clip_coefficient(total_norm(so_far) if norm is None else norm, self._limit)
            landed.counts = math.isfinite(so_far[0])  # else `apply` refuses the step, and names the unit

        self._submit(landed, touched, prepare)

    def _correct(self, norm: float, scale: float, rank: Callable[[Region], float]) -> Applied:
        """Bring what was updated with the norm so far to the true coefficient, before it is fetched again."""
        if self._limit is None or self._norm is not None:
            return Applied(norm)
        total, worst, wrong = 0.0, 1.0, []
        for landed in self._updated:  # the same sums as on the lane, which may be behind
            total += sum(self._measures.squares[index] for index in landed.region.parameters)
            applied = clip_coefficient(total_norm([total]), self._limit)
            if _as_float32(applied) != _as_float32(scale):
                worst = max(worst, applied / scale if scale else math.inf)
                wrong.append(landed)
        for landed in sorted(wrong, key=lambda landed: rank(landed.region)):
            self._submit_correction(landed, scale)
        for landed in sorted(self._updated, key=lambda landed: rank(landed.region)):
            self._publish(landed.region)
        return Applied(norm, num_corrected=len(wrong), is_coarse=worst > COARSE_RATIO)

    # -- where it runs ---------------------------------------------------------------------------------------

    def _submit(self, landed: Landed, touched: Sequence[bool], prepare: Callable[[], None] = lambda: None) -> None:
        state, how = self._store[landed.region], self._how()
        first, last = state.tiles[0], state.tiles[-1]
        may_correct = self._is_speculative and self._flow.landing.landed is not None

        def update(tile: Tile, planes: Mapping[str, torch.Tensor], gradients: torch.Tensor) -> int | torch.Tensor:
            if tile is first:
                prepare()
            if not landed.counts:
                return 0
            num_wrong = update_tile(
                state,
                tile,
                planes,
                gradients,
                touched,
                **how,
                scale=landed.scale,
                workspace=self._workspace,
            )
            if tile is last:
                state.count(touched)
            if self._debug and not may_correct:
                gradients.fill_(float("nan"))
            return num_wrong

        self._enter(landed, update, "update", publishes=not may_correct)

    def _submit_correction(self, landed: Landed, scale: float) -> None:
        state, touched, how = self._store[landed.region], self._measures.touched[landed.region.index], self._how()

        def correct(tile: Tile, planes: Mapping[str, torch.Tensor], gradients: torch.Tensor) -> int | torch.Tensor:
            # By now it was updated, with a scale that is known.
            return update_tile(state, tile, planes, gradients, touched, **how, scale=scale, applied_scale=landed.scale)

        self._enter(landed, correct, "correct", publishes=False)

    def _how(self) -> dict[str, Any]:
        """Return what an update goes by that is submitted now, and may be made when `tune` has told of others."""
        return {"rules": self._rules, "infos": self.infos, "lr": self.lr, "seed": self._seed}

    def _publish(self, region: Region) -> None:
        """Give the other ranks the weights that were updated speculatively, now that they are final."""
        for number, tile in enumerate(self._store[region].tiles if self._store.sharding.publishes else ()):
            lease = tile.lend("weights")
            self._store.publish(region, number, lease, lease.reads)

    def _enter(
        self,
        landed: Landed,
        work: Work,
        verb: str,
        publishes: bool,
    ) -> None:
        """Submit work on a region's states, tile by tile: after its gradients, behind every fetch of what it
        overwrites. The work returns how many weights are no longer finite. `publishes`: they are final, and go to the
        other ranks where these hold them too.
        """
        region, state = landed.region, self._store[landed.region]
        self._is_updating = True
        self._slots.invalidate((region,))
        for number, tile in enumerate(state.tiles):
            lease = self._early.lend(tile, [*tile.states, *(["gradients"] if landed.gradients is None else ())])
            planes = lease.planes
            if landed.gradients is not None:
                gradients = landed.gradients[tile.begin - state.begin : tile.end - state.begin]
                planes = {**planes, "gradients": gradients}
            ticket = self._place.submit(
                TileUpdate(
                    region,
                    partial(work, tile),
                    lease,
                    planes,
                    landed.fence,
                    state.stays,
                    partial(self.refuse_weights, region, self.lr),
                    f"{verb} {region.name}",
                    region.update_bytes(tile.end - tile.begin),
                )
            )
            if publishes and self._store.sharding.publishes:
                self._store.publish(region, number, lease, (ticket,))

    def _refuse_gradients(self, norm: float) -> None:
        order = [index for landed in self._updated for index in landed.region.parameters]  # what came first, explains
        bad = [self.infos[i] for i in (order or range(len(self.infos))) if not math.isfinite(self._measures.squares[i])]
        advice = self._store.why_not_finite(
            "Lower --optimizer.lr or look at the data of this step; --train.on_nonfinite skip goes on without such "
            "steps."
        )
        if not bad:
            largest = max(range(len(self.infos)), key=lambda i: self._measures.squares[i])
            raise NonFiniteError(
                f"the norm of the gradients is {norm}, although each parameter's is finite; the largest is that of "
                f"{self.infos[largest].name}. {advice}"
            )
        units: Mapping[int, str] = {
            index: state.region.name for state in self._store.states for index in state.region.parameters
        }
        raise NonFiniteError(
            f"the gradient of {bad[0].name} in unit {units[bad[0].index]} is not finite ({len(bad)} of "
            f"{len(self.infos)} parameters). {advice}"
        )

    def refuse_weights(self, region: Region, lr: float, num_wrong: int) -> NoReturn:
        """Raise NonFiniteError: an update has made weights that are no numbers. The states are not to be used."""
        self._is_updating = True
        advice = self._store.why_not_finite(
            "The step is too large. Lower --optimizer.lr, and go on from the last checkpoint."
        )
        raise NonFiniteError(
            f"{num_wrong} weights of unit {region.name} are not finite after the update with lr {lr:g}. {advice}"
        )


def _as_float32(value: float) -> float:
    """Return the value as the kernels see it."""
    return float(struct.unpack("f", struct.pack("f", value))[0])
