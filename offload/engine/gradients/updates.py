"""Updates of the regions, beside the passes, with exact clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from offload.engine.gradients.flow import GradientFlow
from offload.engine.gradients.loss_scale import LOSS_SCALES
from offload.engine.gradients.policies import (
    DeferredPolicy,
    ImmediatePolicy,
    NormOnlyPolicy,
    SpeculativePolicy,
    UpdatePolicy,
    UpdateResult,
    refuse_gradients,
)
from offload.engine.gradients.tile_updates import TileUpdates, UpdatePlace
from offload.errors import ConfigError
from offload.interrupts import interrupts
from offload.layout.regions import Region
from offload.optim.rule import UpdateRule
from offload.optim.update import clip_coefficient, total_norm
from offload.planning.settings import Settings
from offload.tiers.slots import Slots
from offload.tiers.store import Store
from offload.tiers.tile import DeferredUpdates, PendingUpdate

UNCLIPPED_STEPS = 8
"""After this many steps without clipping, a run with `clip: auto` becomes speculative, if that hides updates.

Until then the result bits are equal in both modes.
"""


class Updates:
    """Chooses the policy for each step, passes it the norm, and submits the remaining updates.

    Steps with sums over several backward passes are always deferred, independent of `clip`. If the update rule keeps no
    gradients, a step with clipping runs two backwards: the first for the norm, the second for the updates.
    """

    def __init__(
        self,
        store: Store,
        flow: GradientFlow,
        slots: Slots,
        deferred: DeferredUpdates,
        settings: Settings,
        place: UpdatePlace,
        workspace: torch.Tensor | None = None,
    ) -> None:
        """`workspace`: device memory for update rules that compute on the device."""
        self.tiles = TileUpdates(store, slots, settings, place, workspace)
        self._flow = flow
        self._measures = flow.measures
        self._slots = slots
        self._deferred = deferred
        self._lanes = store.lanes

        # Norm and clipping.
        self.max_norm = settings.max_grad_norm
        """Norm to clip to. None: no clipping."""
        self._limit = self.max_norm
        """The same for this step."""
        self._measures_norm = settings.needs_all_gradients and settings.optimizer.drops_gradients
        self._norm: float | None = None
        """This step's norm, from a separate backward."""
        self._skips = settings.skips
        self.loss_scale = LOSS_SCALES[settings.precision]()
        """Factor on the loss of each backward."""
        self._delays_from = math.inf  # in steps
        if settings.delay:
            self._delays_from = settings.delay_after
        self._is_inline = store.update_lane is store.lanes.on_compute
        self.clip = settings.resolved_clip
        if self._is_inline:  # such an update hides nothing, so it may as well wait for the norm
            self.clip = "deferred"
        self.num_unclipped: int | None = None  # steps so far, while `clip` is undecided; else None

    @property
    def needs_norm(self) -> bool:
        """True if updates wait for the norm."""
        is_deferred = self.max_norm is not None and self.clip != "speculative"
        return (self._skips or is_deferred) and not self._measures_norm

    def delays(self, number: int) -> bool:
        """Return whether the update after `number` earlier steps is delayed."""
        return number >= self._delays_from

    @property
    def measures_first(self) -> bool:
        """True if a step needs a separate backward for the norm.

        `begin_step` receives the current backward as `for_norm` or `norm`.
        """
        return self._measures_norm and not self._flow.has_sums

    @property
    def is_immediate(self) -> bool:
        """True if, in this step, regions are updated at arrival without a later correction."""
        return self._flow.transfer.policy.is_final

    def decide(self, clip: str, num_unclipped: int | None = None) -> None:
        """Set the clipping mode: "deferred", "speculative", or "auto" after `num_unclipped` steps without clipping.

        With "auto" steps are deferred. The first clipped step makes the run deferred for good; `UNCLIPPED_STEPS` steps
        without clipping make it speculative. Unclipped steps have equal bits in both modes, so the whole run has the
        bits of the mode decided.
        """
        self.clip = clip
        self.num_unclipped = num_unclipped

    def tune(self, rule: UpdateRule, decays: Mapping[str, float]) -> None:
        """Use other rule settings, and other weight decays by parameter name, for the next updates.

        Pending updates keep their own.
        """
        settings = self.tiles.settings
        if [part.moments for part in rule.parts] != [part.moments for part in settings.rules]:
            raise ConfigError(
                f"the update rule {settings.rules[0]} cannot change to {rule}, which stores other moments per "
                "weight: choose this setting when the engine is created."
            )
        infos = [replace(info, weight_decay=decays.get(info.name, info.weight_decay)) for info in settings.infos]
        self.tiles.settings = settings._replace(rules=rule.parts, infos=infos)

    def begin_step(
        self, lr: float, after_norm: bool, number: int, *, for_norm: bool = False, norm: float | None = None
    ) -> None:
        """Start step `number`.

        `after_norm`: updates come after the norm in any case. `for_norm`: the next backward is for the norm only.
        `norm`: the norm from such a backward.
        """
        self._norm = norm
        self._limit = self.max_norm
        self._lanes.close_step()
        self.tiles.settings = self.tiles.settings._replace(lr=lr, unscale=1 / self.loss_scale.value)
        self.tiles.place.begin_step()
        delays = self.delays(number)
        self._flow.transfer.policy = self._choose(after_norm or delays, delays, for_norm, norm)

    def _choose(self, after_norm: bool, delays: bool, for_norm: bool, norm: float | None) -> UpdatePolicy:
        tiles, measures = self.tiles, self._measures
        limit = self._limit
        if for_norm:
            return NormOnlyPolicy()
        if after_norm or self.needs_norm:
            reads_early = not after_norm and tiles.early.are_possible
            return DeferredPolicy(tiles, measures, self._deferred, reads_early=reads_early, delays=delays)
        if limit is None or norm is not None:
            return ImmediatePolicy(tiles, measures, limit, norm, self._is_inline)
        return SpeculativePolicy(tiles, measures, limit, norm, self._is_inline)

    def measure_norm(self) -> float:
        """End the norm-only backward: return the norm and forget the gradients.

        Raises NonFiniteError for a non-finite norm, unless such steps are skipped.
        """
        self._norm = self.measure()
        if not math.isfinite(self._norm) and not self._skips:
            refuse_gradients(self.tiles, self._measures, self._norm)
        self._flow.begin_step()
        return self._norm

    def measure(self) -> float:
        """Complete the gradients and return their norm over all ranks. Collective."""
        self._flow.send_rest()
        return self._total_norm()

    def _total_norm(self) -> float:
        """Wait for the gradients and return their norm over all ranks, without the loss scale. Collective."""
        self._flow.finish()
        norm = total_norm(self.tiles.store.comm.squares_of_model(self._measures.squares))
        return norm * self.tiles.settings.unscale

    def take_scale(self) -> float:
        """Return the factor that makes the step's gradients those of the loss. The caller multiplies them by it: norm
        and update do so no more.
        """
        factor = self.tiles.settings.unscale
        self.tiles.settings = self.tiles.settings._replace(unscale=1.0)
        return factor

    def steer(self, lr: float, max_norm: float | None) -> None:
        """Set the learning rate and, if given, the clipping norm (0: no clipping) for this step.

        The step's updates must still be waiting for the norm.
        """
        self.tiles.settings = self.tiles.settings._replace(lr=lr)
        if max_norm is not None:
            self._limit = max_norm or None

    def clip_gradients(self, first_use: Callable[[Region], float]) -> UpdateResult:
        """Wait for the gradient norm and choose the clipping coefficient for the remaining updates.

        `first_use`: sort key for the updates, a region's first use in the next step.
        """
        policy = self._flow.transfer.policy
        norm = self._total_norm()
        # The updates have used the norm of the first backward. The last bits may differ.
        if self._norm is not None and math.isfinite(norm):
            norm = self._norm
        self.loss_scale.adjust(math.isfinite(norm))
        if math.isfinite(norm):
            if self.num_unclipped is not None:  # this step counts for the decision about `clip: auto`
                self.num_unclipped += 1
                if clip_coefficient(norm, self._limit) != 1.0:
                    self.decide("deferred")
                elif self.num_unclipped == UNCLIPPED_STEPS:
                    self.decide("speculative")
            return policy.finish(norm, self._limit, first_use)
        if not self._skips or self.tiles.is_updating:
            refuse_gradients(self.tiles, self._measures, norm, policy.arrived)
        self.tiles.early.give_back()  # no update takes over these leases, and the ring needs the room
        self.tiles.choose_weights()
        return UpdateResult(norm, skipped=True)

    def defer(self, updates: Mapping[Region, PendingUpdate]) -> None:
        """Add updates without gradients to the pending ones, in this order."""
        self._deferred.pending.update(updates)
        self._slots.invalidate(self._deferred.pending)

    def flush(self) -> None:
        """Run on the host the updates that wait for the next copy of weights to the device: the host reads next."""
        if updates := dict(self._deferred.in_slot):
            self._deferred.in_slot.clear()
            self.defer(updates)
            self.start()

    def start(self) -> None:
        """Start all pending updates."""
        # An interrupt between two updates would leave a torn state.
        with interrupts.uninterrupted():
            self.update_resident()
            self.start_rest()

    def update_resident(self) -> None:
        """Start the pending updates of resident weights, and copy these weights to the device again.

        Fetches for the next step may follow: each one starts the pending updates up to its own region.
        """
        self.tiles.mark_updating(bool(self._deferred.pending))
        self._slots.refresh()

    def start_rest(self) -> None:
        """Start the pending updates without a fetch. All updates of the step are then submitted."""
        self._deferred.start()
        self.tiles.place.check()
        self._lanes.close_step()  # pending updates now belong to a finished step: `give_up` leaves them
        self.tiles.is_updating = False

    def catch_up(self) -> None:
        """Let the next pass compute with the newest weights: all updates are done."""
        self.tiles.choose_weights()

    # -- failures --------------------------------------------------------------------------------------------

    def give_up(self) -> str | None:
        """Cancel work after an exception. Return the reason if the states are torn, else None."""
        self._deferred.pending.clear()
        self.tiles.early.forget()
        self._lanes.give_up()
        self.tiles.place.reset()
        return self.failure()

    def mark_sound(self) -> None:
        """Mark the states as whole: all were written again."""
        self.tiles.is_updating = False

    def failure(self) -> str | None:
        """Return the reason if the states belong to no step, else None. Call between steps."""
        error = self._lanes.failure
        if error is not None:
            return f"an update failed ({type(error).__name__}: {error})"
        if self.tiles.is_updating:
            return "a step failed after updating some units but not all"
        return None
