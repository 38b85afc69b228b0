"""Mutations in plans and budgets."""

from __future__ import annotations

from typing import Any

import pytest

from offload.planning import plan
from offload.tiers.counters import Counters, Ledger
from tests.mutations import mutation


@mutation("tests/engine/test_budgets.py")
def plan_forgets_a_buffer(patch: pytest.MonkeyPatch) -> None:
    """The budget check ignores the largest allocation in each tier."""
    check = plan.check_budgets

    def forgetful(allocations: Any, *how: Any, **more: Any) -> None:
        largest = {id(max(its, key=lambda each: each.num_bytes)) for its in _by_tier(allocations)}
        check([each for each in allocations if id(each) not in largest], *how, **more)

    patch.setattr(plan, "check_budgets", forgetful)


def _by_tier(allocations: Any) -> list[list[Any]]:
    return [[each for each in allocations if each.tier == tier] for tier in {each.tier for each in allocations}]


@mutation("tests/engine/test_placements.py")
def bytes_brought_up_ahead_not_counted(patch: pytest.MonkeyPatch) -> None:
    count = Counters.count

    def counted(self: Counters, name: str, amount: int, is_ahead: bool = False) -> None:
        count(self, name, 0 if is_ahead else amount, is_ahead)

    patch.setattr(Counters, "count", counted)


@mutation("tests/tiers/test_ledger.py", "tests/engine/test_budgets.py")
def budgets_not_held(patch: pytest.MonkeyPatch) -> None:
    """A step may allocate beyond the budget."""
    reserve = Ledger.reserve

    def reserved(self: Ledger, name: str, num_bytes: int, fix: str = "") -> None:
        budget, self.budget_bytes = self.budget_bytes, None
        try:
            reserve(self, name, num_bytes, fix)
        finally:
            self.budget_bytes = budget

    patch.setattr(Ledger, "reserve", reserved)
