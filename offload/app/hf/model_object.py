"""A model object made in Python instead of a model folder."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from offload.app.config.sections import PYTHON_PREFIX
from offload.app.hf.models import BuiltModel, ModelKind, model_kind
from offload.errors import ConfigError


@dataclass(frozen=True)
class ModelObject:
    """A transformers model, or any module with forward(input_ids, labels) returning a loss.

    Both inputs are int64 [rows, tokens]. Labels are unshifted; -100 marks tokens without loss. The run consumes the
    model.
    """

    model: Any

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise ConfigError(f"the model is a {type(self.model).__name__}; it should be a torch.nn.Module.")
        if hasattr(self.model, "peft_config"):
            raise ConfigError(
                "the model has a PEFT adapter in it already: set model.path to the folder of its base, and describe "
                "the adapter by lora.rank, lora.config or lora.adapter."
            )
        # Before any work: a wrong signature would show only in the first step, after the data are prepared.
        names = inspect.signature(self.model.forward).parameters
        takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in names.values())
        missing = [name for name in ("input_ids", "labels") if name not in names]
        if missing and not takes_all:
            raise ConfigError(
                f"{type(self.model).__name__}.forward does not take {' and '.join(missing)}: a run calls the model "
                "with input_ids and labels, and trains on the returned loss. For other batches use offload.Engine in "
                "your own loop."
            )

    @property
    def path(self) -> str:
        """Placeholder for `model.path` in a configuration."""
        return f"{PYTHON_PREFIX}{type(self.model).__name__}"

    @property
    def is_transformers(self) -> bool:
        """True for a transformers model; only these load again from an export."""
        return isinstance(self.model, PreTrainedModel)

    @property
    def tokenizer(self) -> str | None:
        """Origin of the model, a folder or hub name where a tokenizer may be. None: unknown."""
        return getattr(self.model, "name_or_path", None) or None

    def architecture(self) -> PreTrainedConfig:
        """Return the model configuration.

        For a module outside transformers: a configuration with only the vocabulary size, the row count of the largest
        embedding. Raises ConfigError for a module without an embedding.
        """
        if self.is_transformers:
            return copy.deepcopy(self.model.config)
        tables = [each.num_embeddings for each in self.model.modules() if isinstance(each, nn.Embedding)]
        if not tables:
            raise ConfigError(f"{type(self.model).__name__} has no nn.Embedding, so it cannot read tokens.")
        return PreTrainedConfig(vocab_size=max(tables))

    def resolve_kind(self, architecture: PreTrainedConfig) -> ModelKind:
        if not self.is_transformers:
            return ModelKind("causal", None)
        architecture.architectures = [type(self.model).__name__]  # a configuration may name another class, or none
        return ModelKind(model_kind(architecture).name, type(self.model))

    def build(self) -> BuiltModel:
        """Return the model as a BuiltModel. It is already filled."""
        return BuiltModel(self.model)
