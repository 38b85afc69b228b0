"""What a piece of work of a lane needs to know of the memory that it works on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from offload.lanes.ticket import Fence, Ticket


@dataclass(frozen=True)
class Lease:
    """Planes of a tile, lent for one piece of work. Call `done_reading` or `done_writing` with the ticket of that work
    before the next lease is taken.
    """

    planes: dict[str, torch.Tensor]
    """The planes, by name."""
    reads: Sequence[Ticket]
    """The tickets after which the planes can be read."""
    fills: Sequence[Ticket]
    """The tickets after which, and after `reads`, the planes can be changed."""
    done_reading: Callable[[Ticket], None]
    """To be called if the work has read the planes."""
    done_writing: Callable[[Ticket], None]
    """To be called if the work has changed the planes: what changed is written back."""

    def beside(self, fence: Fence) -> Lease:
        """Return a lease that also reads what has another fence."""

        def read(ticket: Ticket) -> None:
            fence.read(ticket)
            self.done_reading(ticket)

        def write(ticket: Ticket) -> None:
            fence.read(ticket)
            self.done_writing(ticket)

        return replace(self, reads=(*self.reads, *fence.before_read()), done_reading=read, done_writing=write)

    def give_back(self) -> None:
        """The work was done by the caller, or there was none; nothing was changed."""
        self.done_reading(Ticket("compute", is_done=True))


NOTHING = Lease({}, (), (), lambda _: None, lambda _: None)
"""What a lease of a record alone adds to."""
