"""Sources for parameter values, read by flat element ranges, so a rank reads only its shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import nn

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
