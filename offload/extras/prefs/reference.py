"""Reference log-probabilities for DPO, measured once before training, so no second model is in memory.

The reference is the initial model, or another one (prefs.reference). For an adapter, it is the base model.

Measured values are cached under a hash over every input to the computation. All settings except `LEFT_OUT` are
included, so a new setting counts until someone excludes it with a reason. The rest comes from the objects themselves:
weights, buffers, module attributes, code, rows.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import nn

from offload.app.config.config import Config
from offload.app.environment import describe_environment
from offload.app.stored_model import REFERENCE
from offload.checkpoint.manifest import raw
from offload.checkpoint.spread import broadcast_value
from offload.distributed.comm import Comm, digest
from offload.distributed.outcomes import share_failure
from offload.engine.engine import Engine
from offload.engine.moved_buffers import digests_of
from offload.errors import ConfigError
from offload.extras.data.cache import unusable
from offload.extras.data.dataset import Dataset
from offload.extras.data.sources import hash_text
from offload.extras.prefs.losses import LogProbs
from offload.native.io import disk_error
from offload.planning.memory import EXPERT_BUFFER
from offload.user_cache import class_hash, code_hash, default_cache_dir

_PRINT_INTERVAL_S = 30.0
_SAME_SHARE = 1e-3
"""Allowed difference of a stored log-probability, relative: on a GPU sums may have any order."""
Say = Callable[[str], None]
LEFT_OUT: Mapping[str, str] = {
    **dict.fromkeys(
        ("run.dir", "run.name", "run.report_to"),
        "It names where a run is written.",
    ),
    **dict.fromkeys(
        ("model.path", "model.preset", "model.init", "lora.config", "lora.adapter", "prefs.reference"),
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
            *("optimizer.schedule", "optimizer.warmup_steps", "optimizer.states"),
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
}
"""Attributes and items left out of the key everywhere, each with a reason."""
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def with_reference(data: Dataset, values: np.ndarray) -> tuple[Dataset, Mapping[str, bytes]]:
    """Return a data set with `reference` in its batches, and the checkpoint file with the values."""
    sizes = _sizes(data)
    ends = np.cumsum(list(sizes.values()))[:-1]  # of all sets but the last
    by_name = {name: {"reference": part} for name, part in zip(sizes, np.split(values, ends), strict=True)}
    return replace(data, values=by_name), {REFERENCE: values.astype("<f4").tobytes()}


def _sizes(data: Dataset) -> dict[str, int]:
    return {name: rows.num_distinct for name, rows in data.row_sets.items()}


def read_stored(folders: Sequence[Path], data: Dataset, comm: Comm) -> np.ndarray:
    """Return the log-probability per row, in `Dataset.row_sets` order, from the first checkpoint with a reference file.

    Raises ConfigError if the row count differs.
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
    return values


def measure(config: Config, engine: Engine, data: Dataset, comm: Comm, say: Say) -> np.ndarray:
    """Return the log-probabilities for all rows with the engine's current weights.

    Values measured by an interrupted run, or by a run with the same `reference_key`, are reused, if the first batch
    has these values here too.
    """
    key = reference_key(config, engine, data)
    spans = list(_batch_spans(data))
    num_rows = sum(end - begin for _, begin, end in spans)
    with _open_cache(default_cache_dir() / "reference" / f"{key}.f32", comm) as cache:
        batches: list[np.ndarray] = []
        with share_failure(comm, "reading of the reference"):
            if cache is not None:
                batches = _read(cache, [end - begin for _, begin, end in spans])
        loss = LogProbs()

        def measured(name: str, begin: int, end: int) -> np.ndarray:
            engine.evaluate(data.batch_of(name, begin, end, engine.rank, engine.world_size), loss)
            own = loss.metrics.get("log_probs")
            parts = comm.gather_objects(None if own is None else own.numpy(), "log-probabilities of the reference")
            return np.concatenate([part for part in parts if part is not None])

        # Rank 0 alone has the cache, and all ranks must measure the same batches.
        num_cached = comm.from_rank(0, len(batches), "what is known of the reference")
        # A key can miss an influence nobody thought of. One batch costs little beside all of them.
        if num_cached:
            first = measured(*spans[0])
            is_same = not batches or np.allclose(first, batches[0], _SAME_SHARE, equal_nan=True)
            if not comm.from_rank(0, is_same, "whether the reference is known"):
                say("reference: the stored log-probabilities are not those of this model, and are computed again.")
                batches, num_cached = [], 0
                if cache is not None:
                    cache.truncate(0)
        if num_cached < len(spans):
            known = f", of which {sum(map(len, batches)):,} are already computed" if num_cached else ""
            say(f"reference: log-probabilities of {num_rows:,} answers{known} ...")
        printed_at = time.monotonic()
        for span in spans[num_cached:]:
            batches.append(measured(*span))
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
        raise unusable(path.parent, error) from error
    with stream:
        fcntl.flock(stream, fcntl.LOCK_EX)  # a second process waits, and then finds all values
        yield stream


def _read(cache: BinaryIO, sizes: Sequence[int]) -> list[np.ndarray]:
    """Return the complete batches in the cache, and truncate the rest. `sizes`: rows per batch."""
    cache.seek(0)
    values = np.frombuffer(cache.read(), "<f4", count=cache.tell() // 4)
    # A killed process may have left part of a batch.
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
