"""Files of a quantized folder that are not there: tensors by the shapes of a model, selected as transformers does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from offload.app.hf.quantized import PlannedWeight
from offload.files.safetensors_file import TensorEntry, TensorFile

Select = Callable[[PlannedWeight], bool]
"""Tells whether a weight is stored quantized."""


class PlannedFile(TensorFile):
    """Tensors without a file: shapes and dtypes on `meta`, and values of the few tensors that are read for a plan."""

    def __init__(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """`path`: the configuration, for messages."""
        self.path = path
        self._tensors = tensors
        self.entries = {name: TensorEntry(each.dtype, tuple(each.shape), 0, 0) for name, each in tensors.items()}

    def read(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        return self._tensors[name].reshape(-1)[begin:end]

    def close(self) -> None:
        pass


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def unless_skipped(model: nn.Module, skipped: Sequence[str] | None, select: Select) -> Select:
    """Return `select` without the modules that the configuration leaves out.

    `skipped`: names or regular expressions of modules. None: output embeddings, tied modules and the last module.
    """
    kept_fp32 = getattr(model, "_keep_in_fp32_modules", None)
    # transformers' own rules: a plan has the same quantized weights as the files.
    patterns = HfQuantizer.get_modules_to_not_convert(model, None if skipped is None else list(skipped), kept_fp32)
    return lambda weight: (
        select(weight) and all(should_convert_module(name, patterns) for name in (weight.module_name, weight.file_name))
    )


def is_linear(weight: PlannedWeight) -> bool:
    """Return whether the weight is the matrix of a linear layer, not of a class made from it."""
    return weight.key == "weight" and type(weight.module) is nn.Linear


def is_grouped_linear(weight: PlannedWeight) -> bool:
    """Return whether the weight is the matrix of several linear layers beside each other (DeepSeek-V4)."""
    is_grouped = isinstance(weight.module, nn.Linear) and "GroupedLinear" in type(weight.module).__name__
    return weight.key == "weight" and is_grouped


def is_expert(weight: PlannedWeight) -> bool:
    """Return whether the weight is a matrix of an expert, or of all experts of a layer."""
    return weight.module_name.endswith(".experts") and len(weight.shape) > 1 and "bias" not in weight.key


def target_of(weight: PlannedWeight, targets: Iterable[str]) -> str | None:
    """Return the first matching target of compressed-tensors: a name, then `re:` and an expression, then a class.

    None: no match. An expert with its own tensor counts as a linear layer, as in the model that was quantized.
    """
    names, classes = (weight.module_name, weight.file_name), {each.__name__ for each in type(weight.module).__mro__}
    if is_expert(weight) and len(weight.shape) == 2:
        # transformers joins the experts of a layer in one tensor; they were single layers when quantized.
        classes.add("Linear")
    targets = list(targets)
    by_name = (each for each in targets if each in names)
    by_expression = (
        each for each in targets if each.startswith("re:") and any(re.match(each[3:], name) for name in names)
    )
    by_class = (each for each in targets if each in classes)
    return next((each for found in (by_name, by_expression, by_class) for each in found), None)
