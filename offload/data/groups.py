"""Which rows are a batch, and how wide it is: rows that are padded stand beside others of about their length.

Groups are made as transformers makes them for `group_by_length`: of the mixed order of an epoch, so many batches at a
time are sorted by length. Here a batch is still a function of its number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from offload.data.mixture import RowSet
from offload.data.order import shuffled

_MOST_BATCHES = 50
_FEWEST_GROUPS = 4
"""Of an epoch: sorted as a whole, each epoch would have the same batches."""
_MULTIPLE = 8
_PER_DOUBLING = 4
_SEED = 1 << 48
"""What sets the order of batches apart from those of rows."""


class Batching(Protocol):
    """How the endless sequence of rows is cut into batches."""

    @property
    def by_length(self) -> bool:
        """Whether rows of a batch have about one length."""

    def at(self, rows: RowSet, step: int, batch_size: int, seed: int) -> np.ndarray:
        """Return the rows of the batch of `step` (from 0), int64 [batch_size]."""

    def width(self, lengths: np.ndarray, sequence_length: int) -> int:
        """Return to how many tokens rows of these lengths [n] are padded."""


@dataclass(frozen=True)
class Mixed:
    """Batches in the mixed order of an epoch, all of one width."""

    by_length = False

    def at(self, rows: RowSet, step: int, batch_size: int, seed: int) -> np.ndarray:
        return rows.at(step * batch_size, batch_size, seed)

    def width(self, _lengths: np.ndarray, sequence_length: int) -> int:
        return sequence_length


@dataclass(frozen=True)
class ByLength:
    """Batches of rows of about one length, padded to the longest of them.

    An epoch has each row once, as before. A batch over the border of two epochs has the longest rows of the group that
    ends there, and of the one that begins.
    """

    by_length = True

    def at(self, rows: RowSet, step: int, batch_size: int, seed: int) -> np.ndarray:
        in_group = min(_MOST_BATCHES, max(rows.num_rows // (_FEWEST_GROUPS * batch_size), 1))
        group, place = divmod(step, in_group)
        size = in_group * batch_size
        mixed = rows.at(group * size, size, seed)
        lengths = rows.lengths(mixed)
        epochs = (group * size + np.arange(size)) // rows.num_rows
        found = np.empty(size, np.int64)
        for epoch in np.unique(epochs):
            here = np.flatnonzero(epochs == epoch)
            batches = here // batch_size
            whole = np.flatnonzero(np.bincount(batches) == batch_size)
            slots = np.arange(size).reshape(in_group, batch_size)
            order = whole[shuffled(np.arange(len(whole)), len(whole), seed + _SEED, group)]
            places = np.concatenate([here[~np.isin(batches, whole)], slots[order].ravel()])
            found[places] = mixed[here[np.argsort(-lengths[here], kind="stable")]]
        return found[place * batch_size :][:batch_size]

    def width(self, lengths: np.ndarray, sequence_length: int) -> int:
        """Of few widths, as memory is kept, and kernels are chosen, for each: four in a doubling, as multiples of 8."""
        longest = int(lengths.max())
        exponent = np.floor(_PER_DOUBLING * np.log2(sequence_length / longest) + 1e-9)
        width = np.ceil(sequence_length / 2 ** (exponent / _PER_DOUBLING) / _MULTIPLE - 1e-9) * _MULTIPLE
        return min(int(width), sequence_length)
