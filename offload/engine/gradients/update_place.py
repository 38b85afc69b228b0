"""Updates at the planes, in place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from offload.engine.gradients.tile_updates import NonFiniteCounts, TileUpdate, UpdatePlace
from offload.lanes.ticket import Lane, Ticket
from offload.tiers.device import Device


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
