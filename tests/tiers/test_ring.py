"""Ring buffer slices, compared with a map from each byte to the last user."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.lanes.ticket import Ticket
from offload.tiers.lease import Ring, RingSlice


def ring(num_bytes: int) -> Ring:
    return Ring(torch.zeros(num_bytes, dtype=torch.uint8), "staging")


def test_one_after_the_other_and_from_the_beginning_again():
    """None: the buffer is too small beside the open slices."""
    buffer, found = ring(10), []
    for size in (11, 4, 4, 3, 2, 1):
        stretch = buffer.take(size)
        found.append(stretch and (stretch.begin, stretch.end))
        if size == 3:
            buffer.reset()
    assert found == [None, (0, 4), (4, 8), None, (8, 10), (0, 1)]


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
