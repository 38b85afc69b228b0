"""Limits how far the launching thread runs ahead of the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from offload.lanes.ticket import Ticket
from offload.tiers.device import Device

_SHARE_OF_BUDGET = 1 / 32
_MOST_USES = 2
"""Maximum unfinished uses on the device at a new launch: the running one and the next."""


class RunAhead:
    """Lets the launching thread wait if the device is more than two unit uses behind.

    Applies only while more than 1/32 of the budget waits to be free. A copy on another stream keeps source and target
    memory in use until the device has finished the copy. Without a limit, step memory (unit inputs in D2H or
    H2D copies, gradients) would grow with up to about a thousand pending launches and vary between steps.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._ends: deque[Sequence[Ticket]] = deque()

    def enter(self) -> None:
        """Wait, if necessary, before another use is launched."""
        ends, budget = self._ends, self._device.ledger.budget_bytes
        while ends and ends[0][-1].is_over:
            ends.popleft()
        if len(ends) < _MOST_USES or budget is None or self._device.waiting_bytes <= budget * _SHARE_OF_BUDGET:
            return
        while len(ends) >= _MOST_USES:
            last = ends.popleft()
        # `synchronize` instead of a lane wait: compute is not delayed, and no timeline event is recorded.
        for mark in last:
            mark.synchronize()

    def leave(self, marks: Sequence[Ticket]) -> None:
        """Record the compute marks that end a use."""
        if marks:
            self._ends.append(marks)
