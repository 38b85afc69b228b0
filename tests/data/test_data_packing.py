"""Rows, packed, apart and isolated, against a plain oracle: tokens once and in order, labels, documented losses."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.extras.data import packing
from offload.extras.data.packing import IGNORE, Rows, best_fit
from offload.extras.data.token_file import TokenFile, TokenWriter
from tests.matrix import examples

PAD = 60_000
# trained tokens per document
documents_strategy = st.lists(st.lists(st.booleans(), min_size=1, max_size=20), max_size=12)


@contextmanager
def stored(documents: list[list[bool]], masked: bool) -> Iterator[TokenFile]:
    """Store documents with ids 0, 1, 2, ...: each id equals the stream position."""
    with tempfile.TemporaryDirectory() as temporary:
        writer = TokenWriter(Path(temporary) / "store", 65536, masked)
        position = 0
        for mask in documents:
            ids = np.arange(position, position + len(mask))
            cut = len(mask) // 2  # a document may arrive in pieces
            writer.append(ids[:cut], np.asarray(mask[:cut], bool) if masked else None, closes=False)
            writer.append(ids[cut:], np.asarray(mask[cut:], bool) if masked else None, closes=True)
            position += len(mask)
        yield TokenFile(Path(temporary) / "store", writer.finish())


def trained_positions(documents: list[list[bool]], masked: bool) -> set[int]:
    return {i for i, trained in enumerate(itertools.chain.from_iterable(documents)) if trained or not masked}


def targets(row_ids: np.ndarray, row_labels: np.ndarray) -> list[int]:
    """Check the labels against the ids in one row. Return the targets of the shifted loss."""
    used = row_labels != IGNORE
    assert (row_labels[used] == row_ids[used]).all()
    return [int(label) for label in row_labels[1:] if label != IGNORE]


@examples(80)
@given(documents_strategy, st.integers(2, 16), st.booleans(), st.sampled_from([4, 16, 1 << 22]))
def test_packed_rows(documents: list[list[bool]], length: int, masked: bool, group_tokens: int) -> None:
    num_tokens = sum(map(len, documents))
    trained = trained_positions(documents, masked)
    with stored(documents, masked) as store, patch.object(packing, "_GROUP_TOKENS", group_tokens):
        rows = Rows.over(store, length, True, PAD)
        ids, labels = rows.read(np.arange(rows.num_rows))
        lengths = rows.lengths(np.arange(rows.num_rows))

    expected = []  # (ids, targets) for each row with a target
    for start in range(0, num_tokens, length):
        begin = max(min(start, num_tokens - length), 0)
        row_targets = [i for i in range(max(begin + 1, start), min(start + length, num_tokens)) if i in trained]
        if row_targets:
            expected.append((list(range(begin, min(begin + length, num_tokens))), row_targets))
    assert [ids[i, : lengths[i]].tolist() for i in range(rows.num_rows)] == [row for row, _ in expected]
    assert [targets(*pair) for pair in zip(ids, labels, strict=True)] == [row for _, row in expected]
    assert rows.num_targets == sum(len(row) for _, row in expected)
    assert all((ids[i, n:] == PAD).all() and (labels[i, n:] == IGNORE).all() for i, n in enumerate(lengths))
    if num_tokens >= length:
        assert (lengths == length).all(), "only a stream shorter than a row may be padded"


@examples(80)
@given(documents_strategy, st.integers(2, 16), st.booleans(), st.sampled_from([4, 16, 1 << 22]))
def test_unpacked_rows(documents: list[list[bool]], length: int, masked: bool, group_tokens: int) -> None:
    trained = trained_positions(documents, masked)
    with stored(documents, masked) as store, patch.object(packing, "_GROUP_TOKENS", group_tokens):
        rows = Rows.over(store, length, False, PAD)
        ids, labels = rows.read(np.arange(rows.num_rows))
        lengths = rows.lengths(np.arange(rows.num_rows))
        if rows.num_rows:
            assert rows.num_truncated_tokens == sum(max(len(mask) - length, 0) for mask in documents)
    expected, position = [], 0
    for mask in documents:
        row = list(range(position, position + min(len(mask), length)))
        if any(i in trained for i in row[1:]):
            expected.append((row, [i for i in row[1:] if i in trained]))
        position += len(mask)
    assert [ids[i, : lengths[i]].tolist() for i in range(rows.num_rows)] == [row for row, _ in expected]
    assert [targets(*pair) for pair in zip(ids, labels, strict=True)] == [row for _, row in expected]
    assert rows.num_without_target == len(documents) - len(expected)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, np.uint16), (65537, np.uint32)])
def test_ids_are_stored_in_the_narrowest_type(tmp_path: Path, vocab_size: int, dtype: type) -> None:
    writer = TokenWriter(tmp_path / "store", vocab_size, masked=False)
    writer.append(np.asarray([0, vocab_size - 1]), None, closes=True)
    store = TokenFile(tmp_path / "store", writer.finish())
    assert store.tokens.dtype == dtype
    assert store.tokens.tolist() == [0, vocab_size - 1]
    assert isinstance(store.tokens.base, np.memmap) or isinstance(store.tokens, np.memmap), "read through a memory map"


def test_a_mask_that_masks_nothing_is_not_kept(tmp_path: Path) -> None:
    writer = TokenWriter(tmp_path / "store", 100, masked=True)
    writer.append(np.arange(5), np.ones(5, bool), closes=True)
    meta = writer.finish()
    assert "trained" not in meta["columns"]
    assert not (tmp_path / "store" / "trained.npy").exists()
    assert TokenFile(tmp_path / "store", meta).trained is None


def test_the_hash_sees_tokens_borders_and_mask(tmp_path: Path) -> None:
    def content_hash(name: str, ids: list[int], cut: int, mask: list[bool]) -> str:
        writer = TokenWriter(tmp_path / name, 100, masked=True)
        writer.append(np.asarray(ids[:cut]), np.asarray(mask[:cut]), closes=True)
        writer.append(np.asarray(ids[cut:]), np.asarray(mask[cut:]), closes=True)
        return str(writer.finish()["content_hash"])

    base = content_hash("base", [1, 2, 3], 1, [True, True, False])
    assert base == content_hash("same", [1, 2, 3], 1, [True, True, False])
    assert base != content_hash("ids", [1, 2, 4], 1, [True, True, False])
    assert base != content_hash("cut", [1, 2, 3], 2, [True, True, False])
    assert base != content_hash("mask", [1, 2, 3], 1, [True, False, False])


def test_damaged_files_are_noticed(tmp_path: Path) -> None:
    writer = TokenWriter(tmp_path / "store", 100, masked=False)
    writer.append(np.arange(50), None, closes=True)
    meta = writer.finish()
    path = tmp_path / "store" / "tokens.npy"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ValueError, match=r"mmap|size|shape|buffer|length"):
        TokenFile(tmp_path / "store", meta)
    np.save(path, np.arange(50, dtype=np.uint16))
    with pytest.raises(ValueError, match="instead of 51"):
        TokenFile(tmp_path / "store", {**meta, "columns": {**meta["columns"], "tokens": 51}})


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
                assert begin >= lengths[row]
                assert (marks == IGNORE).all()
                continue
            assert marks[0] == IGNORE, "the token before the first one of a document is another document's"
            found.append((its, [int(label) for label in marks if label != IGNORE]))
            assert [i for i, label in zip(its, marks, strict=True) if label != IGNORE] == found[-1][1]
    assert sorted(found) == expected
    assert rows.num_targets == sum(len(trained) for _, trained in expected)
    assert rows.num_rows == 0 or lengths.min() > 0
    for own, end in zip(positions, lengths, strict=True):
        assert own.max() == own[:end].max(), "some models choose frequencies by the largest position"


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


@pytest.mark.parametrize(
    ("sizes", "length", "rows"),
    [([3, 6, 7, 4], 10, [0, 1, 0, 1]), ([10, 1, 9, 10], 10, [0, 1, 1, 2]), ([], 5, []), ([5], 5, [0])],
)
def test_what_fits_goes_where_it_leaves_least(sizes: list[int], length: int, rows: list[int]) -> None:
    assert best_fit(np.asarray(sizes, np.int64), length).tolist() == rows
