"""Stored probabilities of a teacher: measured once before training, then read from disk with each batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from offload.engine.loss.batch import IGNORED, Batch, Chunk, next_labels
from offload.engine.loss.cross_entropy import Term
from offload.engine.loss.loss import Loss, Needs
from offload.errors import ConfigError
from offload.extras.data.dataset import Dataset
from offload.extras.data.mixture import RowSet
from offload.extras.distill.classes import VALUES, pieces, record_type, top_classes
from offload.extras.frozen.measurement import Measurement

_BLOCK_ROWS = 256
"""Rows whose labels are in memory at once."""
_SUM_NATS = 1e-3
"""Most that the logarithm of a sum of probabilities may be from 0: the rounding of fp32, with room."""


class TeacherClasses(Measurement):
    """The classes at each token with a target."""

    name, unit = "teacher", "tokens"

    def __init__(self, temperature: float, top_k: int | None, vocabulary: int) -> None:
        self.dtype = record_type(top_k, vocabulary)
        self.loss: _TakeClasses = _TakeClasses(temperature, top_k, vocabulary)
        self.mark = f"{self.dtype}, {vocabulary}"

    def num_records(self, rows: RowSet, begin: int, end: int) -> int:
        return int(_num_targets(rows, begin, end).sum())

    def taken(self) -> np.ndarray:
        records = [np.empty(len(ids), self.dtype) for _, ids in self.loss.parts]
        for part, values in zip(records, self.loss.parts, strict=True):
            for key, each in zip(VALUES, values, strict=True):
                part[key] = each
        return np.concatenate([np.empty(0, self.dtype), *records])

    def is_same(self, found: np.ndarray, stored: np.ndarray) -> bool:
        # Not the tokens: two of them may be equally probable.
        (key, *_) = VALUES
        return super().is_same(found[key], stored[key])


class _TakeClasses(Loss):
    """A loss of 0 that keeps the classes of the tokens with a target, in their order."""

    own: ClassVar[frozenset[str]] = frozenset({"labels"})

    def __init__(self, temperature: float, top_k: int | None, vocabulary: int) -> None:
        super().__init__(Needs.MEAN)
        self._temperature = temperature
        self._top_k = top_k
        self._vocabulary = vocabulary
        self.parts: list[tuple[np.ndarray, ...]] = []
        """Of the last pass, as in `Classes`."""
        self._newest: list[tuple[np.ndarray, ...]] = []

    def begin(self) -> None:
        self.parts = []

    def keep(self) -> None:
        self.parts += self._newest

    def of(self, outputs: Any, batch: Batch) -> torch.Tensor:
        logits = outputs.logits.flatten(0, 1)
        self._newest = self._take(logits[next_labels(batch).flatten() != IGNORED])
        return logits.new_zeros((), dtype=torch.float32)

    def term(self, _inputs: Batch, _batch: Batch, chunks: Sequence[Chunk]) -> Term:
        return partial(self._term, iter(chunks))

    def _term(
        self, chunks: Iterator[Chunk], logits: torch.Tensor, labels: torch.Tensor, _slopes: torch.Tensor | None
    ) -> tuple[torch.Tensor, None]:
        self.parts += self._take(logits[: next(chunks).num_targets])
        return torch.zeros(labels.shape, device=logits.device), None

    def _take(self, logits: torch.Tensor) -> list[tuple[np.ndarray, ...]]:
        """`logits`: [tokens, vocabulary]. Beyond the tokens both models have rows without a meaning."""
        logits = logits[:, : self._vocabulary].detach()
        found = (top_classes(logits[rows], self._temperature, self._top_k) for rows in pieces(logits))
        return [tuple(each.cpu().numpy() for each in classes) for classes in found]


@dataclass(frozen=True)
class StoredRows:
    """Stored classes of the rows of a set, see `RowValues`."""

    path: Path
    records: np.ndarray
    """Of all sets, in the file at `path`, [targets]."""
    ends: np.ndarray
    """Place behind the last record of each row, int64 [rows]."""

    def of(self, rows: np.ndarray, labels: np.ndarray) -> Mapping[str, torch.Tensor]:
        fields = self.records.dtype
        values = {key: np.zeros((*labels.shape, *fields[key].shape), fields[key].base) for key in VALUES}
        targets = labels[:, 1:] != IGNORED
        for place, (row, is_target) in enumerate(zip(rows, targets, strict=True)):
            end = self.ends[row]
            found = self.records[end - is_target.sum() : end]
            for key, of_rows in values.items():
                of_rows[place, :-1][is_target] = found[key]
        (key, *_) = VALUES
        # A record of zeros, such as a power cut leaves, or of other rows' bytes would be trained on.
        sums = torch.from_numpy(values[key][:, :-1][targets]).logsumexp(1)
        if not (sums.abs() < _SUM_NATS).all():
            raise damage(self.path, "the probabilities of a token do not sum to 1")
        return {key: torch.from_numpy(each) for key, each in values.items()}


def damage(path: Path, what: str) -> ConfigError:
    """Return the error for a file of stored classes with other content than was measured."""
    return ConfigError(
        f"{path}, with the probabilities of the teacher, is damaged: {what}. Remove it, to measure the teacher again."
    )


def open_stored(path: Path, record: np.dtype[Any], data: Dataset) -> dict[str, StoredRows]:
    """Return the stored classes of all row sets, by the names in `Dataset.row_sets`.

    Raises OSError, and ConfigError for a damaged file.
    """
    try:
        records = np.memmap(path, record, "r")
    except ValueError as error:  # part of a record, or nothing
        raise damage(path, str(error)) from error
    ends = np.cumsum(np.concatenate([_num_targets(*span) for span in _blocks(data)]))
    if ends[-1] != len(records):
        raise damage(path, f"it has {len(records):,} tokens, and the data {ends[-1]:,}")
    borders = np.cumsum([rows.num_distinct for rows in data.row_sets.values()])
    parts = np.split(ends, borders[:-1])
    return {name: StoredRows(path, records, part) for name, part in zip(data.row_sets, parts, strict=True)}


def _blocks(data: Dataset) -> Iterator[tuple[RowSet, int, int]]:
    for rows in data.row_sets.values():
        for begin in range(0, rows.num_distinct, _BLOCK_ROWS):
            yield rows, begin, min(begin + _BLOCK_ROWS, rows.num_distinct)


def _num_targets(rows: RowSet, begin: int, end: int) -> np.ndarray:
    """Return the tokens with a target in each of the rows [begin, end)."""
    _, labels = rows.read(np.arange(begin, end))
    return (labels[:, 1:] != IGNORED).sum(1)
