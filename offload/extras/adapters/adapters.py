"""PEFT adapters over a frozen base model whose weights are read one parameter at a time."""

from __future__ import annotations

import copy
import importlib.util
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from offload.app.config.sections import LoraSection
from offload.app.hf.models import BuiltModel, absolute_name
from offload.app.hf.sources import MemorySource, RemovedProduct
from offload.app.hf.write import check_export_folder, export_folder
from offload.errors import (
    ConfigError,
    MissingLibraryError,
    OffloadError,
    counted,
    first_names,
    nearest,
    shorten,
    unless_no_folder,
)
from offload.extras.adapters.residual import BaseReads, from_bytes, to_plain_lora
from offload.files.extra_files import write_extra_files
from offload.files.pointers import refuse_pointers
from offload.files.sources import Source

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""File names that PEFT uses."""
_TASKS = {"causal": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM", "reward": "SEQ_CLS", "embedding": "FEATURE_EXTRACTION"}
"""PEFT task types by model kind. PEFT has no type for masked models."""
_NUM_NAMES = 12  # modules listed in an error
_HEADS = ("classifier", "score")  # of classification models
INITIAL = "adapter_initial.safetensors"
"""Checkpoint file beside the adapter state: the products that the adapter initialization subtracted from the base."""
_MODES = {"training": False, "_disable_adapters": True}
"""Attributes of a module that computes as in the base."""
_DATA_INITS = ("eva", "corda", "lora_ga")
_NO_LOFTQ = (
    ", which is no longer computed: set --lora.init default, gaussian, orthogonal, olora or pissa, all possible with "
    "--offload.frozen_weights nf4."
)


@dataclass(frozen=True)
class Adaptation:
    """An adapter configuration, its initial weights and their effect on the base."""

    config: Any
    folder: Path | None = None
    """Folder with the initial adapter weights. None: initialize as the configuration says."""
    removed: Mapping[str, RemovedProduct] = field(default_factory=dict)
    """Products already subtracted from base weights, by weight name.

    If set, the initialization does not run again.
    """

    @classmethod
    def of(cls, section: LoraSection, model_kind: str) -> Adaptation:
        """Return the adaptation for the `lora` settings and a model kind. Raises ConfigError, MissingLibraryError."""
        _require_peft()
        if section.adapter is not None:
            return cls.from_folder(Path(section.adapter).expanduser(), "lora.adapter")
        if section.config is not None:
            config = _read_config(Path(section.config).expanduser(), "lora.config")
            config.task_type = config.task_type or _TASKS.get(model_kind)
            return cls(config)
        from peft import LoraConfig

        targets: Any = section.target_modules and list(section.target_modules)
        if not targets and section.target_parameters:
            targets = []  # None would stand for PEFT's default modules
        if targets == ["all-linear"]:
            targets = "all-linear"  # PEFT knows the word alone, not in a list
        init: Any = section.init
        if init == "default":
            init = True
        if section.init.startswith("loftq"):
            raise ConfigError(f"lora.init is {section.init}{_NO_LOFTQ}")
        return cls(
            LoraConfig(
                r=section.rank,
                lora_alpha=section.alpha,
                lora_dropout=section.dropout,
                target_modules=targets,
                target_parameters=_as_list(section.target_parameters),
                modules_to_save=_as_list(section.modules_to_save),
                trainable_token_indices=_as_list(section.trainable_tokens),
                init_lora_weights=init,
                use_rslora=section.use_rslora,
                use_dora=section.use_dora,
                task_type=_TASKS.get(model_kind),
            )
        )

    @classmethod
    def from_folder(cls, folder: Path, label: str) -> Adaptation:
        """Return the adapter in a folder. Errors call the folder `label`. Raises ConfigError, MissingLibraryError."""
        _require_peft()
        if missing := [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]:
            problem = unless_no_folder(folder, f"has no {missing[0]}")
            raise ConfigError(f"{label} is {folder}, which {problem}: give the folder of an adapter as PEFT saves it.")
        config = _read_config(folder / CONFIG, label)
        if (init := str(getattr(config, "init_lora_weights", ""))) in ("corda", "lora_ga") or "niter" in init:
            raise ConfigError(
                f"{label} is {folder}, whose initialization {init} changed the base weights by random numbers or data "
                "that the folder does not record: convert it (path_initial_model_for_weight_conversion of PEFT's "
                "save_pretrained)."
            )
        return cls(config, folder)

    @classmethod
    def from_checkpoint(cls, checkpoint: Path) -> Adaptation:
        """Return the adapter configuration in a checkpoint. The checkpoint states hold the weights.

        Raises ConfigError, MissingLibraryError.
        """
        _require_peft()
        config, initial = _read_config(checkpoint / CONFIG, "the checkpoint's adapter"), checkpoint / INITIAL
        removed = {}
        if initial.is_file():
            removed = from_bytes(initial.read_bytes())
        return cls(config, removed=removed)

    def apply_to(self, built: BuiltModel, seed: int, *, trains: bool = True) -> BuiltModel:
        """Put the adapter over a model with unfilled weights, and freeze the base.

        Base weights needed for initial values (for example for DoRA norms) are read one parameter at a time. `source`
        in the result keeps the base parameter names. If the initialization subtracts a product from a base weight, the
        result provides the reduced weight, and no longer lists it as quantized. `trains=False` freezes the adapter too.

        Raises ConfigError if no module matches, or if the adapter would change the base in any other way.
        """
        config = copy.deepcopy(self.config)
        config.inference_mode = False  # PEFT then reports missing trainable weights
        init = getattr(config, "init_lora_weights", None)
        if init in _DATA_INITS and self.folder is None:
            raise ConfigError(
                f"lora.config asks for init_lora_weights {init}, which PEFT computes from rows of data by a separate "
                "function before a run: use pissa or olora, which need only the weights."
            )
        if init in _DATA_INITS:
            init = True
        if self.removed or init is True:  # initial values are known, or PEFT's default
            config.init_lora_weights = True
        if trains and (config.is_prompt_learning or config.peft_type == "ADALORA"):
            raise ConfigError(
                f"lora.config asks for {getattr(config.peft_type, 'value', config.peft_type)}: adapters that learn a "
                "prompt, or change their ranks between steps, train in OffloadTrainer, not from the command line."
            )
        module_list = _list_modules(built.model)
        _check_targets(built.model, config, module_list)
        # The seed decides the initial values alone: the generators of the caller go on as before.
        with torch.random.fork_rng(devices=[]), BaseReads(built, self.removed) as reads, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about kept ties and empty names
            torch.manual_seed(seed)
            model = _wrap(built.model, config, module_list)
            # The exported adapter lies in another folder, so a relative path would lead nowhere.
            if name := adapter_config(model).base_model_name_or_path:
                adapter_config(model).base_model_name_or_path = absolute_name(name)
            if init is not None:
                adapter_config(model).init_lora_weights = init
            if changed := reads.changed_names:
                raise ConfigError(
                    f"the adapter's initialization changes the base weight {changed[0]} in a way that cannot be "
                    "repeated on the base's files (only pissa and olora can, with weights in --model.path): set "
                    "--lora.init default, gaussian or orthogonal, or leave init_lora_weights out of the file of "
                    "lora.config."
                )
            if self.folder is not None:
                _load(model, self.folder)
                reads.restore_unchanged()
                if trains and (changed := reads.changed_names):
                    raise ConfigError(
                        f"{self.folder} changes the base weight {changed[0]}, and base weights are frozen in training: "
                        "merge the adapter into its base, or set --model.path to the base that it was trained over."
                    )
        if not trains:
            model.requires_grad_(False)
        bases = dict(reads.unchanged_names(model))
        changed_ids = {id(model.get_parameter(name)) for name, base in bases.items() if base in reads.removed}

        def source(name: str) -> Source | None:
            if name not in bases:
                return None
            return reads.source(bases[name])

        return replace(
            built,
            model=model,
            fill=reads.fill,
            source=source,
            quantized={each: codec for each, codec in built.quantized.items() if id(each) not in changed_ids},
            removed=reads.removed,
        )

    def apply_to_shapes(self, model: nn.Module) -> nn.Module:
        """Put the adapter over a shape-only model on the `meta` device. Raises ConfigError."""
        if not hasattr(self.config, "init_lora_weights"):
            return self.apply_to(BuiltModel(model), seed=0).model
        config = copy.deepcopy(self.config)
        config.init_lora_weights = True
        # An initialization by the weights (pissa) would read values, and shapes have none.
        adapted = replace(self, config=config).apply_to(BuiltModel(model), seed=0).model
        adapter_config(adapted).init_lora_weights = self.config.init_lora_weights
        return adapted

    def check_tier(self, tier: str) -> None:
        """Raise ConfigError if the initialization changes base weights and the base is read from its own files."""
        if self._reduces_base and tier == "files":
            raise ConfigError(
                f"--lora.init {self.config.init_lora_weights} changes base weights, but --offload.parameters files "
                "reads them unchanged from the model's files: set --offload.parameters cpu or nvme, or --lora.init "
                "default, gaussian or orthogonal."
            )

    def reduced_weights(self, model: nn.Module) -> set[nn.Parameter]:
        """Return the base weights, in a model on `meta`, from which the adapter initialization subtracts a product."""
        from peft.tuners.lora.layer import LoraLayer

        layers: Iterator[Any] = (
            each.get_base_layer() for _, each in outermost_modules(model) if isinstance(each, LoraLayer)
        )
        return {layer.weight for layer in layers if self._reduces_base and hasattr(layer, "weight")}

    @property
    def _reduces_base(self) -> bool:
        return _reduces_base(self.config)


def keeps_base(model: Any) -> bool:
    """Return whether a model is an adapted one, and computes as its base in the files while the adapter is off."""
    if not hasattr(model, "peft_config"):
        return False
    config = adapter_config(model)
    trains = getattr(config, "bias", "none") != "none"
    return not (trains or _reduces_base(config) or getattr(config, "layer_replication", None))


@contextmanager
def as_base(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context in which modules of an adapted model compute without the adapter and in eval mode, as in the base."""
    # Not by PEFT's `disable_adapter`: it asks all parameters for their state, and changes requires_grad.
    before = [(module, {key: getattr(module, key) for key in _MODES if hasattr(module, key)}) for module in modules]
    try:
        for module, modes in before:
            vars(module).update({key: _MODES[key] for key in modes})
        yield
    finally:
        for module, modes in before:
            vars(module).update(modes)


def _reduces_base(config: Any) -> bool:
    return str(getattr(config, "init_lora_weights", "")).startswith(("pissa", "olora"))


def config_bytes(model: nn.Module) -> bytes:
    """Return the adapter configuration completed by PEFT, as JSON."""

    def to_json(value: Any) -> Any:
        if isinstance(value, set):  # sorted: equal adapters have equal files
            return sorted(value)
        return getattr(value, "value", str(value))

    return json.dumps(adapter_config(model).to_dict(), default=to_json, indent=2, sort_keys=True).encode()


def adapter_config(model: Any) -> Any:
    return model.peft_config[model.active_adapter]


def adapter_type(model: Any) -> str:
    """Return PEFT's adapter type in lower case, for example "lora"."""
    peft_type = adapter_config(model).peft_type
    return str(getattr(peft_type, "value", peft_type)).lower()


def outermost_modules(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, module) for each outermost adapter module in the base model."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    last = None
    for name, module in model.get_base_model().named_modules():
        # PEFT may wrap a wrapper, for example for several parameters of one module.
        is_inside = last is not None and name.startswith(f"{last}.")
        if not is_inside and isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            last = name
            yield name, module


def describe_adapter(model: nn.Module) -> str:
    num_trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in model.parameters())
    counts = Counter(name.rpartition(".")[2] for name, _ in outermost_modules(model))
    names = ", ".join(f"{count} {module_name}" for module_name, count in counts.items())
    modules = ""
    if counts:
        modules = f", over {counts.total()} modules ({names})"
    share = 100 * num_trainable / max(1, total)
    return f"{adapter_type(model)}, {num_trainable:,} of {counted(total, 'parameter')} train ({share:.3g}%){modules}"


def insert_adapter(
    model: nn.Module, source: Callable[[str], Source | None], folder: Path
) -> tuple[nn.Module, Callable[[str], Source | None]]:
    """Put the adapter from a folder, frozen, over an unfilled model.

    `source` provides the base parameters. Return the same model with adapter modules inserted, and one source for base
    and adapter parameters, by name in the adapted model. Raises ConfigError, MissingLibraryError.
    """
    built = Adaptation.from_folder(folder, "the adapter").apply_to(BuiltModel(model, source=source), 0, trains=False)
    adapted: Any = built.model
    inner: nn.Module = adapted.get_base_model()
    if not any(True for _ in outermost_modules(adapted)):
        raise ConfigError(
            f"{folder} holds an adapter of kind {adapter_type(adapted)}, which has no modules in the model (such as a "
            "learned prompt): generation does not support this kind."
        )
    names = {id(parameter): name for name, parameter in adapted.named_parameters()}
    outer = {name: names[id(parameter)] for name, parameter in inner.named_parameters()}
    values: dict[str, Source] = {name: MemorySource(parameter.detach()) for name, parameter in inner.named_parameters()}
    return inner, lambda name: built.source(outer[name]) or values[name]


def write_adapter(
    model: Any,
    values: Mapping[str, torch.Tensor],
    folder: Path,
    files: Mapping[str, bytes],
    removed: Mapping[str, RemovedProduct],
    *,
    replace: bool = False,
) -> int:
    """Write an adapter in PEFT's format. Return the byte count of its weights.

    - values: adapter weights by parameter name in `model`. The values in the model itself are not read.
    - files: further files for the folder, by name.
    - removed: products missing from the base. If there are any, a LoRA with twice the rank is written for the original
      base.
    - replace: replace an earlier export.

    Raises ConfigError, DiskError, and OffloadError if the written file reads back differently.
    """
    import peft

    check_export_folder(folder.resolve(), replace)
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    by_id = {id(named[name]): value for name, value in values.items() if name in named}
    # PEFT may ask for a tied parameter under another name than `values` has.
    state = dict(values) | {name: by_id[id(p)] for name, p in named.items() if id(p) in by_id}
    with export_folder(folder.resolve(), replace) as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Without embeddings: PEFT would ask the hub for the vocabulary of the base.
        model.save_pretrained(temporary, state_dict=state, save_embedding_layers=False)
        expected = peft.get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False)
        if removed:
            config, expected = to_plain_lora(model, adapter_config(model), expected, removed)
            config.save_pretrained(temporary)
            save_file(
                {name: value.contiguous() for name, value in expected.items()}, temporary / WEIGHTS, {"format": "pt"}
            )
        # Read back before the rename: a folder with the final name is verified.
        file_weights = load_file(temporary / WEIGHTS)
        if file_weights.keys() != expected.keys() or not all(
            torch.equal(file_weights[name], expected[name]) for name in expected
        ):
            raise OffloadError(
                f"{temporary / WEIGHTS} differs from what was written when it is read back: use another disk."
            )
        write_extra_files(files, temporary)
        return sum(value.nbytes for value in file_weights.values())


def _require_peft() -> None:
    if importlib.util.find_spec("peft") is None:
        raise MissingLibraryError(
            'an adapter needs peft, which is not installed: pip install "offload[peft]", or leave the settings of lora '
            "out to train the whole model."
        )


def _as_list(values: tuple[Any, ...] | None) -> list[Any] | None:
    if values is None:
        return None
    return list(values)


def _read_config(path: Path, label: str) -> Any:
    """Return the PeftConfig in a file. Raises ConfigError."""
    from peft import PeftConfig

    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        refuse_pointers(path)
        raise ConfigError(f"{label} is {path}, which cannot be read as JSON: {error}.") from None
    if not isinstance(values, dict) or "peft_type" not in values:
        raise ConfigError(
            f"{label} is {path}, which has no peft_type, such as LORA: give an adapter_config.json as PEFT's "
            "save_pretrained writes it."
        )
    if values.get("init_lora_weights") == "loftq":
        raise ConfigError(f"{label} is {path}, with init_lora_weights loftq{_NO_LOFTQ}")
    # Settings of one process (`ephemeral_gpu_offload`), not of the adapter.
    values.pop("runtime_config", None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unknown keys, refused below
            config = PeftConfig.from_peft_type(**values)
    except (ValueError, TypeError, KeyError) as error:
        reason = shorten(" ".join(f"{type(error).__name__}: {error}".split()))
        raise ConfigError(f"{label} is {path}, but PEFT cannot build a PeftConfig from it: {reason}.") from error
    known = {field.name for field in fields(config)} | {"peft_version"}
    if unknown := sorted(values.keys() - known):
        config_class = f"{type(config).__name__} of peft {version('peft')}"
        raise ConfigError(
            f"{label} is {path}, with {unknown[0]}{nearest(unknown[0], sorted(known))}, but {config_class} has no such "
            "field: leave it out, or use the version of peft that wrote the file."
        )
    return config


def _load(model: Any, folder: Path) -> None:
    """Load adapter weights from a folder. Raises ConfigError."""
    import peft

    try:
        values = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        refuse_pointers(folder / WEIGHTS)
        raise ConfigError(f"{folder / WEIGHTS} cannot be read: {shorten(' '.join(str(error).split()))}") from error
    try:
        load_result: Any = peft.set_peft_model_state_dict(model, values)
    except (RuntimeError, KeyError) as error:  # shapes differ, or a saved module lacks a key
        reason = shorten(" ".join(str(error).split()))
        raise ConfigError(f"{folder} does not fit this model, so it is an adapter of another one: {reason}") from error
    # PEFT also lists the base as missing: the file needs only trained weights.
    own = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    missing = sorted(own.intersection(load_result.missing_keys))
    if load_result.unexpected_keys or missing:
        if load_result.unexpected_keys:
            difference = f"has {load_result.unexpected_keys[0]}"
        else:
            difference = f"lacks {missing[0]}"
        raise ConfigError(f"{folder} does not fit this model, so it is an adapter of another one: it {difference}.")


def _wrap(model: nn.Module, config: Any, module_list: str) -> Any:
    """Return a model in PEFT's wrapper. Raises ConfigError; the message lists the adaptable modules (`module_list`)."""
    import peft

    try:
        return peft.get_peft_model(model, config)
    except (ImportError, ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        reason = shorten(" ".join(str(error).split())).rstrip(".")
        if isinstance(error, AttributeError) and getattr(config, "target_parameters", None):
            reason += " (only --lora.init default and gaussian initialize such parameters)"
        raise ConfigError(f"PEFT cannot add the adapter to {type(model).__name__}: {reason}. {module_list}") from error


def _check_targets(model: nn.Module, config: Any, module_list: str) -> None:
    """Raise ConfigError for a configured module name without a matching module."""
    names = [name for name, _ in model.named_modules()]
    target_modules = getattr(config, "target_modules", None) or []
    if isinstance(target_modules, str):  # a regular expression
        target_modules = []
    module_names = [*target_modules, *(getattr(config, "modules_to_save", None) or [])]
    if config.task_type == "SEQ_CLS":  # PEFT adds both names, and a model has one
        module_names = [name for name in module_names if name not in _HEADS]
    for each in sorted(module_names):
        if not any(name == each or name.endswith(f".{each}") for name in names):
            ends = sorted({"all-linear", *(name.rpartition(".")[2] for name in names)})
            raise ConfigError(
                f"{type(model).__name__} has no module {each!r} to adapt{nearest(each, ends)}. {module_list}"
            )


def _list_modules(model: nn.Module) -> str:
    """List the adaptable modules for an error message."""
    counts = Counter(
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding | nn.modules.conv._ConvNd) or type(module).__name__ == "Conv1D"
    )
    counts = Counter({name: n for name, n in counts.items() if not name.isdecimal()})
    listed = first_names((f"{name} ({n})" for name, n in counts.most_common()), _NUM_NAMES)
    return f"Modules for --lora.target_modules: {listed}."
