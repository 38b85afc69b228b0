"""Rows of several sources as one sequence: by weight, each epoch drawn anew, and still a function of the position.

An epoch of a mixture has a fixed number of rows of each part, its quota, in one shuffled order. A part whose quota is
not its number of rows has an order of its own, too: a large part shows other rows from epoch to epoch for as long as
there are enough others, and never one twice in an epoch; a small one comes around in each epoch as often as its quota
says, each row as often as the others but for one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from offload.data.order import rows_at
from offload.data.packing import Layout, total_bytes
from offload.data.pictures import Pictured

StoppingStrategy = Literal["all_exhausted", "first_exhausted"]


class RowSet(Protocol):
    """What a dataset reads rows from: `Rows` of one source, or a `Mixture`."""

    @property
    def num_rows(self) -> int:
        """Rows of an epoch."""

    @property
    def sequence_length(self) -> int:
        """Tokens of a row."""

    @property
    def packing(self) -> Layout:
        """How the rows are cut."""

    @property
    def group(self) -> int:
        """Neighbouring rows that stay side by side."""

    @property
    def num_different(self) -> int:
        """Rows that there are, however often an epoch has each."""

    @property
    def identity(self) -> str:
        """A text that is the same for the same rows alone."""

    def at(self, start: int, count: int, seed: int) -> np.ndarray:
        """Return which rows stand at positions [start, start + count) of the endless sequence, int64 [count]."""

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Return how many tokens of each row are real, int64 [n]; the rest is padding."""

    def read(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return input ids and labels, both int64 [n, sequence_length], of the rows with these indices [n]."""

    def num_bytes(self, rows: np.ndarray) -> int | None:
        """Return how many bytes of text the targets of these rows are of; None where that is not known."""

    def positions(self, rows: np.ndarray) -> np.ndarray | None:
        """Return the position of each token in its document, int64 [n, sequence_length]; None where a row is one."""

    def pictured(self, rows: np.ndarray) -> list[Pictured] | None:
        """Return what each of these rows was made of; None where no row has pictures."""

    def document_starts(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return for each of these rows where in it a document begins or goes on, int64 [documents]: first is 0."""


@dataclass(frozen=True)
class Mixture:
    """Rows of several parts. Row r of part i has the index (rows of the parts before it) + r."""

    parts: tuple[RowSet, ...]
    quotas: tuple[int, ...]
    """How many rows of each part an epoch has."""

    @classmethod
    def of(cls, parts: Sequence[RowSet], quotas: Sequence[int] | None = None) -> RowSet:
        """Return the parts as one; `quotas` None takes each row of each part once. One part stays what it is."""
        if len(parts) == 1:
            return parts[0]
        return cls(tuple(parts), tuple(part.num_rows for part in parts) if quotas is None else tuple(quotas))

    @property
    def num_rows(self) -> int:
        return sum(self.quotas)

    @property
    def sequence_length(self) -> int:
        return self.parts[0].sequence_length

    @property
    def packing(self) -> Layout:
        return self.parts[0].packing

    @property
    def group(self) -> int:
        return self.parts[0].group

    @property
    def num_different(self) -> int:
        return sum(part.num_different for part in self.parts)

    @property
    def identity(self) -> str:
        return " ".join(f"{part.identity}*{quota}" for part, quota in zip(self.parts, self.quotas, strict=True))

    def at(self, start: int, count: int, seed: int) -> np.ndarray:
        positions = np.arange(start, start + count)
        slots, epochs = rows_at(positions, self.num_rows, seed, self.group), positions // self.num_rows
        ends = np.cumsum(self.quotas)
        rows, first = np.empty(count, np.int64), 0
        for index, (part, quota, end) in enumerate(zip(self.parts, self.quotas, ends, strict=True)):
            here = (slots >= end - quota) & (slots < end)
            own = slots[here] - (end - quota)
            if quota != part.num_rows:  # else the order of the epoch has each of its rows once
                begin = _begin(epochs[here], quota, part.num_rows)
                own = rows_at(begin + own, part.num_rows, seed + (index + 1 << 32), self.group)
            rows[here] = first + own
            first += part.num_rows
        return rows

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        lengths = np.empty(len(rows), np.int64)
        for part, here, own in self._by_part(rows):
            lengths[here] = part.lengths(own)
        return lengths

    def read(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids = np.empty((len(rows), self.sequence_length), np.int64)
        labels = np.empty_like(ids)
        for part, here, own in self._by_part(rows):
            ids[here], labels[here] = part.read(own)
        return ids, labels

    def num_bytes(self, rows: np.ndarray) -> int | None:
        return total_bytes(part.num_bytes(own) for part, _, own in self._by_part(rows))

    def positions(self, rows: np.ndarray) -> np.ndarray | None:
        positions = np.empty((len(rows), self.sequence_length), np.int64)
        for part, here, own in self._by_part(rows):
            if (found := part.positions(own)) is None:  # all parts are cut alike
                return None
            positions[here] = found
        return positions

    def pictured(self, rows: np.ndarray) -> list[Pictured] | None:
        found = dict[int, Pictured]()
        for part, here, own in self._by_part(rows):
            if (pictured := part.pictured(own)) is None:  # all parts are prepared alike
                return None
            found |= zip(np.flatnonzero(here).tolist(), pictured, strict=True)
        return [found[index] for index in range(len(rows))]

    def document_starts(self, rows: np.ndarray) -> list[np.ndarray]:
        found = dict[int, np.ndarray]()
        for part, here, own in self._by_part(rows):
            found |= zip(np.flatnonzero(here).tolist(), part.document_starts(own), strict=True)
        return [found[index] for index in range(len(rows))]

    def owners(self, rows: np.ndarray) -> np.ndarray:
        """Return of which part each of these rows is, int64 [n]."""
        return np.searchsorted(np.cumsum([part.num_rows for part in self.parts]), rows, "right")

    def _by_part(self, rows: np.ndarray) -> list[tuple[RowSet, np.ndarray, np.ndarray]]:
        """Return for each part that has some of these rows: which of them, bool [n], and their indices in it."""
        ends = np.cumsum([part.num_rows for part in self.parts])
        owners = self.owners(rows)
        here = [owners == index for index in range(len(self.parts))]
        return [
            (part, mask, rows[mask] - (end - part.num_rows))
            for part, mask, end in zip(self.parts, here, ends, strict=True)
            if mask.any()
        ]


def _begin(epochs: np.ndarray, quota: int, num_rows: int) -> np.ndarray:
    """Return at which position of a part's own endless sequence each of `epochs` [n] begins to read it: such that an
    epoch takes whole passes over the part first, or is one of those that share a pass.
    """
    if quota > num_rows:
        return epochs * (-(-quota // num_rows) * num_rows)
    sharing = num_rows // quota
    return epochs // sharing * num_rows + epochs % sharing * quota


def quotas(num_rows: Sequence[int], weights: Sequence[float | None], strategy: StoppingStrategy) -> list[int]:
    """Return how many rows of each source an epoch has: in the proportion of the weights (all or none is None), such
    that every source is used up, or that none comes twice; without weights each row once.
    """
    given = [weight for weight in weights if weight is not None]
    if not given:
        return list(num_rows)
    shares = [weight / sum(given) for weight in given]
    lengths = [rows / share for rows, share in zip(num_rows, shares, strict=True)]
    slack = 1e-9  # of products that are whole numbers but for their rounding
    if strategy == "all_exhausted":
        return [max(1, math.ceil(max(lengths) * share - slack)) for share in shares]
    return [max(1, math.floor(min(lengths) * share + slack)) for share in shares]
