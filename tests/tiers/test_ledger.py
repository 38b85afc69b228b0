"""Held bytes against the budget, exact to the byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import DoesNotFitError
from offload.tiers.counters import Ledger

NAMES = ("weights", "moments", "inputs")


@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 100)), max_size=40), st.integers(0, 1000), st.randoms()
)
def test_never_above_the_budget_and_never_wrong_about_the_sum(requests, budget, random):
    ledger, held, peak = Ledger("device", budget, "offload.device_memory"), [], 0
    for name, size in requests:
        if held and random.random() < 0.4:
            ledger.release(*held.pop(random.randrange(len(held))))
        if sum(s for _, s in held) + size > budget:
            with pytest.raises(DoesNotFitError):
                ledger.reserve(name, size)
        else:
            ledger.reserve(name, size)
            held.append((name, size))
        peak = max(peak, sum(s for _, s in held))
        assert ledger.current_bytes == sum(s for _, s in held) <= budget
        assert ledger.peak_bytes == peak
        assert ledger.allocations == {
            n: sum(s for m, s in held if m == n) for n in NAMES if any(m == n for m, _ in held)
        }


def test_a_refusal_prints_the_table_and_what_would_do():
    ledger = Ledger("device", 1000, "offload.device_memory")
    ledger.reserve("unit slot", 600)
    ledger.reserve("gradient buffer", 300)
    with pytest.raises(DoesNotFitError) as refusal:
        ledger.reserve("unit inputs", 101)
    message = str(refusal.value)
    for part in (
        "offload.device_memory is 1000 B",
        "unit inputs needs 101 B",
        "unit slot 600 B",
        "gradient buffer 300 B",
        "1 bytes",
    ):
        assert part in message
    assert "--offload.device_memory to at least 1001" in message
    assert ledger.allocations == {"unit slot": 600, "gradient buffer": 300}
