"""Ring buffer slices, compared with a map from each byte to the last user."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.lanes.ticket import Ticket
from offload.tiers.lease import Ring, RingSlice


def ring(num_bytes: int) -> Ring:
    return Ring(torch.zeros(num_bytes, dtype=torch.uint8), "staging")


def taken(ring: Ring, num_bytes: int) -> RingSlice:
    stretch = ring.take(num_bytes)
    assert stretch is not None
    return stretch


def used(stretch: RingSlice) -> list[Ticket]:
    """Fill, read and release a slice."""
    tickets = [Ticket("d2h"), Ticket("update")]
    stretch.fence.record_writer(tickets[0])
    stretch.fence.record_reader(tickets[1])
    stretch.is_open = False
    return tickets


def test_one_after_the_other_and_from_the_beginning_again():
    buffer = ring(10)
    stretches = [taken(buffer, 4), taken(buffer, 4)]
    tickets = [used(stretch) for stretch in stretches]
    stretches.append(taken(buffer, 4))
    assert [(s.begin, s.end) for s in stretches[1:]] == [(4, 8), (0, 4)], "4 bytes do not fit behind the second"
    assert stretches[0].users == stretches[1].users == []
    assert stretches[2].users == tickets[0]
    tickets.append(used(stretches[2]))
    last = taken(buffer, 6)
    assert (last.begin, last.end) == (4, 10), "up to the last byte"
    assert last.users == tickets[1]
    used(last)
    assert taken(buffer, 1).users == tickets[2]


def test_a_stretch_is_its_part_of_the_memory():
    buffer = ring(10)
    for number, size in enumerate((3, 4), 1):
        stretch = taken(buffer, size)
        assert stretch.flat.shape == (size,)
        stretch.flat.fill_(number)
        assert stretch.fence.buffer_type == "staging"
    assert buffer.memory.tolist() == [1] * 3 + [2] * 4 + [0] * 3


def test_nothing_where_the_buffer_is_too_small_beside_what_is_open():
    buffer = ring(10)
    assert buffer.take(11) is None
    first = taken(buffer, 6)
    assert buffer.take(5) is None
    assert (taken(buffer, 4).begin, first.is_open) == (6, True)
    assert buffer.take(1) is None
    tickets = used(first)
    assert taken(buffer, 1).users == tickets


ACTIONS = st.one_of(
    st.tuples(st.just("take"), st.integers(1, 24)),
    st.tuples(st.sampled_from(["record_writer", "record_reader", "close"]), st.integers(0, 30)),
    st.tuples(st.just("reset"), st.just(0)),
)


@given(st.integers(1, 20), st.lists(ACTIONS, max_size=60))
def test_nobody_gets_what_is_open_and_everybody_waits_for_who_had_it_before(size, actions):
    buffer, owners = ring(size), [None] * size
    stretches: list[RingSlice] = []
    reset: list[RingSlice] = []
    for action, number in actions:
        if action == "take":
            some_are_open = any(stretch.is_open for stretch in stretches)
            has_room = buffer.has_room(number)
            stretch = buffer.take(number)
            assert has_room == (stretch is not None)
            if stretch is None:
                assert number > size or some_are_open
                continue
            assert 0 <= stretch.begin <= stretch.end - number == stretch.begin <= size - number
            assert stretch.flat.data_ptr() == buffer.memory.data_ptr() + stretch.begin
            before = [owner for owner in owners[stretch.begin : stretch.end] if owner is not None]
            assert not any(owner.is_open for owner in before)
            assert set(stretch.users) == {ticket for owner in before for ticket in owner.fence.before_fill()}
            owners[stretch.begin : stretch.end] = [stretch] * number
            stretches.append(stretch)
            for other in stretches:
                mine = all(owner is other for owner in owners[other.begin : other.end]) and other not in reset
                assert other.is_whole == (mine and other.end - other.begin == other.flat.numel())
        elif action == "reset":
            buffer.reset()
            reset += stretches
            assert not any(stretch.is_open for stretch in stretches)
        elif stretches:
            stretch = stretches[number % len(stretches)]
            if action == "close":
                stretch.is_open = False
            elif stretch.is_open:
                getattr(stretch.fence, action)(Ticket("d2h"))
    buffer.reset()
    assert buffer.take(size) is not None
