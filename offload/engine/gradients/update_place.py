"""Updates at the planes, in place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from offload.engine.gradients.tile_updates import TileUpdate, UpdatePlace
from offload.lanes.ticket import Lane, Ticket
from offload.tiers.device import Device


class InPlaceUpdates(UpdatePlace):
    """Updates states in place on one lane: the host update lane, or compute for states on the device."""

    def __init__(self, lane: Lane, device: Device, within: Callable[[], AbstractContextManager[Any]]) -> None:
        """`within`: context for the work."""
        self._lane, self._device, self._within = lane, device, within
        self._counts: list[tuple[TileUpdate, torch.Tensor]] = []  # non-finite weight counts, in device memory

    def begin_step(self) -> None:
        self._counts = []

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
            count = tile.run(tile.planes)
        if count is not None:
            self._counts.append((tile, count))

    def check(self) -> None:
        """Read the accelerator's counts once and refuse non-finite weights."""
        if self._counts:
            tiles, counts = zip(*self._counts, strict=True)
            self._counts = []
            for tile, num_wrong in zip(tiles, self._device.copy_to_host(torch.stack(counts))().tolist(), strict=True):
                if num_wrong:
                    tile.update.refuse(num_wrong)
