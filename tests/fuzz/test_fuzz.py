"""The fuzzer itself: fixed cases pass for every kind, and the fuzzer parts work."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from tests.fuzz import shrink as shrinking
from tests.fuzz.__main__ import drawn
from tests.fuzz.cases import KINDS, Case, draw, parse
from tests.fuzz.habits import HABITS
from tests.fuzz.workers import Crew, signature
from tests.matrix import quick

NUM_CASES = {"engine": 16, "loops": 6, "saves": 5, "interrupts": 6, "ranks2": 4, "ranks3": 2, "commands": 12}
"""Cases in the long run, as a check of each kind. `make fuzz` searches for errors."""


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    crew = Crew()
    yield crew
    crew.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", NUM_CASES)
def test_cases_of_each_kind_pass(crew: Crew, kind: str) -> None:
    refused, seeds = 0, range(100, 100 + NUM_CASES[kind])
    for seed in seeds:
        case = draw(kind, seed)
        outcome: Any = crew.run(case.name, case.world)
        assert not outcome.wrong, f'{outcome.wrong}\nrepeat: make fuzz ARGS="--case {case.name}"'
        refused += bool(outcome.refused)
    assert refused <= max(1, len(seeds) // 4), "cases that are refused prove little"


@pytest.mark.slow
@pytest.mark.parametrize("habit", quick(sorted(HABITS), sorted(HABITS)[::3]))
def test_a_habit(crew: Crew, habit: str) -> None:
    kind = "scripts" if habit in ("scheduler", "change") else "loops"
    having = (case for case in drawn(1, [kind]) if habit in case.habits)
    for case in islice(having, 2):
        alone = case.leave_out(HABITS.keys() - {habit})
        wrong = crew.run(alone.name, alone.world).wrong
        assert not wrong, f'{wrong}\nrepeat: make fuzz ARGS="--case {alone.name}"'


def test_a_case_follows_from_its_seed() -> None:
    for kind in KINDS:
        assert draw(kind, 7) == draw(kind, 7)
        assert draw(kind, 7) != draw(kind, 8)


def test_a_name_repeats_the_case_that_was_cut() -> None:
    for kind in KINDS:
        case = draw(kind, 3)
        for part in case.parts()[::2]:
            case = case.cut(part)
        assert parse(case.name) == case


def test_drawn_cases_follow_from_the_seed_and_are_of_all_kinds() -> None:
    one, other = ([case.name for case in drawn(5, list(KINDS), 200)] for _ in range(2))
    assert one == other
    assert {name.partition(":")[0] for name in one} == set(KINDS)


def test_shrinking_leaves_what_the_failure_needs() -> None:
    case = next(case for case in drawn(1, ["engine"]) if {"op1", "op2", "layout0.debug"} <= set(case.parts()))

    def fails(smaller: Case) -> bool:
        return bool(smaller.ops[1]) and "debug" in smaller.layouts[0]

    small = shrinking.shrink(case, fails)
    assert fails(small)
    assert [number for number, op in enumerate(small.ops) if op] == [1]
    assert list(small.layouts[0]) == ["debug"]
    assert not small.settings


@pytest.mark.slow
@pytest.mark.parametrize("name", ["steps-of-first-parameters-not-counted", "moving-buffers-not-put-back"])
def test_a_broken_engine_is_found(crew: Crew, name: str) -> None:
    """All mutations: make fuzz ARGS=--mutations."""
    cases = drawn(0, ["engine"], 60)
    assert any(crew.run(case.name, case.world, name).wrong for case in cases)


def test_failures_of_one_cause_have_one_signature() -> None:
    first = "op 3 (step): 20 of 21 differ, first head.weight by 2.98e-08"
    other = "op 1 (step): 2 of 9 differ, first tiles.0.up.weight by 1.2\nmore"
    assert signature(first) == signature(other)
    assert signature(first) != signature("KeyError in call.py:_recompute: 0")
