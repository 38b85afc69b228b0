"""Assigns rows to batches and decides the batch width: padded rows join rows with similar length.

As for `group_by_length` in transformers, megabatches from the shuffled epoch are sorted by length. Here a batch remains
a function of the step number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from offload.extras.data.mixture import RowSet
from offload.extras.data.order import shuffled

_MOST_BATCHES = 50
_FEWEST_GROUPS = 4
"""Minimum megabatches per epoch. Sorting a whole epoch would give the same batches in every epoch."""
_MULTIPLE = 8
_PER_DOUBLING = 4
_SEED = 1 << 48
"""Seed offset: separates the batch order from the row order."""


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
        in_group = min(_MOST_BATCHES, max(rows.num_rows // (_FEWEST_GROUPS * batch_size), 1))
        group, place = divmod(step, in_group)
        size = in_group * batch_size
        mixed = rows.at(group * size, size, seed)
        lengths = rows.lengths(mixed)
        epochs = (group * size + np.arange(size)) // rows.num_rows
        ordered = np.empty(size, np.int64)
        for epoch in np.unique(epochs):
            in_epoch = np.flatnonzero(epochs == epoch)
            batches = in_epoch // batch_size
            whole = np.flatnonzero(np.bincount(batches) == batch_size)
            slots = np.arange(size).reshape(in_group, batch_size)
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
