"""Arenas: mappings with exactly the planned size, divided without gaps."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.tiers.host import Arena

DTYPES = (torch.uint8, torch.int16, torch.bfloat16, torch.float32)
takes = st.lists(st.tuples(st.integers(0, 5).map(lambda n: 2048 * n), st.sampled_from(DTYPES)), min_size=1, max_size=12)


@given(takes)
def test_an_arena_is_carved_in_order_without_gaps(wanted):
    size = sum(numel * dtype.itemsize for numel, dtype in wanted)
    arena = Arena(size)
    flats = [arena.take(numel, dtype) for numel, dtype in wanted]
    end = None
    for number, (flat, (numel, dtype)) in enumerate(zip(flats, wanted, strict=True)):
        assert flat.shape == (numel,)
        assert flat.dtype == dtype
        assert not flat.view(torch.uint8).any(), "a new arena is zero"
        if numel:
            assert end is None or flat.data_ptr() == end
            end = flat.data_ptr() + flat.nbytes
        flat.view(torch.uint8).fill_(number % 250 + 1)
    for number, flat in enumerate(flats):
        assert (flat.view(torch.uint8) == number % 250 + 1).all(), "two tensors overlap"


def test_an_arena_does_not_give_more_than_it_has():
    arena = Arena(4096)
    arena.take(1024, torch.float32)
    with pytest.raises(AssertionError, match="too small"):
        arena.take(1, torch.uint8)


def test_tensors_begin_on_a_page():
    assert Arena(10).take(10, torch.uint8).data_ptr() % mmap.PAGESIZE == 0


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads /proc/self/smaps")
@pytest.mark.parametrize("num_bytes", [(5 << 20) + 4096, (33 << 20) + 1])
def test_the_mapping_has_the_size_that_was_asked_for(num_bytes: int):
    """The size is not rounded to a power of two, unlike torch's pinned allocator. Pages become resident at the first
    write.
    """
    before = address_space(), resident()
    arena = Arena(num_bytes)
    flat = arena.take(num_bytes, torch.uint8)
    assert 0 <= address_space() - before[0] - num_bytes <= 4 * mmap.PAGESIZE
    assert resident() - before[1] < 1 << 20
    flat.fill_(1)
    assert 0 <= resident() - before[1] - num_bytes <= 1 << 20
    del flat, arena
    assert resident() - before[1] < 1 << 20, "a mapping goes with its last tensor"


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
