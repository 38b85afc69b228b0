"""Rows of whole documents that do not see each other: packed by best fit, each with positions of its own.

A document lies in one row, with positions from 0, and the rest of a row is padding, again with positions from 0. From
where positions begin anew transformers makes a mask that keeps documents apart (`find_packed_sequence_indices`). A
document that is longer than a row is cut into pieces, each of which is a document here; of one with a prompt, where a
piece would lack the prompt, the rest is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from offload.data.order import rows_at
from offload.data.packing import IGNORE, Layout, Rows, total_bytes
from offload.data.store import TokenStore


@dataclass(frozen=True)
class IsolatedRows:
    """Rows [sequence_length] over a store, of pieces that lie side by side."""

    store: TokenStore
    """The tokens."""
    sequence_length: int
    """Tokens of a row, padding included."""
    pad_id: int
    """The token that stands where there is none."""
    starts: np.ndarray
    """Where in the store each piece begins, int64 [pieces]; those of a row are neighbours."""
    ends: np.ndarray
    """Where each piece ends, int64 [pieces]."""
    borders: np.ndarray
    """The first piece of each row, int64 [num_rows + 1]; the last entry is the number of pieces."""
    num_targets: int
    """Tokens of all rows that are trained and have a token before them."""
    num_without_target: int
    """Documents that were left out, since none of their tokens is trained."""
    num_truncated_tokens: int
    """Tokens of documents with a prompt that lie beyond the end of a row."""
    num_too_long: ClassVar[int] = 0
    """Documents with pictures that were left out: there are none here."""
    packing: ClassVar[Layout] = "isolated"
    """The name of the layout, as a checkpoint keeps it."""
    group: ClassVar[int] = 1
    """Neighbouring rows that stay side by side."""
    first: int = 0
    """Of a part, which row of the whole is its first."""

    @classmethod
    def over(cls, store: TokenStore, sequence_length: int, pad_id: int) -> IsolatedRows:
        """Lay out all documents of `store`, counting their targets."""
        whole = Rows.over(store, sequence_length, False, pad_id)
        if store.trained is None:
            starts, ends = _pieces(store.documents, sequence_length)
            some = ends - starts > 1  # a single token has none before it
            starts, ends = starts[some], ends[some]
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
        """Rows of an epoch."""
        return len(self.borders) - 1

    @property
    def num_different(self) -> int:
        """Rows that there are."""
        return self.num_rows

    def part(self, begin: int, end: int) -> IsolatedRows:
        """Return rows [begin, end) as rows of their own; the counts of targets stay those of the whole."""
        return replace(self, borders=self.borders[begin : end + 1], first=self.first + begin)

    @property
    def identity(self) -> str:
        """A text that is the same for the same tokens and the same part of them alone."""
        return f"{self.store.content_hash}/{self.first}+{self.num_rows}"

    def at(self, start: int, count: int, seed: int) -> np.ndarray:
        """Return which rows stand at positions [start, start + count) of the endless sequence, int64 [count]."""
        return rows_at(np.arange(start, start + count), self.num_rows, seed)

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Return how many tokens of each row are real, int64 [n]; the rest is padding."""
        spans = [slice(self.borders[row], self.borders[row + 1]) for row in rows]
        return np.asarray([(self.ends[span] - self.starts[span]).sum() for span in spans], np.int64)

    def read(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return input ids and labels, both int64 [n, sequence_length], of the rows with these indices [n]. The first
        token of a document is no target.
        """
        ids = np.full((len(rows), self.sequence_length), self.pad_id, np.int64)
        labels = np.full_like(ids, IGNORE)
        for place, begin, end in self._placed(rows):
            ids[place] = labels[place] = self.store.tokens[begin:end]
            if self.store.trained is not None:
                labels[place][~self.store.trained[begin:end]] = IGNORE
            labels[place][:1] = IGNORE
        return ids, labels

    def num_bytes(self, rows: np.ndarray) -> int | None:
        """Return how many bytes of text the targets of these rows are of; None where that is not known."""
        return total_bytes(self.store.trained_bytes(begin + 1, end) for _, begin, end in self._placed(rows))

    def positions(self, rows: np.ndarray) -> np.ndarray:
        """Return the position of each token in its document, or in the padding, int64 [n, sequence_length]."""
        length = self.sequence_length
        found = np.arange(length) - self.lengths(rows)[:, None]
        for place, begin, end in self._placed(rows):
            found[place] = np.arange(end - begin)
        return found

    def pictured(self, rows: np.ndarray) -> None:
        """No row has pictures."""

    def document_starts(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return for each of these rows where in it a document begins, int64 [documents]: first is 0."""
        return [
            np.flatnonzero(positions[:length] == 0)
            for positions, length in zip(self.positions(rows), self.lengths(rows), strict=True)
        ]

    def _placed(self, rows: np.ndarray) -> list[tuple[tuple[int, slice], int, int]]:
        """Return where in the array of these rows each piece lies, and where it lies in the store."""
        found = []
        for number, row in enumerate(rows):
            at = 0
            for piece in range(self.borders[row], self.borders[row + 1]):
                begin, end = int(self.starts[piece]), int(self.ends[piece])
                found.append(((number, slice(at, at + end - begin)), begin, end))
                at += end - begin
        return found


Laid = Rows | IsolatedRows


def lay_out(store: TokenStore, sequence_length: int, layout: Layout, pad_id: int, group: int) -> Laid:
    """Return all rows of `store`, cut in one of the ways; `group` as of `Rows`."""
    if layout == "isolated":
        return IsolatedRows.over(store, sequence_length, pad_id)
    return Rows.over(store, sequence_length, layout, pad_id, group)


def _pieces(documents: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where pieces of at most `length` tokens begin and end, int64 [pieces] each."""
    sizes = np.diff(documents)
    counts = -(-sizes // length)
    owner = np.repeat(np.arange(len(sizes)), counts)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = documents[owner] + number * length
    return starts, np.minimum(starts + length, documents[owner + 1])


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Return the row of each piece, int64 [n], such that no row has more than `capacity` tokens: the longest piece
    first, always to the row that has the least room left for it (best-fit decreasing; Johnson et al. 1974,
    "Worst-case performance bounds for simple one-dimensional packing algorithms"). Rows are numbered by their first
    piece.
    """
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # by the tokens of room that rows have
    rooms = 1 << capacity  # bit r is set where a row has room for r tokens; a new one for all
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
