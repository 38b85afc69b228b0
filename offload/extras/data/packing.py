"""Rows with a fixed length, computed on read from stored documents, without a copy. There are three layouts.

Packed: the documents form one stream, each ended by an EOS, and row r is tokens [r * L, (r + 1) * L). If L does not
divide the stream, the last row starts earlier to be full; tokens already trained in the previous row are context only
(labels -100). Only a stream shorter than one row is padded. Labels are unshifted, so the first token in a row has no
context and is lost as a target; nothing else is lost. Rows attend across document borders.

Unpacked: a row is one document, cut off at L tokens or padded to L. Documents with pictures are skipped if longer,
because picture tokens must not be cut.

Isolated: several whole documents in a row do not attend to each other, packed by best fit. Each document lies in one
row with positions from 0. The rest is padding, with positions from 0 again. From restarting positions, transformers
builds a mask that separates documents (`find_packed_sequence_indices`). A document longer than a row is cut into
pieces, each treated as a document. From a long document with a prompt, only the first piece is kept, because later
pieces would lack the prompt.

A row without targets would make a loss of 0/0 and is skipped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from offload.extras.data.order import rows_at
from offload.extras.data.pictures import PictureDocument
from offload.extras.data.store import TokenStore

Layout = bool | Literal["isolated"]
"""Row layout: packed stream (True), one document per row (False), or packed documents isolated from each other."""
IGNORE = -100  # ignored label in torch and transformers losses
_GROUP_TOKENS = 1 << 22


def total_bytes(parts: Iterable[int | None]) -> int | None:
    """Return the sum. None if any part is None (not known)."""
    known = list(parts)
    return None if None in known else sum(each or 0 for each in known)


@dataclass(frozen=True)
class Rows:
    """`mixture.RowSet` over a store, with rows [sequence_length].

    `kept` int64 [num_rows]: remaining layout rows. None: all.
    """

    store: TokenStore
    sequence_length: int
    packing: bool
    pad_id: int
    num_rows: int
    num_targets: int
    num_without_target: int
    kept: np.ndarray | None
    first: int = 0
    group: int = 1
    """Neighbouring rows that stay side by side. A group remains only if each row has a target (unpacked only)."""
    num_too_long: int = 0
    """Skipped documents with pictures, longer than a row."""

    @classmethod
    def over(cls, store: TokenStore, sequence_length: int, packing: bool, pad_id: int, group: int = 1) -> Rows:
        """Lay out all rows in `store` and count the targets."""
        layout = cls(store, sequence_length, packing, pad_id, 0, 0, 0, None, group=group)
        num_rows = -(-store.num_tokens // sequence_length) if packing else store.num_documents
        kept, num_targets, num_too_long, begin = [], 0, 0, 0
        while begin < num_rows:
            end = layout._group_end(begin, num_rows)
            targets = layout._count_targets(np.arange(begin, end))
            targets *= (targets > 0).reshape(-1, group).all(1).repeat(group)
            if store.picture_store is not None:
                is_too_long = np.diff(store.documents[begin : end + 1]) > sequence_length
                num_too_long += int(is_too_long.sum())
                targets[is_too_long] = 0
            kept.append(begin + np.flatnonzero(targets))
            num_targets += int(targets.sum())
            begin = end
        num_kept = sum(map(len, kept))
        indices = None if num_kept == num_rows else np.concatenate(kept)
        return replace(
            layout,
            num_rows=num_kept,
            num_targets=num_targets,
            num_without_target=num_rows - num_kept - num_too_long,
            kept=indices,
            num_too_long=num_too_long,
        )

    @property
    def num_distinct(self) -> int:
        return self.num_rows

    def part(self, begin: int, end: int) -> Rows:
        """Return rows [begin, end) as a separate set. The target counts still describe the whole."""
        return replace(self, first=self.first + begin, num_rows=end - begin)

    @property
    def identity(self) -> str:
        """A text equal only for the same tokens and the same row range."""
        return f"{self.store.content_hash}/{self.first}+{self.num_rows}"

    def at(self, start: int, count: int, seed: int) -> np.ndarray:
        return rows_at(np.arange(start, start + count), self.num_rows, seed, self.group)

    @property
    def num_truncated_tokens(self) -> int:
        """Tokens cut off beyond the row end, in the whole store (unpacked only)."""
        if self.packing or not self.num_rows or self.store.picture_store is not None:
            return 0
        lengths = np.diff(self.store.documents)
        return int(np.maximum(lengths - self.sequence_length, 0).sum())

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        start, end, _ = self._spans(rows)
        return np.asarray(end - start)

    def read(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids = np.full((len(rows), self.sequence_length), self.pad_id, np.int64)
        labels = np.full_like(ids, IGNORE)
        store = self.store
        for i, (start, end, fresh) in enumerate(zip(*self._spans(rows), strict=True)):
            ids[i, : end - start] = store.tokens[start:end]
            labels[i, fresh - start : end - start] = store.tokens[fresh:end]
            if store.trained is not None:
                labels[i, : end - start][~store.trained[start:end]] = IGNORE
        return ids, labels

    def num_bytes(self, rows: np.ndarray) -> int | None:
        spans = zip(*self._spans(rows), strict=True)
        return total_bytes(self.store.trained_bytes(max(start + 1, fresh), end) for start, end, fresh in spans)

    def positions(self, rows: np.ndarray) -> None:
        """Return None: each row is one sequence."""

    def picture_documents(self, rows: np.ndarray) -> list[PictureDocument] | None:
        if self.store.picture_store is None:
            return None
        rows = self.first + rows
        return [self.store.picture_store.at(int(row)) for row in (rows if self.kept is None else self.kept[rows])]

    def document_starts(self, rows: np.ndarray) -> list[np.ndarray]:
        starts = []
        for start, end, _ in zip(*self._spans(rows), strict=True):
            first, last = np.searchsorted(self.store.documents, [start + 1, end])
            starts.append(np.concatenate([[0], np.unique(self.store.documents[first:last]) - start]))
        return starts

    def _spans(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows = self.first + rows
        return self._layout_spans(rows if self.kept is None else self.kept[rows])

    def _layout_spans(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (row start, row end, first trained token) in the store, int64 [n] each."""
        length, num_tokens = self.sequence_length, self.store.num_tokens
        if self.packing:
            fresh = rows * length
            start = np.minimum(fresh, max(num_tokens - length, 0))
            return start, np.minimum(start + length, num_tokens), fresh
        start, end = self.store.documents[rows], self.store.documents[rows + 1]
        return start, np.minimum(end, start + length), start

    def _count_targets(self, rows: np.ndarray) -> np.ndarray:
        """Return the trained tokens with a token before them, per layout row, int64 [n]."""
        start, end, fresh = self._layout_spans(rows)
        first = np.minimum(np.maximum(start + 1, fresh), end)
        if self.store.trained is None:
            return np.asarray(end - first)
        begin = int(start.min())
        before = np.concatenate([[0], np.cumsum(self.store.trained[begin : int(end.max())], dtype=np.int64)])
        return np.asarray(before[end - begin] - before[first - begin])

    def _group_end(self, begin: int, num_rows: int) -> int:
        """Return the end of a row block from `begin` with about _GROUP_TOKENS tokens."""
        if self.packing:
            return min(begin + max(_GROUP_TOKENS // self.sequence_length, 1), num_rows)
        documents = self.store.documents
        end = int(np.searchsorted(documents, documents[begin] + _GROUP_TOKENS, "right")) - 1
        return max(end - (end - begin) % self.group, begin + self.group)


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
