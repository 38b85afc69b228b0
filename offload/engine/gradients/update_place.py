"""Place for a tile update: at the planes, or on the device, with copies to the device and back."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from offload.lanes.ticket import Fence, Lane, Ticket
from offload.layout.regions import Region
from offload.tiers.device import Device
from offload.tiers.lease import Lease


@dataclass(frozen=True)
class TileUpdate:
    """A tile update, done in place."""

    region: Region
    """The tile's region."""
    work: Callable[[Mapping[str, torch.Tensor]], int | torch.Tensor]
    """Updates planes in place; returns the non-finite weight count."""
    lease: Lease
    """Lease on the tile's states."""
    planes: Mapping[str, torch.Tensor]
    """Leased planes and the gradients, by name."""
    fence: Fence
    """Fence for the gradients' memory."""
    stays: Container[str]
    """Names of planes already on the device."""
    refuse: Callable[[int], None]
    """Raises an error; called with the non-finite weight count if above 0."""
    name: str
    """Name in the timeline."""
    num_bytes: int
    """Bytes of states read and written by the update."""

    def run(self, planes: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Run the update on these planes.

        Returns the non-finite weight count if only the accelerator knows the value; otherwise refuses such weights here
        and returns None.
        """
        num_wrong = self.work(planes)
        if isinstance(num_wrong, torch.Tensor) and not num_wrong.is_cpu:
            return num_wrong
        if num_wrong:
            self.refuse(int(num_wrong))
        return None


class UpdatePlace(Protocol):
    """Place where updates run."""

    def begin_step(self) -> None:
        """Prepare for a step."""

    def submit(self, tile: TileUpdate) -> Ticket:
        """Submit a tile update, after the gradients and after every fetch of the overwritten data.

        The returned ticket is done when the new weights are ready.
        """

    def check(self) -> None:
        """Refuse non-finite weights after all of a step's updates are submitted."""

    def reset(self) -> None:
        """Reset after a step was given up."""

    def free(self) -> None:
        """Release all buffers."""


class InPlaceUpdates:
    """Updates states in place on one lane: the host update lane, or compute for states on the device."""

    def __init__(self, lane: Lane, device: Device, within: Callable[[], AbstractContextManager[Any]]) -> None:
        """`within`: context for the work."""
        self._lane, self._device, self._within = lane, device, within
        self._counts: list[tuple[TileUpdate, torch.Tensor]] = []  # non-finite weight counts, in device memory

    def begin_step(self) -> None:
        """Forget the previous step's counts."""
        self._counts = []

    def submit(self, tile: TileUpdate) -> Ticket:
        """Submit a tile update, after the gradients and after every fetch of the overwritten data.

        The returned ticket is done when the new weights are ready.
        """
        ticket = self._lane.submit(
            partial(self._run, tile),
            reads=(*tile.fence.before_read(), *tile.lease.reads),
            fills=tile.lease.fills,
            name=tile.name,
            num_bytes=tile.num_bytes,
        )
        tile.fence.record_reader(ticket)
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
                    tile.refuse(num_wrong)

    def reset(self) -> None:
        """Reset after a step was given up."""

    def free(self) -> None:
        """Release all buffers."""
