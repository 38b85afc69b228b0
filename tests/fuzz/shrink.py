"""Shrinks a failing case: removes one part after another while the same failure occurs."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.fuzz.cases import Case

_LONGEST_S = 120.0


def shrink(case: Case, fails: Callable[[Case], bool], longest_s: float = _LONGEST_S) -> Case:
    """Return a smaller case with `fails` true. Removal runs from the last operation to the first, because late
    operations matter most.
    """
    deadline, again = time.monotonic() + longest_s, True
    while again:
        again = False
        for part in sorted(case.parts(), key=_order):
            if time.monotonic() > deadline:
                return case
            smaller = case.cut(part)
            if fails(smaller):
                case, again = smaller, True
    return case


def _order(part: str) -> tuple[int, int]:
    """Operations come first, in reverse order."""
    head, _, key = part.partition(".")
    return (0, -int(head[2:])) if head.startswith("op") and not key else (1, 0)
