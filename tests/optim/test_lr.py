"""Learning-rate schedules as functions of the step."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.app.training.lr import learning_rate

SCHEDULES = ["constant", "linear", "cosine", "wsd"]


def rates(schedule: str, warmup_steps: int, num_steps: int, base: float = 1.0) -> list[float]:
    return [
        learning_rate(step, base=base, schedule=schedule, warmup_steps=warmup_steps, num_steps=num_steps)
        for step in range(num_steps)
    ]


@given(st.sampled_from(SCHEDULES), st.integers(0, 30), st.integers(1, 200), st.floats(1e-6, 10))
def test_up_in_a_straight_line_then_never_up_again(
    schedule: str, warmup_steps: int, num_steps: int, base: float
) -> None:
    warmup_steps = min(warmup_steps, num_steps)
    found = rates(schedule, warmup_steps, num_steps, base)
    assert all(0 < rate <= base for rate in found)  # no step has rate zero
    assert max(found) == base
    for step in range(warmup_steps):
        assert found[step] == pytest.approx(base * (step + 1) / warmup_steps)
    after = found[max(0, warmup_steps - 1) :]
    assert all(later <= earlier for earlier, later in itertools.pairwise(after))


@given(st.integers(0, 10), st.integers(20, 200))
def test_shapes(warmup_steps: int, num_steps: int) -> None:
    constant, linear = rates("constant", warmup_steps, num_steps), rates("linear", warmup_steps, num_steps)
    cosine, wsd = rates("cosine", warmup_steps, num_steps), rates("wsd", warmup_steps, num_steps)
    assert set(constant[warmup_steps:]) == {1.0}
    falls = [early - late for early, late in itertools.pairwise(linear[warmup_steps:])]
    assert falls == pytest.approx([1 / (num_steps - warmup_steps)] * len(falls))
    middle = warmup_steps + (num_steps - warmup_steps) // 2
    assert cosine[middle] == pytest.approx(0.5, abs=2 / (num_steps - warmup_steps))
    assert cosine[warmup_steps + 1] > linear[warmup_steps + 1]
    assert cosine[-1] < linear[-1]
    decay = round(num_steps * 0.2)
    assert set(wsd[warmup_steps : num_steps - decay]) <= {1.0}
    assert wsd[-1] == pytest.approx(1 / decay)


def test_golden_values() -> None:
    assert rates("cosine", 2, 6, 4.0) == pytest.approx([2.0, 4.0, 4.0, 3.41421356, 2.0, 0.58578644])
    assert rates("wsd", 1, 10, 1.0) == pytest.approx([1.0] * 9 + [0.5])


@pytest.mark.parametrize("schedule", SCHEDULES[1:])
def test_only_constant_works_without_an_end(schedule: str) -> None:
    assert learning_rate(10**6, base=2.0, schedule="constant", warmup_steps=3, num_steps=None) == 2.0
    with pytest.raises(ValueError, match="number of steps"):
        learning_rate(5, base=2.0, schedule=schedule, warmup_steps=3, num_steps=None)
