"""Write a model as a Hugging Face folder one parameter at a time, so a model larger than memory can be exported.

Names, shapes and values match `save_pretrained`; transformers' conversions are reversed group by group (`names.py`). A
folder appears complete under the final name, or not at all.
"""

from __future__ import annotations

import copy
import errno
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.dynamic_module_utils import custom_object_save

from offload.amounts import Tally, Tell, tell_nobody
from offload.app.hf.names import CannotStream, Conversion, describe_conversions, drop_tied, plan_writing, stays_fp32
from offload.app.hf.tensor_writer import TensorFileWriter, WrittenFile
from offload.errors import ConfigError, DiskError, OffloadError, counted, format_bytes, shorten, system_code, warn
from offload.files.atomic_folder import clear, replace_folder
from offload.files.extra_files import check_extra_files, write_extra_files
from offload.files.safetensors_file import DTYPES, ReadRange, TensorFile, tensor_reader
from offload.files.sources import SHARD_BYTES, ReadValues
from offload.native.io import because, sync_path
from offload.tiers.host import trim_heap

_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")
_EXPORT_ENTRIES = re.compile(
    r"(adapter_)?model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|.*token.*|.*\.jinja|.*config\.json"
)


@dataclass(frozen=True)
class ExportResult:
    """A written and verified export: folder, weight files, bytes, and an XXH3-128 per tensor."""

    folder: Path
    files: tuple[Path, ...]
    num_bytes: int
    hashes: dict[str, str]

    def describe(self) -> str:
        files = counted(len(self.files), "file")
        return f"{self.folder}: {format_bytes(self.num_bytes)} of weights in {files}, read back and unchanged."


def write_model(
    model: nn.Module,
    get: ReadValues,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    files: Mapping[str, bytes] | None = None,
    replace: bool = False,
    tell: Tell = tell_nobody,
) -> ExportResult:
    """Write `model` as `save_pretrained` would. Parameters need only the right shapes and dtypes.

    - get(name, begin, end): returns elements of a flat parameter, in any float dtype. Called once for each element, in
      model order, with the first name of a tied parameter. Buffers come from the model.
    - dtype: dtype for floating-point parameters, except those transformers keeps in fp32. None: unchanged.
    - shard_bytes: limit for a weight file. A larger tensor gets a separate file.
    - files: further files by name, for example the tokenizer's.
    - replace: replace an earlier export in `folder`, once the new one is complete.
    - tell: receives the write and the check of the files, with their bytes.

    Memory: one piece of a parameter, or one expert row; for a fused group, twice the group. A module outside
    transformers becomes `model.safetensors`, in one or several files, with unchanged names and no configuration.

    Raises ConfigError, DiskError, CannotStream if only `save_pretrained` itself can write the model, and OffloadError
    if the files read back differently.
    """
    if hasattr(model, "peft_config"):
        raise ConfigError(
            f"{type(model).__name__} has a PEFT adapter: a folder of the whole model would have names that neither "
            "PEFT nor transformers loads. model.save_pretrained(folder) writes the adapter; engine.close(restore=True) "
            "and then model.merge_and_unload().save_pretrained(folder) write the merged model."
        )
    _check_shard_bytes(shard_bytes)
    own = tuple(name for name in files or () if _WEIGHTS.fullmatch(str(name)))
    if isinstance(model, transformers.PreTrainedModel):
        own = ("config.json", "generation_config.json", *own)
    check_extra_files(files, "export", own, may_nest=True)
    folder = folder.resolve()  # A link is followed: the data must go to the disk behind it.
    check_export_folder(folder, replace)
    plan = _ExportPlan(model, dtype)
    # The plan is complete by now: an impossible export leaves no folder.
    with export_folder(folder, replace) as temporary:
        write_extra_files(files or {}, temporary)
        write_configuration(model, temporary, plan.main_dtype, _tokenizer_in(temporary))
        written = _write_weights(model, plan, get, temporary, shard_bytes, tell)
        tally = Tally(sum(entry.end - entry.begin for each in written for entry in each.entries.values()))
        tell("checking the written weights", tally)
        for each in written:
            _verify(each, tally)
    return ExportResult(
        folder,
        tuple(folder / each.path.name for each in written),
        sum(each.num_bytes for each in written),
        {name: value for each in written for name, value in each.hashes.items()},
    )


def _check_shard_bytes(given: Any) -> None:
    if isinstance(given, bool) or not isinstance(given, Integral) or int(given) < 1:
        raise ConfigError(f"shard_bytes is {given!r}; it must be a whole number of bytes, at least 1.")


class _ExportPlan:
    """Export plan: conversions, and the tensors in the files."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        state: dict[str, Any] = model.state_dict(keep_vars=True)
        if not all(isinstance(value, torch.Tensor) for value in state.values()):
            raise ConfigError(f"{type(model).__name__} has more than tensors in its state_dict: it cannot be exported.")
        self.main_dtype = dtype or _main_dtype(model)
        is_kept = stays_fp32(model, self.main_dtype)
        first_names: dict[int, str] = {}
        self.values: dict[str, tuple[str, torch.Tensor]] = {}  # state name -> (first name, tensor)
        metas: dict[str, torch.Tensor] = {}
        for name, value in state.items():
            self.values[name] = (first_names.setdefault(id(value), name), value)  # `get` knows first names alone
            target = value.dtype
            if dtype is not None and isinstance(value, nn.Parameter) and target.is_floating_point:
                target = dtype
                if is_kept(name):
                    target = torch.float32
            metas[name] = torch.empty(value.shape, dtype=target, device="meta")
        if isinstance(model, transformers.PreTrainedModel):
            metas = drop_tied(model, metas)
            groups, order = plan_writing(model, metas)
        else:
            metas = {name: meta for name, meta in metas.items() if self.values[name][0] == name}
            groups = [Conversion.identity(name, tuple(meta.shape)) for name, meta in metas.items()]
            order = list(metas)
        self.groups = groups
        dtypes = {name: metas[group.sources[0]].dtype for group in groups for name in group.outputs}
        shapes = {name: shape for group in groups for name, shape in group.outputs.items()}
        self.tensors = {name: torch.empty(shapes[name], dtype=dtypes[name], device="meta") for name in order}
        unknown = set(dtypes.values()) - set(DTYPES.values())
        if unknown:
            raise ConfigError(
                f"{type(model).__name__} has tensors of {unknown.pop()}, a dtype that safetensors does not have."
            )

    def reader(self, source: str, get: ReadValues) -> ReadRange:
        name, tensor = self.values[source]
        if isinstance(tensor, nn.Parameter):
            return partial(get, name)
        return tensor_reader(tensor)


def _main_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of the first floating-point parameter, as transformers does."""
    return next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)


def _write_weights(
    model: nn.Module, plan: _ExportPlan, get: ReadValues, folder: Path, shard_bytes: int, tell: Tell
) -> list[WrittenFile]:
    """Write the weight files, and an index if there are several."""
    # The function in `save_pretrained`, for an equal division into files.
    split = split_torch_state_dict_into_shards(plan.tensors, max_shard_size=shard_bytes)
    layouts = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in plan.tensors.items()}
    tally = Tally(sum(tensor.nbytes for tensor in plan.tensors.values()))
    tell("writing the weights", tally)
    with ExitStack() as stack:
        # All files are open at once: transformers decides about the files, and the model about the order of reads.
        writers = [
            stack.enter_context(TensorFileWriter(folder / file, {name: layouts[name] for name in names}))
            for file, names in split.filename_to_tensors.items()
        ]
        writer_by_name = {name: writer for writer in writers for name in writer.entries}
        for group in plan.groups:
            if group.is_identity:
                (name,) = group.outputs
                writer_by_name[name].write(name, plan.reader(group.sources[0], get))
            else:
                for name, value in _convert_group(group, plan, get):
                    assert tuple(value.shape) == writer_by_name[name].entries[name].shape, (name, value.shape)
                    writer_by_name[name].write(name, tensor_reader(value))
            tally.add(sum(plan.tensors[name].nbytes for name in group.outputs))
            trim_heap()  # malloc would keep most of the freed memory
        written = [writer.finish() for writer in writers]
    if split.is_sharded:
        total = sum(parameter.numel() for parameter in model.parameters())
        index = {"metadata": {"total_parameters": total, **split.metadata}, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    return written


def _convert_group(group: Conversion, plan: _ExportPlan, get: ReadValues) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the output tensors of a group, in the planned dtype or in the dtype from `get`."""
    if group.is_cut:
        (source,) = group.sources
        read, shape = plan.reader(source, get), plan.values[source][1].shape
        width = math.prod(shape[1:])
        for row in range(group.rows):
            yield from group.cut_row(row, read(row * width, (row + 1) * width).view(shape[1:])).items()
    else:
        dtype = plan.tensors[next(iter(group.outputs))].dtype
        shapes = [plan.values[source][1].shape for source in group.sources]
        yield from group.run(
            plan.reader(source, get)(0, math.prod(shape)).view(shape).to(dtype)
            for source, shape in zip(group.sources, shapes, strict=True)
        ).items()


def conversions(model: nn.Module) -> dict[str, Any]:
    """Return `describe_conversions`, or no conversions: an export then uses the default rules of the model family."""
    try:
        return describe_conversions(model)
    except CannotStream:
        return {}


def _tokenizer_in(folder: Path) -> Any:
    """Return the tokenizer in a folder. None: there is none, or it needs code that is never run."""
    if not (folder / "tokenizer_config.json").is_file():
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # any fault in a tokenizer's files
        warn(
            f"the tokenizer in the export cannot be loaded ({type(error).__name__}: {shorten(str(error))}), so "
            "config.json and generation_config.json keep the special tokens of the model."
        )
        return None


def write_configuration(
    model: nn.Module, folder: Path, dtype: torch.dtype | None = None, tokenizer: Any = None
) -> None:
    """Write config.json, generation_config.json and custom model code (`auto_map`) as `save_pretrained` does.

    Files added by an overridden `save_pretrained` are written too. A module outside transformers gets none of these
    files. `dtype`: weight dtype in the configuration; None: the model's. `tokenizer`: the files name the special tokens
    of this tokenizer, as after a training by transformers' Trainer. Generation then ends at the trained end.
    """
    if not isinstance(model, transformers.PreTrainedModel):
        return
    config: Any = copy.deepcopy(model.config)  # the model goes on training with the original
    generation_config: Any = copy.deepcopy(getattr(model, "generation_config", None))
    if tokenizer is not None:
        from transformers.trainer_utils import align_special_tokens  # imports accelerate, which takes seconds

        align_special_tokens(SimpleNamespace(config=config, generation_config=generation_config), tokenizer)
    config.dtype = str(dtype or _main_dtype(model)).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    if type(model).save_pretrained is not transformers.PreTrainedModel.save_pretrained:
        _write_custom_files(model, folder)
    if model._auto_class is not None:
        custom_object_save(model, folder, config=config)
    config.save_pretrained(folder)
    if model.can_generate():
        try:
            generation_config.save_pretrained(folder)
        except ValueError:  # loaded with a warning, refused on save: still export
            generation_config.to_json_file(folder / "generation_config.json")


def _write_custom_files(model: nn.Module, folder: Path) -> None:
    """Run an overridden `save_pretrained` without weights, and keep the files it adds."""
    save: Any = model.save_pretrained
    with TemporaryDirectory(dir=folder) as temporary:
        try:
            save(temporary, state_dict={})
        except Exception as error:
            if system_code(error) in (errno.ENOSPC, errno.EDQUOT):
                raise
            warn(
                f"{type(model).__name__} overrides save_pretrained, and its version fails without weights "
                f"({type(error).__name__}: {error}): {folder} lacks the additional files of that version."
            )
        for path in Path(temporary).iterdir():
            if not path.name.endswith((".safetensors", ".safetensors.index.json")):
                path.replace(folder / path.name)


def _verify(written: WrittenFile, tally: Tally) -> None:
    """Read a file back with safetensors' own reader, and compare every byte by hash. Raises OffloadError."""

    def differs(file: TensorFile, name: str) -> bool:
        digest = file.hash(name)
        tally.add(file.entries[name].end - file.entries[name].begin)
        return digest != written.hashes[name]

    try:
        with safe_open(written.path, framework="pt") as reference, TensorFile(written.path) as file:
            if hasattr(os, "posix_fadvise"):  # the next read comes from the disk
                with written.path.open("rb") as stream:
                    os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            same_header = file.entries == written.entries and set(reference.keys()) == set(written.entries)
            differing = [name for name in written.hashes if same_header and differs(file, name)]
    except (SafetensorError, ConfigError) as error:
        raise OffloadError(f"{written.path} cannot be read back after it was written: {error}") from error
    if differing or not same_header:
        difference = "its header differs"
        if differing:
            difference = f"tensor {differing[0]} differs"
        raise OffloadError(
            f"{written.path} differs from what was written: {difference} when it is read back. The disk or the memory "
            "is faulty; export to another disk."
        )


def check_export_folder(folder: Path, replace: bool) -> None:
    """Raise ConfigError for a mount point, or for existing contents.

    An earlier export is accepted with `replace`.
    """
    if folder.is_mount():
        raise ConfigError(f"{folder} is a mount point and cannot be renamed to; give a folder inside of it.")
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not replace:
        raise ConfigError(f"{folder} exists; give a new name for the export, or remove it.")
    # A folder without weights is somebody's work, and must not be replaced.
    if not folder.is_dir() or not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{folder} exists and is not an earlier export; give a new name for this one.")


@contextmanager
def export_folder(folder: Path, replace: bool) -> Iterator[Path]:
    """Yield a temporary folder, synced to disk and renamed to `folder` at exit.

    On any error the temporary folder is removed. Raises DiskError.
    """
    temporary = folder.with_name(f".{folder.name}.part-{os.getpid()}")
    try:
        if replace:
            clear(folder.parent)  # restores a folder from a killed, half-done replacement
        for leftover in folder.parent.glob(f".{folder.name}.part-*"):
            if not Path(f"/proc/{leftover.name.rpartition('-')[2]}").exists() or leftover == temporary:
                shutil.rmtree(leftover)  # left by a killed export
        temporary.mkdir(parents=True)
        yield temporary
        for path in temporary.rglob("*"):
            sync_path(path)
        # The name comes last: a power cut leaves a complete folder or none.
        sync_path(temporary)
        previous = None
        if replace:
            previous = replace_folder(temporary, folder)
        else:
            temporary.rename(folder)  # rename replaces an empty folder
        sync_path(folder.parent)
        if previous is not None:
            written_names = {path.name for path in folder.iterdir()}
            others = sorted(path for path in previous.iterdir() if path.name not in written_names)
            user_names = [path.name for path in others if path.is_dir() or not _EXPORT_ENTRIES.fullmatch(path.name)]
            if user_names:  # for example notes
                backup = folder.with_name(f"{folder.name}.aside-{secrets.token_hex(4)}")
                previous.rename(backup)
                warn(f"{folder} held {user_names[0]}, which no export has, and was renamed to {backup}.")
            else:
                shutil.rmtree(previous)
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        code = system_code(error)
        if code is None or isinstance(error, OffloadError):
            raise
        raise DiskError(f"{folder} cannot be written{because(code, folder)}", code, folder) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
