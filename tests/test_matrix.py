"""The combinations for the quick run are a cover."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import settings

from tests.matrix import cover, examples, matrix, meetings, quick

AXES = {"stage": ["0", "1", "2", "3"], "size": ["1", "2", "3"], "tier": ["cpu", "nvme"], "clip": ["on", "off", "late"]}


@pytest.mark.parametrize("strength", [1, 2, 3, 4])
def test_any_values_come_together(strength: int) -> None:
    chosen = cover(AXES, strength)
    met = {some for one in chosen for some in combinations(one.items(), strength)}
    assert met == meetings(AXES, strength)
    assert all(list(one) == list(AXES) for one in chosen)
    num_least = (4, 4 * 3, 4 * 3 * 3, 4 * 3 * 2 * 3)[strength - 1]
    assert num_least <= len(chosen) <= num_least * 1.5, "few"


def test_the_long_run_has_all_combinations_where_it_is_to_and_the_quick_one_a_cover() -> None:
    tiers = {"cpu": {}, "nvme": {"parameters": "nvme"}}
    names, params = matrix(long=4, stage=[0, 1, 2], tier=tiers, build=[len, max], on=[True, False]).args
    assert names == ["stage", "tier", "build", "on"]
    assert len({param.id for param in params}) == len(params) == 3 * 2 * 2 * 2
    assert (0, {}, len, True) in [param.values for param in params]
    quick = [param for param in params if not param.marks]
    assert 0 < len(quick) < len(params)
    assert all([mark.name for mark in param.marks] == ["slow"] for param in params if param not in quick)
    values = [[0, 1, 2], ["cpu", "nvme"], ["len", "max"], ["True", "False"]]
    for one, other in combinations(range(4), 2):
        met = {(param.id.split("-")[one], param.id.split("-")[other]) for param in quick}
        assert met == {(str(x), str(y)) for x in values[one] for y in values[other]}


def test_a_long_run_may_be_a_cover_too() -> None:
    long = {param.id for param in matrix(strength=1, **AXES).args[1]}
    quick = {param.id for param in matrix(strength=1, **AXES).args[1] if not param.marks}
    every = {param.id for param in matrix(long=4, **AXES).args[1]}
    assert quick < long < every
    axes = list(AXES.values())
    for one, other in combinations(range(4), 2):
        met = {(name.split("-")[one], name.split("-")[other]) for name in long}
        assert met == {(x, y) for x in axes[one] for y in axes[other]}


def test_what_is_not_kept_is_slow() -> None:
    found = quick([(1, "a"), (2, "b"), (3, "c")], [(2, "b")])
    assert [param.values for param in found] == [(1, "a"), (2, "b"), (3, "c")]
    assert [[mark.name for mark in param.marks] for param in found] == [["slow"], [], ["slow"]]
    assert [param.values for param in quick({"x": 1, "y": 2}, "y")] == [("x",), ("y",)]
    with pytest.raises(AssertionError, match="not there"):
        quick(["x"], ["z"])


def test_the_quick_run_has_fewer_examples() -> None:
    share = {15: 6, 100: 1}[settings().max_examples]
    assert examples(40).max_examples == 40 // share
