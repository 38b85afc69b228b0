"""Rows with isolated documents: each document once, with separate positions, in almost the minimal number of rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.extras.data.packing import IGNORE, Rows, best_fit
from tests.data.test_data_packing import PAD, documents_strategy, stored
from tests.matrix import examples


@examples(80)
@given(documents_strategy, st.integers(2, 16), st.booleans())
def test_each_document_lies_in_one_row_with_positions_of_its_own(
    documents: list[list[bool]], length: int, masked: bool
) -> None:
    expected, position = [], 0  # (ids, targets) for each piece with a target
    masked = masked and not all(map(all, documents))  # otherwise the store keeps no mask
    for mask in documents:
        ids = list(range(position, position + len(mask)))
        for begin in range(0, len(ids), length) if not masked else [0]:
            piece = ids[begin : begin + length]
            trained = [i for i in piece[1:] if not masked or mask[i - position]]
            expected += [(piece, trained)] if trained else []
        position += len(mask)
    with stored(documents, masked) as store:
        rows = Rows.over(store, length, "isolated", PAD)
        which = np.arange(rows.num_rows)
        (ids, labels), positions, lengths = rows.read(which), rows.positions(which), rows.lengths(which)
    found = []
    for row in range(rows.num_rows):
        ends = [*np.flatnonzero(positions[row] == 0)[1:].tolist(), length]
        for begin, end in zip([0, *ends], ends, strict=False):
            assert (positions[row, begin:end] == np.arange(end - begin)).all()
            its, marks = ids[row, begin:end].tolist(), labels[row, begin:end]
            if its == [PAD] * len(its):
                assert begin == lengths[row]
                assert (marks == IGNORE).all()
                continue
            assert marks[0] == IGNORE, "the token before the first one of a document is another document's"
            found.append((its, [int(label) for label in marks if label != IGNORE]))
            assert [i for i, label in zip(its, marks, strict=True) if label != IGNORE] == found[-1][1]
    assert sorted(found) == expected
    assert rows.num_targets == sum(len(trained) for _, trained in expected)
    assert rows.num_rows == 0 or lengths.min() > 0


@examples(60)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_rows_are_about_as_few_as_can_be(sizes: list[int]) -> None:
    lengths = np.asarray(sizes)
    rows = best_fit(lengths, 40)
    filled = np.bincount(rows, lengths)
    assert filled.max() <= 40
    assert len(filled) <= 11 / 9 * -(-sum(sizes) // 40) + 4 or (lengths > 20).sum() >= len(filled) / 2
    left = sorted(40 - filled)
    firsts = [int(np.flatnonzero(rows == row)[0]) for row in range(len(filled))]
    assert firsts == sorted(firsts)
    assert left[0] >= 0


def test_what_fits_goes_where_it_leaves_least() -> None:
    assert best_fit(np.asarray([3, 6, 7, 4]), 10).tolist() == [0, 1, 0, 1]
    assert best_fit(np.asarray([10, 1, 9, 10]), 10).tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize("sizes", [[], [5]])
def test_nothing_and_one(sizes: list[int]) -> None:
    assert best_fit(np.asarray(sizes, np.int64), 5).tolist() == [0] * len(sizes)
