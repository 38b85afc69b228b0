"""Model weights from a checkpoint; the counterpart for a Hugging Face folder is `hf/read.py`."""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import GenerationConfig
from transformers.utils import ADAPTER_CONFIG_NAME

from offload.app.checkpoint_folder import suggesting_alternative
from offload.app.config.sections import ModelSection
from offload.app.hf.deferred_init import DeferredInit
from offload.app.hf.models import attention_options, folder_config, fuse_attention, model_kind
from offload.app.hf.names import Shape, apply_conversions, recompute_buffers, stays_fp32
from offload.app.hf.write import ExportResult, write_model
from offload.app.telemetry.progress import work_progress
from offload.checkpoint.manifest import DTYPE_OF, without_moved
from offload.checkpoint.reader import Reader
from offload.errors import ConfigError, first_names
from offload.files.sources import SHARD_BYTES, ReadValues, ReopenFile
from offload.native import kernels

DTYPES = {"auto": None, "bf16": torch.bfloat16, "fp32": torch.float32}
"""Weight dtypes by command-line name; None: the original dtype per parameter."""
REFERENCE = "reference.f32"
"""Attached file with the reference log-probabilities of the initial model. A resumed run reads them; an export omits
them.
"""
REFERENCE_MARK = "reference.txt"
"""Attached file with a fingerprint of a reference that is another model, which a resumed run compares."""
TEACHER_MARK = "teacher.txt"
"""Attached file with a fingerprint of the teacher, which a resumed run compares."""
TEACHER_VALUES = "teacher_values.txt"
"""Attached file with the name of the teacher's stored probabilities in the cache."""
MEASURED_ROWS = "measured_rows.txt"
"""Attached file with a hash of the rows that the values of a reference or a teacher are of."""
_OF_OTHERS = (REFERENCE, REFERENCE_MARK, TEACHER_MARK, TEACHER_VALUES, MEASURED_ROWS)
_NOT_EXPORTED = ("config.json", "generation_config.json", *_OF_OTHERS)
_IN_FOLDER = "--"
"""Stands for / in the names of attached files: a checkpoint has no folders."""
_BLOCK_NUMEL = 1 << 22  # elements joined or converted at once


@dataclass
class StoredParameter:
    """One checkpoint parameter as a `Source` (hf/sources.py): master weights for fp32, else the compute weights."""

    reader: Reader
    name: str
    shape: Shape
    dtype: torch.dtype

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Return a new tensor with elements `begin` to `end` of the flat parameter. Raises CheckpointError."""
        planes = self.reader.contents[self.name].planes
        has_low = "low" in planes  # any other dtype comes from the fp32 master
        if planes["weights"] == self.dtype:  # no conversion, so no blocks
            return self._plane("weights", begin, end)
        values = torch.empty(end - begin, dtype=self.dtype)
        for low in range(begin, end, _BLOCK_NUMEL):
            high = min(low + _BLOCK_NUMEL, end)
            block = self._plane("weights", low, high)
            if has_low:
                block = kernels.join(block, self._plane("low", low, high))
            values[low - begin : high - begin] = block
        return values

    def reopen_files(self, reopen: ReopenFile) -> StoredParameter:  # noqa: ARG002
        """Return self: a checkpoint has no tensor file to reopen."""
        return self

    def _plane(self, plane: str, begin: int, end: int) -> torch.Tensor:
        values = torch.empty(end - begin, dtype=self.reader.contents[self.name].planes[plane])
        self.reader.read(self.name, plane, begin, values)
        return values


class StoredWeights:
    """Checkpoint weights for one model. Read from one thread at a time."""

    def __init__(self, model: nn.Module, reader: Reader, dtype: torch.dtype | None) -> None:
        """Set dtypes and tied weights of `model`, without parameter values; buffers are read at once.

        dtype: None for the training dtype of each parameter; else for all except parameters kept in fp32 by
        transformers. Raises ConfigError if the checkpoint belongs to another model, and CheckpointError.
        """
        self._reader = reader
        state: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
        _check(state, reader)
        # A tied weight is stored under the first name.
        first: dict[int, str] = {}
        for name in without_moved(reader.contents):
            first.setdefault(id(state[name]), name)
        is_kept = stays_fp32(model, dtype or torch.float32)
        self._sources: dict[str, StoredParameter] = {}
        for name, value in state.items():
            entry = reader.contents[first[id(value)]]
            if isinstance(value, nn.Parameter):
                target = dtype or entry.planes["weights"]
                if is_kept(name):
                    target = torch.float32
                self._sources[name] = StoredParameter(reader, first[id(value)], entry.shape, target)
                if value.dtype != target:
                    value.data = torch.empty(entry.shape, dtype=target)
            else:
                owner, _, key = name.rpartition(".")
                buffer = torch.empty(entry.shape, dtype=entry.planes["buffer"])
                reader.read(first[id(value)], "buffer", 0, buffer)
                model.get_submodule(owner)._buffers[key] = buffer

    def source(self, name: str) -> StoredParameter:
        return self._sources[name]

    def built_in(self, name: str) -> torch.dtype:
        """Return the dtype in which a parameter was built for training."""
        built_in = self._reader.meta["engine"]["built_in"]
        return DTYPE_OF[built_in["others"].get(name, built_in["main"])]

    def files(self) -> dict[str, bytes]:
        """Return {file name: content} of the export beside the model."""
        return export_files(self._reader)

    def close(self) -> None:
        self._reader.close()


def read_stored(
    folder: Path,
    dtype: torch.dtype | None = None,
    *,
    in_part: bool = False,
    **options: Any,
) -> tuple[nn.Module, StoredWeights]:
    """Build a checkpoint model in eval mode, without weights. dtype: as for StoredWeights.

    options: for `from_config` of the Auto class, for example attn_implementation.

    Raises CheckpointError, and ConfigError if the checkpoint does not describe the model.
    """
    with ExitStack() as opened:
        reader = opened.enter_context(Reader(folder, in_part=in_part))
        if ADAPTER_CONFIG_NAME in reader.attached:
            raise ConfigError(
                f"{folder} has an adapter without its base model: `python -m offload.export {folder} OUT` writes it to "
                "OUT as PEFT saves it, for `python -m offload.generate BASE --adapter OUT`, and with --merge the whole "
                "model."
            )
        if reader.meta.get("engine", {}).get("trained_only"):
            raise ConfigError(
                f"{folder} has only trained parameters, such as an adapter's, without the frozen weights. Load it with "
                "engine.load_checkpoint into an engine over the original model, and export it with engine.export."
            )
        if "config.json" not in reader.attached:
            raise ConfigError(
                f"{folder} has no config.json, because its model is not a transformers model, so the model cannot be "
                "built here. Load the checkpoint with engine.load_checkpoint, and export it with engine.export."
            )
        config = folder_config(folder)
        stored = {entry.planes.get("weights") for entry in reader.contents.values()}
        short = next((each for each in (torch.bfloat16, torch.float16) if each in stored), torch.float32)
        with DeferredInit(0):
            main = dtype or short
            model = model_kind(config).auto.from_config(copy.deepcopy(config), dtype=main, **options)
            recompute_buffers(model)
            # No configuration has the ties cut at load, and the rules for names.
            apply_conversions(model, reader.meta["engine"]["conversions"])
        if "generation_config.json" in reader.attached:
            model.generation_config = GenerationConfig.from_pretrained(folder)
        weights = StoredWeights(model, reader, dtype)
        # From here on the weights own the reader.
        opened.pop_all()
    return model.eval(), weights


def rebuild_model(folder: Path, section: ModelSection) -> nn.Module:
    """Rebuild a checkpoint model as for training, without weights, to resume. Raises as `read_stored`."""
    model, weights = read_stored(folder, in_part=True, **attention_options(section))
    fuse_attention(section, model)
    with closing(weights):
        for name, parameter in model.named_parameters():
            # Without values: the engine reads the states from the checkpoint.
            parameter.data = torch.empty(parameter.shape, dtype=weights.built_in(name))
    return model


def export_stored(
    folder: Path, out: Path, dtype: torch.dtype | None = None, shard_bytes: int | None = SHARD_BYTES
) -> ExportResult:
    """Write the model in a checkpoint to `out`, a new Hugging Face folder, with a progress bar.

    dtype: as for StoredWeights. shard_bytes: maximum size per weight file; None for one file. Needs memory for
    one parameter. Raises CheckpointError for a damaged checkpoint, with the name of an intact one if there is one, and
    ConfigError, DiskError, OffloadError as `write_model`.
    """
    with suggesting_alternative(folder):
        model, weights = read_stored(folder, dtype)
        with closing(weights):

            def read(name: str, begin: int, end: int) -> torch.Tensor:
                return weights.source(name).read(begin, end)

            return write_with_progress(model, read, out, dtype, shard_bytes, weights.files())


def write_with_progress(
    model: nn.Module,
    read: ReadValues,
    out: Path,
    dtype: torch.dtype | None,
    shard_bytes: int | None,
    files: Mapping[str, bytes],
) -> ExportResult:
    """Call `write_model` with a progress bar. shard_bytes: maximum size per weight file; None for one file."""
    with work_progress() as tell:
        return write_model(
            model, read, out, dtype=dtype, shard_bytes=shard_bytes or sys.maxsize, files=files, tell=tell
        )


def attached_names(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files of an export under the names that they have in a checkpoint."""
    return {name.replace("/", _IN_FOLDER): content for name, content in files.items()}


def export_files(reader: Reader, others: Collection[str] = ()) -> dict[str, bytes]:
    """Return {file name: content} of an export, from a checkpoint: of the tokenizer, and of other libraries.

    others: attached files of another kind.
    """
    excluded = {*_NOT_EXPORTED, *others}
    names = {name: name.replace(_IN_FOLDER, "/") for name in reader.attached if name not in excluded}
    return {exported: reader.attached[name].read_bytes() for name, exported in names.items()}


def _check(state: Mapping[str, torch.Tensor], reader: Reader) -> None:
    """Raise ConfigError unless checkpoint and model have the same state names and shapes."""
    contents = without_moved(reader.contents)
    # A tied parameter is stored under the first name alone.
    shared_ids = {id(state[name]) for name in contents if name in state}
    wrong = [f"it lacks {name}" for name, value in state.items() if id(value) not in shared_ids]
    for name, entry in contents.items():
        if name not in state:
            wrong.append(f"the model has no {name}")
        elif tuple(state[name].shape) != entry.shape:
            wrong.append(f"{name} is {list(entry.shape)} in the checkpoint and {list(state[name].shape)} in the model")
    if wrong:
        listed = first_names(wrong, 3, ", and {} more", between="; ")
        raise ConfigError(
            f"{reader.path} does not fit the model that transformers {transformers.__version__} builds from its "
            f"config.json: {listed}. Use the version of transformers with which it was trained."
        )
