"""The updates of regions, tile by tile, on their way to where they run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from offload.engine.gradients.update_place import TileUpdate, UpdatePlace
from offload.errors import NonFiniteError
from offload.lanes.ticket import Fence
from offload.layout.regions import ParameterInfo, Region
from offload.optim.update import update_tile
from offload.planning.settings import Settings
from offload.tiers.due import Work
from offload.tiers.lease import Lease
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


class EarlyReads:
    """Leases of the tiles that are likely to be updated first, those of the last norm: their states are read from disk
    before the norm is known, which says how they are updated.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._order: list[Region] = []
        self._leases: dict[Tile, Lease] = {}
        self.are_possible = store.lends_early

    def begin(self) -> None:
        """The backward begins, in which the disk has little to do: read what was updated first last time, as far as the
        ring reaches.
        """
        for tile in (tile for region in self._order for tile in self._store[region].tiles if tile.record is not None):
            lease = tile.lend_early(*tile.states)
            if lease is None:
                break
            self._leases[tile] = lease

    def check(self) -> None:
        """Raise what has failed of it: nothing is updated yet, and nothing lost."""
        for ticket in (ticket for lease in self._leases.values() for ticket in lease.reads):
            if ticket.error is not None:
                raise ticket.error

    def follow(self, order: list[Region]) -> None:
        """Updates come in this order; what was read for another would be in the way."""
        if order != self._order:
            self.give_back()
        self._order = order

    def give_back(self, tiles: Iterable[Tile] | None = None) -> None:
        """What was read of these tiles, or of all, is not updated."""
        for tile in list(self._leases) if tiles is None else tiles:
            if (lease := self._leases.pop(tile, None)) is not None:
                lease.give_back()

    def forget(self) -> None:
        """All leases were given up."""
        self._leases.clear()

    def lend(self, tile: Tile, names: Sequence[str]) -> Lease:
        """Lend a tile's planes for its update: those that were read early, or anew."""
        early = self._leases.pop(tile, None)
        return tile.lend(*names) if early is None else tile.renewed(early)


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
        place: UpdatePlace,
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
            lease = tile.lend(tile.travelling)
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
