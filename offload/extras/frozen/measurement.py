"""Values measured with a frozen model once before training, so no second model is in memory.

The reference of DPO is measured so, and a teacher whose probabilities are stored (distill.way). Measured values are
cached under a key (`measurement_key`).
"""

from __future__ import annotations

import fcntl
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedRandom, BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from offload.amounts import clock
from offload.app.config.config import Config
from offload.app.stored_model import MEASURED_ROWS
from offload.distributed.comm import Comm
from offload.distributed.outcomes import share_failure
from offload.engine.engine import Engine
from offload.engine.loss.loss import Loss
from offload.errors import DoesNotFitError, format_bytes, warn
from offload.extras.data.cache import unusable
from offload.extras.data.dataset import Dataset
from offload.extras.data.mixture import RowSet
from offload.extras.data.sources import hash_text
from offload.extras.frozen.measurement_key import measurement_key
from offload.files.directories import free_bytes
from offload.native.io import disk_error, sync_path
from offload.user_cache import default_cache_dir, hash_paths

_PRINT_INTERVAL_S = 30.0
_ABANDONED_S = 30 * 86400
"""Age of a part that nobody goes on with: a change of the code gives it another key."""
SAME_SHARE = 1e-3
"""Allowed difference of a stored log-probability, relative: on a GPU sums may have any order."""
SAME_NATS = 1e-3
"""Allowed difference beside this share: the log-probability of a sure token is the rounding of its sum."""
Say = Callable[[str], None]


class Measurement(ABC):
    """What is measured of a frozen model: records for the rows, in their order, with a fixed size each."""

    name: str
    """Name of the model in messages, and of the folder in the cache."""
    unit: str
    """Things with a record, in the plural."""
    dtype: np.dtype[Any] = np.dtype("<f4")
    """Of a record."""
    loss: Loss
    """Loss of the passes that measure."""
    mark: str = ""
    """What decides the records beside settings, model and rows."""

    @abstractmethod
    def num_records(self, rows: RowSet, begin: int, end: int) -> int:
        """Return the number of records for rows [begin, end)."""

    @abstractmethod
    def taken(self) -> np.ndarray:
        """Return the records of this rank from the last pass, in `dtype`."""

    def is_same(self, found: np.ndarray, stored: np.ndarray) -> bool:
        """Tell whether two measurements of the same rows agree."""
        return np.allclose(found, stored, SAME_SHARE, SAME_NATS, equal_nan=True)


def rows_mark(data: Dataset) -> bytes:
    """Return a hash of all rows, trained and evaluated, without the names of their files."""
    rows = [(each.identity, each.sequence_length, each.packing) for each in data.row_sets.values()]
    return hash_text(repr(rows)).encode()


def is_of_rows(folder: Path, data: Dataset) -> bool:
    """Return whether the values that the checkpoint in `folder` has of another model are of the rows of `data`."""
    file = folder / MEASURED_ROWS
    return not file.is_file() or file.read_bytes() == rows_mark(data)  # earlier versions wrote no such file


def measure(config: Config, engine: Engine, data: Dataset, comm: Comm, say: Say, wanted: Measurement) -> Path:
    """Measure all rows with the engine's current weights. Return the file with the records, on the disk of rank 0.

    Values measured by an interrupted run, or by a run with the same `measurement_key`, are reused, if the first batch
    has these values here too.
    """
    # Of rank 0: ranks on other machines would have another key.
    key = comm.from_rank(0, hash_text(measurement_key(config, engine, data) + wanted.mark), "key of the records")
    path = default_cache_dir() / wanted.name / f"{key}.bin"
    spans = list(_batch_spans(data))
    sizes = [wanted.num_records(data.row_sets[name], begin, end) for name, begin, end in spans]
    with _open_cache(path, wanted, sizes, comm, say) as cache:

        def measured(name: str, begin: int, end: int) -> np.ndarray:
            engine.evaluate(data.batch_of(name, begin, end, engine.rank, engine.world_size), wanted.loss)
            return np.concatenate(comm.gather_objects(wanted.taken(), f"log-probabilities of the {wanted.name}"))

        num_known = 0
        if cache is not None:
            num_known = cache.num_known
        # Rank 0 alone has the cache, and all ranks must measure the same batches.
        num_known = comm.from_rank(0, num_known, f"what is known of the {wanted.name}")
        # A key can miss an influence nobody thought of. One batch costs little beside all of them.
        if num_known:
            first = measured(*spans[0])
            is_same = cache is None or wanted.is_same(first, cache.first())
            if not comm.from_rank(0, is_same, f"whether the {wanted.name} is known"):
                say(f"{wanted.name}: the stored log-probabilities are not those of this model, and are computed again.")
                num_known = 0
                if cache is not None:
                    cache.restart()
        if num_known < len(spans):
            done = sum(sizes[:num_known])
            known = f", of which {done:,} are already computed" if done else ""
            num_bytes = format_bytes(sum(sizes) * wanted.dtype.itemsize)
            say(
                f"{wanted.name}: log-probabilities of {sum(sizes):,} {wanted.unit}{known}; {num_bytes} in "
                f"{path.parent} ..."
            )
            _tell_use(config, data, wanted, say)
        began_at = printed_at = time.monotonic()
        num_before = sum(sizes[:num_known])
        for number in range(num_known, len(spans)):
            records = measured(*spans[number])
            with share_failure(comm, f"keeping of the {wanted.name}"):
                if cache is not None:
                    cache.append(records)
            if time.monotonic() - printed_at > _PRINT_INTERVAL_S:
                printed_at, done = time.monotonic(), sum(sizes[: number + 1])
                record_s = (printed_at - began_at) / max(1, done - num_before)
                left = clock(record_s * (sum(sizes) - done))
                say(f"{wanted.name}: {done:,} of {sum(sizes):,} {wanted.unit}, eta {left}")
        with share_failure(comm, f"keeping of the {wanted.name}"):
            if cache is not None:
                cache.complete()
    return path


def _tell_use(config: Config, data: Dataset, wanted: Measurement, say: Say) -> None:
    """Tell how many of the measured rows the run will use."""
    steps, num_rows = config.train.steps, data.num_train_rows
    if steps is not None and steps * data.batch_size < num_rows:
        say(
            f"note: all rows are measured by the {wanted.name}, and the run uses {steps * data.batch_size:,} of the "
            f"{num_rows:,} training rows. Give it fewer rows, or more steps."
        )


def _batch_spans(data: Dataset) -> Iterator[tuple[str, int, int]]:
    """Yield the batches for the measurement: (row set name in `Dataset.row_sets`, begin, end)."""
    for name, rows in data.row_sets.items():
        for begin in range(0, rows.num_distinct, data.batch_size):
            yield name, begin, min(begin + data.batch_size, rows.num_distinct)


@contextmanager
def _open_cache(path: Path, wanted: Measurement, sizes: Sequence[int], comm: Comm, say: Say) -> Iterator[_Cache | None]:
    """Open rank 0's file of records, locked for one process. None on other ranks. Raises ConfigError, DoesNotFitError,
    on all ranks.
    """
    with ExitStack() as opened:
        cache = None
        with share_failure(comm, f"opening of the {wanted.name}"):
            if comm.rank == 0:
                try:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    lock = opened.enter_context(path.with_suffix(".lock").open("w"))
                    try:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        say(f"{wanted.name}: another process measures the same; this one waits for it ...")
                        fcntl.flock(lock, fcntl.LOCK_EX)  # then all values are there
                    _remove_abandoned(path.parent)
                    cache = _Cache(path, wanted.dtype, sizes)
                except OSError as error:
                    raise unusable(path.parent, error) from error
                opened.callback(cache.close)
        yield cache


def _remove_abandoned(folder: Path) -> None:
    """Remove old parts of measurements, except those of running processes."""
    for part in folder.glob("*.part"):
        # A locked one is in use, and another process may remove the same.
        with suppress(OSError), part.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - part.stat().st_mtime > _ABANDONED_S:
                part.unlink()


class _Cache:
    """The file at `path` with the records of all batches. Until it is complete, it has another name, and is continued
    from the last whole batch.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], sizes: Sequence[int]) -> None:
        """`sizes`: records of each batch. Raises OSError, and DoesNotFitError if the disk is too small."""
        self._path = path
        self._part = path.with_suffix(".part")
        self._dtype = dtype
        self._sizes = sizes
        self._ends = dtype.itemsize * np.cumsum(sizes, dtype=np.int64)
        num_bytes = int(self._ends[-1]) if len(sizes) else 0
        self._digest = path.with_suffix(".digest")
        if path.is_file() and path.stat().st_size == num_bytes and self._is_whole():
            self.num_known = len(sizes)
            self._stream: BufferedReader | BufferedRandom = path.open("rb")
            return
        self._stream = self._part.open("a+b")
        # A killed process may have left part of a batch. After a power cut, the last one may be zeros in part.
        self.num_known = max(0, int(np.searchsorted(self._ends, self._stream.tell(), "right")) - 1)
        done = int(self._ends[self.num_known - 1]) if self.num_known else 0
        self._stream.truncate(done)
        free = free_bytes(path.parent)
        if num_bytes - done > free:
            self.close()
            raise DoesNotFitError(
                f"the log-probabilities take {format_bytes(num_bytes - done)} ({num_bytes - done} bytes) more in "
                f"{path.parent}, on a disk with {format_bytes(free)} ({free} bytes) free. Make room, or set "
                "XDG_CACHE_HOME to a folder on another disk."
            )

    def first(self) -> np.ndarray:
        """Return the records of the first batch."""
        self._stream.seek(0)
        return np.frombuffer(self._stream.read(int(self._ends[0])), self._dtype)

    def restart(self) -> None:
        """Forget all records. Another process may still read a complete file."""
        self._stream.close()
        self._stream = self._part.open("w+b")

    def append(self, records: np.ndarray) -> None:
        try:
            self._stream.write(records.astype(self._dtype).tobytes())
            self._stream.flush()
            os.fsync(self._stream.fileno())  # all batches before the last one are whole, also after a power cut
        except OSError as error:
            raise disk_error("the write of the log-probabilities", self._part, error) from error

    def complete(self) -> None:
        """Give the file its name, if it is new."""
        if self._stream.mode == "rb":
            return
        self._digest.write_text(hash_paths([self._part]))
        sync_path(self._digest)
        self._part.replace(self._path)

    def _is_whole(self) -> bool:
        """Tell whether the complete file has its digest. All bytes are read: damaged ones would be trained on."""
        with suppress(OSError):
            if self._digest.read_text() == hash_paths([self._path]):
                return True
        warn(f"{self._path} is damaged, and its records are measured again.")
        return False

    def close(self) -> None:
        self._stream.close()
