"""Rows with several whole documents that do not attend to each other, packed by best fit.

Each document lies in one row with positions from 0. The rest is padding, with positions from 0 again. From restarting
positions, transformers builds a mask that separates documents (`find_packed_sequence_indices`). A document longer than
a row is cut into pieces, each treated as a document. From a long document with a prompt, only the first piece is kept,
because later pieces would lack the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from offload.extras.data.order import rows_at
from offload.extras.data.packing import IGNORE, Layout, Rows, total_bytes
from offload.extras.data.store import TokenStore


@dataclass(frozen=True)
class IsolatedRows:
    """`mixture.RowSet` over a store, with rows [sequence_length] from several pieces side by side."""

    store: TokenStore
    """Token store."""
    sequence_length: int
    """Tokens per row, padding included."""
    pad_id: int
    """Padding token id."""
    starts: np.ndarray
    """Start of each piece in the store, int64 [pieces]. Pieces in one row are adjacent."""
    ends: np.ndarray
    """End of each piece in the store, int64 [pieces]."""
    borders: np.ndarray
    """First piece of each row, int64 [num_rows + 1]. The last entry is the number of pieces."""
    num_targets: int
    """Trained tokens with a token before them, over all rows."""
    num_without_target: int
    """Skipped documents without a trained token."""
    num_truncated_tokens: int
    """Tokens cut off from long documents with a prompt."""
    num_too_long: ClassVar[int] = 0
    """Skipped long documents with pictures. Always 0: isolated rows have no pictures."""
    packing: ClassVar[Layout] = "isolated"
    """Layout name, as stored in checkpoints."""
    group: ClassVar[int] = 1
    first: int = 0
    """For a part: first row in the whole layout."""

    @classmethod
    def over(cls, store: TokenStore, sequence_length: int, pad_id: int) -> IsolatedRows:
        """Lay out all documents in `store` and count the targets."""
        whole = Rows.over(store, sequence_length, False, pad_id)
        if store.trained is None:
            starts, ends = _pieces(store.documents, sequence_length)
            has_context = ends - starts > 1  # a single token has no context
            starts, ends = starts[has_context], ends[has_context]
            num_targets = int((ends - starts - 1).sum())
        else:
            kept = np.arange(whole.num_rows) if whole.kept is None else whole.kept
            starts = store.documents[kept]
            ends = np.minimum(store.documents[kept + 1], starts + sequence_length)
            num_targets = whole.num_targets
        rows = best_fit(ends - starts, sequence_length)
        order = np.argsort(rows, kind="stable")
        counts = np.bincount(rows)
        return cls(
            store,
            sequence_length,
            pad_id,
            starts[order],
            ends[order],
            np.concatenate([[0], np.cumsum(counts)]),
            num_targets,
            whole.num_without_target,
            0 if store.trained is None else whole.num_truncated_tokens,
        )

    @property
    def num_rows(self) -> int:
        return len(self.borders) - 1

    @property
    def num_distinct(self) -> int:
        return self.num_rows

    def part(self, begin: int, end: int) -> IsolatedRows:
        """Return rows [begin, end) as a separate set. The target counts still describe the whole."""
        return replace(self, borders=self.borders[begin : end + 1], first=self.first + begin)

    @property
    def identity(self) -> str:
        """A text equal only for the same tokens and the same row range."""
        return f"{self.store.content_hash}/{self.first}+{self.num_rows}"

    def at(self, start: int, count: int, seed: int) -> np.ndarray:
        return rows_at(np.arange(start, start + count), self.num_rows, seed)

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        spans = [slice(self.borders[row], self.borders[row + 1]) for row in rows]
        return np.asarray([(self.ends[span] - self.starts[span]).sum() for span in spans], np.int64)

    def read(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return input ids and labels as `RowSet.read` does. The first token in a document is not a target."""
        ids = np.full((len(rows), self.sequence_length), self.pad_id, np.int64)
        labels = np.full_like(ids, IGNORE)
        for place, begin, end in self._piece_spans(rows):
            ids[place] = labels[place] = self.store.tokens[begin:end]
            if self.store.trained is not None:
                labels[place][~self.store.trained[begin:end]] = IGNORE
            labels[place][:1] = IGNORE
        return ids, labels

    def num_bytes(self, rows: np.ndarray) -> int | None:
        return total_bytes(self.store.trained_bytes(begin + 1, end) for _, begin, end in self._piece_spans(rows))

    def positions(self, rows: np.ndarray) -> np.ndarray:
        """Return token positions within the document or the padding, int64 [n, sequence_length]."""
        length = self.sequence_length
        positions = np.arange(length) - self.lengths(rows)[:, None]
        for place, begin, end in self._piece_spans(rows):
            positions[place] = np.arange(end - begin)
        return positions

    def picture_documents(self, rows: np.ndarray) -> None:
        """Return None: isolated rows have no pictures."""

    def document_starts(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return the document starts within each row, int64 [documents]; the first is 0."""
        return [
            np.flatnonzero(positions[:length] == 0)
            for positions, length in zip(self.positions(rows), self.lengths(rows), strict=True)
        ]

    def _piece_spans(self, rows: np.ndarray) -> list[tuple[tuple[int, slice], int, int]]:
        """Return for each piece: the index into the row array, and the token range in the store."""
        spans = []
        for number, row in enumerate(rows):
            at = 0
            for piece in range(self.borders[row], self.borders[row + 1]):
                begin, end = int(self.starts[piece]), int(self.ends[piece])
                spans.append(((number, slice(at, at + end - begin)), begin, end))
                at += end - begin
        return spans


StoreRows = Rows | IsolatedRows


def lay_out(store: TokenStore, sequence_length: int, layout: Layout, pad_id: int, group: int) -> StoreRows:
    """Return all rows of `store` in the given layout. `group`: as in `Rows`."""
    if layout == "isolated":
        return IsolatedRows.over(store, sequence_length, pad_id)
    return Rows.over(store, sequence_length, layout, pad_id, group)


def _pieces(documents: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the starts and ends of pieces with at most `length` tokens, int64 [pieces] each."""
    sizes = np.diff(documents)
    counts = -(-sizes // length)
    owner = np.repeat(np.arange(len(sizes)), counts)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = documents[owner] + number * length
    return starts, np.minimum(starts + length, documents[owner + 1])


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Return the row of each piece, int64 [n], with at most `capacity` tokens per row.

    Best-fit decreasing: the longest piece first, into the row with the least sufficient room (Johnson et al. 1974,
    "Worst-case performance bounds for simple one-dimensional packing algorithms"). Rows are numbered by their first
    piece.
    """
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # rows by free tokens
    rooms = 1 << capacity  # bit r: some row has r free tokens; the top bit is a new row
    rows = np.empty(len(lengths), np.int64)
    num_rows = 0
    for piece in np.argsort(-lengths, kind="stable"):
        length = int(lengths[piece])
        room = length + ((rooms >> length) & -(rooms >> length)).bit_length() - 1
        if with_room[room]:
            row = with_room[room].pop()
            if not with_room[room] and room < capacity:
                rooms ^= 1 << room
        else:
            row, num_rows = num_rows, num_rows + 1
        if room > length:
            with_room[room - length].append(row)
            rooms |= 1 << room - length
        rows[piece] = row
    first = np.full(num_rows, len(lengths))
    np.minimum.at(first, rows, np.arange(len(lengths)))
    rank = np.empty(num_rows, np.int64)
    rank[np.argsort(first)] = np.arange(num_rows)
    return rank[rows] if num_rows else rows
