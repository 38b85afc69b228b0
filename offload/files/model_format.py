"""Formats of model folders, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from offload.doors import Door

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
    ) -> Any:
        """Write a model with the weights from `get`. Raises ConfigError and DiskError."""

    def write_configuration(self, model: nn.Module, folder: Path) -> None:
        """Write the files that describe the model configuration."""

    def conversions(self, model: nn.Module) -> dict[str, Any]:
        """Return the key conversions that an export needs in addition to the model configuration, as JSON."""


MODEL_FORMATS: Door[ModelFormat] = Door("format", {})
FORMAT = "huggingface"
"""Format of exports, and of the configuration in checkpoints."""
