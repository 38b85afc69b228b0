"""What a piece of work of a lane needs to know of the memory that it works on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from offload.lanes.ticket import Ticket


@dataclass(frozen=True)
class Loan:
    """Planes of a part of a region, lent for one piece of work: they can be read once `after` is over, and changed once
    `behind` is over as well. Call `read` or `changed` with the ticket of that work before the next loan is taken.
    """

    planes: dict[str, torch.Tensor]
    after: Sequence[Ticket]
    behind: Sequence[Ticket]
    read: Callable[[Ticket], None]
    changed: Callable[[Ticket], None]

    def give_back(self) -> None:
        """The work was done by the caller, or there was none; nothing was changed."""
        self.read(Ticket("compute", is_done=True))


NOTHING = Loan({}, (), (), lambda _: None, lambda _: None)
"""What a loan of a record alone adds to."""
