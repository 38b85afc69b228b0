"""Hugging Face folders for the zoo families, written and read by transformers and by offload."""

from __future__ import annotations

from collections.abc import Collection
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.app.hf.read import FolderWeights, read_model
from tests.engine.compare import same_bits
from tests.zoo.families import UNBUILDABLE, families

QUICK = (
    "llama",
    "gpt2",  # Conv1D, buffers
    "mixtral",  # stacked experts
    "qwen2_moe",
    "qwen3_moe",
    "gemma2",  # tied
    "bloom",
    "opt",
    "bart",
    "mamba",
    "rwkv",
    "olmo_hybrid",  # fused convolutions
    "hrm_text",  # fused projections
    "deepseek_v3",  # fp32 parameters, saved buffers
    "codegen",  # position tables depend on the default dtype
    "zamba",  # shared blocks
)
"""Families for the quick run."""


def names(quick: Collection[str] = QUICK) -> list[Any]:
    """Return a pytest parameter for every buildable family. Families outside `quick` are marked slow."""
    import pytest

    assert set(quick) <= set(families())
    return [
        pytest.param(name, marks=[] if name in quick else [pytest.mark.slow])
        for name in families()
        if name not in UNBUILDABLE
    ]


def names_and_dtypes() -> list[Any]:
    """Return a pytest parameter for every buildable family, with fp32 and bf16 in turn."""
    import pytest

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    families = sorted(names(), key=lambda name: bool(name.marks))
    return [
        pytest.param(*name.values, dtype, id=f"{name.values[0]}-{label}", marks=name.marks)
        for name, (label, dtype) in zip(families, cycle(dtypes.items()), strict=False)
    ]


class Auto:
    """A substitute for an Auto class, for families with a shared configuration class."""

    def __init__(self, model_class: Any) -> None:
        self._class = model_class

    def from_config(self, config: Any, **options: Any) -> nn.Module:
        return self._class._from_config(config, **options)


def read(model_class: Any, folder: Path, **options: Any) -> tuple[nn.Module, FolderWeights]:
    """Return the unfilled model for a folder, and the folder weights."""
    return read_model(Auto(model_class), folder, model_class.config_class.from_pretrained(folder), **options)


def fill_by_parts(model: nn.Module, weights: FolderWeights) -> None:
    """Fill the innermost modules first, like an engine with small units, then the remaining parameters."""
    for name, module in model.named_modules():
        if not list(module.children()):
            fill(weights, name, module)
    fill(weights, "", model)


def fill(weights: FolderWeights, name: str, module: nn.Module) -> None:
    """Fill a module, including parameters left for piecewise reads."""
    for parameter, source in weights.fill(name, module).items():
        parameter.data = source.read(0, parameter.numel()).view(parameter.shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor bytes: NaN equals NaN, and 0.0 differs from -0.0."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def differences(wanted: nn.Module, found: nn.Module) -> list[str]:
    """Return the names of parameters and buffers with any differing bit, including non-persistent buffers."""
    pairs = [
        (dict(wanted.named_parameters(remove_duplicate=False)), dict(found.named_parameters(remove_duplicate=False))),
        (dict(wanted.named_buffers()), dict(found.named_buffers())),
    ]
    return [
        name
        for mine, its in pairs
        for name in mine.keys() | its.keys()
        if name not in mine or name not in its or not same_bits(mine[name], its[name])
    ]


def llama(**changes: Any) -> Any:
    """Return a small llama configuration."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 40}
    return LlamaConfig(**{**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, **changes})
