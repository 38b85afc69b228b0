"""How far the thread that launches is ahead of the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from offload.lanes.ticket import Ticket
from offload.tiers.device import Device

_SHARE_OF_BUDGET = 1 / 32
_MOST_USES = 2
"""That the device may still have to do when another is launched: one that it is at, and the next."""


class RunAhead:
    """Lets the launching thread wait where it is more than two uses of units ahead of the device, and more than a share
    of the budget waits to be free.

    Memory that a copy in another stream reads or fills is nobody's again once the device has made the copy, not once it
    was launched. So what a step holds at once would grow with the launches that are under way, about a thousand, and
    differ from step to step: unit inputs on their way down or back, and gradients.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._ends: deque[Sequence[Ticket]] = deque()

    def enter(self) -> None:
        """Another use is about to be launched."""
        ends, budget = self._ends, self._device.ledger.budget_bytes
        while ends and ends[0][-1].is_over:
            ends.popleft()
        if len(ends) < _MOST_USES or budget is None or self._device.waiting_bytes <= budget * _SHARE_OF_BUDGET:
            return
        while len(ends) >= _MOST_USES:
            last = ends.popleft()
        for mark in last:  # compute is not late by it, and no timeline is told
            mark.synchronize()

    def leave(self, marks: Sequence[Ticket]) -> None:
        """A use was launched up to these marks of compute."""
        if marks:
            self._ends.append(marks)
