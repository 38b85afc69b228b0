"""Check a Hugging Face folder for completeness, as far as possible: safetensors have no checksums."""

from __future__ import annotations

import json
import math
from contextlib import closing
from pathlib import Path

from transformers.utils import ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME

from offload.app.hf.models import folder_config, model_kind
from offload.app.hf.names import CannotStream
from offload.app.hf.read import read_model, weight_files
from offload.errors import ConfigError, counted, format_bytes
from offload.files.safetensors_file import PIECE_BYTES, TensorFile


def verify_folder(folder: Path) -> str:
    """Check the weight files in a folder. Return a summary.

    Checked: headers, sizes, NaN values, the index, and shapes against the configuration. Raises ConfigError or
    DiskError for the first fault.
    """
    if (folder / ADAPTER_CONFIG_NAME).is_file() and not (folder / "config.json").is_file():
        return _verify_adapter(folder)
    file_by_tensor: dict[str, Path] = {}
    num_bytes = 0
    for path in weight_files(folder):
        with TensorFile(path) as file:
            file_by_tensor.update(dict.fromkeys(file.entries, path))
            num_bytes += sum(entry.end - entry.begin for entry in file.entries.values())
            _check_values(file)
    index = folder / "model.safetensors.index.json"
    # Beside a single file no loader reads the index.
    if index.is_file() and not (folder / "model.safetensors").is_file():
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        for name, file_name in listed.items():
            # Loaders believe the index: a tensor in another file would be missing for them.
            if file_by_tensor.get(name) != folder / file_name:
                raise ConfigError(f"{folder / file_name} lacks {name}, although {index.name} places it there.")
        if extra := sorted(file_by_tensor.keys() - listed.keys()):
            raise ConfigError(f"{index} does not list {extra[0]}, which is in {file_by_tensor[extra[0]].name}.")
    num_files = len(set(file_by_tensor.values()))
    summary = f"{counted(len(file_by_tensor), 'tensor')}, {format_bytes(num_bytes)}, in {counted(num_files, 'file')}"
    return f"{summary}; headers, index and sizes agree; {_compare_with_config(folder)}"


def _verify_adapter(folder: Path) -> str:
    """Check an adapter file in PEFT's format and its configuration. Raises ConfigError."""
    try:
        adapter_type = str(json.loads((folder / ADAPTER_CONFIG_NAME).read_text(encoding="utf-8"))["peft_type"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder / ADAPTER_CONFIG_NAME} is not a valid adapter configuration ({type(error).__name__}: {error})."
        ) from None
    if not (folder / ADAPTER_SAFE_WEIGHTS_NAME).is_file():
        raise ConfigError(f"{folder} has no {ADAPTER_SAFE_WEIGHTS_NAME}.")
    with TensorFile(folder / ADAPTER_SAFE_WEIGHTS_NAME) as file:
        num_bytes = sum(entry.end - entry.begin for entry in file.entries.values())
        summary = f"{counted(len(file.entries), 'tensor')}, {format_bytes(num_bytes)}"
        _check_values(file)
    return f"an adapter ({adapter_type.lower()}): {summary}; header and size agree"


def _compare_with_config(folder: Path) -> str:
    """Compare names and shapes with the configured model. Return a summary. Raises ConfigError."""
    config = folder_config(folder)
    architecture = (config.architectures or [""])[0]
    try:
        model, weights = read_model(model_kind(config).auto, folder, config)
    except CannotStream as error:
        return f"not compared with the configuration: {error}"
    with closing(weights):
        name = type(model).__name__
        # Another class has other names, so each tensor would count as missing.
        if architecture and architecture != name:
            return f"not compared with the configuration: {architecture} is not a language model that offload can train"
        if missing := sorted(weights.report.missing):
            raise ConfigError(f"{folder} lacks {len(missing)} of the parameters of {name}, for example {missing[0]}.")
        unused = sorted(weights.report.unexpected)
        note = ""
        if unused:
            note = f", but {len(unused)} tensors are not used, for example {unused[0]}"
        return f"shapes are those of {name}{note}"


def _check_values(file: TensorFile) -> None:
    """Read every tensor in pieces. Raises ConfigError for NaN, and DiskError."""
    for name, entry in file.entries.items():
        numel = math.prod(entry.shape)
        for begin in range(0, numel, PIECE_BYTES):
            # The read itself refuses NaN.
            file.read(name, begin, min(begin + PIECE_BYTES, numel))
