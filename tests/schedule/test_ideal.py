"""The ideal list schedule on steps small enough to compute by hand."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.ideal import (
    MODES,
    Ideal,
    Policy,
    Unit,
    Use,
    Work,
    ideal,
    simulate,
)


def chain(num_units: int, forward_s: float, backward_s: float, unit: Unit, **more: object) -> Work:
    """Make a step over equal units, forward in order, backward in reverse."""
    names = [chr(ord("a") + i) if num_units <= 26 else f"{i:03}" for i in range(num_units)]
    uses = [Use(forward_s, name) for name in names]
    uses += [Use(backward_s, name, is_backward=True) for name in reversed(names)]
    return Work(uses, dict.fromkeys(names, unit), **{"capacity": 2, **more})


def actions(run: Ideal, step: int) -> list[tuple[str, str | None, float, float]]:
    start = next(span.begin_s for span in run.spans if span.lane == "compute" and span.step == step)
    return [
        (span.action, span.unit, round(span.begin_s - start, 9), round(span.end_s - start, 9))
        for span in run.spans
        if span.step == step
    ]


@pytest.mark.parametrize("mode", MODES)
def test_one_unit_is_a_chain(mode):
    work = chain(1, 1, 3, Unit(1, fetch_s=2, land_s=5, update_s=7, correct_s=11), mode=mode, num_corrected=1)
    run = ideal(work)
    # This copy is the last, so the norm is known before the update: no correction.
    assert run.seconds == pytest.approx(1 + 3 + 5 + 7 + 2)
    assert run.busy_s == pytest.approx({"compute": 4, "d2h": 5, "update": 7, "h2d": 2})


def test_two_units_without_clipping():
    work = chain(2, 1, 3, Unit(1, fetch_s=2, land_s=1, update_s=1))
    run = simulate(work, Policy(1, "never", "need"))
    # With two slots both units stay until the backward. b arrives and is updated during a's backward, but a is fetched
    # first.
    assert actions(run, 6) == [
        ("fetch", "a", -2, 0),
        ("forward", "a", 0, 1),
        ("fetch", "b", 0, 2),
        ("forward", "b", 2, 3),
        ("backward", "b", 3, 6),
        ("backward", "a", 6, 9),
        ("land", "b", 6, 7),
        ("update", "b", 7, 8),
        ("land", "a", 9, 10),
        ("update", "a", 10, 11),
    ]
    assert run.seconds == pytest.approx(13)
    # A fetch without a wait overtakes a waiting one: forward 0 to 2, backward to 8, b updated at 7, a at 10.
    skipping = simulate(work, Policy(1, "always", "need"))
    assert ("fetch", "b", 7 - 12, 9 - 12) in actions(skipping, 6)
    assert skipping.seconds == pytest.approx(12)
    assert ideal(work).seconds == pytest.approx(12)


def test_deferred_updates_wait_and_run_in_forward_order():
    run = ideal(chain(2, 1, 3, Unit(1, fetch_s=2, land_s=1, update_s=4), mode="deferred"))
    # a: arrived 0, updated 4, fetched 6, forward 7; b: updated 8, fetched 10, forward 11, backward 14; a: 17, arrived
    # 18.
    assert run.seconds == pytest.approx(18)
    updates = [span for span in run.spans if span.action == "update" and span.step == 6]
    assert [span.unit for span in updates] == ["a", "b"]


def test_a_block_begins_and_ends_with_nothing_pending():
    work = chain(2, 1, 3, Unit(1, fetch_s=2, land_s=1, update_s=4), mode="deferred")
    # Both start in slots. a: forward 1; b: 2, backward 5; a: 8, arrived 9, updated 13, fetched 15; b: updated 17,
    # fetched 19.
    assert ideal(work, 1, as_block=True).seconds == pytest.approx(19)
    # The second step begins with a at 15 and takes 18, as in the steady state.
    two = ideal(work, 2, as_block=True)
    assert two.seconds == pytest.approx((19 + 18) / 2)
    assert two.busy_s == pytest.approx({"compute": 8, "d2h": 2, "update": 8, "h2d": 4})
    one = chain(1, 1, 3, Unit(1, fetch_s=2, land_s=5, update_s=7), mode="deferred")
    assert ideal(one, 5, as_block=True).seconds == pytest.approx(ideal(one).seconds)


def test_corrections_follow_the_norm_and_come_before_the_fetch():
    unit = Unit(1, fetch_s=1, land_s=1, update_s=1, correct_s=5)
    run = ideal(chain(3, 1, 3, unit, capacity=3, mode="speculative", num_corrected=9))
    by_action = {(span.action, span.unit): span for span in run.spans if span.step == 6}
    norm_s = max(span.end_s for (action, _), span in by_action.items() if action == "land")
    corrected = sorted(unit for action, unit in by_action if action == "correct")
    assert corrected == ["b", "c"], "a is updated after the norm"
    for name in corrected:
        correction = by_action["correct", name]
        assert correction.begin_s >= norm_s
        again = next(span for span in run.spans if (span.action, span.unit, span.step) == ("fetch", name, 7))
        assert again.begin_s >= correction.end_s
    assert run.busy_s["update"] == pytest.approx(3 + 2 * 5)
    one = ideal(chain(3, 1, 3, unit, capacity=3, mode="speculative", num_corrected=1))
    assert one.busy_s["update"] == pytest.approx(3 + 5)


def test_one_gradient_buffer_puts_the_landing_between_the_backwards():
    unit = Unit(1, land_s=4)
    one = ideal(chain(4, 1, 1, unit, capacity=4, num_gradient_buffers=1))
    two = ideal(chain(4, 1, 1, unit, capacity=4, num_gradient_buffers=2))
    assert one.seconds == pytest.approx(4 + 4 * (1 + 4))
    assert two.seconds == pytest.approx(4 + 1 + 4 * 4)


def test_compute_that_needs_no_unit_hides_fetches():
    work = chain(2, 1, 1, Unit(1, fetch_s=1), capacity=1)
    loss = Use(5)
    longer = dataclasses.replace(work, uses=[*work.uses[:1], loss, *work.uses[1:]])
    assert ideal(work).seconds == pytest.approx(4 + 3)
    assert ideal(longer).seconds == pytest.approx(4 + 2 + 5), "b is fetched beside it, and a's slot is idle by then"
    work = chain(1, 1, 1, Unit(1, land_s=4))
    work = dataclasses.replace(work, uses=[Use(2), *work.uses])
    assert ideal(work).seconds == pytest.approx(2 + 1 + 1 + 4), "the norm is known before the next step begins"


def test_sizes_in_bytes():
    work = chain(3, 1, 1, Unit(100, fetch_s=0.5), capacity=250)
    work = dataclasses.replace(work, units={**work.units, "c": Unit(20, fetch_s=0.1)})
    # All fetches except a's and b's are saved if a, b and c fit together: 220 bytes.
    assert ideal(work).busy_s["h2d"] == pytest.approx(1.1)
    assert ideal(dataclasses.replace(work, capacity=219)).busy_s["h2d"] == pytest.approx(1.6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "both"}, "mode is 'both'"),
        ({"num_gradient_buffers": 0}, "needs at least one"),
        ({"capacity": 0.5}, "of a capacity of 0.5"),
        ({"uses": [Use(1, "a", True), Use(1, "a")]}, "as its last use"),
        ({"uses": [Use(1, "a")]}, "as its last use"),
        ({"uses": []}, "as its last use"),
    ],
)
def test_refused(change, message):
    work = chain(1, 1, 1, Unit(1))
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(work, **change)
