"""The fetch schedule: random schedules replayed, minimal fetch counts, and timing.

A *place* has room for one cargo; cargoes have equal sizes.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from offload.schedule.build import CargoUse, Fetch, Schedule, SlotMemory, build, window_bytes
from tests.matrix import examples

SIZE = 512


@dataclass(frozen=True)
class Pass:
    """Arguments for `build`."""

    uses: tuple[CargoUse, ...]
    room: SlotMemory
    lookahead: int
    held: Mapping[int, int] = field(default_factory=dict)
    homes: Mapping[int, int] = field(default_factory=dict)
    trained: frozenset[int] = frozenset()

    def build(self) -> Schedule:
        return build(
            self.uses, self.room, self.lookahead, valid_offsets=self.held, homes=self.homes, trained=self.trained
        )


def fetches(schedule: Schedule) -> list[Fetch]:
    return [fetch for issued in schedule.before for fetch in issued]


def offsets(schedule: Schedule) -> list[tuple[int, int]]:
    return [(fetch.cargo, fetch.offset) for fetch in fetches(schedule)]


# -- the replay ------------------------------------------------------------------------------------------------


def replay(asked: Pass, schedule: Schedule) -> dict[int, int]:
    """Check a schedule by replay. Return the offsets of cargoes valid for the next pass."""
    uses, room, lying = schedule.uses, asked.room, dict(asked.held)
    assert uses == tuple(asked.uses)
    assert len(schedule.before) == len(uses)
    for now, issued in enumerate(schedule.before):
        for fetch in issued:
            check_fetch(asked, lying, fetch, now)
            for cargo in fetch.evicts:
                del lying[cargo]
            lying[fetch.cargo] = fetch.offset
        cargo = uses[now].cargo
        assert cargo in lying or not room.sizes[cargo] or not uses[now].reads, "compute finds what it needs"
        if needed(asked, cargo, now + 1) == math.inf:
            lying.pop(cargo, None)  # an update follows
    assert not {use.cargo for use in uses if use.backward} & asked.trained & set(lying)
    return lying


def check_fetch(asked: Pass, lying: Mapping[int, int], fetch: Fetch, now: int) -> None:
    uses, room = asked.uses, asked.room
    assert uses[fetch.serves].cargo == fetch.cargo not in lying
    assert uses[fetch.serves].reads
    assert room.sizes[fetch.cargo] > 0
    window = [use.cargo for use in uses[now : fetch.serves] if use.reads]
    assert all(cargo in lying or not room.sizes[cargo] for cargo in window), "what is needed earlier comes earlier"
    assert fetch.cargo not in window
    assert len({*window, fetch.cargo} - {uses[now].cargo if uses[now].reads else 0, 0}) <= asked.lookahead
    begin, end = fetch.offset, fetch.offset + room.sizes[fetch.cargo]
    assert 0 <= begin < end <= room.capacity
    overwritten = {
        cargo for cargo, offset in lying.items() if offset < end and begin < offset + room.sizes[cargo]
    }  # no two cargoes ever overlap
    counted_out = set(fetch.evicts) - overwritten
    assert overwritten <= set(fetch.evicts) <= set(lying)
    assert len(fetch.evicts) == len(set(fetch.evicts))
    if counted_out:
        assert room.max_cargoes is not None
        assert len(lying) >= room.max_cargoes
        (out,) = counted_out
        assert all(needed(asked, out, now) >= needed(asked, other, now) for other in lying)
    assert room.max_cargoes is None or len(lying) - len(fetch.evicts) + 1 <= room.max_cargoes
    assert all(needed(asked, cargo, now) > fetch.serves for cargo in fetch.evicts), "no harm to an earlier use"


def needed(asked: Pass, cargo: int, now: int) -> float:
    """Return the time of the next read of a loaded cargo, counted into the next pass. Infinite: never, or changed by an
    update.
    """
    times = [time for time, use in enumerate(asked.uses) if use.cargo == cargo and use.reads]
    later = [time for time in times if time >= now]
    if later:
        return later[0]
    stale = cargo in asked.trained and any(use.cargo == cargo and use.backward for use in asked.uses)
    return math.inf if stale or not times else len(asked.uses) + times[0]


def uses_of(cargoes: st.SearchStrategy[int]) -> st.SearchStrategy[CargoUse]:
    """Forwards, backwards, and backwards without weight reads."""
    kinds = st.sampled_from([(False, True), (True, True), (True, False)])
    return st.builds(lambda cargo, kind: CargoUse(cargo, *kind), cargoes, kinds)


@st.composite
def passes(draw: st.DrawFn) -> Pass:
    """Cargo 0 has zero bytes; the other sizes are random."""
    num_cargoes = draw(st.integers(1, 6))
    sizes = (0, *(draw(st.integers(1, 5)) for _ in range(num_cargoes)))
    cargoes = st.integers(0, num_cargoes)
    uses = tuple(draw(st.lists(uses_of(cargoes), max_size=16)))
    capacity = max(sizes) + draw(st.integers(0, sum(sizes) + 2 - max(sizes)))
    most = draw(st.none() | st.integers(1, num_cargoes))
    held, end = {}, 0
    for cargo in draw(st.permutations(range(1, num_cargoes + 1))):
        begin = end + draw(st.integers(0, 3))
        if begin + sizes[cargo] <= capacity and (most is None or len(held) < most):
            held[cargo], end = begin, begin + sizes[cargo]
    homes = draw(st.dictionaries(st.integers(1, num_cargoes), st.integers(0, capacity), max_size=num_cargoes))
    return Pass(
        uses,
        SlotMemory(sizes, capacity, most),
        draw(st.integers(0, 7)),
        held,
        {**homes, **held},
        frozenset(draw(st.sets(st.integers(1, num_cargoes)))),
    )


@examples(100)
@given(passes(), st.booleans())
def test_every_schedule_keeps_the_rules_and_so_do_those_of_the_passes_after_it(asked, frozen):
    homes, trained = dict(asked.homes), frozenset() if frozen else asked.trained
    held = dict(asked.held)
    for _ in range(3):
        again = replace(asked, held=held, homes=homes, trained=trained)
        schedule = again.build()
        assert again.build() == schedule, "nothing is kept from one to the next, and nothing given is changed"
        held = replay(again, schedule)
        homes |= dict(offsets(schedule))


# -- the fewest fetches ------------------------------------------------------------------------------------------


def fewest(order: Sequence[int], num_places: int, held: Iterable[int] = ()) -> int:
    """Return the fewest fetches on demand, by trying every eviction."""
    held = sorted(held)
    costs = {
        frozenset(kept): 0
        for number in range(min(num_places, len(held)) + 1)
        for kept in itertools.combinations(held, number)
    }
    for cargo in order:
        after: dict[frozenset[int], int] = {}
        for there, cost in costs.items():
            if cargo in there:
                choices = [(there, cost)]
            elif len(there) < num_places:
                choices = [(there | {cargo}, cost + 1)]
            else:
                choices = [(there - {out} | {cargo}, cost + 1) for out in there]
            for choice, total in choices:
                after[choice] = min(total, after.get(choice, total))
        costs = after
    return min(costs.values())


@st.composite
def equal_passes(draw: st.DrawFn) -> tuple[Pass, int]:
    """Draw a pass over equal cargoes, and the number of places, limited by bytes or by count."""
    num_cargoes = draw(st.integers(1, 5))
    uses = tuple(draw(st.lists(uses_of(st.integers(1, num_cargoes)), min_size=1, max_size=14)))
    num_places = draw(st.integers(1, num_cargoes))
    by_count = draw(st.booleans())
    capacity = SIZE * (num_places + by_count * draw(st.integers(0, 3))) + draw(st.integers(0, SIZE - 1))
    there = draw(st.permutations(range(1, num_cargoes + 1)))[: draw(st.integers(0, num_places))]
    asked = Pass(
        uses,
        SlotMemory((0, *[SIZE] * num_cargoes), capacity, num_places if by_count else None),
        draw(st.integers(0, 4)),
        {cargo: SIZE * place for place, cargo in enumerate(there)},
        trained=frozenset(draw(st.sets(st.integers(1, num_cargoes)))),
    )
    return asked, num_places


@examples(80)
@given(equal_passes())
def test_as_few_fetches_as_there_can_be_with_the_places_that_are_not_lookahead(case):
    asked, num_places = case
    num_fetches = len(fetches(asked.build()))
    order = [use.cargo for use in asked.uses if use.reads]
    assert num_fetches >= fewest(order, num_places, asked.held)
    if asked.lookahead == 0:
        assert num_fetches == fewest(order, num_places, asked.held)
    elif asked.lookahead < num_places:
        assert num_fetches <= fewest(order, num_places - asked.lookahead, asked.held)


@examples(80)
@given(equal_passes())
def test_a_fetch_is_issued_as_soon_as_there_is_room(case):
    asked, num_places = case
    schedule, lying = asked.build(), dict(asked.held)
    uses = asked.uses
    for now, issued in enumerate(schedule.before):
        for fetch in issued:
            lying = {cargo: offset for cargo, offset in lying.items() if cargo not in fetch.evicts}
            lying[fetch.cargo] = fetch.offset
        reading = [time for time in range(now, len(uses)) if uses[time].reads]
        missing = next((time for time in reading if uses[time].cargo not in lying), None)
        ahead = {uses[time].cargo for time in reading if missing is not None and time <= missing}
        if missing is not None and len(ahead) <= asked.lookahead + uses[now].reads:
            assert len(lying) == num_places
            assert all(needed(asked, cargo, now) < missing for cargo in lying)
        if needed(asked, uses[now].cargo, now + 1) == math.inf:
            lying.pop(uses[now].cargo, None)


@st.composite
def roomy_passes(draw: st.DrawFn) -> Pass:
    sizes = (0, *draw(st.lists(st.integers(1, 9), min_size=1, max_size=6)))
    uses = tuple(draw(st.lists(uses_of(st.integers(0, len(sizes) - 1)), max_size=14)))
    trained = frozenset(draw(st.sets(st.integers(1, len(sizes) - 1))))
    return Pass(uses, SlotMemory(sizes, sum(sizes), None), draw(st.integers(0, 6)), trained=trained)


@given(roomy_passes())
def test_what_holds_everything_fetches_later_what_an_update_changed_to_where_it_was(asked):
    forward = tuple(CargoUse(cargo, False) for cargo in dict.fromkeys(use.cargo for use in asked.uses))
    asked = replace(asked, uses=forward + forward + asked.uses)  # load all cargoes before any has its last read
    first = asked.build()
    read = {use.cargo for use in asked.uses if use.reads}
    assert sorted(fetch.cargo for fetch in fetches(first)) == sorted(read - {0}), "everything once"
    asked = replace(asked, held=replay(asked, first), homes=dict(offsets(first)))
    second = asked.build()
    assert asked.held.items() <= replay(asked, second).items()
    updated = {use.cargo for use in asked.uses if use.backward} & asked.trained
    assert sorted(offsets(second)) == sorted((cargo, asked.homes[cargo]) for cargo in updated)


# -- repeated passes ---------------------------------------------------------------------------------------------


def sweep(num_units: int) -> tuple[CargoUse, ...]:
    """Return a step over units with separate cargoes: forward in order, backward in reverse."""
    units = range(1, num_units + 1)
    return (*(CargoUse(unit, False) for unit in units), *(CargoUse(unit, True) for unit in reversed(units)))


def rooms(num_units: int, num_places: int) -> list[SlotMemory]:
    """Return room for `num_places` units, limited by bytes and by count."""
    sizes = (0, *[SIZE] * num_units)
    return [SlotMemory(sizes, SIZE * num_places, None), SlotMemory(sizes, SIZE * (num_units + 1), num_places)]


def repeat(num_units: int, room: SlotMemory, lookahead: int, trained: Iterable[int], num_passes: int) -> list[Schedule]:
    """Return schedules for consecutive passes, each starting from the device state left by the previous pass."""
    held: dict[int, int] = {}
    homes: dict[int, int] = {}
    schedules = []
    for _ in range(num_passes):
        asked = Pass(sweep(num_units), room, lookahead, dict(held), dict(homes), frozenset(trained))
        schedules.append(asked.build())
        held = replay(asked, schedules[-1])
        homes |= dict(offsets(schedules[-1]))
    return schedules


@given(
    st.integers(1, 12).flatmap(
        lambda n: st.tuples(st.just(n), st.integers(1, n), st.integers(0, n), st.sets(st.integers(1, n)))
    ),
    st.integers(0, 1),
)
@example((12, 6, 2, {1, 3, 5, 7, 9, 11}), 0)
def test_steps_never_thrash(case, which):
    """With some cargoes frozen, places may rotate, but every step after the first has equally many fetches."""
    num_units, num_places, lookahead, trained = case
    schedules = repeat(num_units, rooms(num_units, num_places)[which], lookahead, trained, 8)
    counts = [len(fetches(schedule)) for schedule in schedules]
    assert len(set(counts[1:])) == 1
    assert counts[1] <= counts[0] <= 2 * num_units - max(0, num_places - lookahead)


# -- when ------------------------------------------------------------------------------------------------------


def seconds(schedule: Schedule, forward_s: float, backward_s: float, fetch_s: float) -> float:
    """Return the end of compute, starting with an empty device. A fetch begins once issued, after the previous fetch,
    and after the last read of evicted cargoes.
    """
    now = link_free = 0.0
    there: dict[int, float] = {}
    read: dict[int, float] = {}
    for use, issued in zip(schedule.uses, schedule.before, strict=True):
        for fetch in issued:
            link_free = max(now, link_free, *(read.get(cargo, 0.0) for cargo in fetch.evicts)) + fetch_s
            there[fetch.cargo] = link_free
        now = max(now, there[use.cargo]) + (backward_s if use.backward else forward_s)
        read[use.cargo] = now
    return now


def test_looking_ahead_hides_the_fetches():
    """Six units, two places, one second for everything: all fetches except the first overlap compute."""
    for room in rooms(6, 2):
        asked = [Pass(sweep(6), room, lookahead, trained=frozenset(range(1, 7))).build() for lookahead in (0, 1)]
        assert seconds(asked[0], 1, 1, 1) == 12 + (12 - 2)
        assert seconds(asked[1], 1, 1, 1) == 12 + 1


# -- by hand -----------------------------------------------------------------------------------------------------


def test_two_places_for_three_units():
    a, b, c = 1, 2, 3
    asked = Pass(sweep(3), rooms(3, 2)[0], 1, trained=frozenset({a, b, c}))
    assert asked.build().before == (
        (Fetch(a, 0, (), 0), Fetch(b, SIZE, (), 1)),
        (Fetch(c, 0, (a,), 2),),
        (),
        (),
        (Fetch(a, 0, (), 5),),  # the backward of c has ended, and an update follows
        (),
    )


def test_what_a_backward_does_not_read_is_not_fetched_for_it():
    """Three units, the first an embedding, each updated right after the backward. The third unit replaces the
    embedding, since no use needs the embedding weights any more.
    """
    uses = (*sweep(3)[:-1], CargoUse(1, True, reads=False))
    for places in (2, 4):
        room = rooms(3, places)[0]
        first = build(uses, room, 2, valid_offsets={}, homes={}, trained={1, 2, 3}, fetches_next=True)
        served = [(fetch.cargo, fetch.serves) for fetch in fetches(first)]
        assert served[:3] == [(1, 0), (2, 1), (3, 2)]
        assert served[3:]
        assert all(serves >= len(uses) and cargo != 1 for cargo, serves in served[3:])


def test_a_place_costs_as_much_as_the_first_need_of_whom_it_takes():
    room = SlotMemory((0, 2, 2, 4, 4), 8, None)
    lying, next_use = {1: 0, 2: 2, 3: 4}, {1: 9.0, 2: 5.0, 3: 6.0}
    assert room.place(4, lying, next_use, 4, None) == (4, (3,))
    assert room.place(4, lying, {1: 9.0, 2: 7.0, 3: 6.0}, 4, None) == (0, (1, 2))
    assert room.place(4, lying, next_use, 6, None) is None, "one that is needed by then is in every place"
    assert room.place(4, lying, {1: 9.0, 2: 7.0, 3: 6.0}, 6, None) == (0, (1, 2))
    assert room.place(4, lying, {1: math.inf, 2: math.inf, 3: 6.0}, 100, None) == (0, (1, 2)), "stale: nobody's harm"


def test_home_is_preferred_where_nothing_is_lost_by_it():
    room = SlotMemory((0, 2, 2, 2), 8, None)
    assert room.place(1, {}, {}, 0, None) == (0, ())
    assert room.place(1, {}, {}, 0, 5) == (5, ())
    assert room.place(1, {}, {}, 0, 7) == (0, ()), "no room there any more"
    assert room.place(1, {2: 4}, {2: 9.0}, 0, 5) == (0, ()), "somebody is there"
    assert room.place(1, {2: 0, 3: 4}, {2: 9.0, 3: 9.0}, 0, 3) == (2, ())
    full = SlotMemory((0, 4, 4, 4), 8, None)
    assert full.place(1, {2: 0, 3: 4}, {2: 9.0, 3: 9.0}, 0, 4) == (4, (3,))
    assert full.place(1, {2: 0, 3: 4}, {2: 10.0, 3: 9.0}, 0, 4) == (0, (2,))


def test_a_count_lets_go_of_what_is_needed_last():
    room = SlotMemory((0, 2, 2, 2), 8, 2)
    assert room.place(1, {2: 0, 3: 2}, {2: 8.0, 3: 9.0}, 0, None) == (2, (3,))
    assert room.place(1, {2: 0, 3: 2}, {2: 8.0, 3: 9.0}, 0, 6) == (6, (3,))
    assert room.place(1, {2: 0, 3: 2}, {2: 8.0, 3: 9.0}, 9, None) is None
    assert room.place(1, {2: 0}, {2: 8.0}, 9, None) == (2, ())


@given(st.lists(st.integers(1, 99), min_size=1, max_size=8), st.integers(1, 10))
def test_the_window_holds_so_many_neighbours_anywhere(sizes, num_units):
    runs = [sizes[i:j] for i in range(len(sizes)) for j in range(i + 1, len(sizes) + 1) if j - i <= num_units]
    assert window_bytes(sizes, num_units) == max(map(sum, runs))
    assert window_bytes([], num_units) == 0


@pytest.mark.slow
def test_a_long_schedule_is_made_quickly():
    asked = Pass(sweep(200), rooms(200, 60)[0], 200, trained=frozenset(range(1, 201)))
    calls = [0]
    sys.setprofile(lambda _frame, event, _arg: calls.__setitem__(0, calls[0] + event.endswith("call")))
    schedule = asked.build()
    sys.setprofile(None)
    assert calls[0] < 1_000_000, "a second or so"
    replay(asked, schedule)
    assert len(fetches(schedule)) >= 400 - 60
