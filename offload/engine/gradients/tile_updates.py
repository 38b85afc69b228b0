"""The updates of regions, tile by tile, on their way to where they run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from offload.engine.gradients.early import EarlyReads
from offload.engine.gradients.update_place import InPlace, OnDevice, TileUpdate
from offload.errors import NonFiniteError
from offload.lanes.ticket import Fence
from offload.layout.regions import ParameterInfo, Region
from offload.optim.update import update_tile
from offload.planning.settings import Settings
from offload.tiers.due import Work
from offload.tiers.slots import Slots
from offload.tiers.store import Store
from offload.tiers.tile import Tile


@dataclass
class Landed:
    """A region whose gradients have landed. With which coefficient the region is updated is known once the norm is."""

    region: Region
    """The region."""
    gradients: torch.Tensor | None
    """The gradients in memory; None where they wait on disk with the region's states."""
    fence: Fence
    """Who reads and writes the gradients."""
    scale: float = 1.0
    """The clipping coefficient, by which gradients are multiplied."""
    counts: bool = True
    """False if the region must not be updated: the step is skipped."""

    def decide(self, scale: float, *, counts: bool) -> None:
        """The norm is known."""
        self.scale, self.counts = scale, counts


class TileUpdates:
    """Submits updates to their `place`. `rules`, `infos`, `lr`: by which those go that are submitted from now on.
    `is_updating`: some regions of a step are updated, or will be, and others are not yet.
    """

    def __init__(
        self,
        store: Store,
        infos: Sequence[ParameterInfo],
        slots: Slots,
        settings: Settings,
        place: InPlace | OnDevice,
        workspace: torch.Tensor | None,
    ) -> None:
        """`workspace`: memory of the device, for rules that compute there."""
        self.store, self.infos, self.slots, self.place, self._workspace = store, infos, slots, place, workspace
        self.early = EarlyReads(store)
        self.rules, self.lr = settings.optimizer.parts, settings.optimizer.lr
        self._debug, self._seed = bool(settings.debug), settings.seed
        self.is_updating = False

    def steer(self, lr: float) -> None:
        """Go by this learning rate from now on."""
        self.lr = lr

    def begin(self, is_updating: bool = True) -> None:
        """A step is counted, or about to be, and `is_updating`."""
        self.is_updating = self.is_updating or is_updating

    def end(self) -> None:
        """All of a step is submitted, or all states were written anew."""
        self.is_updating = False

    def tune(self, rules: Any, infos: Sequence[ParameterInfo]) -> None:
        """Let the next updates go by these; those under way keep their own."""
        self.rules, self.infos = rules, infos

    # -- what is done ----------------------------------------------------------------------------------------

    def submit(
        self,
        landed: Landed,
        touched: Sequence[bool],
        prepare: Callable[[], None] = lambda: None,
        is_final: bool = True,
    ) -> None:
        """Submit the update of a region; before its first tile the lane calls `prepare`. `is_final`: it will not be
        corrected.
        """
        state, how = self.store[landed.region], self._how()
        first, last = state.tiles[0], state.tiles[-1]

        def update(tile: Tile, planes: Mapping[str, torch.Tensor], gradients: torch.Tensor) -> int | torch.Tensor:
            if tile is first:
                prepare()
            if not landed.counts:
                return 0
            scale, space = landed.scale, self._workspace
            num_wrong = update_tile(state, tile, planes, gradients, touched, **how, scale=scale, workspace=space)
            if tile is last:
                state.count(touched)
            if self._debug and is_final:
                gradients.fill_(float("nan"))
            return num_wrong

        self.enter(landed, update, "update", publishes=is_final)

    def correct(self, landed: Landed, touched: Sequence[bool], scale: float) -> None:
        """Submit the correction of an update to another coefficient."""
        state, how = self.store[landed.region], self._how()

        def correct(tile: Tile, planes: Mapping[str, torch.Tensor], gradients: torch.Tensor) -> int | torch.Tensor:
            # By now it was updated, with a scale that is known.
            return update_tile(state, tile, planes, gradients, touched, **how, scale=scale, applied_scale=landed.scale)

        self.enter(landed, correct, "correct", publishes=False)

    def _how(self) -> dict[str, Any]:
        """Return what an update goes by that is submitted now, and may be made when `tune` has told of others."""
        return {"rules": self.rules, "infos": self.infos, "lr": self.lr, "seed": self._seed}

    def publish(self, region: Region) -> None:
        """Give the other ranks weights that were to be corrected, now that they are final."""
        for number, tile in enumerate(self.store[region].tiles if self.store.sharding.publishes else ()):
            lease = tile.lend("weights")
            self.store.publish(region, number, lease, lease.reads)

    def enter(self, landed: Landed, work: Work, verb: str, publishes: bool) -> None:
        """Submit work on a region's states, tile by tile: after its gradients, behind every fetch of what it
        overwrites. `publishes`: the weights are final then, and go to the other ranks where these hold them too.
        """
        region, state = landed.region, self.store[landed.region]
        self.begin()
        self.slots.invalidate((region,))
        for number, tile in enumerate(state.tiles):
            lease = self.early.lend(tile, [*tile.states, *(["gradients"] if landed.gradients is None else ())])
            planes = lease.planes
            if landed.gradients is not None:
                gradients = landed.gradients[tile.begin - state.begin : tile.end - state.begin]
                planes = {**planes, "gradients": gradients}
            ticket = self.place.submit(
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
            if publishes and self.store.sharding.publishes:
                self.store.publish(region, number, lease, (ticket,))

    def show(self, late: Collection[Region]) -> None:
        """Let the next pass compute with the weights from before the updates of these regions, and with the newest ones
        of all others.
        """
        changed = [state for state in self.store.states if state.is_late or state.region in late]
        self.begin(bool(late))
        self.slots.invalidate([state.region for state in changed])
        for state in changed:
            for tile in state.held:
                tile.show(state.region in late)

    def refuse_weights(self, region: Region, lr: float, num_wrong: int) -> NoReturn:
        """Raise NonFiniteError: an update has made weights that are no numbers. The states are not to be used."""
        self.begin()
        advice = self.store.values.why_not_finite(
            "The step is too large. Lower --optimizer.lr, and go on from the last checkpoint."
        )
        raise NonFiniteError(
            f"{num_wrong} weights of unit {region.name} are not finite after the update with lr {lr:g}. {advice}"
        )
