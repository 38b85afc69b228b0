"""Log-probabilities of the reference of DPO, measured once before training.

The reference is the initial model, or another one (prefs.reference). For an adapter, the reference is the base model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from offload.app.config.config import Config
from offload.app.stored_model import MEASURED_ROWS, REFERENCE
from offload.checkpoint.spread import broadcast_value
from offload.distributed.comm import Comm
from offload.distributed.outcomes import share_failure
from offload.engine.engine import Engine
from offload.errors import ConfigError
from offload.extras.data.dataset import Dataset
from offload.extras.data.mixture import RowSet
from offload.extras.frozen.measurement import Measurement, Say, is_of_rows, measure, rows_mark
from offload.extras.prefs.losses import LogProbs


@dataclass(frozen=True)
class _References:
    """Reference log-probabilities in batches, see `RowValues`."""

    values: np.ndarray
    """fp32 [rows]."""

    def of(self, rows: np.ndarray, labels: np.ndarray) -> Mapping[str, torch.Tensor]:
        # The shape of the labels lets the engine cut these values into micro-batches like any other input.
        reference = torch.zeros(labels.shape, dtype=torch.float32)
        reference[:, 0] = torch.from_numpy(self.values[rows])
        return {"reference": reference}


def with_reference(data: Dataset, values: np.ndarray) -> tuple[Dataset, Mapping[str, bytes]]:
    """Return a data set with `reference` in its batches, and the checkpoint file with the values."""
    sizes = _sizes(data)
    ends = np.cumsum(list(sizes.values()))[:-1]  # of all sets but the last
    by_name = dict(zip(sizes, map(_References, np.split(values, ends)), strict=True))
    return replace(data, values=by_name), {REFERENCE: values.astype("<f4").tobytes(), MEASURED_ROWS: rows_mark(data)}


def _sizes(data: Dataset) -> dict[str, int]:
    return {name: rows.num_distinct for name, rows in data.row_sets.items()}


def read_stored(folders: Sequence[Path], data: Dataset, comm: Comm) -> np.ndarray:
    """Return the log-probability per row, in `Dataset.row_sets` order, from the first checkpoint with a reference file.

    Raises ConfigError for other rows.
    """
    num_rows, values = sum(_sizes(data).values()), np.zeros(0, np.float32)
    with share_failure(comm, "reading of the reference"):
        file = next((folder / REFERENCE for folder in folders if (folder / REFERENCE).is_file()), None)
        if file is not None:
            values = np.fromfile(file, "<f4")
        if len(values) != num_rows:
            raise ConfigError(
                f"{file or folders[0]} has {len(values):,} log-probabilities of the reference model, but the data have "
                f"{num_rows:,} answers: restore the checkpoint or the data, or begin a new run in another run.dir."
            )
        # The training data are compared by the data set itself.
        if file is not None and not is_of_rows(file.parent, data):
            raise ConfigError(
                f"{file} has log-probabilities of the reference model for other rows: the evaluation data has changed "
                "since the run began. Restore it, or begin a new run in another run.dir."
            )
    return values


class _Answers(Measurement):
    """The summed log-probability of each answer."""

    name, unit = "reference", "answers"

    def __init__(self) -> None:
        self.loss: LogProbs = LogProbs()

    def num_records(self, _rows: RowSet, begin: int, end: int) -> int:
        return end - begin

    def taken(self) -> np.ndarray:
        values = self.loss.metrics.get("log_probs")
        return np.zeros(0, np.float32) if values is None else values.numpy()


def measure_reference(config: Config, engine: Engine, data: Dataset, comm: Comm, say: Say) -> np.ndarray:
    """Return the log-probabilities for all rows with the engine's current weights."""
    path, values = measure(config, engine, data, comm, say, _Answers()), np.zeros(0, np.float32)
    if comm.rank == 0:
        values = np.fromfile(path, "<f4")
    return broadcast_value(comm, values, "the reference")
