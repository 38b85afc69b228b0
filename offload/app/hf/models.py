"""Build models from a folder, a config.json or a preset.

Initial weights need not all be in memory at once.
"""

from __future__ import annotations

import copy
import logging
import re
import socket
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import huggingface_hub
import torch
import transformers
from huggingface_hub import snapshot_download
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from offload.app.config.presets import PRESETS
from offload.app.config.sections import DOCUMENTS, PYTHON_PREFIX, ModelSection
from offload.app.hf.deferred_init import DeferredInit
from offload.app.hf.model_path import find_model, missing_message, refuse_adapter
from offload.app.hf.names import CannotStream, Shape
from offload.app.hf.quantized import quantization_settings, remove_quantization
from offload.app.hf.read import LoadReport, build_empty, conversion_advice, read_model, replace_parameters, weight_files
from offload.app.hf.sources import RemovedProduct
from offload.distributed.comm import Comm
from offload.engine.units.attention import ATTENTIONS
from offload.errors import ConfigError, OffloadError, counted, first_names, format_bytes, warn
from offload.files.sources import Fill, Source
from offload.layout.codecs import Codec
from offload.tiers.counters import Counters

_NUM_NAMES = 3  # parameters listed in a note


@dataclass(frozen=True)
class BuiltModel:
    """A model ready for the engine, usually with unfilled weights.

    - fill(name, module): called just before the parameters of a module are taken. Fills them, or returns sources to
      read them from. Default: they are filled already, or by somebody else.
    - folder: possible tokenizer folder. None: model from a preset.
    - report: match between the folder and the model. Empty: the weights come from elsewhere.
    - close: called after the last fill.
    - source(name): source of a parameter for repeated reads. None: not in any file.
    - removed: products subtracted from base weights by an adapter initialization, by weight name.
    - quantized: parameters stored quantized in the files, and their codecs. `fill` returns sources with quantized
      records; `source` reads dequantized values.
    """

    model: nn.Module
    fill: Fill = lambda _name, _module: None
    folder: Path | None = None
    report: LoadReport = field(default_factory=LoadReport)
    close: Callable[[], None] = lambda: None
    source: Callable[[str], Source | None] = lambda _name: None
    removed: Mapping[str, RemovedProduct] = field(default_factory=dict)
    quantized: Mapping[nn.Parameter, Codec] = field(default_factory=dict)

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines about the weights for the user."""
        return tuple(_notes(self.report))


def folder_config(folder: Path) -> PreTrainedConfig:
    """Return the model configuration in a folder. Raises ConfigError."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json, so the model class is unknown.")
    return _read_configuration(folder, str(folder / "config.json"))


def _read_configuration(path: Path, label: str) -> PreTrainedConfig:
    """Return the configuration in a folder or file. The error calls the file `label`. Raises ConfigError."""
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)  # the default would ask on the terminal
    except Exception as error:  # OSError, ValueError, KeyError, TypeError, ...: any fault in a config.json
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"{label} belongs to a model with its own Python code (auto_map), which commands never run. Train it "
                "in Python by offload.integrations.transformers.OffloadTrainer, or offload.Engine, with the model from "
                "AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True)."
            ) from error
        raise ConfigError(f"{label} cannot be read: {_shorten_error(error)}") from error


def quiet_transformers() -> None:
    """Keep progress bars and advice from transformers out of the output.

    Our own errors tell the user everything important.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    huggingface_hub.utils.disable_progress_bars()  # type: ignore[attr-defined]
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"transformers\..*")


def load_model_config(section: ModelSection) -> PreTrainedConfig:
    """Read the architecture from the preset or from model.path. Raises ConfigError."""
    path = locate(section)
    if section.path is not None and path is None:
        raise ConfigError(
            f"model.path is {section.path}, so the run trained a model built in Python: pass that model to "
            "offload.Trainer(model=...) again, or set --model.path to a folder."
        )
    if path is None:
        shape = dict(PRESETS[section.preset or "tiny"])
        return AutoConfig.for_model(shape.pop("model_type"), **shape)
    find_model(str(path))
    file = path
    if path.is_dir():
        file = path / "config.json"
    config = _read_configuration(file, f"model.path is {section.path}, whose configuration")
    # An adapter names its base by this. No name leads to random weights.
    config.name_or_path = ""
    if is_pretrained(section, path):
        config.name_or_path = absolute_name(str(section.path))
    return config


def absolute_name(name: str) -> str:
    """Return a model name for any working folder: the absolute path of a folder, or the name on the hub."""
    path = Path(name).expanduser()
    if path.exists():
        return str(path.absolute())
    return name


def locate(section: ModelSection) -> Path | None:
    """Return the folder or config.json at model.path, or the local copy of a hub model, downloaded if needed.

    None: a preset, or a model given in Python.
    """
    if section.path is None or section.path.startswith(PYTHON_PREFIX):
        return None
    path = find_model(section.path)
    if path.exists():  # a folder here comes before a model of this name on the hub
        return path
    # No pickled weights: folders often have them beside the safetensors, half of the download.
    patterns = ["*.json", "*.txt", "*.model", "*.jinja"]
    if section.init != "random":
        patterns.append("*.safetensors")
    is_online = _is_hub_reachable()
    try:
        folder = Path(snapshot_download(section.path, allow_patterns=patterns, local_files_only=not is_online))
    except Exception as error:  # not on the hub, not allowed, not in the local cache, no network, ...
        reason = "there is no earlier download, and the hub cannot be reached"
        if is_online:
            reason = _shorten_error(error)
        raise ConfigError(f"{missing_message(section.path)} As the name of a hub model: {reason}.") from error
    refuse_adapter(folder, section.path)
    return folder


def without_weights(section: ModelSection) -> ModelSection:
    """Return a section for which `locate` finds the same folder, and downloads no weights."""
    return section.model_copy(update={"init": "random"})


def is_found(section: ModelSection) -> bool:
    """Return whether `locate` finds the model."""
    try:
        locate(section)
    except ConfigError:
        return False
    return True


def is_pretrained(section: ModelSection, path: Path | None) -> bool:
    """Return whether weights are read from files. `path`: the result of `locate`."""
    return section.init == "pretrained" or (section.init == "auto" and path is not None and path.is_dir())


def _is_hub_reachable() -> bool:
    """Return whether the hub's host name resolves. Without DNS, a request would only wait for timeouts."""
    try:
        socket.getaddrinfo(urlparse(huggingface_hub.constants.ENDPOINT).hostname, 443)
    except OSError:
        return False
    return not huggingface_hub.constants.HF_HUB_OFFLINE


def _shorten_error(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}{'...' * (len(text) > 400)}"


def max_positions(config: PreTrainedConfig) -> int | None:
    """Return the longest sequence with positions in the architecture. None: no limit stated."""
    text = config.get_text_config()
    for key in ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"):
        value = getattr(text, key, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def rope_limit(config: PreTrainedConfig) -> int | None:
    """Return the most tokens in a batch for which rotary frequencies do not depend on the longest row.

    LongRoPE has other factors for all rows if one row is longer, and dynamic NTK other frequencies. None: no limit.
    """
    text = config.get_text_config()
    ropes = getattr(text, "rope_parameters", None) or {}
    layers = [each for each in ropes.values() if isinstance(each, dict)]  # another rope for each type of layer
    limits = []
    for rope in layers or [ropes]:
        kind, own = rope.get("rope_type"), rope.get("original_max_position_embeddings")
        if kind in ("longrope", "dynamic"):
            limits.append(own if kind == "longrope" and own else max_positions(config))
    return min((limit for limit in limits if limit), default=None)


def vocab_size(config: PreTrainedConfig) -> int:
    return int(config.get_text_config().vocab_size)


def check_sequence_length(limit: int | None, sequence_length: int) -> None:
    """Raise ConfigError for rows longer than the position range of the model. `limit`: None without one."""
    if limit is not None and sequence_length > limit:
        raise ConfigError(
            f"data.sequence_length is {sequence_length}, but the model has positions for only {limit} tokens "
            f"(max_position_embeddings); set --data.sequence_length to {limit} or less."
        )


@dataclass(frozen=True)
class ModelKind:
    """Model kind and the matching Auto class.

    Kinds: "causal", "masked" and "seq2seq" language models, "reward" for a model with a single output, and "embedding"
    for a model of hidden states.
    """

    name: str
    auto: Any


def model_kind(config: PreTrainedConfig) -> ModelKind:
    """Return the kind named by `architectures` in the configuration.

    Without a match: "masked" for families with bidirectional attention, "seq2seq" for an encoder-decoder, "causal" for
    the rest, vision-language models included. Raises ConfigError.
    """
    tables = transformers.models.auto.modeling_auto
    image_text_kind = ModelKind(
        "seq2seq" if config.is_encoder_decoder else "causal", transformers.AutoModelForImageTextToText
    )
    # In order of preference: a family may have classes of several kinds.
    mappings = {
        ModelKind("causal", transformers.AutoModelForCausalLM): tables.MODEL_FOR_CAUSAL_LM_MAPPING,
        ModelKind("masked", transformers.AutoModelForMaskedLM): tables.MODEL_FOR_MASKED_LM_MAPPING,
        ModelKind("seq2seq", transformers.AutoModelForSeq2SeqLM): tables.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        image_text_kind: tables.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    }
    architecture = (config.architectures or [""])[0]
    possible = []
    for candidate, mapping in mappings.items():
        model_class = mapping.get(type(config), None)
        classes = model_class
        if not isinstance(classes, tuple):
            classes = (classes,)
        if any(each is not None and each.__name__ == architecture for each in classes):
            return candidate
        if model_class is not None:
            possible.append(candidate)
    # A model with several labels is a classifier, and no method trains one.
    if architecture and architecture == _scorer_class(config) and config.num_labels == 1:
        return ModelKind("reward", transformers.AutoModelForSequenceClassification)
    if architecture and architecture == _base_class(config):
        return ModelKind("embedding", transformers.AutoModel)
    if config.is_encoder_decoder:
        possible.sort(key=lambda candidate: candidate.name != "seq2seq")
    elif not getattr(config, "is_decoder", False):  # as causal, a family with a masked head would see the target
        possible.sort(key=lambda candidate: candidate.name != "masked")
    if not possible:
        raise ConfigError(
            f"model type {config.model_type} has no language model in transformers {transformers.__version__} "
            f"(causal, masked or sequence-to-sequence); set --model.path to one that has."
        )
    return possible[0]


def embedding_width(config: PreTrainedConfig) -> int:
    """Return the numbers in a last hidden state. 0: unknown."""
    text = config.get_text_config()
    width = getattr(text, "hidden_size", 0)
    return int(getattr(text, "word_embed_proj_dim", width))  # OPT may project its last states


def is_decoder(config: PreTrainedConfig) -> bool:
    """Return whether all language models of the family are causal: a token sees only those before it."""
    tables = transformers.models.auto.modeling_auto
    heads = tables.MODEL_FOR_CAUSAL_LM_MAPPING, tables.MODEL_FOR_MASKED_LM_MAPPING
    causal, masked = (_class_name(mapping, config) for mapping in heads)
    return bool(causal) and not masked and not config.is_encoder_decoder


def to_scorer_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of the configuration for a text-scoring model with one output. Raises ConfigError."""
    scorer = _scorer_class(config)
    if not scorer:
        raise ConfigError(
            f"train.method is reward, and model type {config.model_type} has no class in transformers "
            f"{transformers.__version__} that scores texts (sequence classification); set --model.path to one that has."
        )
    config = copy.deepcopy(config)
    config.architectures = [scorer]
    config.num_labels = 1
    text = config.get_text_config()
    # A scorer finds the last token of a row by the padding.
    text.pad_token_id = text.pad_token_id or 0
    return config


def trained_config(config: PreTrainedConfig, method: str) -> PreTrainedConfig:
    """Return the configuration of the model that `train.method` trains, given the one at `model.path`."""
    if method == "reward":
        return to_scorer_config(config)
    base = _base_class(config)
    if method == "contrastive":
        if not base or config.is_encoder_decoder:
            raise ConfigError(
                f"train.method is contrastive, but model type {config.model_type} has no class in transformers "
                f"{transformers.__version__} with one hidden state per token; set --model.path to one that has."
            )
        return _with_architectures(config, [base])
    if config.architectures == [base]:  # the method decides about the head
        return _with_architectures(config, None)
    return config


def _with_architectures(config: PreTrainedConfig, architectures: list[str] | None) -> PreTrainedConfig:
    config = copy.deepcopy(config)
    config.architectures = architectures
    return config


def _base_class(config: PreTrainedConfig) -> str:
    """Return the class without a head for a model type. Empty string: none, or several."""
    return _class_name(transformers.models.auto.modeling_auto.MODEL_MAPPING, config)


def _scorer_class(config: PreTrainedConfig) -> str:
    """Return the scoring class for a model type. Empty string: none."""
    return _class_name(transformers.models.auto.modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, config)


def _class_name(mapping: Any, config: PreTrainedConfig) -> str:
    return str(getattr(mapping.get(type(config), None), "__name__", ""))


def build_model(
    section: ModelSection,
    *,
    seed: int,
    config: PreTrainedConfig | None = None,
    sequence_length: int = 0,
    grow: bool = False,
    dtype: torch.dtype | None = None,
) -> BuiltModel:
    """Build the model in `section` for rows of `sequence_length` tokens. Raises OffloadError.

    `dtype`: compute dtype. The model equals the one transformers makes in `dtype`, except for the parameters. None: the
    parameter dtype.

    - `init: random`: architecture built by transformers, fp32 parameters, writes to parameters deferred until `fill`.
    - `init: pretrained`: as loaded by transformers, parameters in the dtype of the files, read on `fill`.

    With `grow`, embeddings may have more rows than in the files. If the files lack head parameters, these are
    initialized with a note: a base model folder gets a new head, and a pooler. Other missing parameters of the base
    model raise ConfigError.
    """
    path = locate(section)
    config = config or load_model_config(section)
    pretrained = is_pretrained(section, path)
    folder = path
    if path is not None and not path.is_dir():
        folder = path.parent  # of a config.json
    kind = model_kind(config)
    if kind.name == "seq2seq" and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id or 0  # T5's choice, if the configuration has none
    options = attention_options(section)
    try:
        if pretrained:
            built = _load(kind.auto, section, path, config, dtype=dtype, seed=seed, grow=grow, **options)
        else:
            with DeferredInit(seed) as deferred:
                model = build_empty(kind.auto.from_config, config, dtype or torch.float32, torch.float32, **options)
            built = BuiltModel(model, deferred.bind(model), folder)
    except OffloadError:
        raise
    except (ImportError, ValueError, OSError, KeyError, RuntimeError, TypeError, AttributeError) as error:
        attention = ""
        if section.attention != "auto":
            attention = f" with --model.attention {section.attention}"
        raise ConfigError(f"the model {section.label}{attention} cannot be built: {_shorten_error(error)}") from error
    fuse_attention(section, built.model)
    # Again, now with the modules: in some families a row may use fewer positions than `max_position_embeddings`.
    for name, module in built.model.named_modules():
        # RoBERTa and similar models reserve the first rows of a position table for padding.
        if isinstance(module, nn.Embedding) and "position" in name.split(".")[-1] and module.padding_idx is not None:
            check_sequence_length(module.num_embeddings - module.padding_idx - 1, sequence_length)
    return built


def fill_all(built: BuiltModel) -> nn.Module:
    """Load all weights into memory and return the model."""
    sources = built.fill("", built.model) or {}
    with torch.no_grad():
        for parameter, source in sources.items():
            parameter.copy_(source.read(0, parameter.numel()).view(parameter.shape))
    built.close()
    return built.model


def empty_model(section: ModelSection, config: PreTrainedConfig) -> nn.Module:
    """Return the shape-only model for an architecture: on `meta`, fp32, in train mode. Raises ConfigError."""
    try:
        with torch.device("meta"):
            own = remove_quantization(copy.deepcopy(config))  # from_config writes the dtype to the configuration
            model = model_kind(config).auto.from_config(own, dtype=torch.float32, **attention_options(section))
    except OffloadError:
        raise
    except Exception as error:  # any failure from a constructor that reads values
        raise ConfigError(
            f"the model {section.label} cannot be built on the meta device (without memory): {_shorten_error(error)}"
        ) from error
    fuse_attention(section, model)
    return typing.cast(nn.Module, model.train())


def attention_options(section: ModelSection) -> dict[str, Any]:
    """Return the attention arguments for `from_config` and `from_pretrained`."""
    if section.attention in ("auto", DOCUMENTS):
        return {}
    return {"attn_implementation": section.attention}


def fuse_attention(section: ModelSection, model: nn.Module) -> None:
    """Replace eager attention with sinks, if the section leaves the choice and transformers has no other for it."""
    if section.attention in ("auto", DOCUMENTS) and not getattr(model, "_supports_sdpa", True):
        ATTENTIONS["sinks"].open(model, 1, Comm(), Counters()).divert()


def _load(
    auto: Any,
    section: ModelSection,
    path: Path | None,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype | None,
    seed: int,
    grow: bool,
    **options: Any,
) -> BuiltModel:
    if path is None or path.is_file():
        raise ConfigError(
            f"model.path is {section.path}, a file without weights, but model.init is pretrained; set --model.init "
            "random, or give the folder."
        )
    if not Path(str(section.path)).expanduser().exists() and not any(path.glob("*.safetensors")):
        raise ConfigError(
            f"the hub's model {section.path} has no weights as safetensors. "
            + conversion_advice(str(section.path), str(section.path).rpartition("/")[2])
        )
    try:
        model, weights = read_model(auto, path, config, dtype=dtype, seed=seed, grow=grow, **options)
    except CannotStream as error:
        if quantization_settings(config) is not None:  # transformers would load other modules
            raise ConfigError(
                f"the weights of {path} are quantized, and cannot be read one parameter at a time: {error} Give the "
                "folder of the unquantized model."
            ) from error
        warn(
            f"the weights of {path} are read by transformers, whole into memory "
            f"({format_bytes(sum(file.stat().st_size for file in weight_files(path)))}): {error}"
        )
        return load_whole(auto, path, config, dtype, options)
    _check_complete(model, path, weights.report.missing)
    return BuiltModel(
        model, weights.fill, path, weights.report, weights.close, weights.source, quantized=weights.quantized
    )


def load_whole(
    auto: Any, path: Path, config: PreTrainedConfig, dtype: torch.dtype | None, options: Mapping[str, Any]
) -> BuiltModel:
    """Return the model loaded by transformers, completely in memory, with parameters as in the files.

    `dtype`: compute dtype; None: the dtype of the files. Raises ConfigError.
    """

    def load(dtype: Any) -> Any:
        own = copy.deepcopy(config)
        return auto.from_pretrained(str(path), config=own, dtype=dtype, output_loading_info=True, **options)

    try:
        model, info = load(dtype or "auto")
        if dtype is not None:
            # Parameters as in the files: masters keep all their bits.
            replace_parameters(model, load("auto")[0])
    except Exception as error:  # SafetensorError, OSError, RuntimeError, ...: any fault in a file
        raise ConfigError(f"the weights of {path} cannot be read: {_shorten_error(error)}") from error
    state = model.state_dict()
    missing = {name: tuple(state[name].shape) for name in sorted(info["missing_keys"])}
    _check_complete(model, path, missing)
    unexpected: dict[str, Shape] = dict.fromkeys(sorted(info["unexpected_keys"]), ())
    return BuiltModel(model, folder=path, report=LoadReport({}, [], missing, unexpected))


def _check_complete(model: nn.Module, path: Path, missing: Mapping[str, Any]) -> None:
    """Raise ConfigError if the folder lacks base model parameters."""
    prefix = getattr(model, "base_model_prefix", "")
    has_head = bool(prefix) and hasattr(model, prefix)
    # The folder of a base model has no head, and the model gets a new one. A pooler belongs to the heads: a language
    # model is saved without one.
    in_base = [name for name in missing if not has_head or name.startswith(f"{prefix}.")]
    required = [name for name in in_base if "pooler" not in name.split(".")]
    if required:
        raise ConfigError(
            f"the weights of {path} lack {counted(len(required), 'parameter')} of {type(model).__name__}, for example "
            f"{required[0]}; give a folder with all weights, or set --model.init random."
        )


def _notes(report: LoadReport) -> Iterator[str]:
    """Yield notes about the weights for the user. Ties declared by the configuration are not worth a note."""
    for name, (old, new) in report.grown.items():
        yield (
            f"{name} grows from {old[0]:,} to {new[0]:,} rows, for tokens that were added to the tokenizer; each new "
            "row is the mean of the others."
        )
    for names, description in (
        (report.untied, "not tied, although the configuration ties them: their values in the files differ"),
        (report.missing, "not in the files, and initialised at random"),
        (report.unexpected, "not read: the model has no place for them"),
    ):
        if names:
            yield f"{len(names)} of the weights are {description} ({first_names(names, _NUM_NAMES)})."


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze each parameter with a name matched by one regular expression in `patterns` (`re.search`).

    All names of a tied parameter count. Raises ConfigError for a pattern without a match, or if all parameters would be
    frozen.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matches = [parameter for name, parameter in named if re.search(pattern, name)]
        if not matches:
            raise ConfigError(
                f"optimizer.freeze has {pattern!r}, but none of the {len(named)} parameter names (such as "
                f"{named[len(named) // 2][0]}) matches: fix the expression, or leave it out."
            )
        for parameter in matches:
            parameter.requires_grad_(False)
    # Ask the parameters: of a tied weight only one name may match.
    if patterns and not any(parameter.requires_grad for _, parameter in named):
        raise ConfigError(
            f"optimizer.freeze is {' '.join(patterns)}, which matches all {len(named)} parameter names, so nothing is "
            "left to train. Leave one of the expressions out."
        )


def freeze_for_evaluation(model: nn.Module) -> None:
    """Freeze all parameters but the smallest one: an engine needs a parameter that trains."""
    model.requires_grad_(False)
    min(model.parameters(), key=torch.Tensor.numel).requires_grad_(True)
