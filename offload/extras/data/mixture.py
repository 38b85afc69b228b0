"""Rows from several sources as one sequence, by weight; the row remains a function of the position.

An epoch has a fixed number of rows from each part, the quota, in one shuffled order. If the quota differs from the row
count, the part also has a separate order. A large part then continues with unseen rows from epoch to epoch, and never
repeats a row within an epoch. A small part repeats within an epoch, and row counts differ by at most one.

The sequence is cut into batches. Batches of padded rows join rows with similar length: as for `group_by_length` in
transformers, megabatches from the shuffled epoch are sorted by length. A batch remains a function of the step number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from offload.extras.data.order import rows_at, shuffled
from offload.extras.data.packing import Layout, Rows, total_bytes
from offload.extras.data.pictures import PictureDocument

StoppingStrategy = Literal["all_exhausted", "first_exhausted"]
_MOST_BATCHES = 50  # batches in a megabatch, as for `group_by_length` in transformers
_FEWEST_GROUPS = 4
"""Minimum megabatches per epoch. Sorting a whole epoch would give the same batches in every epoch."""
_MULTIPLE = 8  # tokens: kernels prefer such widths
_PER_DOUBLING = 4  # distinct widths from one length to its double
_SEED = 1 << 48
"""Seed offset: separates the batch order from the row order."""


@dataclass(frozen=True)
class Mixture:
    """Rows from several parts, read like `Rows`. Row r in part i has the index (total rows in earlier parts) + r."""

    parts: tuple[Rows, ...]
    quotas: tuple[int, ...]
    """Rows per epoch from each part."""

    @classmethod
    def of(cls, parts: Sequence[Rows], quotas: Sequence[int]) -> RowSet:
        """Return the parts as one row set; a single part is returned unchanged."""
        # Rows of one part have an order of their own: a run with one source never depends on this class.
        if len(parts) == 1:
            return parts[0]
        return cls(tuple(parts), tuple(quotas))

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
    def num_distinct(self) -> int:
        return sum(part.num_distinct for part in self.parts)

    @property
    def longest(self) -> int:
        return max(part.longest for part in self.parts)

    @property
    def identity(self) -> str:
        return " ".join(f"{part.identity}*{quota}" for part, quota in zip(self.parts, self.quotas, strict=True))

    def at(self, start: int, count: int, seed: int) -> np.ndarray:
        positions = np.arange(start, start + count)
        slots, epochs = rows_at(positions, self.num_rows, seed, self.group), positions // self.num_rows
        # The slots of an epoch belong to the parts in order, by quota.
        ends = np.cumsum(self.quotas)
        rows, first = np.empty(count, np.int64), 0
        for index, (part, quota, end) in enumerate(zip(self.parts, self.quotas, ends, strict=True)):
            mask = (slots >= end - quota) & (slots < end)
            part_rows = slots[mask] - (end - quota)
            if quota != part.num_rows:  # otherwise the shared epoch order already has each row once
                begin = _begin(epochs[mask], quota, part.num_rows)
                # Another seed for each part: two parts of one size would otherwise have the same order.
                part_rows = rows_at(begin + part_rows, part.num_rows, seed + (index + 1 << 32), self.group)
            rows[mask] = first + part_rows
            first += part.num_rows
        return rows

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        return np.asarray(self._each(rows, lambda part, part_rows: part.lengths(part_rows)), np.int64)

    def read(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids = np.empty((len(rows), self.sequence_length), np.int64)
        labels = np.empty_like(ids)
        for part, mask, part_rows in self._by_part(rows):
            ids[mask], labels[mask] = part.read(part_rows)
        return ids, labels

    def num_bytes(self, rows: np.ndarray) -> int | None:
        return total_bytes(part.num_bytes(part_rows) for part, _, part_rows in self._by_part(rows))

    def positions(self, rows: np.ndarray) -> np.ndarray | None:
        positions = self._each(rows, lambda part, part_rows: part.positions(part_rows))
        if positions is None:
            return None
        # A batch without rows has no first row to take the width from.
        return np.asarray(positions, np.int64).reshape(-1, self.sequence_length)

    def picture_documents(self, rows: np.ndarray) -> list[PictureDocument] | None:
        return self._each(rows, lambda part, part_rows: part.picture_documents(part_rows))

    def document_starts(self, rows: np.ndarray) -> list[np.ndarray]:
        return self._each(rows, lambda part, part_rows: part.document_starts(part_rows)) or []

    def owners(self, rows: np.ndarray) -> np.ndarray:
        """Return the part index of each row, int64 [n]."""
        # Right: the first row of a part equals the end of the part before.
        return np.searchsorted(np.cumsum([part.num_rows for part in self.parts]), rows, "right")

    def _each(self, rows: np.ndarray, read: Callable[[Rows, np.ndarray], Any]) -> list[Any] | None:
        """Return `read(part, rows within the part)` in the order of `rows`. None: a part has nothing to read.

        All parts have the same layout and the same preparation, so either all of them or none has.
        """
        values = dict[int, Any]()
        for part, mask, part_rows in self._by_part(rows):
            if (part_values := read(part, part_rows)) is None:
                return None
            values |= zip(np.flatnonzero(mask).tolist(), part_values, strict=True)
        return [values[index] for index in range(len(rows))]

    def _by_part(self, rows: np.ndarray) -> list[tuple[Rows, np.ndarray, np.ndarray]]:
        """Return for each part with rows here: the part, a mask bool [n], and the row indices within the part."""
        ends = np.cumsum([part.num_rows for part in self.parts])
        owners = self.owners(rows)
        masks = [owners == index for index in range(len(self.parts))]
        return [
            (part, mask, rows[mask] - (end - part.num_rows))
            for part, mask, end in zip(self.parts, masks, ends, strict=True)
            if mask.any()
        ]


RowSet = Rows | Mixture


def _begin(epochs: np.ndarray, quota: int, num_rows: int) -> np.ndarray:
    """Return the start position of each epoch [n] in the endless sequence of one part.

    Above one pass, an epoch starts with whole passes over the part. Below, consecutive epochs share a pass.
    """
    if quota > num_rows:
        return epochs * (-(-quota // num_rows) * num_rows)
    # The rest of a pass is dropped, so that no row comes twice within an epoch.
    sharing = num_rows // quota
    return epochs // sharing * num_rows + epochs % sharing * quota


def quotas(num_rows: Sequence[int], weights: Sequence[float | None], strategy: StoppingStrategy) -> list[int]:
    """Return the rows per epoch from each source, in proportion to the weights (all or none are None).

    Without weights: each row once. `all_exhausted`: every source is used up. `first_exhausted`: no row comes twice.
    """
    known = [weight for weight in weights if weight is not None]
    if not known:
        return list(num_rows)
    shares = [weight / sum(known) for weight in known]
    lengths = [rows / share for rows, share in zip(num_rows, shares, strict=True)]
    slack = 1e-9  # for products that differ from whole numbers only by rounding
    if strategy == "all_exhausted":
        return [max(1, math.ceil(max(lengths) * share - slack)) for share in shares]
    return [max(1, math.floor(min(lengths) * share + slack)) for share in shares]


@dataclass(frozen=True)
class MixedBatching:
    """Cuts the endless row sequence into batches: in shuffled order, all with the same width."""

    by_length: ClassVar[bool] = False
    """True if the rows in a batch have similar length."""

    def at(self, rows: RowSet, step: int, batch_size: int, seed: int) -> np.ndarray:
        """Return the rows for `step` (from 0), int64 [batch_size]."""
        return rows.at(step * batch_size, batch_size, seed)

    def width(self, _lengths: np.ndarray, sequence_length: int, /) -> int:
        """Return the padded width in tokens for rows with these lengths [n]."""
        return sequence_length


@dataclass(frozen=True)
class LengthBatching(MixedBatching):
    """Batches with rows of similar length, padded to the longest.

    An epoch still has each row once. A batch across an epoch border has the longest rows from both epochs, within its
    megabatch.
    """

    by_length: ClassVar[bool] = True

    def at(self, rows: RowSet, step: int, batch_size: int, seed: int) -> np.ndarray:
        # A small data set has smaller megabatches: a sorted epoch would have the same batches each time.
        in_group = min(_MOST_BATCHES, max(rows.num_rows // (_FEWEST_GROUPS * batch_size), 1))
        group, place = divmod(step, in_group)
        size = in_group * batch_size
        mixed = rows.at(group * size, size, seed)
        lengths = rows.lengths(mixed)
        epochs = (group * size + np.arange(size)) // rows.num_rows
        ordered = np.empty(size, np.int64)
        # Sorted within each epoch, so every epoch still has each row once.
        for epoch in np.unique(epochs):
            in_epoch = np.flatnonzero(epochs == epoch)
            batches = in_epoch // batch_size
            whole = np.flatnonzero(np.bincount(batches) == batch_size)
            slots = np.arange(size).reshape(in_group, batch_size)
            # Batches from long to short would show in the loss, so whole batches are shuffled again.
            order = whole[shuffled(np.arange(len(whole)), len(whole), seed + _SEED, group)]
            places = np.concatenate([in_epoch[~np.isin(batches, whole)], slots[order].ravel()])
            ordered[places] = mixed[in_epoch[np.argsort(-lengths[in_epoch], kind="stable")]]
        return ordered[place * batch_size :][:batch_size]

    def width(self, lengths: np.ndarray, sequence_length: int, /) -> int:
        """Round up to one of few distinct widths: four per doubling, all divisible by 8.

        Each distinct width costs cached memory and a kernel selection.
        """
        longest = int(lengths.max())
        exponent = np.floor(_PER_DOUBLING * np.log2(sequence_length / longest) + 1e-9)
        width = np.ceil(sequence_length / 2 ** (exponent / _PER_DOUBLING) / _MULTIPLE - 1e-9) * _MULTIPLE
        return min(int(width), sequence_length)
