"""Updates that are made in the slot in which their weights come up next, and go down from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from offload.engine.gradients.updates import Updates
from offload.lanes.lanes import Lanes
from offload.layout.regions import Region
from offload.tiers.device import Device, copy_planes
from offload.tiers.due import Due, Work
from offload.tiers.slots import Slots
from offload.tiers.store import Store


class SlotUpdates:
    """What a step puts off until the next one comes to its weights, so that these go up once and down once a step (ZO2,
    arXiv:2503.12668). Who reads the states before that has it made on the host: each update is made once,
    by whoever comes first, and has the same bits. What has gone down belongs to the step before: a step that is given
    up leaves it alone.
    """

    def __init__(
        self, store: Store, slots: Slots, updates: Updates, due: Due, lanes: Lanes, device: Device, lr: float
    ) -> None:
        self._store, self._slots, self._updates, self._lanes, self._device = store, slots, updates, lanes, device
        self._works, self._lr = due.in_slot, lr
        self._counts: list[tuple[Region, torch.Tensor]] = []  # of weights that are not finite, known to the device

    def takes(self, region: Region) -> bool:
        """True where the update of a region can be put off."""
        return self._store.updates_in_slot(region) and not self._slots.is_resident(region)

    def put(self, works: Mapping[Region, Work]) -> None:
        """Put updates off."""
        self._works.update(works)
        self._slots.need_masters(works)

    def make(self, regions: Sequence[Region]) -> None:
        """The weights of a unit with these regions have come up: update them, and send them down."""
        due = [region for region in regions if region in self._works]
        for region, planes in self._slots.masters(regions).items() if due else ():
            if region not in self._works:
                continue
            (tile,) = self._store[region].tiles  # nothing of it is on disk, or on other ranks
            # In a slot that was kept lies what went down after the last update, and may be on its way still.
            self._lanes.compute_after(tile.fence.before_fill())
            num_wrong = self._works[region](tile, planes, torch.empty(0, device="cpu"))
            if isinstance(num_wrong, torch.Tensor):
                self._counts.append((region, num_wrong))
            elif num_wrong:
                self._updates.tiles.refuse_weights(region, self._lr, num_wrong)
            lease = tile.land(*planes)
            num_bytes = sum(plane.nbytes for plane in planes.values())
            down = self._lanes.update_down.submit(
                partial(copy_planes, self._device, lease.planes, planes),
                reads=self._lanes.mark(),
                fills=lease.fills,
                name=region.name,
                num_bytes=num_bytes,
            )
            lease.done_writing(down)
            self._slots.used(self._slots.cargo_of(regions), (), (down,))
            self._lanes.settle()
            del self._works[region]
            self._store.came_down(num_bytes)
        assert not any(region in self._works for region in due), "a cargo came up without its master weights"

    def check(self) -> None:
        """The passes of a step are over: refuse weights that are no longer finite, as far as the device alone knew."""
        counts, self._counts = self._counts, []
        if counts:
            told = self._device.bring_down(torch.stack([count for _, count in counts]))().tolist()
            for (region, _), num_wrong in zip(counts, told, strict=True):
                if num_wrong:
                    self._updates.tiles.refuse_weights(region, self._lr, num_wrong)

    def forget(self) -> None:
        """The weights are others by now."""
        self._works.clear()
        self._counts.clear()
