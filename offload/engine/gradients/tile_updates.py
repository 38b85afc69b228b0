"""Updates of regions, submitted tile by tile to their update place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch

from offload.engine.gradients.update_place import TileUpdate, UpdatePlace
from offload.errors import NonFiniteError
from offload.lanes.ticket import Fence
from offload.layout.regions import ParameterInfo, Region
from offload.optim.update import update_tile
from offload.planning.settings import Settings
from offload.tiers.lease import Lease
from offload.tiers.slots import Slots
from offload.tiers.store import Store
from offload.tiers.tile import Tile, UpdateFunction


@dataclass
class RegionGradients:
    """A region with gradients on their way to the update. The clipping coefficient follows once the norm is known."""

    region: Region
    """The region."""
    gradients: torch.Tensor | None
    """Gradients in memory; None: on disk with the region's states."""
    fence: Fence
    """Fence for the gradients' memory."""
    scale: float | None = 1.0
    """Clipping coefficient, multiplied with the gradients. None: the region is not updated, because the step fails."""


class EarlyReads:
    """Early disk reads: states of the tiles likely to be updated first are read before the norm is known.

    The previous step's update order serves as the prediction.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._order: list[Region] = []
        self._leases: dict[Tile, Lease] = {}
        self.are_possible = store.lends_early

    def begin(self) -> None:
        """Read states during the backward, when the disk is mostly idle.

        Follows the last update order as far as the ring has room.
        """
        for tile in (tile for region in self._order for tile in self._store[region].tiles if tile.record is not None):
            lease = tile.lend_early(*tile.states)
            if lease is None:
                break
            self._leases[tile] = lease

    def check(self) -> None:
        """Raise the error from a failed read: no update has begun, so nothing is lost."""
        for ticket in (ticket for lease in self._leases.values() for ticket in lease.reads):
            if ticket.error is not None:
                raise ticket.error

    def follow(self, order: list[Region]) -> None:
        """Set the update order. Reads for another order are released, because they would block the ring."""
        if order != self._order:
            self.give_back()
        self._order = order

    def give_back(self, tiles: Iterable[Tile] | None = None) -> None:
        """Release the leases on these tiles (None: all) without an update."""
        for tile in list(self._leases) if tiles is None else tiles:
            if (lease := self._leases.pop(tile, None)) is not None:
                lease.give_back()

    def forget(self) -> None:
        """Forget all leases after a give-up."""
        self._leases.clear()

    def lend(self, tile: Tile, names: Sequence[str]) -> Lease:
        """Return a lease on tile planes for the update, from the early read if there is one."""
        early = self._leases.pop(tile, None)
        return tile.lend(*names) if early is None else tile.renew_lease(early)


class TileUpdates:
    """Submits updates to `place`.

    `rules`, `infos`, `lr`: used for updates submitted from now on. `is_updating`: True from a step's first update until
    the last one is submitted.
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
        """`workspace`: device memory for update rules that compute on the device."""
        self.store, self.infos, self.slots, self.place, self._workspace = store, infos, slots, place, workspace
        self.early = EarlyReads(store)
        self.rules, self.lr = settings.optimizer.parts, settings.optimizer.lr
        self._debug, self._seed = bool(settings.debug), settings.seed
        self.is_updating = False

    def begin(self, is_updating: bool = True) -> None:
        """Mark the step as updating, if `is_updating`."""
        self.is_updating = self.is_updating or is_updating

    # -- updates ---------------------------------------------------------------------------------------------

    def update(
        self,
        region_gradients: RegionGradients,
        touched: Sequence[bool],
        choose_scale: Callable[[], float | None] | None = None,
        is_final: bool = True,
    ) -> None:
        """Submit a region's update.

        `choose_scale`: called on the lane before the first tile, returns the region's `scale`. `is_final`: no
        correction follows.
        """
        state, run = self.store[region_gradients.region], self._update_function(region_gradients.region, touched)
        first, last = state.tiles[0], state.tiles[-1]

        def update(tile: Tile, planes: Mapping[str, torch.Tensor]) -> int | torch.Tensor:
            if tile is first and choose_scale is not None:
                region_gradients.scale = choose_scale()
            if region_gradients.scale is None:
                return 0
            num_wrong = run(tile, planes, scale=region_gradients.scale)
            if tile is last:
                state.count(touched)
            if self._debug and is_final:
                planes["gradients"].fill_(float("nan"))
            return num_wrong

        self.submit_tiles(region_gradients, update, "update", publishes=is_final)

    def correct(self, region_gradients: RegionGradients, touched: Sequence[bool], scale: float) -> None:
        """Submit a correction from the applied coefficient to `scale`."""
        run = self._update_function(region_gradients.region, touched)

        def correct(tile: Tile, planes: Mapping[str, torch.Tensor]) -> int | torch.Tensor:
            # The update has run by now, so `region_gradients.scale` is final.
            assert region_gradients.scale is not None
            return run(tile, planes, scale=scale, applied_scale=region_gradients.scale)

        self.submit_tiles(region_gradients, correct, "correct", publishes=False)

    def _update_function(self, region: Region, touched: Sequence[bool]) -> Callable[..., int | torch.Tensor]:
        """Return `update_tile` for a region with the current settings: `tune` may change them before the update."""
        return partial(
            update_tile,
            self.store[region],
            touched=touched,
            rules=self.rules,
            infos=self.infos,
            lr=self.lr,
            seed=self._seed,
            workspace=self._workspace,
        )

    def publish(self, region: Region) -> None:
        """Send corrected, now final weights to the other ranks."""
        for number, tile in enumerate(self.store[region].tiles if self.store.sharding.publishes else ()):
            lease = tile.lend(tile.travelling)
            self.store.publish(region, number, lease, lease.reads)

    def submit_tiles(self, region_gradients: RegionGradients, work: UpdateFunction, verb: str, publishes: bool) -> None:
        """Submit work on a region's states, tile by tile, after its gradients and after every fetch of the overwritten
        data. `publishes`: the weights are then final and are sent to other ranks with a copy.
        """
        region, state = region_gradients.region, self.store[region_gradients.region]
        self.begin()
        self.slots.invalidate((region,))
        for number, tile in enumerate(state.tiles):
            lease = self.early.lend(
                tile, [*tile.states, *(["gradients"] if region_gradients.gradients is None else ())]
            )
            planes = lease.planes
            if region_gradients.gradients is not None:
                gradients = region_gradients.gradients[tile.begin - state.begin : tile.end - state.begin]
                planes = {**planes, "gradients": gradients}
            ticket = self.place.submit(
                TileUpdate(
                    region,
                    partial(work, tile),
                    lease,
                    planes,
                    region_gradients.fence,
                    state.stays,
                    partial(self.refuse_weights, region, self.lr),
                    f"{verb} {region.name}",
                    region.update_bytes(tile.end - tile.begin) + planes["gradients"].nbytes,
                )
            )
            if publishes and self.store.sharding.publishes:
                self.store.publish(region, number, lease, (ticket,))

    def show(self, late: Collection[Region]) -> None:
        """Let the next pass use the old weights of the regions `late`, and the newest weights of all others."""
        changed = [state for state in self.store.states if state.is_stale or state.region in late]
        self.begin(bool(late))
        self.slots.invalidate([state.region for state in changed])
        for state in changed:
            for tile in state.held_tiles:
                tile.show(state.region in late)

    def refuse_weights(self, region: Region, lr: float, num_wrong: int) -> NoReturn:
        """Raise NonFiniteError after an update produced non-finite weights. The states are then unusable."""
        self.begin()
        advice = self.store.values.explain_nonfinite(
            "The step is too large. Lower --optimizer.lr, and resume from the last checkpoint."
        )
        raise NonFiniteError(
            f"{num_wrong} weights of unit {region.name} are not finite after the update with lr {lr:g}. {advice}"
        )
