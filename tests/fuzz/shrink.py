"""Makes a failing case smaller: leaves one part out after the other, as long as it fails alike."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.fuzz.cases import Case

_LONGEST_S = 120.0


def shrink(case: Case, fails: Callable[[Case], bool], longest_s: float = _LONGEST_S) -> Case:
    """Return a smaller case for which `fails` is true, too. From the last op to the first: what comes late matters
    most."""
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
    """Ops go first, the last of them before the others."""
    head, _, key = part.partition(".")
    return (0, -int(head[2:])) if head.startswith("op") and not key else (1, 0)
