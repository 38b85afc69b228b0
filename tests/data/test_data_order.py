"""Each epoch order is a new permutation, computed from a position alone."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from offload.extras.data.order import rows_at, shuffled
from tests.matrix import examples


@examples(60)
@given(st.integers(1, 700), st.integers(-(2**63), 2**64), st.integers(0, 2**31))
def test_every_epoch_is_a_permutation(num_rows: int, seed: int, epoch: int) -> None:
    order = shuffled(np.arange(num_rows), num_rows, seed, epoch)
    assert sorted(order) == list(range(num_rows))


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = {tuple(shuffled(np.arange(20), 20, seed, epoch)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


def test_every_row_is_as_often_first() -> None:
    """Over 1200 epochs with 6 rows, each (position, row) has 200 expected hits; 77 is six standard deviations."""
    orders = np.stack([shuffled(np.arange(6), 6, 1, epoch) for epoch in range(1200)])
    for position in range(6):
        counts = Counter(orders[:, position].tolist())
        assert all(abs(counts[row] - 200) < 77 for row in range(6)), (position, counts)


def test_a_large_order_needs_no_memory() -> None:
    num_rows = 10**12
    order = shuffled(np.asarray([0, 1, 2, num_rows - 1]), num_rows, 0, 0)
    assert len(set(order.tolist())) == 4
    assert 0 <= order.min() <= order.max() < num_rows


@examples(60)
@given(st.integers(1, 40), st.integers(1, 100), st.integers(0, 60))
def test_positions_run_through_the_epochs(num_rows: int, count: int, start: int) -> None:
    epochs = (start + count) // num_rows + 1
    whole = np.concatenate([shuffled(np.arange(num_rows), num_rows, 3, epoch) for epoch in range(epochs)])
    assert rows_at(np.arange(start, start + count), num_rows, 3).tolist() == whole[start : start + count].tolist()
