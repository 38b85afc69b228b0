"""Plans and budgets: what is told is what is held."""

from __future__ import annotations

from typing import Any

import pytest

from offload.planning import plan
from tests.mutations import mutation


@mutation("tests/engine/test_budgets.py")
def plan_forgets_a_buffer(patch: pytest.MonkeyPatch) -> None:
    """What is compared with a budget lacks the largest allocation of each tier."""
    check = plan.check_budgets

    def forgetful(allocations: Any, *how: Any, **more: Any) -> None:
        largest = {id(max(its, key=lambda each: each.num_bytes)) for its in _by_tier(allocations)}
        check([each for each in allocations if id(each) not in largest], *how, **more)

    patch.setattr(plan, "check_budgets", forgetful)


def _by_tier(allocations: Any) -> list[list[Any]]:
    return [[each for each in allocations if each.tier == tier] for tier in {each.tier for each in allocations}]
