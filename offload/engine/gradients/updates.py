"""The update of the regions, beside the passes, with exact clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from offload.engine.gradients.flow import GradientFlow
from offload.engine.gradients.policies import (
    Applied,
    AtOnce,
    Deferred,
    Delayed,
    LearnFirst,
    Policy,
    Speculative,
    refuse_gradients,
)
from offload.engine.gradients.tile_updates import Landed, TileUpdates
from offload.engine.gradients.update_place import UpdatePlace
from offload.errors import ConfigError
from offload.interrupts import interrupts
from offload.lanes.lanes import Lanes
from offload.lanes.ticket import Fence
from offload.layout.regions import ParameterInfo, Region
from offload.optim.rule import UpdateRule
from offload.optim.update import clip_coefficient, total_norm
from offload.planning.settings import Settings
from offload.tiers.due import Due, Work
from offload.tiers.slots import Slots
from offload.tiers.store import Store

UNCLIPPED_STEPS = 8
"""So many steps, none of which was clipped, have a run go on speculatively where that hides updates. Up to then no bit
has depended on it.
"""


class Updates:
    """Chooses the policy of each step, tells it the norm, and has submitted what it leaves due.

    Steps that sum over several backward passes are deferred, whatever `clip` says. With a rule whose gradients do not
    wait, a step that clips makes one backward to learn the norm and a second one, in which they are updated from.
    """

    def __init__(
        self,
        store: Store,
        infos: Sequence[ParameterInfo],
        flow: GradientFlow,
        slots: Slots,
        due: Due,
        lanes: Lanes,
        settings: Settings,
        place: UpdatePlace,
        workspace: torch.Tensor | None = None,
    ) -> None:
        """`workspace`: memory of the device, for rules that compute there."""
        self.tiles = TileUpdates(store, infos, slots, settings, place, workspace)
        self._flow, self._slots, self._due, self._lanes, self._measures = flow, slots, due, lanes, flow.measures
        self._learns = settings.judges_gradients and settings.optimizer.drops_gradients
        self._norm: float | None = None  # that of this step, as a backward of its own has found it
        self._max_norm = self._limit = settings.max_grad_norm  # as it was told, and of this step
        self._skips, self._delays_from = settings.skips, settings.delay_after if settings.delay else math.inf
        self._is_inline = store.updating is lanes.here
        # Compute itself hides nothing.
        self.clip = "deferred" if self._is_inline else settings.resolved_clip
        self.num_unclipped: int | None = None  # steps, while it is open how the run clips and they are counted
        self._policy = Policy()

    @property
    def infos(self) -> Sequence[ParameterInfo]:
        """By which the next updates go."""
        return self.tiles.infos

    @property
    def max_norm(self) -> float | None:
        """To which norm gradients are clipped, but in a step that says otherwise; None for no clipping."""
        return self._max_norm

    @property
    def waits(self) -> bool:
        """True where updates come after the norm."""
        is_deferred = self._max_norm is not None and self.clip != "speculative"
        return (self._skips or is_deferred) and not self._learns

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
        return self._policy.is_final

    def decide(self, clip: str, num_unclipped: int | None = None) -> None:
        """Clip so from now on: deferred, speculative, or auto, which leaves it to the steps, of which so many were
        made: deferred until one is clipped, and then for good; speculative after `UNCLIPPED_STEPS` without one. Steps
        that are not clipped have the same bits either way, so that all of the run has those of what is decided.
        """
        self.clip, self.num_unclipped = clip, num_unclipped

    def _watch(self, norm: float) -> None:
        """A step's norm is known, and it is open how the run clips."""
        assert self.num_unclipped is not None
        self.num_unclipped += 1
        if clip_coefficient(norm, self._limit) != 1.0:
            self.decide("deferred")
        elif self.num_unclipped == UNCLIPPED_STEPS:
            self.decide("speculative")

    def tune(self, rule: UpdateRule, decays: Mapping[str, float]) -> None:
        """Let the next updates go by a rule with other settings, and other weight decays of parameters, by their names;
        those under way keep their own.
        """
        if [part.moments for part in rule.parts] != [part.moments for part in self.tiles.rules]:
            raise ConfigError(
                f"the rule was {self.tiles.rules[0]}, and is to be {rule}, which keeps other moments of each weight: "
                "such a setting is chosen when the engine is made."
            )
        infos = [replace(info, weight_decay=decays.get(info.name, info.weight_decay)) for info in self.infos]
        self.tiles.tune(rule.parts, infos)

    def begin_step(
        self, lr: float, waits: bool, number: int, *, learns: bool = False, norm: float | None = None
    ) -> None:
        """Start a step, by its number; `waits`: its updates come after the norm in any case. `learns`: the backward
        that comes is for the norm alone; `norm`: such a one has found it.
        """
        self._norm, self._limit = norm, self._max_norm
        self._lanes.settle()
        self.tiles.steer(lr)
        self.tiles.place.begin_step()
        self._policy = self._choose(waits, self.delays(number), learns, norm)
        self._flow.landing.follow(self._policy)

    def _choose(self, waits: bool, delays: bool, learns: bool, norm: float | None) -> Policy:
        tiles, measures, limit = self.tiles, self._measures, self._limit
        if learns:
            return LearnFirst()
        if delays:
            return Delayed(tiles, measures, self._due, reads_early=False)
        if waits or self.waits:
            return Deferred(tiles, measures, self._due, reads_early=not waits and tiles.early.are_possible)
        if limit is None or norm is not None:
            return AtOnce(tiles, measures, limit, norm, self._is_inline)
        return Speculative(tiles, measures, limit, norm, self._is_inline)

    def learn(self) -> float:
        """The backward for the norm is over: return it, and forget the gradients. Raises NonFiniteError where that is
        not finite, and the step is not to be skipped for it.
        """
        self._flow.land_rest()
        self._flow.landing.finish()
        self._norm = total_norm(self._measures.squares.values())
        if not math.isfinite(self._norm) and not self._skips:
            refuse_gradients(self.tiles, self._measures, self._norm)
        self._flow.begin_step()
        return self._norm

    def measure(self) -> float:
        """The gradients of an own loop's step are complete: return their norm, over all ranks. Collective."""
        self._flow.land_rest()
        self._flow.finish()
        return total_norm(self._measures.squares.values())

    def steer(self, lr: float, max_norm: float | None) -> None:
        """Go by this learning rate in this step, whose updates wait for their norm; and clip to another norm than
        usual, where one is given (0 for no clipping).
        """
        self.tiles.steer(lr)
        if max_norm is not None:
            self._limit = max_norm or None

    def apply(self, rank: Callable[[Region], float], go_on: Callable[[], None]) -> Applied:
        """Finish the gradients, clip, submit what is left to update in the order of `rank`; call `go_on` as soon as it
        is known how, and weights may come up for the next step.
        """
        self._flow.land_rest()
        if self.is_immediate:
            self._slots.refresh()
            go_on()
        applied = self._clip(rank)
        if self.is_immediate:
            self._settle()
        else:
            self._end(go_on)
        return applied

    def _clip(self, rank: Callable[[Region], float]) -> Applied:
        self._flow.finish()
        norm = total_norm(self._measures.squares.values())
        if self._norm is not None and math.isfinite(norm):
            norm = self._norm
        if math.isfinite(norm):
            if self.num_unclipped is not None:
                self._watch(norm)
            return self._policy.finish(norm, self._limit, rank)
        if not self._skips or self.tiles.is_updating:
            refuse_gradients(self.tiles, self._measures, norm, self._policy.arrived)
        self.tiles.early.give_back()
        self.tiles.show(())
        return Applied(norm, skipped=True)

    def descend(self, works: Mapping[Region, Work], go_on: Callable[[], None]) -> None:
        """Submit the updates of a step without gradients, in this order, and `go_on` as `apply` does."""
        for region, work in works.items():
            landed = Landed(region, torch.empty(0, device="cpu"), Fence("no gradients"))
            self._due.submissions[region] = partial(self.tiles.enter, landed, work, "update", publishes=True)
        self._slots.invalidate(self._due.submissions)
        self._end(go_on)

    def flush(self) -> None:
        """Make on the host what was put off until its weights come up: somebody reads these before."""
        if works := dict(self._due.in_slot):
            self._due.in_slot.clear()
            self.descend(works, lambda: None)

    def _end(self, go_on: Callable[[], None]) -> None:
        """What is left to update is due: let weights come up for the next step, and submit it."""
        self.tiles.begin(bool(self._due.submissions))
        with interrupts.firm():
            self._slots.refresh()
            go_on()
            self._due.submit()
            self._settle()

    def _settle(self) -> None:
        self.tiles.place.check()
        self._lanes.settle()  # what is on its way belongs to a step that is over
        self.tiles.end()

    def catch_up(self) -> None:
        """Every update is made: the next pass computes with the weights as they are now."""
        self.tiles.show(())

    # -- failures --------------------------------------------------------------------------------------------

    def give_up(self) -> str | None:
        """The step ended with an exception: cancel what was not begun. Return why the states belong to no step any
        more, where they do not.
        """
        self._due.submissions.clear()
        self.tiles.early.forget()
        self._lanes.give_up()
        self.tiles.place.reset()
        return self.failure()

    def mend(self) -> None:
        """All states were written anew."""
        self.tiles.end()

    def free(self) -> None:
        """Let go of every buffer."""
        self.tiles.place.free()

    def failure(self) -> str | None:
        """Between steps: return why the states belong to no step, if they do not."""
        error = self._lanes.failure
        if error is not None:
            return f"an update failed ({type(error).__name__}: {error})"
        torn = self.tiles.is_updating
        return "a step failed after some units were updated and before the others were" if torn else None
