"""Updates of regions, submitted tile by tile to an update place, and updates in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from offload.errors import NonFiniteError
from offload.lanes.ticket import Fence, Lane, Ticket
from offload.layout.regions import Region
from offload.optim.update import UpdateSettings, update_tile
from offload.planning.settings import Settings
from offload.tiers.device import Device
from offload.tiers.lease import Lease
from offload.tiers.slots import Slots
from offload.tiers.store import Store
from offload.tiers.tile import PendingUpdate, Tile


class EarlyReads:
    """Early disk reads: states of the tiles likely to be updated first are read before the norm is known.

    The previous step's update order serves as the prediction.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._order: list[Region] = []
        self._leases: dict[Tile, Lease] = {}
        # A record with room for gradients would lend them with the states, before they exist.
        self.are_possible = not any(state.has_room_on_disk for state in store.states.values())

    def begin(self) -> None:
        """Read states during the backward, when the disk is mostly idle.

        Follows the last update order as far as the ring has room.
        """
        for tile in (
            tile for region in self._order for tile in self._store.states[region].tiles if tile.record is not None
        ):
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
        if order != self._order:  # the prediction was wrong
            self.give_back()
        self._order = order

    def give_back(self, tiles: Iterable[Tile] | None = None) -> None:
        """Release the leases on these tiles (None: all) without an update."""
        if tiles is None:
            tiles = list(self._leases)
        for tile in tiles:
            if (lease := self._leases.pop(tile, None)) is not None:
                lease.give_back()

    def forget(self) -> None:
        """Forget all leases after a give-up."""
        self._leases.clear()

    def lend(self, tile: Tile, names: Sequence[str]) -> Lease:
        """Return a lease on tile planes for the update, from the early read if there is one."""
        early = self._leases.pop(tile, None)
        if early is None:
            return tile.lend(*names)
        return tile.renew_lease(early)


class TileUpdates:
    """The parts that all updates of an engine share.

    `settings`: for the next updates; pending ones keep their own. `is_updating`: True from a step's first update until
    the last one is submitted.
    """

    def __init__(
        self, store: Store, slots: Slots, settings: Settings, place: UpdatePlace, workspace: torch.Tensor | None
    ) -> None:
        """`workspace`: device memory for update rules that compute on the device."""
        self.store = store
        self.slots = slots
        self.place = place
        self.debug = bool(settings.debug)
        self.early = EarlyReads(store)
        rule = settings.optimizer
        self.settings = UpdateSettings(rule.parts, store.infos, rule.lr, settings.seed, workspace)
        self.is_updating = False

    def mark_updating(self, is_updating: bool = True) -> None:
        """Mark the step as updating, if `is_updating`."""
        self.is_updating = self.is_updating or is_updating

    def publish(self, region: Region) -> None:
        """Send corrected, now final weights to the other ranks."""
        if not self.store.publishes:
            return
        for number, tile in enumerate(self.store.states[region].tiles):
            lease = tile.lend(tile.travelling)
            self.store.publish(region, number, lease, lease.reads)

    def choose_weights(self, late: Collection[Region] = ()) -> None:
        """Let the next pass use the old weights of the regions `late`, and the newest weights of all others."""
        changed = [state for region, state in self.store.states.items() if state.is_stale or region in late]
        self.mark_updating(bool(late))
        self.slots.invalidate([state.region for state in changed])
        for state in changed:
            for tile in state.held_tiles:
                tile.show(state.region in late)


class RegionUpdate:
    """The update of a region with gradients on their way, run tile by tile.

    `scale`: clipping coefficient, multiplied with the gradients; None: no update, because the step fails.
    """

    verb = "update"

    def __init__(
        self,
        tiles: TileUpdates,
        region: Region,
        gradients: torch.Tensor | None,
        fence: Fence,
        touched: Sequence[bool],
        scale: float | None = 1.0,
        *,
        is_final: bool = True,
    ) -> None:
        """`gradients`: in memory, behind `fence`; None: on disk with the region's states. `touched`: per piece, True
        if there is a gradient. `is_final`: no correction follows.
        """
        self.tiles = tiles
        self.region = region
        self.state = tiles.store.states[region]
        self.settings = tiles.settings  # those of this step: the next one may have others
        self.gradients = gradients
        self.fence = fence
        self.touched = touched
        self.scale = scale
        self.is_final = is_final

    def submit(self) -> None:
        """Submit the update, after the gradients and after every fetch of the overwritten data.

        Final weights are sent to other ranks with a copy.
        """
        tiles, state = self.tiles, self.state
        gradients = self.gradients
        tiles.mark_updating()  # a failure from here on leaves a torn state
        tiles.slots.invalidate((self.region,))  # a copy on the device is of the old weights
        for number, tile in enumerate(state.tiles):
            names = [*tile.states]
            if gradients is None:
                names.append("gradients")
            lease = tiles.early.lend(tile, names)
            planes = lease.planes
            if gradients is not None:
                planes = {**planes, "gradients": gradients[tile.begin - state.begin : tile.end - state.begin]}
            ticket = tiles.place.submit(TileUpdate(self, tile, lease, planes))
            if self.is_final and tiles.store.publishes:
                tiles.store.publish(self.region, number, lease, (ticket,))

    def update_tile(self, tile: Tile, planes: Mapping[str, torch.Tensor]) -> int | torch.Tensor:
        """Update a tile's planes in place. Return the non-finite weight count."""
        if tile is self.state.tiles[0]:
            self.choose_scale()
        if self.scale is None:
            return 0
        num_wrong = update_tile(self.state, tile, planes, self.touched, self.settings, self.scale)
        if tile is self.state.tiles[-1]:  # once, and last: every tile of an update has the same step number
            self.state.count(self.touched)
        if self.tiles.debug and self.is_final:  # a correction reads the gradients again
            planes["gradients"].fill_(float("nan"))
        return num_wrong

    def choose_scale(self) -> None:
        """Set `scale`, before the first tile."""

    def refuse(self, num_wrong: int) -> NoReturn:
        """Raise NonFiniteError after the update produced non-finite weights. The states are then unusable."""
        self.tiles.mark_updating()
        advice = self.tiles.store.values.explain_nonfinite(
            "The step is too large. Lower --optimizer.lr, and resume from the last checkpoint."
        )
        raise NonFiniteError(
            f"{num_wrong} weights of unit {self.region.name} are not finite after the update with lr "
            f"{self.settings.lr:g}. {advice}"
        )


class Correction(RegionUpdate):
    """Corrects an update from the applied coefficient to another one."""

    verb = "correct"

    def __init__(self, update: RegionUpdate, scale: float) -> None:
        super().__init__(
            update.tiles, update.region, update.gradients, update.fence, update.touched, scale, is_final=False
        )
        self._corrected = update

    def update_tile(self, tile: Tile, planes: Mapping[str, torch.Tensor]) -> int | torch.Tensor:
        applied_scale = self._corrected.scale  # the update has run by now
        assert self.scale is not None
        assert applied_scale is not None
        return update_tile(self.state, tile, planes, self.touched, self.settings, self.scale, applied_scale)


@dataclass(frozen=True)
class TileUpdate:
    """The update of one tile, done in place."""

    update: RegionUpdate
    """The region's update."""
    tile: Tile
    """The tile."""
    lease: Lease
    """Lease on the tile's states."""
    planes: Mapping[str, torch.Tensor]
    """Leased planes and the gradients, by name."""

    @property
    def name(self) -> str:
        """Name in the timeline."""
        return f"{self.update.verb} {self.update.region.name}"

    @property
    def num_bytes(self) -> int:
        """Bytes of states read and written by the update."""
        tile = self.tile
        return self.update.region.update_bytes(tile.end - tile.begin) + self.planes["gradients"].nbytes


class UpdatePlace:
    """Place where updates run."""

    def begin_step(self) -> None:
        """Forget the previous step's counts of non-finite weights."""

    def submit(self, tile: TileUpdate) -> Ticket:
        """Submit a tile update, after the gradients and after every fetch of the overwritten data.

        The returned ticket is done when the new weights are ready.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Refuse non-finite weights after all of a step's updates are submitted."""

    def reset(self) -> None:
        """Reset after a step was given up."""

    def free(self) -> None:
        """Release all buffers."""


class NonFiniteCounts:
    """Counts of non-finite weights that only the accelerator knows, to be read together."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._counts: list[tuple[PendingUpdate, torch.Tensor]] = []

    def add(self, update: PendingUpdate, num_wrong: int | torch.Tensor) -> None:
        """Add the count of an update. A count known on the host is checked at once."""
        if isinstance(num_wrong, torch.Tensor) and not num_wrong.is_cpu:
            self._counts.append((update, num_wrong))
        elif num_wrong:
            update.refuse(int(num_wrong))

    def reader(self) -> Callable[[], None] | None:
        """Start a copy of all counts to the host. Return a function that waits for the copy and refuses non-finite
        weights; None without counts.
        """
        counts, self._counts = self._counts, []
        if not counts:
            return None
        wait = self._device.copy_to_host(torch.stack([count for _, count in counts]))

        def check() -> None:
            for (update, _), num_wrong in zip(counts, wait().tolist(), strict=True):
                if num_wrong:
                    update.refuse(num_wrong)

        return check

    def check(self) -> None:
        """Wait for all counts and refuse non-finite weights."""
        if check := self.reader():
            check()

    def forget(self) -> None:
        """Forget all counts."""
        self._counts = []


class InPlaceUpdates(UpdatePlace):
    """Updates states in place on one lane: the host update lane, or compute for states on the device."""

    def __init__(
        self, lane: Lane, checking: Lane, device: Device, within: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        """`checking`: host lane that waits for counts of the device. `within`: context for the work."""
        self._lane = lane
        self._checking = checking
        self._within = within
        self._counts = NonFiniteCounts(device)

    def begin_step(self) -> None:
        self._counts.forget()

    def submit(self, tile: TileUpdate) -> Ticket:
        ticket = self._lane.submit(
            partial(self._update, tile),
            reads=(*tile.update.fence.before_read(), *tile.lease.reads),
            users=tile.lease.users,
            name=tile.name,
            num_bytes=tile.num_bytes,
        )
        tile.update.fence.record_reader(ticket)
        tile.lease.done_writing(ticket)
        return ticket

    def _update(self, tile: TileUpdate) -> None:
        with self._within():
            self._counts.add(tile.update, tile.update.update_tile(tile.tile, tile.planes))

    def check(self) -> None:
        """Let a lane check the device's counts, so the caller queues the next step meanwhile."""
        if check := self._counts.reader():
            self._checking.submit(check, name="check")
