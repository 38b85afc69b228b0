"""Leases: planes borrowed for one work item in a lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from offload.lanes.ticket import Fence, Ticket


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

    def beside(self, fence: Fence) -> Lease:
        """Return a lease that also reads the buffer behind `fence`."""

        def read(ticket: Ticket) -> None:
            fence.record_reader(ticket)
            self.done_reading(ticket)

        def write(ticket: Ticket) -> None:
            fence.record_reader(ticket)
            self.done_writing(ticket)

        return replace(self, reads=(*self.reads, *fence.before_read()), done_reading=read, done_writing=write)

    def give_back(self) -> None:
        """End the lease after work by the caller, or without work, and without changes."""
        self.done_reading(Ticket("compute", is_done=True))


NOTHING = Lease({}, (), (), lambda _: None, lambda _: None)
"""Empty base for leases with disk planes only."""
