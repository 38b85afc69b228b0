"""Limit on unfinished device work ahead of the launching thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from offload.lanes.ticket import Ticket
from offload.tiers.device import Device

_SHARE_OF_BUDGET = 1 / 32
_MOST_USES = 2
"""Maximum unfinished uses on the device at a new launch: the running one and the next."""


class RunAhead:
    """Blocks the launching thread if more than two unit uses ahead of the device.

    Applies only while more than 1/32 of the memory budget waits to be free. Memory read or filled by a copy on another
    stream becomes free only after the device has finished the copy. Without a limit, step memory (unit inputs in D2H or
    H2D copies, gradients) would grow with up to about a thousand pending launches and vary between steps.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._ends: deque[Sequence[Ticket]] = deque()

    def enter(self) -> None:
        """Wait if necessary, before the launch of another use."""
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
        """Record the compute marks at the end of a use."""
        if marks:
            self._ends.append(marks)
