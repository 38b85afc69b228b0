"""Write an engine's model in place of another library's own save."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from offload.distributed.outcomes import share_failure
from offload.engine.engine import Engine
from offload.errors import DiskError, OffloadError, format_bytes
from offload.native.io import disk_error

_MAKING = ".offload-export"
_OF_TORCH_SAVE = re.compile("inline_container|iostream error|PytorchStreamWriter")
"""Words of torch.save after a failed write; it names neither the path nor the reason."""


def weights_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the export dtype for a model before the engine takes it.

    float32 (master weights) if all floating-point parameters are float32. None: the engine's compute dtype.
    """
    # A model with some bf16 parameters is a bf16 model, with a few norms kept in fp32.
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if dtypes == {torch.float32}:
        return torch.float32
    return None


def export_into(engine: Engine, folder: Path, dtype: torch.dtype | None) -> None:
    """Write the model as a Hugging Face folder into `folder`, next to existing files.

    Earlier weight files are replaced. Collective; rank 0 writes. Raises like `Engine.export`.
    """
    # Beside the other files, so the moves below stay within a file system.
    making = folder / _MAKING
    with share_write_errors(engine, folder):
        if engine.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(making, ignore_errors=True)
    engine.export(making, dtype)
    with share_write_errors(engine, folder):
        if engine.rank == 0:
            # An earlier save may have had more weight files: a reader of the folder would take them for parts.
            own = {exported.name for exported in making.iterdir()}
            for name in own:
                (making / name).replace(folder / name)
            for pattern in ("model*.safetensors", "model.safetensors.index.json", "pytorch_model*.bin*"):
                for old in folder.glob(pattern):
                    if old.name not in own:
                        old.unlink()
            making.rmdir()


@contextmanager
def complete_or_absent(folder: Path, *, is_writer: bool) -> Iterator[None]:
    """Context for writing a new folder. After a failure the rank that writes (`is_writer`) removes it.

    Raises DiskError for a failed write of another library.
    """
    is_new = not folder.exists()
    try:
        yield
    except BaseException as error:
        found = error
        if isinstance(error, OSError) and not isinstance(error, DiskError):
            found = disk_error("the write", folder, error)
        elif isinstance(error, RuntimeError) and _OF_TORCH_SAVE.search(str(error)):
            free = format_bytes(shutil.disk_usage(folder.parent).free)
            found = DiskError(f"torch.save cannot write to {folder}, with {free} free: {error}.", 0, folder)
        # An existing folder may hold other files.
        if is_new and is_writer:
            shutil.rmtree(folder, ignore_errors=True)
        if found is error:
            raise
        raise found from error


@contextmanager
def share_write_errors(engine: Engine, folder: Path) -> Iterator[None]:
    """Context: a failure on one rank, for example a full disk, raises on all ranks.

    No collective calls inside. Raises DiskError, or any other `share_outcome` error.
    """
    with share_failure(engine.comm, f"writing to {folder}"):
        try:
            yield
        except OSError as error:
            if isinstance(error, DiskError):
                raise
            path = error.filename2 or error.filename
            if not isinstance(path, str):  # an error of a descriptor, or of another library
                path = folder
            raise disk_error("the write", Path(path), error) from error
        except Exception as error:
            if isinstance(error, OffloadError) or engine.world_size == 1:
                raise
            raise OffloadError(f"the write to {folder} failed: {type(error).__name__}: {error}") from error


def state_of(engine: Engine, only: Callable[[str], bool] = lambda _name: True) -> dict[str, torch.Tensor]:
    """Return the model's `state_dict()` in the original dtypes, completely in memory. Collective.

    `only`: filter for parameters, by first name.
    """
    first = {id(parameter): name for name, parameter in engine.model.named_parameters()}
    values = dict(engine.named_parameters(names=filter(only, first.values()), as_given=True))
    state: dict[str, torch.Tensor] = {}
    # Tied weights under each of their names, as in the module's own `state_dict`.
    for name, module in engine.model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        for key, parameter in module._parameters.items():
            if parameter is not None and first[id(parameter)] in values:
                state[prefix + key] = values[first[id(parameter)]]
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                state[prefix + key] = buffer.detach().cpu()
    return state


def adapters_state(engine: Engine) -> dict[str, torch.Tensor]:
    """Return the part of a PEFT model's `state_dict()` saved by PEFT. Collective.

    Contains every adapter, trained or frozen, and base parameters saved with an adapter.
    """
    import peft

    first = {id(parameter): name for name, parameter in engine.model.named_parameters()}
    state: dict[str, Any] = engine.model.state_dict(keep_vars=True)
    # PEFT selects names from a full state. This one takes a single element of memory per parameter.
    places = {name: torch.zeros((), dtype=value.dtype).expand(value.shape) for name, value in state.items()}
    owners = {each.untyped_storage().data_ptr(): first.get(id(state[name])) for name, each in places.items()}
    trained = {name for name, parameter in engine.model.named_parameters() if parameter.requires_grad}
    tensors = state_of(engine, trained.__contains__)
    adapter_names = set[str | None]()
    model = cast(Any, engine.model)
    with engine.answering(tensors), warnings.catch_warnings():  # for prompt tuning, PEFT reads the model itself
        warnings.simplefilter("ignore")
        for adapter in model.peft_config:
            saved = peft.get_peft_model_state_dict(model, dict(places), adapter)
            # PEFT renames the saved tensors: the memory identifies the parameter.
            adapter_names |= {owners.get(value.untyped_storage().data_ptr()) for value in saved.values()}
    return tensors | state_of(engine, (adapter_names - trained).__contains__)
