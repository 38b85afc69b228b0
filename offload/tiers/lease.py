"""Leases: planes borrowed for one work item in a lane."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from offload.lanes.ticket import Fence, Ticket
from offload.tiers.ring import RingSlice


@dataclass(frozen=True)
class Lease:
    """Tile planes borrowed for one work item. Before the next lease, call `done_reading` or `done_writing` with the
    work's ticket.
    """

    planes: dict[str, torch.Tensor]
    """Planes by name."""
    reads: Sequence[Ticket]
    """Tickets to wait for before a read."""
    fills: Sequence[Ticket]
    """Additional tickets to wait for before a write."""
    done_reading: Callable[[Ticket], None]
    """Call this if the work only reads the planes."""
    done_writing: Callable[[Ticket], None]
    """Call this if the work changes the planes. Changes are written back."""

    @classmethod
    def of(cls, planes: dict[str, torch.Tensor], fence: Fence, fills: Sequence[Ticket] | None = None) -> Lease:
        """Return a lease on memory behind a fence. `fills`: replaces the tickets of the fence."""
        fills = fence.before_fill() if fills is None else fills
        return cls(planes, fence.before_read(), fills, fence.record_reader, fence.record_writer)

    def beside(self, fence: Fence, planes: Mapping[str, torch.Tensor] = {}) -> Lease:
        """Return a lease that also reads `planes` in the buffer behind `fence`."""

        def read(ticket: Ticket) -> None:
            fence.record_reader(ticket)
            self.done_reading(ticket)

        def write(ticket: Ticket) -> None:
            fence.record_reader(ticket)
            self.done_writing(ticket)

        reads = (*self.reads, *fence.before_read())
        return replace(self, planes={**self.planes, **planes}, reads=reads, done_reading=read, done_writing=write)

    def staged(
        self,
        ring_slice: RingSlice,
        planes: Mapping[str, torch.Tensor],
        write_back: Callable[[Ticket], object],
        *,
        reads: Sequence[Ticket] = (),
        fills: Sequence[Ticket] = (),
    ) -> Lease:
        """Return a lease with further planes in ring memory, after further tickets. The ring memory is free again with
        the end of the lease. `write_back`: called with the ticket of the work, if the work changes the planes.
        """

        def read(ticket: Ticket) -> None:
            ring_slice.fence.record_reader(ticket)
            ring_slice.close()
            self.done_reading(ticket)

        def write(ticket: Ticket) -> None:
            ring_slice.fence.record_writer(ticket)
            write_back(ticket)
            ring_slice.close()
            self.done_writing(ticket)

        return Lease({**self.planes, **planes}, (*self.reads, *reads), (*self.fills, *fills), read, write)

    @contextmanager
    def opened(self, wait: Callable[..., None], changes: bool = False) -> Iterator[dict[str, torch.Tensor]]:
        """Context with the planes for work by the caller. `wait`: waits for tickets, see `Lanes.wait`. `changes`: the
        work changes the planes, unless an error ends the context.
        """
        end = self.done_reading
        try:
            wait(self.reads, fills=self.fills if changes else ())
            yield self.planes
            end = self.done_writing if changes else self.done_reading
        finally:
            end(Ticket("compute", is_done=True))

    def give_back(self) -> None:
        """End the lease after work by the caller, or without work, and without changes."""
        self.done_reading(Ticket("compute", is_done=True))


NOTHING = Lease({}, (), (), lambda _: None, lambda _: None)
"""Empty base for leases with disk planes only."""
