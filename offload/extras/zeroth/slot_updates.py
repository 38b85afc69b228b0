"""Updates run in the device slot at the next fetch of the weights, then copied to the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from offload.engine.gradients.tile_updates import NonFiniteCounts
from offload.lanes.lanes import Lanes
from offload.layout.regions import Region
from offload.layout.residence import SLOT
from offload.tiers.device import Device, copy_planes
from offload.tiers.slots import Slots
from offload.tiers.store import Store
from offload.tiers.tile import DeferredUpdates, PendingUpdate


class SlotUpdates:
    """Updates put off until the next fetch, so weights make one H2D and one D2H copy per step (ZO2, arXiv:2503.12668).

    If the host reads the states before, the update runs on the host instead. Each update runs once, on the host or the
    device, with equal bits. A copy to the host belongs to the previous step: a give-up of the current step does not
    change the copied states.
    """

    def __init__(
        self,
        store: Store,
        slots: Slots,
        deferred: DeferredUpdates,
        lanes: Lanes,
        device: Device,
    ) -> None:
        self._store = store
        self._slots = slots
        self._lanes = lanes
        self._device = device
        self._updates = deferred.in_slot
        self._counts = NonFiniteCounts(device)

    def can_defer(self, region: Region) -> bool:
        """Return whether a region's update can be put off."""
        return self._store.residence.row(region).update == SLOT and not self._slots.is_resident(region)

    def defer(self, updates: Mapping[Region, PendingUpdate]) -> None:
        """Put updates off until the next fetch."""
        self._updates.update(updates)
        # The next fetch brings the low halves too: an update needs all 32 bits.
        self._slots.need_masters(updates)

    def run(self, regions: Sequence[Region]) -> None:
        """Update the fetched weights of a unit and copy them to the host."""
        pending = [region for region in regions if region in self._updates]
        if not pending:
            return
        for region, planes in self._slots.masters(regions).items():
            if region not in self._updates:
                continue
            (tile,) = self._store.states[region].tiles  # one tile: neither on disk nor partitioned
            # A kept slot holds the weights from the last copy to the host, and this copy may still be in progress.
            self._lanes.compute_after(tile.fence.before_fill())
            update = self._updates[region]
            self._counts.add(update, update.update_tile(tile, planes))
            lease = tile.land(*planes)
            num_bytes = sum(plane.nbytes for plane in planes.values())
            down = self._lanes.update_down.submit(
                partial(copy_planes, self._device, lease.planes, planes),
                reads=self._lanes.mark(),
                users=lease.users,
                name=region.name,
                num_bytes=num_bytes,
            )
            lease.done_writing(down)
            self._slots.release(self._slots.cargo_of(regions), (), (down,))
            # The copy belongs to the step before: a give-up of this step must not cancel the copy.
            self._lanes.close_step()
            del self._updates[region]
            if self._store.is_below_device:
                self._store.counters.count("d2h_bytes", num_bytes)
        assert not any(region in self._updates for region in pending), "a cargo came up without its master weights"

    def check(self) -> None:
        """Refuse non-finite weights counted on the device, after a step's passes."""
        self._counts.check()

    def forget(self) -> None:
        """Forget pending updates: the weights were replaced."""
        self._updates.clear()
        self._counts.forget()
