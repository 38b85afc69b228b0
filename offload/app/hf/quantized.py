"""Quantized model folders: the door of storage formats, and quantization settings in a configuration.

The model is built as if unquantized, with exactly the values transformers dequantizes to.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from offload.doors import Door
from offload.errors import ConfigError
from offload.files.safetensors_file import TensorEntry, TensorFile
from offload.files.sources import ReopenFile
from offload.layout.codecs import QuantizedCodec

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Dtypes of unquantized weights."""


class QuantizedTensor(ABC):
    """A quantized weight assembled from several file tensors. Reads like a file tensor with dequantized values."""

    codec: QuantizedCodec
    entries: Mapping[str, TensorEntry]
    """Weight name -> dtype and shape."""

    @abstractmethod
    def records(self, begin: int, end: int) -> torch.Tensor:
        """Return the records for elements `begin` to `end` in the flat weight, uint8, flat. Raises DiskError."""

    @abstractmethod
    def read(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Return elements `begin` to `end` of the flat weight. Raises DiskError."""

    @abstractmethod
    def reopen_files(self, reopen: ReopenFile) -> QuantizedTensor:
        """Return the same weight with reopened files. `reopen` maps each file to the new one. Raises DiskError."""

    @abstractmethod
    def close(self) -> None:
        """Close the files."""

    def matrix(self) -> torch.Tensor:
        """Return all records, uint8 [n, record_bytes]. Raises DiskError."""
        ((_, entry),) = self.entries.items()
        return self.records(0, math.prod(entry.shape)).view(-1, self.codec.record_bytes)


@dataclass(frozen=True)
class PlannedWeight:
    """A tensor of a model that `save_pretrained` would write, in a folder without files yet."""

    name: str
    """Name in the files."""
    shape: tuple[int, ...]
    """Shape in the files."""
    module_name: str
    """Name of the module in the model."""
    module: nn.Module
    key: str
    """Name of the parameter in the module."""

    @property
    def file_name(self) -> str:
        """Module name by the files, which may differ from the model's: an expert with its own tensors."""
        return self.name.rpartition(".")[0]


class Format(ABC):
    """Storage format for quantized weights in a folder, by `quant_method` in the configuration:

    class Packed(Format):
        title = "packed int3"

        def readers(self, files, folder):
            return {name: PackedTensor(file, name) for name, file in files.items()}

    FORMATS.register("packed", Packed)
    """

    title: str
    """Description in messages."""

    def __init__(self, quantization: Mapping[str, Any]) -> None:
        """`quantization`: settings from the configuration. Raises ConfigError with the unsupported feature."""
        self._quantization = quantization

    @abstractmethod
    def readers(self, files: Mapping[str, TensorFile], folder: Path) -> dict[str, TensorFile | QuantizedTensor]:
        """Return the reader for each weight by name, given the files by tensor name. Raises ConfigError, DiskError."""

    def planned_readers(
        self,
        model: nn.Module,  # noqa: ARG002
        weights: Sequence[PlannedWeight],  # noqa: ARG002
        path: Path,
        dtype: torch.dtype,  # noqa: ARG002
    ) -> dict[str, TensorFile | QuantizedTensor]:
        """Return readers like those of a folder with these weights, whose values are unknown. Raises ConfigError.

        `path`: the configuration, for messages. `dtype`: dtype of unquantized weights.
        """
        raise ConfigError(f"{path} is quantized as {self.title}, which cannot be planned without weight files.")


FORMATS: Door[type[Format]] = Door("quantized format", {})
"""Storage formats by `quant_method` in the configuration."""


def known_formats() -> str:
    """Return the descriptions of all formats, for messages."""
    *titles, last = (format_.title for format_ in FORMATS.values())
    return f"{', '.join(titles)}, and {last}"


def quantization_settings(config: PreTrainedConfig) -> Mapping[str, Any] | None:
    """Return the quantization settings in a configuration. None: not quantized."""
    settings: Any = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    if isinstance(settings, dict):
        return settings
    return settings.to_dict()


def remove_quantization(config: PreTrainedConfig) -> PreTrainedConfig:
    """Remove the quantization settings from a configuration, in place, and return the configuration."""
    # A model with pictures has the settings in the configuration of the text.
    for each in (config, config.get_text_config()):
        if hasattr(each, "quantization_config"):
            del each.quantization_config
    return config


def quantization_method(quantization: Mapping[str, Any]) -> str:
    method = quantization.get("quant_method")
    return str(getattr(method, "value", method) or "quantization_config")


def find_format(folder: Path, quantization: Mapping[str, Any]) -> Format:
    """Return the storage format for a quantized folder. Raises ConfigError for an unknown format."""
    method = quantization_method(quantization)
    try:  # a format names the unsupported feature; the sentence around is common
        if method not in FORMATS:
            raise ConfigError("in an unknown format")
        return FORMATS[method](quantization)
    except ConfigError as error:
        raise unsupported_error(folder, method, str(error)) from None


def unsupported_error(folder: Path, method: str, feature: str) -> ConfigError:
    """Return the error for a folder or a configuration with an unsupported `feature`, such as "as fp4"."""
    return ConfigError(
        f"the model in {folder} is quantized ({method}) {feature}, which is not supported. Supported: "
        f"{known_formats()}. Give the folder of the unquantized model, or let transformers dequantize it once: "
        f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).dequantize(), and save_pretrained."
    )


def open_folder(paths: Iterable[Path], folder: Path, quantization: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the reader for each weight in the files, by name: a TensorFile or a `QuantizedTensor`.

    Raises ConfigError, also for unknown formats, and DiskError.
    """
    files: dict[str, TensorFile] = {}
    for path in paths:
        file = TensorFile(path)
        files |= dict.fromkeys(file.entries, file)
    readers: dict[str, Any] = files
    if quantization is not None:  # some tensors become parts of others: scales have no reader of their own
        readers = find_format(folder, quantization).readers(files, folder)
    for name, file in readers.items():
        dtype = file.entries[name].dtype
        # An fp8 weight alone is codes without their scales.
        if dtype.is_floating_point and dtype not in FLOATS:
            reason = "no scales belong to this tensor"
            if quantization is None:
                reason = "its configuration does not name the format"
            raise ConfigError(
                f"tensor {name} in {file.path} is {str(dtype).removeprefix('torch.')}: the model is quantized, but "
                f"{reason}. Supported: {known_formats()}. Give the folder of the unquantized model."
            )
    return readers


def model_dtype(folder: Path, files: Mapping[str, Any]) -> torch.dtype:
    """Return the model dtype in the folder configuration, independent of the compute dtype.

    Default: the dtype of the first weights. Raises ConfigError.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for each in (config, config.get("text_config") or {}):  # a model with pictures has the dtype below
        dtype = getattr(torch, str(each.get("dtype") or each.get("torch_dtype") or "").removeprefix("torch."), None)
        if isinstance(dtype, torch.dtype):
            return dtype
    return first_dtype(folder, files)


def first_dtype(folder: Path, files: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of the first floating-point weights. Raises ConfigError."""
    dtypes = (file.entries[name].dtype for name, file in files.items())
    if (first := next((dtype for dtype in dtypes if dtype in FLOATS), None)) is None:
        raise ConfigError(f"{folder} has no floating-point weights.")
    return first
