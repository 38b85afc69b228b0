"""Sources of parameter values, read by flat element ranges (a rank reads only its shard). Formats of model folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from offload.amounts import Tell, tell_nobody
from offload.doors import Door
from offload.files.safetensors_file import TensorFile
from offload.layout.codecs import Codec


class Source(Protocol):
    """Values for one parameter, in the model dtype and shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Return a new tensor with flat elements `begin` to `end`. Raises DiskError."""

    def reopen_files(self, reopen: ReopenFile) -> Source:
        """Return the same values from reopened files. Raises ConfigError, DiskError."""


ReopenFile = Callable[[TensorFile], TensorFile]
"""Returns the reopened file."""


@runtime_checkable
class QuantizedSource(Source, Protocol):
    """A parameter stored quantized in files. `read` returns dequantized values."""

    codec: Codec
    """Codec in the files."""

    def records(self, begin: int, end: int) -> torch.Tensor:
        """Return the records for flat elements `begin` to `end`, uint8, flat.

        `begin` must be the start of a record. Raises DiskError.
        """


Fill = Callable[[str, nn.Module], Mapping[nn.Parameter, Source] | None]
"""Called with a name and module just before the parameters are taken. Fills them, or returns sources for some."""
SHARD_BYTES = 5 << 30
"""Largest size of a weight file by default."""

ReadValues = Callable[[str, int, int], torch.Tensor]
"""Returns elements [begin, end) of a flat parameter in any float dtype, from (name, begin, end)."""


class ModelFormat(Protocol):
    """A format of model folders: functions of a module."""

    def write_model(
        self,
        model: nn.Module,
        get: ReadValues,
        folder: Path,
        *,
        dtype: torch.dtype | None = None,
        shard_bytes: int = SHARD_BYTES,
        files: Mapping[str, bytes] | None = None,
        replace: bool = False,
        tell: Tell = tell_nobody,
    ) -> Any:
        """Write a model with the weights from `get`. Raises ConfigError and DiskError."""

    def write_configuration(self, model: nn.Module, folder: Path) -> None:
        """Write the files that describe the model configuration."""

    def conversions(self, model: nn.Module) -> dict[str, Any]:
        """Return the key conversions that an export needs in addition to the model configuration, as JSON."""


MODEL_FORMATS: Door[ModelFormat] = Door("format", {})
FORMAT = "huggingface"
"""Format of exports, and of the configuration in checkpoints."""
