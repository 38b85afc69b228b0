"""Reference log-probabilities for DPO, measured once before training, so no second model is in memory.

For an adapter, the reference is the base model.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from offload.app.config.config import Config
from offload.app.stored_model import REFERENCE
from offload.checkpoint.spread import broadcast_value
from offload.distributed.comm import Comm, share_failure
from offload.engine.engine import Engine
from offload.errors import ConfigError
from offload.extras.data.dataset import Dataset
from offload.extras.prefs.losses import LogProbs
from offload.extras.prefs.reference_key import reference_key
from offload.files.user_cache import default_cache_dir
from offload.native.io import disk_error

_PRINT_INTERVAL_S = 30.0
Say = Callable[[str], None]


def add_reference(
    config: Config, engine: Engine, data: Dataset, comm: Comm, folders: Sequence[Path], say: Say
) -> tuple[Dataset, Mapping[str, bytes]]:
    """Return a data set with `reference` in its batches, and the checkpoint file with the values.

    A resumed run reads the reference from its checkpoints, `folders`; a new run measures with the initial weights.
    Collective. Raises ConfigError and DiskError.
    """
    sizes = {name: rows.num_distinct for name, rows in data.row_sets.items()}
    if folders:
        with share_failure(comm, "reading of the reference"):
            values = _read_stored(folders, sum(sizes.values()))
    else:
        values = _measure(config, engine, data, comm, say)
    ends = np.cumsum(list(sizes.values()))[:-1]
    by_name = {name: {"reference": part} for name, part in zip(sizes, np.split(values, ends), strict=True)}
    return replace(data, values=by_name), {REFERENCE: values.astype("<f4").tobytes()}


def _read_stored(folders: Sequence[Path], num_rows: int) -> np.ndarray:
    """Return the log-probability per row, in `Dataset.row_sets` order, from the first checkpoint with a reference file.

    Raises ConfigError if the row count differs.
    """
    file = next((folder / REFERENCE for folder in folders if (folder / REFERENCE).is_file()), None)
    values = np.zeros(0, np.float32) if file is None else np.fromfile(file, "<f4")
    if len(values) != num_rows:
        raise ConfigError(
            f"{file or folders[0]} has {len(values):,} log-probabilities of the reference model, but the data have "
            f"{num_rows:,} answers: restore the checkpoint or the data, or begin a new run in another run.dir."
        )
    return values


def _measure(config: Config, engine: Engine, data: Dataset, comm: Comm, say: Say) -> np.ndarray:
    """Return the log-probabilities for all rows with the engine's current weights.

    Values measured by an interrupted run, or by a run with the same `reference_key`, are reused.
    """
    key = reference_key(config, engine, data)
    spans = list(_batch_spans(data))
    num_rows = sum(end - begin for _, begin, end in spans)
    with _open_cache(default_cache_dir() / "reference" / f"{key}.f32", comm) as cache:
        batches: list[np.ndarray] = []
        with share_failure(comm, "reading of the reference"):
            if cache is not None:
                batches = _read(cache, [end - begin for _, begin, end in spans])
        num_cached = int(comm.gather_objects(len(batches), "what is known of the reference")[0])
        if num_cached < len(spans):
            known = f", of which {sum(map(len, batches)):,} are already computed" if num_cached else ""
            say(f"reference: the initial weights' log-probabilities of {num_rows:,} answers{known} ...")
        printed_at, loss = time.monotonic(), LogProbs()
        for name, begin, end in spans[num_cached:]:
            engine.evaluate(data.batch_of(name, begin, end, comm.rank, comm.size), loss)
            own = loss.metrics.get("log_probs")
            parts = comm.gather_objects(None if own is None else own.numpy(), "log-probabilities of the reference")
            batches.append(np.concatenate([part for part in parts if part is not None]))
            with share_failure(comm, "keeping of the reference"):
                if cache is not None:
                    _write(cache, batches[-1])
            if time.monotonic() - printed_at > _PRINT_INTERVAL_S:
                printed_at = time.monotonic()
                say(f"reference: {sum(map(len, batches)):,} of {num_rows:,} answers")
    values = np.concatenate(batches) if batches else np.zeros(0, np.float32)
    return broadcast_value(comm, values, "the reference")  # only rank 0 has the cached values


def _batch_spans(data: Dataset) -> Iterator[tuple[str, int, int]]:
    """Yield the batches for the measurement: (row set name in `Dataset.row_sets`, begin, end)."""
    for name, rows in data.row_sets.items():
        for begin in range(0, rows.num_distinct, data.batch_size):
            yield name, begin, min(begin + data.batch_size, rows.num_distinct)


@contextmanager
def _open_cache(path: Path, comm: Comm) -> Iterator[BinaryIO | None]:
    """Open rank 0's cache file for measured values, locked for one process. None on other ranks."""
    if comm.rank:
        yield None
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("a+b")
    except OSError as error:
        raise ConfigError(
            f"The data cache {path.parent} cannot be used: {error}. Make room there, or set XDG_CACHE_HOME to another "
            "folder."
        ) from error
    with stream:
        fcntl.flock(stream, fcntl.LOCK_EX)  # a second process waits, and then finds all values
        yield stream


def _read(cache: BinaryIO, sizes: Sequence[int]) -> list[np.ndarray]:
    """Return the complete batches in the cache, and truncate the rest. `sizes`: rows per batch."""
    cache.seek(0)
    values = np.frombuffer(cache.read(), "<f4", count=cache.tell() // 4)
    num_whole = int(np.searchsorted(np.cumsum(sizes), len(values), "right"))
    ends = np.cumsum(sizes[:num_whole])
    cache.truncate(4 * int(ends[-1]) if num_whole else 0)
    return np.split(values, ends)[:num_whole]


def _write(cache: BinaryIO, values: np.ndarray) -> None:
    try:
        cache.write(values.astype("<f4").tobytes())
        cache.flush()
    except OSError as error:
        raise disk_error("the write of the reference", Path(cache.name), error) from error
