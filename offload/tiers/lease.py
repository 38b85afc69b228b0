"""What a piece of work of a lane needs to know of the memory that it works on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from offload.lanes.ticket import Fence, Ticket


@dataclass(frozen=True)
class Lease:
    """Planes of a tile of a region, lent for one piece of work: they can be read once `reads` is over, and changed once
    `fills` is over as well. Call `done_reading` or `done_writing` with the ticket of that work before the next lease is
    taken.
    """

    planes: dict[str, torch.Tensor]
    reads: Sequence[Ticket]
    fills: Sequence[Ticket]
    done_reading: Callable[[Ticket], None]
    done_writing: Callable[[Ticket], None]

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
