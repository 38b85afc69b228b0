"""The ideal list schedule: manual cases, rules on random work, and bounds for every schedule."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ideal import (
    LANES,
    MODES,
    Ideal,
    Policy,
    Unit,
    Use,
    Work,
    ideal,
    simulate,
    simulate_block,
)
from tests.matrix import examples


def chain(num_units: int, forward_s: float, backward_s: float, unit: Unit, **more: object) -> Work:
    """Make a step over equal units, forward in order, backward in reverse."""
    names = [chr(ord("a") + i) if num_units <= 26 else f"{i:03}" for i in range(num_units)]
    uses = [Use(forward_s, name) for name in names]
    uses += [Use(backward_s, name, is_backward=True) for name in reversed(names)]
    return Work(uses, dict.fromkeys(names, unit), **{"capacity": 2, **more})


def llama(
    num_units: int, slots: int, h2d_s: float, d2h_s: float, update_s: float, mode: str, corrected: int = 0
) -> Work:
    """Make a step with one second of compute, a quarter in the forward, and these total seconds per lane."""
    n = num_units
    unit = Unit(1, h2d_s / (2 * n - slots), d2h_s / n, update_s / n, update_s / n)
    return chain(n, 0.25 / n, 0.75 / n, unit, capacity=slots, mode=mode, num_corrected=corrected)


# -- by hand -------------------------------------------------------------------------------------------------


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
    for unit in corrected:
        correction = by_action["correct", unit]
        assert correction.begin_s >= norm_s
        again = next(span for span in run.spans if (span.action, span.unit, span.step) == ("fetch", unit, 7))
        assert again.begin_s >= correction.end_s
    assert run.busy_s["update"] == pytest.approx(3 + 2 * 5)


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


@pytest.mark.slow
def test_the_last_units_of_forward_serve_backward():
    for slots in (1, 2, 3, 5, 6):
        work = chain(6, 1, 1, Unit(1, fetch_s=0.01), capacity=slots)
        assert ideal(work).busy_s["h2d"] == pytest.approx(0.01 * (12 - slots))
        # A look-ahead beyond the slots evicts nothing with an earlier use.
        assert simulate(work, Policy(6)).busy_s["h2d"] == pytest.approx(0.01 * (12 - slots))


def test_sizes_in_bytes():
    work = chain(3, 1, 1, Unit(100, fetch_s=0.5), capacity=250)
    work = dataclasses.replace(work, units={**work.units, "c": Unit(20, fetch_s=0.1)})
    # All fetches except a's and b's are saved if a, b and c fit together: 220 bytes.
    assert ideal(work).busy_s["h2d"] == pytest.approx(1.1)
    assert ideal(dataclasses.replace(work, capacity=219)).busy_s["h2d"] == pytest.approx(1.6)


def test_the_known_figure():
    """The forward has a quarter of compute but half the fetches. With h2d equal to compute, a step takes 1.28 times
    compute (a simulation older than this code).
    """
    assert ideal(llama(32, 3, 1.0, 0.0, 0.0, "deferred")).seconds == pytest.approx(1.28, abs=0.01)
    assert 1.27 < ideal(llama(16, 2, 1.0, 0.05, 0.05, "deferred")).seconds < 1.33


# -- rules, on random work -----------------------------------------------------------------------------------


@st.composite
def works(draw: st.DrawFn, equal: bool = False, least: int = 0) -> Work:
    def seconds() -> float:
        return float(draw(st.integers(least, 5)))

    def unit() -> Unit:
        return Unit(1, *(seconds() for _ in range(4)))

    names = "abcdef"[: draw(st.integers(1, 6))]
    units = dict.fromkeys(names, unit()) if equal else {name: unit() for name in names}
    if not equal and draw(st.booleans()):
        units = {name: dataclasses.replace(unit, size=draw(st.integers(1, 4))) for name, unit in units.items()}
    forward, backward = seconds(), seconds()
    uses = [Use(seconds())] * draw(st.booleans())
    uses += [Use(forward if equal else seconds(), name) for name in names]
    uses += [Use(seconds())] * draw(st.booleans())
    uses += [Use(backward if equal else seconds(), name, is_backward=True) for name in reversed(names)]
    largest = max(unit.size for unit in units.values())
    return Work(
        uses,
        units,
        capacity=largest + draw(st.integers(0, 8)),
        mode=draw(st.sampled_from(MODES)),
        num_gradient_buffers=draw(st.integers(1, 3)),
        num_corrected=draw(st.integers(0, 6)),
    )


POLICIES = st.builds(
    Policy, st.integers(1, 6), st.sampled_from(["never", "late", "always"]), st.sampled_from(["landed", "need", "late"])
)
NUM_STEPS = 4


@given(works(least=1), POLICIES)  # work without duration has no order
def test_every_schedule_keeps_the_rules(work, policy):
    check(work, simulate(work, policy, NUM_STEPS), policy)
    block = simulate_block(work, policy, NUM_STEPS)
    assert max(block.busy_s.values()) <= block.seconds * (1 + 1e-9)
    assert sum(span.action == "update" for span in block.spans) == NUM_STEPS * len(work.units), "all are made in it"


def check(work: Work, run: Ideal, policy: Policy) -> None:
    """Replay the schedule without any state of the simulation."""
    names, spans = [use.unit for use in work.uses], run.spans
    by_lane = defaultdict(list)
    for span in spans:
        by_lane[span.lane].append(span)
    assert set(by_lane) <= set(LANES)
    for lane in by_lane.values():
        assert all(before.end_s <= after.begin_s for before, after in itertools.pairwise(lane))

    compute = by_lane["compute"]
    assert [(span.unit, span.step) for span in compute] == [
        (name, step) for step in range(NUM_STEPS + 1) for name in names
    ][: len(compute)]
    assert (compute[-1].step, compute[-2].step) == (NUM_STEPS, NUM_STEPS - 1)
    done = {(span.action, span.unit, span.step): span for span in spans if span.action not in ("fetch", "forward")}
    norm_s = {
        step: max(done["land", name, step].end_s for name in work.units)
        for step in range(NUM_STEPS)
        if all(("land", name, step) in done for name in work.units)
    }
    for span in compute:
        if span.step and span is next(s for s in compute if s.step == span.step):
            assert span.begin_s >= norm_s[span.step - 1]

    final_s = {}
    early: dict[int, list[str]] = defaultdict(list)
    for span in by_lane["update"]:
        needed = done["land" if span.action == "update" else "update", span.unit, span.step]
        assert span.begin_s >= needed.end_s
        if span.action == "correct" or work.mode == "deferred":
            assert span.begin_s >= norm_s[span.step]
        if span.action == "update" and span.begin_s < norm_s.get(span.step, math.inf):
            early[span.step].append(span.unit)
        final_s[span.unit, span.step] = span.end_s
    for step, units in early.items():
        if step + 1 < NUM_STEPS:
            owing = units[: work.num_corrected] if work.mode == "speculative" else []
            assert {name for name in work.units if ("correct", name, step) in done} == set(owing)

    for span in by_lane["d2h"]:
        assert span.begin_s >= done["backward", span.unit, span.step].end_s
    backward = [span for span in compute if span.action == "backward"]
    for before, after in zip(backward, backward[work.num_gradient_buffers :], strict=False):
        assert after.begin_s >= done["land", before.unit, before.step].end_s

    # Weights: fetched after the previous step's update, before the use, and kept whole until the use ends.
    for span in by_lane["h2d"]:
        if span.step:
            assert span.begin_s >= final_s[span.unit, span.step - 1]
            if work.mode == "speculative":
                assert span.begin_s >= norm_s[span.step - 1]
    stays = []  # from the begin of each fetch to the last use before the next fetch of the same unit
    for span in by_lane["h2d"]:
        again = [s.begin_s for s in by_lane["h2d"] if (s.unit, s.step) == (span.unit, span.step) and s is not span]
        until = min((s for s in again if s > span.begin_s), default=math.inf)
        uses = [s for s in compute if (s.unit, s.step) == (span.unit, span.step) and span.end_s <= s.begin_s]
        uses = [s for s in uses if s.end_s <= until]
        if uses:
            stays.append((span.begin_s, uses[-1].end_s, span.unit, uses))
    for span in compute:
        assert span.unit is None or any(span in uses for *_, uses in stays)
    for moment, *_ in stays:
        there = [unit for begin, end, unit, _ in stays if begin <= moment < end]
        assert sum(work.units[unit].size for unit in there) <= work.capacity
    assert all(busy <= run.seconds + 1e-9 for busy in run.busy_s.values())


# -- bounds ---------------------------------------------------------------------------------------------------


def lower_bound(work: Work) -> float:
    """Return a lower bound for all schedules: the largest lane, and the longest chains between two host waits."""
    first, last = work.units[next(u.unit for u in work.uses if u.unit)], work.units[work.uses[-1].unit or ""]
    lanes = (
        math.fsum(use.seconds for use in work.uses),
        math.fsum(unit.fetch_s for unit in work.units.values()),
        math.fsum(unit.land_s for unit in work.units.values()),
        math.fsum(unit.update_s for unit in work.units.values()),
    )
    assert first is last, "what comes first in forward comes last in backward"
    leading = 0.0 if work.uses[0].unit else work.uses[0].seconds  # overlaps the first update and fetch
    cycle = lanes[0] - leading + last.land_s + max(leading, last.update_s + first.fetch_s)
    # All gradients arrive before the step ends, and the last backward cannot begin before others leave the buffers.
    landing = math.fsum(use.seconds for use in work.uses if not use.is_backward) + lanes[2]
    # Everything except deferred updates needed late in the forward.
    path = 0.0
    if work.mode == "deferred":
        updated = fetched = forward = 0.0
        for use in work.uses:
            unit = work.units.get(use.unit or "")
            if unit and not use.is_backward:
                updated += unit.update_s
                fetched = max(updated, fetched) + unit.fetch_s
                forward = max(forward, fetched)
            forward += use.seconds
        path = forward + last.land_s
    return max(*lanes, cycle, landing, path)


def serial_seconds(work: Work) -> float:
    """Return the seconds of a step with one slot, one operation after the other."""
    fetched = [name for name, _ in itertools.groupby(use.unit for use in work.uses if use.unit is not None)]
    num_corrected = work.num_corrected if work.mode == "speculative" else 0
    corrected = [use.unit for use in work.uses if use.is_backward and use.unit is not None][:num_corrected]
    return math.fsum(
        [use.seconds for use in work.uses]
        + [work.units[name].fetch_s for name in fetched]
        + [unit.land_s + unit.update_s for unit in work.units.values()]
        + [work.units[name].correct_s for name in corrected]
    )


@examples(50)
@given(works())
def test_between_the_bounds(work):
    run = ideal(work, 6)
    assert run.seconds >= lower_bound(work) - 1e-9
    assert run.seconds <= serial_seconds(work) + 1e-9
    assert max(run.busy_s.values()) <= run.seconds + 1e-9


@examples(30)
@given(works(equal=True))
def test_more_slots_are_hardly_ever_slower(work):
    """A list schedule takes any ready work, and may lose a little time (Graham's anomalies). Observed: 38 s with five
    slots, 37 s with four.
    """
    times = [ideal(dataclasses.replace(work, capacity=slots), 6).seconds for slots in range(1, 6)]
    assert all(more <= 1.1 * fewer for fewer, more in itertools.pairwise(times))


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "ratio"), list(zip(MODES, [0.5, 2.0] * 2, strict=False)))
def test_more_slots_are_never_slower_for_a_llama(ratio, mode):
    unit = Unit(1, ratio / 32, ratio / 16, ratio / 16)
    times = [ideal(chain(16, 1 / 64, 3 / 64, unit, capacity=slots, mode=mode)).seconds for slots in (1, 2, 3, 4, 5)]
    assert all(more <= fewer + 1e-9 for fewer, more in itertools.pairwise(times))


@examples(40)
@given(works())
def test_knowing_less_is_never_faster(work):
    none, sure, deferred = (
        ideal(dataclasses.replace(work, mode=mode, num_corrected=0), 6).seconds
        for mode in ("none", "speculative", "deferred")
    )
    assert none <= sure + 1e-9
    assert none <= deferred + 1e-9


# -- refused --------------------------------------------------------------------------------------------------


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
