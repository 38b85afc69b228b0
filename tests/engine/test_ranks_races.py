"""The race rule over ranks: delays on any rank change no bit. Each type of wait in exchanges is removed once, and a
result must then be wrong.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.engine import test_races
from tests.engine.ranks import JobError, run
from tests.engine.ranks_child import Found, Wait, deep_llama, raced
from tests.engine.test_ranks import assert_equal, train

ROWS = (2, 1, 3, 1)


# -- without a wait --------------------------------------------------------------------------------------------------

CLIPPED: dict[str, Any] = {"max_grad_norm": 0.2, "clip": "deferred"}
FREE: dict[str, Any] = {"max_grad_norm": None}
LATE: dict[str, Any] = {"throttle": {"update": {"latency_seconds": 0.01}}}
CHANGES: dict[str, tuple[Wait, dict[str, Any]]] = {
    "compute reads a slot before it was gathered": (("without", "slot", "before_read"), CLIPPED | {"zero_stage": 3}),
    "a shard goes up before its update": (("without", "weights", "before_read"), CLIPPED | LATE | {"zero_stage": 3}),
    "weights are gathered before their update": (
        ("without", "weights", "before_read"),
        CLIPPED | LATE | {"zero_stage": 1},
    ),
    "backward overwrites gradients that are being reduced": (
        ("reused_at_once", "gradient buffer"),
        FREE | {"zero_stage": 2},
    ),
    # For exchange fences: ("without", KIND, "before_read" or "before_fill"), with settings that reuse a buffer of
    # this kind within a step. The test fails for a kind without fences in the run, and lists the kinds in use.
}
"""Removed wait (a function of test_races and its arguments), and settings to reveal the removal."""


DEEP: dict[str, Any] = {"case": "plain", "make": deep_llama, "rows": ROWS[:2], "num_steps": 4}
"""Enough units to reuse slots and buffers while other copies run."""


def race(settings: dict[str, Any], seeds: tuple[int, ...], wait: Wait = ()) -> list[list[Found]]:
    """Run with each delay seed. Return the results by rank and seed."""
    return run(2, raced, runs=[{**DEEP, "prefetch": "auto", **settings, "delays": seed} for seed in seeds], wait=wait)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_without_this_wait_a_result_is_wrong(name: str) -> None:
    """At least one seed in five must show a wrong bit on a rank, a NaN, or lost ranks."""
    wait, settings = CHANGES[name]
    assert hasattr(test_races, wait[0]), "a misspelt change would look like a failure that it causes"
    (wanted,) = train(2, {**DEEP, **settings, "prefetch": 0})
    for found in (one for by_rank in race(settings, (1,)) for one in by_rank):
        assert_equal(found, wanted, "with all waits nothing is wrong")
        if wait[0] == "without":
            assert wait[1] in found.kinds, f"no fence of the kind {wait[1]!r} is made; {sorted(found.kinds)} are"
    broken, failure = [], ""
    try:
        broken = race(settings, (0, 1, 2, 3, 4), wait)
    except JobError as error:
        failure = str(error)
    if failure:  # ranks lost each other, or an impossible state
        assert re.search("RankLostError|AssertionError|NonFiniteError|EnforceNotMet|ConfigError|nan", failure), failure
        return
    assert any(is_wrong(one, wanted) for by_rank in broken for one in by_rank), (
        "five runs went well without it: the delays do not show this wait"
    )


def is_wrong(found: Found, wanted: Found) -> bool:
    try:
        assert_equal(found, wanted)
    except AssertionError:
        return True
    return found.error is not None
