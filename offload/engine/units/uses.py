"""Memory of unit uses: held until their backward, released also if the backward never comes, and limited while the
launching thread runs ahead of the device.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from offload.lanes.ticket import Ticket
from offload.tiers.device import Device


@dataclass(eq=False)
class Claim:
    """The memory held by one use of a unit until the backward."""

    unit: str
    """Unit name."""
    user: weakref.ref[Any]
    """Weak reference to the use. The claim is dropped when the use is garbage-collected."""
    entries: list[tuple[int, int]] = field(default_factory=list)
    """(address, bytes) per storage held by the use."""
    is_current: bool = True
    """True while the weights are unchanged since the forward."""


class Claims:
    """Claims of all uses waiting for their backward.

    The weak-reference callback for a dropped use is a C function, `deque.append`. A Python finalizer would swallow
    exceptions, and a Ctrl-C during the finalizer would be lost.
    """

    def __init__(self) -> None:
        self._open: dict[int, Claim] = {}
        self._dropped: deque[weakref.ref[Any]] = deque()

    def open(self, user: object, unit: str) -> Claim:
        """Open and return the claim of a use."""
        claim = Claim(unit, weakref.ref(user, self._dropped.append))
        self._open[id(claim.user)] = claim
        return claim

    def has(self, claim: Claim) -> bool:
        """True if the claim is open: neither closed nor reset."""
        return self._open.get(id(claim.user)) is claim

    def mark_stale(self) -> None:
        """Mark all open claims as belonging to old weights."""
        for claim in self._open.values():
            claim.is_current = False

    def close(self, claim: Claim) -> None:
        """Close a claim after the use has released all memory."""
        self._open.pop(id(claim.user), None)

    def next_dropped(self) -> Claim | None:
        """Return the next open claim whose use was garbage-collected, or None."""
        while self._dropped:
            claim = self._open.get(id(self._dropped.popleft()))
            if claim is not None:
                return claim
        return None

    def reset(self) -> None:
        """Drop all claims."""
        self._open.clear()
        self._dropped.clear()


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
