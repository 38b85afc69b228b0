"""Updates at the planes, in place, and counts of non-finite weights after updates."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from offload.engine.gradients.tile_updates import TileUpdate, UpdatePlace
from offload.lanes.ticket import Lane, Ticket
from offload.tiers.device import Device
from offload.tiers.tile import PendingUpdate


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

    def check(self) -> None:
        """Read all counts and refuse non-finite weights."""
        counts, self._counts = self._counts, []
        if counts:
            host_counts = self._device.copy_to_host(torch.stack([count for _, count in counts]))().tolist()
            for (update, _), num_wrong in zip(counts, host_counts, strict=True):
                if num_wrong:
                    update.refuse(num_wrong)

    def forget(self) -> None:
        """Forget all counts."""
        self._counts = []


class InPlaceUpdates(UpdatePlace):
    """Updates states in place on one lane: the host update lane, or compute for states on the device."""

    def __init__(self, lane: Lane, device: Device, within: Callable[[], AbstractContextManager[Any]]) -> None:
        """`within`: context for the work."""
        self._lane, self._within, self._counts = lane, within, NonFiniteCounts(device)

    def begin_step(self) -> None:
        self._counts.forget()

    def submit(self, tile: TileUpdate) -> Ticket:
        ticket = self._lane.submit(
            partial(self._run, tile),
            reads=(*tile.update.fence.before_read(), *tile.lease.reads),
            fills=tile.lease.fills,
            name=tile.name,
            num_bytes=tile.num_bytes,
        )
        tile.update.fence.record_reader(ticket)
        tile.lease.done_writing(ticket)
        return ticket

    def _run(self, tile: TileUpdate) -> None:
        with self._within():
            self._counts.add(tile.update, tile.update.run(tile.tile, tile.planes))

    def check(self) -> None:
        self._counts.check()
