"""A model from a folder, a config.json or a preset, and initial weights that need not all be in memory at once."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from offload.checkpoint.deferred import DeferredInit
from offload.checkpoint.mapped import MappedWeights
from offload.errors import ConfigError
from offload.presets import PRESETS
from offload.sections import ModelSection

Fill = Callable[[str, nn.Module], None]


@dataclass(frozen=True)
class BuiltModel:
    """A model ready for the engine.

    `fill(name, module)` is to be called just before a module's parameters are taken: it gives them their initial values, or
    lets go of the file pages of those taken before. `folder` is where a tokenizer may be; None for a preset.
    """

    model: nn.Module
    fill: Fill
    folder: str | None

    def fill_all(self) -> None:
        """Give every parameter its initial value, for use without an engine."""
        self.fill("", self.model)


def quiet_transformers() -> None:
    """Keep transformers' progress bars and advice out of our output; what matters to the user is said by our own errors."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module=r"transformers\..*")


def load_model_config(section: ModelSection) -> PreTrainedConfig:
    """Read the architecture: of the preset, or from model.path. Raises ConfigError."""
    if section.path is None:
        shape = dict(PRESETS[section.preset or "tiny"])
        return AutoConfig.for_model(shape.pop("model_type"), **shape)
    path = Path(section.path).expanduser()
    if not path.exists() and (path.is_absolute() or section.path.startswith((".", "~")) or section.path.endswith(".json") or section.path.count("/") != 1):
        raise ConfigError(f"model.path is {section.path}, which does not exist; set --model.path to a model folder or a config.json.")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(f"model.path is {section.path}, a folder without config.json; set --model.path to a Hugging Face model folder.")
    if path.exists():
        _check_json(path / "config.json" if path.is_dir() else path, section.path)
    try:
        return AutoConfig.from_pretrained(str(path) if path.exists() else section.path)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ... for what is wrong in a config.json
        raise ConfigError(f"model.path is {section.path}, whose configuration cannot be read: {_brief(error)}") from error


def _check_json(path: Path, given: str) -> None:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path is {given}, but {path} is not a JSON file: {error}.") from None
    if not isinstance(values, dict) or "model_type" not in values:
        raise ConfigError(f"model.path is {given}, but {path} names no model_type, so the architecture is unknown.")


def _brief(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}{'...' if len(text) > 400 else ''}"


def max_positions(config: PreTrainedConfig) -> int | None:
    """Return the longest sequence that the architecture has positions for; None where it states no limit."""
    text = config.get_text_config()
    for key in ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"):
        value = getattr(text, key, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def vocab_size(config: PreTrainedConfig) -> int:
    return int(config.get_text_config().vocab_size)


def check_sequence_length(config: PreTrainedConfig, sequence_length: int) -> None:
    """Refuse rows longer than the model has positions for. Raises ConfigError."""
    limit = max_positions(config)
    if limit is not None and sequence_length > limit:
        raise ConfigError(
            f"data.sequence_length is {sequence_length}, but the model has positions for {limit} tokens (max_position_embeddings); "
            f"set --data.sequence_length to {limit} or less."
        )


@dataclass(frozen=True)
class Kind:
    """What sort of language model is trained: "causal", "masked" or "seq2seq", and the Auto class that makes it."""

    name: str
    auto: Any


def model_kind(config: PreTrainedConfig) -> Kind:
    """Return what `architectures` says, else the first of causal, masked, seq2seq that the family has. Raises ConfigError."""
    tables = transformers.models.auto.modeling_auto
    kinds = {
        Kind("causal", transformers.AutoModelForCausalLM): tables.MODEL_FOR_CAUSAL_LM_MAPPING,
        Kind("masked", transformers.AutoModelForMaskedLM): tables.MODEL_FOR_MASKED_LM_MAPPING,
        Kind("seq2seq", transformers.AutoModelForSeq2SeqLM): tables.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    }
    wanted = (config.architectures or [""])[0]
    possible = []
    for kind, mapping in kinds.items():
        made = mapping.get(type(config), None)
        classes = made if isinstance(made, tuple) else (made,)
        if any(each is not None and each.__name__ == wanted for each in classes):
            return kind
        if made is not None:
            possible.append(kind)
    if config.is_encoder_decoder:
        possible.sort(key=lambda kind: kind.name != "seq2seq")
    if not possible:
        raise ConfigError(
            f"model type {config.model_type} has no language model in transformers {transformers.__version__} "
            f"(causal, masked or sequence-to-sequence); set --model.path to one that has."
        )
    return possible[0]


def build_model(section: ModelSection, *, seed: int, config: PreTrainedConfig | None = None) -> BuiltModel:
    """Make the model that `section` asks for. Raises ConfigError.

    `init: random`: the architecture as transformers builds it, fp32, with every write to a parameter put off until `fill`.
    `init: pretrained`: transformers' own loading, in the dtype of the files.
    """
    config = config or load_model_config(section)
    folder = section.path if section.path is not None and not section.path.endswith(".json") else None
    if section.path is not None and section.path.endswith(".json"):
        folder = str(Path(section.path).expanduser().parent)
    pretrained = section.init == "pretrained" or (section.init == "auto" and section.path is not None and not section.path.endswith(".json"))
    auto = model_kind(config).auto
    options = {} if section.attention == "auto" else {"attn_implementation": section.attention}
    try:
        if pretrained:
            model = _load(auto, section, config, options)
            return BuiltModel(model, MappedWeights(), folder)
        with DeferredInit(seed) as deferred:
            model = auto.from_config(config, dtype=torch.float32, **options)
    except ConfigError:
        raise
    except (ImportError, ValueError, OSError, KeyError, RuntimeError, TypeError, AttributeError) as error:
        where = section.path or f"preset {section.preset or 'tiny'}"
        raise ConfigError(f"the model {where} cannot be built: {_brief(error)}") from error
    return BuiltModel(model, deferred.bind(model), folder)


def _load(auto: Any, section: ModelSection, config: PreTrainedConfig, options: dict[str, Any]) -> nn.Module:
    path = Path(str(section.path)).expanduser()
    if path.is_file():
        raise ConfigError(f"model.path is {section.path}, a file without weights, but model.init is pretrained; set --model.init random, or give the folder.")
    if path.is_dir() and not _weight_files(path):
        raise ConfigError(
            f"model.path is {section.path}, which has a config.json but no weights (*.safetensors or pytorch_model*.bin); "
            f"set --model.init random to start from random ones."
        )
    try:
        model, info = auto.from_pretrained(
            str(path) if path.exists() else section.path, config=config, dtype="auto", output_loading_info=True, **options
        )
    except Exception as error:  # a damaged file surfaces as SafetensorError, UnpicklingError, OSError, RuntimeError, ...
        raise ConfigError(f"the weights of model.path {section.path} cannot be read: {_brief(error)}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ConfigError(
            f"the weights of model.path {section.path} lack {len(missing)} parameters of {type(model).__name__}, for example {missing[0]}; "
            f"give a folder with all weights, or set --model.init random."
        )
    return model


def _weight_files(folder: Path) -> list[Path]:
    return [file for pattern in ("*.safetensors", "pytorch_model*.bin") for file in folder.glob(pattern)]
