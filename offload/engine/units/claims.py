"""What uses of units have reserved until their backward, given back also where there will be none."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Claim:
    """What one use of a unit holds until its backward."""

    unit: str
    """The name of the unit."""
    user: weakref.ref[Any]
    """The use. Once nobody refers to the use any more, the claim is dropped."""
    entries: list[tuple[int, int]] = field(default_factory=list)
    """The address and the bytes of each storage that the use holds."""
    is_of_these_weights: bool = True
    """True as long as the weights are those of the forward that made the claim."""


class Claims:
    """The claims of the uses that wait for their backward.

    A use that is dropped without one puts a reference on a list, by a call into C. It does nothing else, and has no
    finalizer in Python: those swallow whatever is raised in them, and a Ctrl-C that came there would be lost.
    """

    def __init__(self) -> None:
        self._open: dict[int, Claim] = {}
        self._dropped: deque[weakref.ref[Any]] = deque()

    def open(self, user: object, unit: str) -> Claim:
        """Return the claim of a use."""
        claim = Claim(unit, weakref.ref(user, self._dropped.append))
        self._open[id(claim.user)] = claim
        return claim

    def has(self, claim: Claim) -> bool:
        """True where a claim was neither closed nor given up."""
        return self._open.get(id(claim.user)) is claim

    def weights_change(self) -> None:
        """What waits for its backward by now belongs to other weights."""
        for claim in self._open.values():
            claim.is_of_these_weights = False

    def close(self, claim: Claim) -> None:
        """A use has given back what it held."""
        self._open.pop(id(claim.user), None)

    def next_dropped(self) -> Claim | None:
        """Return the claim of a use that was dropped, as long as there is one."""
        while self._dropped:
            claim = self._open.get(id(self._dropped.popleft()))
            if claim is not None:
                return claim
        return None

    def reset(self) -> None:
        """Everything is given up."""
        self._open.clear()
        self._dropped.clear()
