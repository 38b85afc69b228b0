"""Updates computed on the device for states in host memory, through a ring of device memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch

from offload.engine.gradients.tile_updates import TileUpdate, UpdatePlace
from offload.lanes.ticket import Fence, Ticket
from offload.layout.planes import CODES
from offload.layout.regions import Region, align
from offload.planning.device_updates import PLANE_ALIGNMENT, UPDATE_RING
from offload.tiers.device import copy_planes
from offload.tiers.lease import Ring
from offload.tiers.store import Store


class DeviceUpdates(UpdatePlace):
    """Updates host states of some regions on the device, through a ring buffer, and the others in place.

    Three lanes (H2D copy, update, D2H copy) work beside each other and beside compute.
    """

    def __init__(
        self,
        in_place: UpdatePlace,
        streamed: Collection[int],
        memory: torch.Tensor,
        store: Store,
    ) -> None:
        """`streamed`: indices of regions updated on the device. `memory`: flat uint8 device memory."""
        self._in_place = in_place
        self._streamed = streamed
        self._ring = Ring(memory, UPDATE_RING)
        self._lanes = store.lanes
        self._device = store.device
        self._counters = store.counters
        self._start_tickets: Sequence[Ticket] = ()
        self._counts: dict[Region, tuple[TileUpdate, torch.Tensor]] = {}  # non-finite weight counts
        self._host_counts = store.device.host_memory(len(store.states), torch.int64)
        self._counts_fence = Fence("counts")

    def begin_step(self) -> None:
        """Start new counts; a lane still checks the previous step's counts."""
        self._in_place.begin_step()
        self._counts = {}
        # Compute has cleared the memory, or loaded resident planes from a checkpoint.
        self._start_tickets = self._lanes.mark()

    def submit(self, tile: TileUpdate) -> Ticket:
        """Submit the H2D copy, the update and the D2H copy of a tile, in the order of `InPlaceUpdates.submit`."""
        if tile.update.region.index not in self._streamed:
            return self._in_place.submit(tile)
        host_planes = {name: flat for name, flat in tile.planes.items() if name not in tile.update.state.stays}
        sizes = [align(flat.nbytes, PLANE_ALIGNMENT) for flat in host_planes.values()]
        stretch = self._ring.take_planned(sum(sizes))
        places = stretch.flat.split(sizes)
        device_planes = {
            name: place[: flat.nbytes].view(flat.dtype)
            for place, (name, flat) in zip(places, host_planes.items(), strict=True)
        }
        # Gradients are only read, and codes are only written.
        changed = {name: flat for name, flat in host_planes.items() if name != "gradients"}
        copied = {name: flat for name, flat in device_planes.items() if name != CODES}

        up_bytes = sum(flat.nbytes for flat in copied.values())
        up = self._lanes.update_up.submit(
            partial(copy_planes, self._device, copied, host_planes),
            reads=(*tile.update.fence.before_read(), *tile.lease.reads, *self._start_tickets),
            users=stretch.users,
            name=tile.name,
            num_bytes=up_bytes,
        )
        stretch.fence.record_writer(up)
        tile.update.fence.record_reader(up)
        updated = self._lanes.update_on_device.submit(
            partial(self._update, tile, {**tile.planes, **device_planes}, self._counts),
            reads=stretch.fence.before_read(),
            name=tile.name,
            num_bytes=tile.num_bytes,
        )
        stretch.fence.record_writer(updated)
        down_bytes = sum(flat.nbytes for flat in changed.values())
        down = self._lanes.update_down.submit(
            partial(copy_planes, self._device, changed, device_planes),
            reads=stretch.fence.before_read(),
            users=tile.lease.users,
            name=tile.name,
            num_bytes=down_bytes,
        )
        stretch.fence.record_reader(down)
        stretch.close()
        tile.lease.done_writing(down)
        self._counters.count("h2d_bytes", up_bytes)
        self._counters.count("d2h_bytes", down_bytes)
        return down

    @staticmethod
    def _update(
        tile: TileUpdate,
        device_planes: Mapping[str, torch.Tensor],
        counts: dict[Region, tuple[TileUpdate, torch.Tensor]],
    ) -> None:
        num_wrong, region = tile.update.update_tile(tile.tile, device_planes), tile.update.region
        if not isinstance(num_wrong, torch.Tensor) or num_wrong.is_cpu:
            if num_wrong:
                tile.update.refuse(int(num_wrong))
        elif region in counts:
            counts[region][1].add_(num_wrong)
        else:
            counts[region] = tile, num_wrong

    def check(self) -> None:
        """Let a lane check the accelerator's counts after all updates are submitted. Does not wait for these."""
        self._in_place.check()
        if self._device.torch_device.type == "cpu":
            return  # `_update` has checked each count itself
        counts, self._counts = self._counts, {}  # from here on those of the functions below, which wait

        def copy_to_host() -> None:
            # Asked in the lane: until the updates have run there, `counts` is empty.
            if counts:
                num_wrong = torch.stack([count for _, count in counts.values()])
                self._device.copy(self._host_counts[: len(counts)], num_wrong)

        def refuse() -> None:
            # Not strict: the buffer has a place for every region, also for those without a count.
            for (tile, _), num_wrong in zip(counts.values(), self._host_counts.tolist(), strict=False):
                if num_wrong:
                    tile.update.refuse(num_wrong)

        copied = self._lanes.update_on_device.submit(copy_to_host, users=self._counts_fence.before_fill(), name="check")
        self._counts_fence.record_writer(copied)
        checked = self._lanes.update.submit(refuse, reads=self._counts_fence.before_read(), name="check")
        self._counts_fence.record_reader(checked)

    def reset(self) -> None:
        """Take back all stretches after a step was given up."""
        self._ring.reset()

    def free(self) -> None:
        self._ring.free()
