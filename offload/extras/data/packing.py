"""Rows with a fixed length, computed on read from stored documents, without a copy. There are three layouts.

Packed: the documents form one stream, each ended by an EOS, and row r is tokens [r * L, (r + 1) * L). If L does not
divide the stream, the last row starts earlier to be full; tokens already trained in the previous row are context only
(labels -100). Only a stream shorter than one row is padded. Labels are unshifted, so the first token in a row has no
context and is lost as a target; nothing else is lost. Rows attend across document borders.

Unpacked: a row is one document, cut off at L tokens or padded to L. A text to embed still ends with the special tokens
of the tokenizer. Documents with pictures are skipped if longer, because picture tokens must not be cut.

Isolated: several whole documents in a row do not attend to each other, packed by best fit. Each document lies in one
row with positions from 0. The rest is padding: documents no longer than the longest one in the row, because some models
choose frequencies by the largest position. From restarting positions, transformers builds a mask that separates
documents (`find_packed_sequence_indices`). A document longer than a row is cut into
pieces, each treated as a document. From a long document with a prompt, only the first piece is kept, because later
pieces would lack the prompt.

A row without targets would make a loss of 0/0 and is skipped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from offload.extras.data.order import rows_at
from offload.extras.data.pictures import PictureDocument
from offload.extras.data.token_file import TokenFile

Layout = bool | Literal["isolated"]
"""Row layout: packed stream (True), one document per row (False), or packed documents isolated from each other."""
IGNORE = -100  # ignored label in torch and transformers losses
_GROUP_TOKENS = 1 << 22


def total_bytes(parts: Iterable[int | None]) -> int | None:
    """Return the sum. None if any part is None (not known)."""
    known = list(parts)
    if None in known:
        return None
    return sum(each or 0 for each in known)


@dataclass(frozen=True)
class Rows:
    """Rows [sequence_length] over a token file, in one layout.

    Row indices and counts are int64 [n]. `kept` int64 [num_rows]: remaining layout rows. None: all.
    """

    token_file: TokenFile
    sequence_length: int
    packing: Layout
    pad_id: int
    num_before: int = 1
    """Tokens of a row before the first one that can be a target: 1 if each token is predicted from those before."""
    group: int = 1
    """Neighbouring rows that stay side by side. A group remains only if each row has a target (unpacked only)."""
    num_rows: int = 0
    num_targets: int = 0
    """Trained tokens with `num_before` tokens before them, over all rows of the layout."""
    num_without_target: int = 0
    """Skipped rows or documents without a trained token."""
    num_too_long: int = 0
    """Skipped documents with pictures, longer than a row."""
    kept: np.ndarray | None = None
    pieces: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    """Isolated rows: start and end of each piece in the file, int64 [pieces], and the first piece of each row, int64
    [rows + 1]. Pieces in one row are adjacent.
    """
    first: int = 0
    """For a part: first row in the whole layout."""

    @classmethod
    def over(
        cls,
        token_file: TokenFile,
        sequence_length: int,
        layout: Layout,
        pad_id: int,
        num_before: int = 1,
        group: int = 1,
    ) -> Rows:
        """Lay out all rows of a token file and count the targets."""
        rows = cls(token_file, sequence_length, layout, pad_id, num_before, group)
        num_rows = token_file.num_documents
        # A stream knows no documents. The last row may be short.
        if layout is True:
            num_rows = -(-token_file.num_tokens // sequence_length)
        kept = []
        num_targets = num_too_long = 0
        begin = 0
        # In blocks: counts for all rows of a mapped file at once could take more memory than the tokens.
        while begin < num_rows:
            end = rows._group_end(begin, num_rows)
            targets = rows._count_targets(np.arange(begin, end))
            # A pair with one empty answer has nothing to compare.
            targets *= (targets > 0).reshape(-1, group).all(1).repeat(group)
            if token_file.has_pictures:
                is_too_long = np.diff(token_file.documents[begin : end + 1]) > sequence_length
                num_too_long += int(is_too_long.sum())
                targets[is_too_long] = 0
            kept.append(begin + np.flatnonzero(targets))
            num_targets += int(targets.sum())
            begin = end
        num_kept = sum(map(len, kept))
        indices = None
        # The usual case needs no array of the size of the data.
        if num_kept != num_rows:
            indices = np.concatenate(kept)
        rows = replace(
            rows,
            num_rows=num_kept,
            num_targets=num_targets,
            num_without_target=num_rows - num_kept - num_too_long,
            kept=indices,
            num_too_long=num_too_long,
        )
        if layout == "isolated":
            return rows._isolated()
        return rows

    def _isolated(self) -> Rows:
        """Return rows with several pieces each, from rows with one document each."""
        documents = self.token_file.documents
        length = self.sequence_length
        num_targets = self.num_targets
        if self.token_file.trained is None:
            starts, ends = _pieces(documents, length)
            has_context = ends - starts > 1  # a single token has no context
            starts, ends = starts[has_context], ends[has_context]
            num_targets = int((ends - starts - 1).sum())
        else:
            kept = self._in_layout(np.arange(self.num_rows))
            starts = documents[kept]
            ends = np.minimum(documents[kept + 1], starts + length)
        rows = best_fit(ends - starts, length)
        # Pieces of a row side by side, in the order of the documents, so `borders` alone finds them.
        order = np.argsort(rows, kind="stable")
        borders = np.concatenate([[0], np.cumsum(np.bincount(rows))])
        pieces = starts[order], ends[order], borders
        return replace(self, num_rows=len(borders) - 1, num_targets=num_targets, kept=None, pieces=pieces)

    @property
    def num_distinct(self) -> int:
        """Distinct rows, regardless of repetition within an epoch."""
        return self.num_rows

    @property
    def longest(self) -> int:
        """Tokens in the longest sequence with positions of its own: a document, or a row of a stream."""
        longest = self.token_file.num_tokens
        # In a stream, documents see each other, so a row has one sequence.
        if self.packing is not True:
            longest = int(np.max(np.diff(self.token_file.documents), initial=0))
        return min(longest, self.sequence_length)

    @property
    def quotas(self) -> tuple[int, ...]:
        """Rows per epoch from each part, as in a `Mixture`: all rows are one part."""
        return (self.num_rows,)

    @property
    def identity(self) -> str:
        """A text equal only for the same tokens and the same row range."""
        return f"{self.token_file.content_hash}/{self.first}+{self.num_rows}"

    @property
    def num_truncated_tokens(self) -> int:
        """Tokens cut off beyond the row end, in the whole file. Isolated rows cut off only documents with a prompt."""
        cuts = not self.packing or (self.packing == "isolated" and self.token_file.trained is not None)
        if not cuts or not self.num_rows or self.token_file.has_pictures:
            return 0
        lengths = np.diff(self.token_file.documents)
        return int(np.maximum(lengths - self.sequence_length, 0).sum())

    def part(self, begin: int, end: int) -> Rows:
        """Return rows [begin, end) as a separate set. The target counts still describe the whole."""
        return replace(self, first=self.first + begin, num_rows=end - begin)

    def at(self, start: int, count: int, seed: int) -> np.ndarray:
        """Return the row indices at positions [start, start + count) in the endless sequence."""
        return rows_at(np.arange(start, start + count), self.num_rows, seed, self.group)

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Return the number of tokens without padding per row."""
        row, _, start, end, _ = self._spans(rows)
        return np.bincount(row, end - start, len(rows)).astype(np.int64)

    def read(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return input ids and labels, both int64 [n, sequence_length]."""
        ids = np.full((len(rows), self.sequence_length), self.pad_id, np.int64)
        labels = np.full_like(ids, IGNORE)
        token_file = self.token_file
        for row, at, start, end, fresh in zip(*self._spans(rows), strict=True):
            place = row, slice(at, at + end - start)
            ids[place] = token_file.tokens[start:end]
            # Tokens before `fresh` were targets of the row before, and are context here.
            labels[place][fresh - start :] = token_file.tokens[fresh:end]
            if token_file.trained is not None:
                labels[place][~token_file.trained[start:end]] = IGNORE
        if token_file.num_last:
            self._end_cut_rows(rows, ids, labels)
        return ids, labels

    def _end_cut_rows(self, rows: np.ndarray, ids: np.ndarray, labels: np.ndarray) -> None:
        """Put the last tokens of documents that are cut at the ends of their rows."""
        documents, num_last = self._in_layout(self.first + rows), self.token_file.num_last
        begins, ends = self.token_file.documents[documents], self.token_file.documents[documents + 1]
        for row in np.flatnonzero(ends - begins > self.sequence_length):
            last = self.token_file.tokens[ends[row] - num_last : ends[row]]
            ids[row, -num_last:] = last
            labels[row, -num_last:] = last

    def num_bytes(self, rows: np.ndarray) -> int | None:
        """Return the number of UTF-8 bytes of text that the target tokens in these rows stand for; None if unknown."""
        spans = zip(*self._spans(rows), strict=True)
        return total_bytes(
            self.token_file.trained_bytes(max(start + 1, fresh), end) for _, _, start, end, fresh in spans
        )

    def positions(self, rows: np.ndarray) -> np.ndarray | None:
        """Return token positions within the document or the padding, int64 [n, sequence_length].

        None: each row is one sequence.
        """
        if self.pieces is None:
            return None
        spans, longest = self._spans(rows), np.ones(len(rows), np.int64)
        # Unbuffered, because a row comes once for each of its pieces.
        np.maximum.at(longest, spans[0], spans[3] - spans[2])
        # First padding for the whole row. The documents then overwrite their part.
        positions = (np.arange(self.sequence_length) - self.lengths(rows)[:, None]) % longest[:, None]
        for row, at, start, end, _ in zip(*spans, strict=True):
            positions[row, at : at + end - start] = np.arange(end - start)
        return positions

    def picture_documents(self, rows: np.ndarray) -> list[PictureDocument] | None:
        """Return the rendered text and pictures of each row. None: no pictures."""
        if not self.token_file.has_pictures:
            return None
        # Rows with pictures are documents, so a row of the layout is the number of its document.
        return [self.token_file.picture_document(int(row)) for row in self._in_layout(self.first + rows)]

    def owners(self, rows: np.ndarray) -> np.ndarray:
        """Return the part index of each row, int64 [n], as in a `Mixture`: all rows are one part."""
        return np.zeros(len(rows), np.int64)

    def document_starts(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return the document starts (or continuations) within each row, int64 [documents]; the first is 0."""
        starts: list[list[np.ndarray]] = [[] for _ in rows]
        for row, at, start, end, _ in zip(*self._spans(rows), strict=True):
            # A piece of an isolated row is within one document; a packed row may hold many borders.
            first, last = np.searchsorted(self.token_file.documents, [start + 1, end])
            starts[row].append(np.concatenate([[at], at - start + np.unique(self.token_file.documents[first:last])]))
        return [np.concatenate(each) for each in starts]

    def _spans(self, rows: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the token ranges of rows in order, five arrays int64 [ranges].

        The index in `rows`, the place within the row, start and end in the file, and the first possible target.
        """
        rows = self.first + rows
        if self.pieces is None:
            start, end, fresh = self._layout_spans(self._in_layout(rows))
            return np.arange(len(rows)), np.zeros_like(start), start, end, fresh
        starts, ends, borders = self.pieces
        counts = borders[rows + 1] - borders[rows]
        row, piece = _ranges(borders[rows], counts)
        start, end = starts[piece], ends[piece]
        # Places count within all rows together first, then from the first piece of each row.
        at = np.cumsum(end - start) - (end - start)
        at -= np.repeat(at[np.cumsum(counts) - counts], counts)
        return row, at, start, end, start + 1  # the first token of a document has no context

    def _in_layout(self, rows: np.ndarray) -> np.ndarray:
        """Return the layout row for each of the remaining rows, int64 [n]."""
        if self.kept is None:
            return rows
        return self.kept[rows]

    def _layout_spans(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (row start, row end, first trained token) in the file, int64 [n] each."""
        length, num_tokens = self.sequence_length, self.token_file.num_tokens
        if self.packing is True:
            fresh = rows * length
            # The last row begins earlier to be full.
            start = np.minimum(fresh, max(num_tokens - length, 0))
            return start, np.minimum(start + length, num_tokens), fresh
        start, end = self.token_file.documents[rows], self.token_file.documents[rows + 1]
        return start, np.minimum(end, start + length), start

    def _count_targets(self, rows: np.ndarray) -> np.ndarray:
        """Return the trained tokens with `num_before` tokens before them, per layout row, int64 [n]."""
        start, end, fresh = self._layout_spans(rows)
        first = np.minimum(np.maximum(start + self.num_before, fresh), end)
        if self.token_file.trained is None:
            return np.asarray(end - first)
        begin = int(start.min())
        before = np.concatenate([[0], np.cumsum(self.token_file.trained[begin : int(end.max())], dtype=np.int64)])
        return np.asarray(before[end - begin] - before[first - begin])

    def _group_end(self, begin: int, num_rows: int) -> int:
        """Return the end of a row block from `begin` with about _GROUP_TOKENS tokens."""
        if self.packing is True:
            return min(begin + max(_GROUP_TOKENS // self.sequence_length, 1), num_rows)
        documents = self.token_file.documents
        end = int(np.searchsorted(documents, documents[begin] + _GROUP_TOKENS, "right")) - 1
        # A block ends between groups, and has at least one, however long its documents are.
        return max(end - (end - begin) % self.group, begin + self.group)


def _ranges(begins: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `counts[i]` consecutive numbers from `begins[i]` for each i: (i, number), int64 [total] each."""
    owners = np.repeat(np.arange(len(counts)), counts)
    return owners, np.arange(len(owners)) + np.repeat(begins - np.cumsum(counts) + counts, counts)


def _pieces(documents: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the starts and ends of pieces with at most `length` tokens, int64 [pieces] each."""
    counts = -(-np.diff(documents) // length)
    owner, number = _ranges(np.zeros_like(counts), counts)
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
        # The lowest set bit from `length` on: the least sufficient room, without a search.
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
    # Numbered by first pieces: rows follow the order of the documents.
    first = np.full(num_rows, len(lengths))
    np.minimum.at(first, rows, np.arange(len(lengths)))
    rank = np.empty(num_rows, np.int64)
    rank[np.argsort(first)] = np.arange(num_rows)
    return rank[rows]
