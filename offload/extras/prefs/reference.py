"""Log-probabilities of a frozen model, measured once before training, so no second model is in memory.

For DPO the frozen model is the reference: the initial model, or another one (prefs.reference). For an adapter, it is
the base model. A teacher whose probabilities are stored (distill.way) is measured the same way.

Measured values are cached under a hash over every input to the computation. All settings except `LEFT_OUT` are
included, so a new setting counts until someone excludes it with a reason. The rest comes from the objects themselves:
weights, buffers, module attributes, code, rows.
"""

from __future__ import annotations

import fcntl
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from io import BufferedRandom, BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from offload.amounts import clock
from offload.app.config.config import Config
from offload.app.environment import describe_environment
from offload.app.stored_model import MEASURED_ROWS, REFERENCE
from offload.checkpoint.manifest import raw
from offload.checkpoint.spread import broadcast_value
from offload.distributed.comm import Comm, digest
from offload.distributed.outcomes import share_failure
from offload.engine.engine import Engine
from offload.engine.loss.loss import Loss
from offload.engine.moved_buffers import digests_of
from offload.errors import ConfigError, DoesNotFitError, format_bytes
from offload.extras.data.cache import unusable
from offload.extras.data.dataset import Dataset
from offload.extras.data.mixture import RowSet
from offload.extras.data.sources import hash_text
from offload.extras.prefs.losses import LogProbs
from offload.files.directories import free_bytes
from offload.native.io import disk_error
from offload.planning.memory import EXPERT_BUFFER
from offload.user_cache import class_hash, code_hash, default_cache_dir

_PRINT_INTERVAL_S = 30.0
_ABANDONED_S = 30 * 86400
"""Age of a part that nobody goes on with: a change of the code gives it another key."""
SAME_SHARE = 1e-3
"""Allowed difference of a stored log-probability, relative: on a GPU sums may have any order."""
SAME_NATS = 1e-3
"""Allowed difference beside this share: the log-probability of a sure token is the rounding of its sum."""
Say = Callable[[str], None]
LEFT_OUT: Mapping[str, str] = {
    **dict.fromkeys(
        ("run.dir", "run.name", "run.report_to"),
        "It names where a run is written.",
    ),
    **dict.fromkeys(
        (
            *("model.path", "model.preset", "model.init", "lora.config", "lora.adapter"),
            *("prefs.reference", "distill.teacher"),
        ),
        "It names where a model is from: the weights, buffers, attributes and code of the model are in the key.",
    ),
    **dict.fromkeys(
        (
            *("data.source", "data.sources", "data.eval_source", "data.format", "data.columns", "data.tokenizer"),
            *("data.stopping_strategy", "data.on_bad_row", "data.train_on_prompt", "data.num_workers"),
            "data.eval_share",
        ),
        "It decides about rows, and a hash of the rows is in the key.",
    ),
    **dict.fromkeys(
        (
            *("train.beta", "train.steps", "train.epochs", "train.max_seconds", "train.recompute"),
            *("train.max_grad_norm", "train.clip", "train.on_nonfinite", "train.delay", "train.delay_after"),
            *("train.eval_every", "train.eval_batches", "train.log_every"),
            *("train.early_stopping_patience", "train.early_stopping_min_delta", "optimizer.reset", "optimizer.lr"),
            *("optimizer.betas", "optimizer.eps", "optimizer.weight_decay", "optimizer.momentum", "optimizer.nesterov"),
            *("optimizer.schedule", "optimizer.warmup_steps", "optimizer.states", "distill.beta", "distill.labels"),
        ),
        "It is about steps, and the reference is computed before the first one, without a backward.",
    ),
    **dict.fromkeys(
        (
            *("offload.parameters", "offload.optimizer", "offload.gradients", "offload.activations", "offload.graphs"),
            *("offload.optimizer_memory", "offload.graphs_memory", "offload.host_memory"),
            *("offload.nvme_dir", "offload.nvme_memory", "offload.prefetch", "offload.throttle", "offload.update"),
            *("offload.zero_stage", "offload.replicas", "offload.replica_states"),
        ),
        "It decides where states are and when they move, which changes no bit of a forward.",
    ),
    **dict.fromkeys(
        (
            *("checkpoint.every", "checkpoint.keep", "checkpoint.resume", "checkpoint.on_error"),
            *("checkpoint.keep_best", "checkpoint.export", "checkpoint.export_best"),
        ),
        "It is about files that are written after the reference is known.",
    ),
}
"""Settings left out of the key, each with a reason."""
LEFT_OUT_NAMES: Mapping[str, str] = {
    **dict.fromkeys(
        ("_name_or_path", "name_or_path", "base_model_name_or_path"),
        "A configuration names where it was loaded from.",
    ),
    **dict.fromkeys(
        ("memory", "platform", "pci"),
        "The environment lists free memory, the kernel of the operating system and the slot of a GPU.",
    ),
    "_original_object_hash": (
        "Python salts it in each process. It tells transformers whether a generation configuration was edited."
    ),
}
"""Attributes and items left out of the key everywhere, each with a reason."""
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


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


def rows_mark(data: Dataset) -> bytes:
    """Return a hash of all rows, trained and evaluated, without the names of their files."""
    rows = [(each.identity, each.sequence_length, each.packing) for each in data.row_sets.values()]
    return hash_text(repr(rows)).encode()


def is_of_rows(folder: Path, data: Dataset) -> bool:
    """Return whether the values that the checkpoint in `folder` has of another model are of the rows of `data`."""
    file = folder / MEASURED_ROWS
    return not file.is_file() or file.read_bytes() == rows_mark(data)  # earlier versions wrote no such file


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


def measure(config: Config, engine: Engine, data: Dataset, comm: Comm, say: Say, wanted: Measurement) -> Path:
    """Measure all rows with the engine's current weights. Return the file with the records, on the disk of rank 0.

    Values measured by an interrupted run, or by a run with the same `reference_key`, are reused, if the first batch
    has these values here too.
    """
    # Of rank 0: ranks on other machines would have another key.
    key = comm.from_rank(0, hash_text(reference_key(config, engine, data) + wanted.mark), "key of the records")
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
        if path.is_file() and path.stat().st_size == num_bytes:
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
        self._part.replace(self._path)

    def close(self) -> None:
        self._stream.close()


def reference_key(config: Config, engine: Engine, data: Dataset) -> str:
    """Return 32 hexadecimal digits, equal only for runs with a bit-equal reference. Collective."""
    # Streamed experts run by other operations, with other last bits.
    streams_experts = any(name == EXPERT_BUFFER for _, name, _ in engine.allocations)  # with auto, memory decides
    passes = engine.device.type, engine.world_size, engine.head_chunk_bytes, engine.told_tiles, streams_experts
    rows = [(name, rows.identity, rows.sequence_length) for name, rows in data.row_sets.items()]
    batches = data.pad_id, data.batch_size, type(data.batching).__name__
    machine = describe_environment(), torch.get_float32_matmul_precision()
    own = describe_settings(config), describe_model(engine.model)
    # Any edit of the code counts: nobody can tell harmless edits from others.
    code = code_hash(), class_hash({type(module) for module in engine.model.modules()})
    return hash_text(
        repr((*own, engine.weights_mark(whole=True), _Description().of([passes, rows, batches, machine, code])))
    )


def describe_settings(config: Config) -> str:
    """Return, as text, the settings that must be equal to reuse the results of a reference model."""
    return repr(_Description().of([item for item in config.items() if item[0] not in LEFT_OUT]))


def describe_model(model: Any) -> str:
    """Return model structure, buffers, attributes, hooks and configurations as text.

    Parameters are left to `Engine.weights_mark`.
    """
    modules = [
        (
            name,
            type(module),
            {key: value for key, value in vars(module).items() if key not in _MODULE_ATTRIBUTES},
            [list(getattr(module, hooks).values()) for hooks in _HOOKS],
        )
        for name, module in model.named_modules()
    ]
    return repr((digests_of(model, torch.Tensor.cpu), _Description().of(modules)))


class _Description:
    """Describes values as nested text lists, equal for equal values in any process: no addresses, no set order."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, Any]] = {}  # keeps values alive, so ids stay unique

    def of(self, value: Any) -> Any:
        """Return the description of a value.

        Modules, parameters and engine attributes on modules appear by class name alone.
        """
        value_class = type(value)
        name = [value_class.__module__, value_class.__qualname__]
        if isinstance(value, nn.Module | nn.Parameter) or value_class.__module__.startswith("offload.engine."):
            return name
        if not hasattr(value, "__dict__") and not isinstance(value, list | tuple | dict | set | frozenset):
            # The default text of an object has an address, another one in each process.
            if any("__repr__" in vars(each) for each in value_class.__mro__[:-1]):
                return repr(value)
            return name
        if id(value) in self._seen:
            return self._seen[id(value)][0]
        self._seen[id(value)] = len(self._seen), value
        return [*name, *self._inside(value)]

    def _inside(self, value: Any) -> list[Any]:
        if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
            cells = getattr(value, "__closure__", None) or ()
            # A function is code, hashed elsewhere, and the values in the closure.
            captured = [getattr(value, "__self__", None), *(each.cell_contents for each in cells)]
            return [value.__module__, value.__qualname__, *(self.of(each) for each in captured)]
        if isinstance(value, partial):
            return [self.of(each) for each in (value.func, value.args, value.keywords)]
        if isinstance(value, torch.Tensor | np.ndarray):
            return [str(value.dtype), *value.shape, digest(raw(torch.as_tensor(value).cpu().contiguous()).tobytes())]
        if isinstance(value, Mapping):
            items = [(repr(self.of(key)), self.of(each)) for key, each in value.items() if key not in LEFT_OUT_NAMES]
            # Sorted: the order of insertion changes no result.
            return sorted(items, key=lambda item: item[0])
        if isinstance(value, set | frozenset):
            return sorted(repr(self.of(each)) for each in value)
        if isinstance(value, list | tuple):
            return [self.of(each) for each in value]
        return self._inside(vars(value))
