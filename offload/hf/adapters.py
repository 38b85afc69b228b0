"""PEFT adapters over a frozen base model whose weights are read one parameter at a time."""

from __future__ import annotations

import copy
import importlib.util
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from offload.config.sections import LoraSection
from offload.errors import ConfigError, MissingLibraryError, OffloadError, counted, nearest, shorten
from offload.files.pointers import refuse_pointers
from offload.hf.base_reads import BaseReads
from offload.hf.models import BuiltModel
from offload.hf.residual import as_plain_lora, from_bytes
from offload.hf.sources import Held, Removed, Source
from offload.hf.write import check_place, made_folder

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""File names that PEFT uses."""
_TASKS = {"causal": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM", "reward": "SEQ_CLS"}
"""PEFT task types by model kind. PEFT has no type for masked models."""
_NUM_NAMES = 12  # modules listed in an error
INITIAL = "adapter_initial.safetensors"
"""Checkpoint file beside the adapter state: the products that the adapter initialization subtracted from the base."""
_OF_DATA = ("eva", "corda", "lora_ga")


@dataclass(frozen=True)
class Adaptation:
    """An adapter configuration, its initial weights and their effect on the base."""

    config: Any
    """PeftConfig of the adapter."""
    folder: Path | None = None
    """Folder with the initial adapter weights. None: initialize as the configuration says."""
    removed: Mapping[str, Removed] = field(default_factory=dict)
    """Products already subtracted from base weights, by weight name.

    If set, the initialization does not run again.
    """
    loftq_rounds: int = 0
    """LoftQ rounds for the initial values, run once the storage format of the base is known. 0: no LoftQ."""

    @classmethod
    def of(cls, section: LoraSection, kind: str) -> Adaptation:
        """Return the adaptation for the `lora` settings and a model kind. Raises ConfigError, MissingLibraryError."""
        _need_peft()
        if section.adapter is not None:
            return cls.saved(Path(section.adapter).expanduser(), "lora.adapter")
        if section.config is not None:
            config = _read_config(Path(section.config).expanduser(), "lora.config")
            config.task_type = config.task_type or _TASKS.get(kind)
            return cls(config)
        from peft import LoraConfig

        targets: Any = section.target_modules and list(section.target_modules)
        if not targets and section.target_parameters:
            targets = []
        rounds = _rounds(section)
        init: Any = True if rounds or section.init == "default" else section.init
        return cls(
            LoraConfig(
                r=section.rank,
                lora_alpha=section.alpha,
                lora_dropout=section.dropout,
                target_modules="all-linear" if targets == ["all-linear"] else targets,
                target_parameters=_listed(section.target_parameters),
                modules_to_save=_listed(section.modules_to_save),
                trainable_token_indices=_listed(section.trainable_tokens),
                init_lora_weights=init,
                use_rslora=section.use_rslora,
                use_dora=section.use_dora,
                task_type=_TASKS.get(kind),
            ),
            loftq_rounds=rounds,
        )

    @classmethod
    def saved(cls, folder: Path, said: str) -> Adaptation:
        """Return the adapter in a folder. Errors call the folder `said`. Raises ConfigError, MissingLibraryError."""
        _need_peft()
        if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
            lacking = CONFIG if not (folder / CONFIG).is_file() else WEIGHTS
            what = f"has no {lacking}" if folder.is_dir() else "is no folder"
            raise ConfigError(f"{said} is {folder}, which {what}: give the folder of an adapter as PEFT saves it.")
        config = _read_config(folder / CONFIG, said)
        if (init := str(getattr(config, "init_lora_weights", ""))) in ("corda", "lora_ga") or "niter" in init:
            raise ConfigError(
                f"{said} is {folder}, whose initialization {init} changed the base weights by random numbers or data "
                "that the folder does not record: convert it (path_initial_model_for_weight_conversion of PEFT's "
                "save_pretrained)."
            )
        return cls(config, folder)

    @classmethod
    def stored(cls, checkpoint: Path) -> Adaptation:
        """Return the adapter configuration in a checkpoint. The checkpoint states hold the weights.

        Raises ConfigError, MissingLibraryError.
        """
        _need_peft()
        config, initial = _read_config(checkpoint / CONFIG, "the checkpoint's adapter"), checkpoint / INITIAL
        return cls(config, removed=from_bytes(initial.read_bytes()) if initial.is_file() else {})

    def over(self, built: BuiltModel, seed: int, *, trains: bool = True) -> BuiltModel:
        """Put the adapter over a model with unfilled weights, and freeze the base.

        Base weights needed for initial values (for example for DoRA norms) are read one parameter at a time. `source`
        in the result keeps the base parameter names. If the initialization subtracts a product from a base weight, the
        result provides the reduced weight, and no longer lists it as quantized. `trains=False` freezes the adapter too.

        Raises ConfigError if no module matches, or if the adapter would change the base in any other way.
        """
        config = copy.deepcopy(self.config)
        config.inference_mode = False  # PEFT then reports missing trainable weights
        init = getattr(config, "init_lora_weights", None)
        if init in _OF_DATA and self.folder is None:
            raise ConfigError(
                f"lora.config asks for init_lora_weights {init}, which PEFT computes from rows of data by a separate "
                "function before a run: use pissa or olora, which need only the weights."
            )
        if init in _OF_DATA:
            init = True
        if self.removed or init is True:  # initial values are known, or PEFT's default
            config.init_lora_weights = True
        if trains and (config.is_prompt_learning or config.peft_type == "ADALORA"):
            raise ConfigError(
                f"lora.config asks for {getattr(config.peft_type, 'value', config.peft_type)}: adapters that learn a "
                "prompt, or change their ranks between steps, train in OffloadTrainer, not from the command line."
            )
        offer = _offer(built.model)
        _check_targets(built.model, config, offer)
        with torch.random.fork_rng(devices=[]), BaseReads(built, self.removed) as reads, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about kept ties and empty names
            torch.manual_seed(seed)
            model = _wrapped(built.model, config, offer)
            if init is not None:
                config_of(model).init_lora_weights = init
            if changed := reads.changed:
                raise ConfigError(
                    f"the adapter's initialization changes the base weight {changed[0]} in a way that cannot be "
                    "repeated on the base's files (only pissa and olora can, with weights in --model.path): set "
                    "--lora.init default, gaussian or orthogonal, or leave init_lora_weights out of the file of "
                    "lora.config."
                )
            if self.folder is not None:
                _load(model, self.folder)
                reads.take_back()
                if trains and (changed := reads.changed):
                    raise ConfigError(
                        f"{self.folder} changes the base weight {changed[0]}, and base weights are frozen in training: "
                        "merge the adapter into its base, or set --model.path to the base that it was trained over."
                    )
        if not trains:
            model.requires_grad_(False)
        bases = dict(reads.names_in(model))
        changed_ids = {id(model.get_parameter(name)) for name, base in bases.items() if base in reads.removed}
        return replace(
            built,
            model=model,
            fill=reads.fill,
            source=lambda name: reads.source(bases[name]) if name in bases else None,
            quantized={each: codec for each, codec in built.quantized.items() if id(each) not in changed_ids},
            removed=reads.removed,
        )

    def over_shapes(self, model: nn.Module) -> nn.Module:
        """Put the adapter over a shape-only model on the `meta` device. Raises ConfigError."""
        shapes = BuiltModel(model, lambda _name, _module: None, None)
        if not hasattr(self.config, "init_lora_weights"):
            return self.over(shapes, seed=0).model
        config = copy.deepcopy(self.config)
        config.init_lora_weights = True
        adapted: Any = replace(self, config=config).over(shapes, seed=0).model
        config_of(adapted).init_lora_weights = self.config.init_lora_weights
        return cast(nn.Module, adapted)

    def check_rest(self, tier: str) -> None:
        """Raise ConfigError if the initialization changes base weights and the base is read from its own files."""
        if self._takes_out and tier == "files":
            raise ConfigError(
                f"--lora.init {self.config.init_lora_weights} changes base weights, but --offload.parameters files "
                "reads them unchanged from the model's files: set --offload.parameters cpu or nvme, or --lora.init "
                "default, gaussian or orthogonal."
            )

    def taken_from(self, model: nn.Module) -> set[nn.Parameter]:
        """Return the base weights, in a model on `meta`, from which the adapter initialization subtracts a product."""
        from peft.tuners.lora.layer import LoraLayer

        layers: Iterator[Any] = (each.get_base_layer() for _, each in outermost(model) if isinstance(each, LoraLayer))
        return {layer.weight for layer in layers if self._takes_out and hasattr(layer, "weight")}

    @property
    def _takes_out(self) -> bool:
        return str(getattr(self.config, "init_lora_weights", "")).startswith(("pissa", "olora"))


def config_bytes(model: nn.Module) -> bytes:
    """Return the adapter configuration completed by PEFT, as JSON."""
    return json.dumps(config_of(model).to_dict(), default=_plain, indent=2, sort_keys=True).encode()


def config_of(model: Any) -> Any:
    """Return the PeftConfig of an adapted model."""
    return model.peft_config[model.active_adapter]


def kind_of(model: Any) -> str:
    """Return PEFT's adapter type in lower case, for example "lora"."""
    kind = config_of(model).peft_type
    return str(getattr(kind, "value", kind)).lower()


def outermost(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, module) for each outermost adapter module in the base model."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    last = None
    for name, module in model.get_base_model().named_modules():
        is_inside = last is not None and name.startswith(f"{last}.")
        if not is_inside and isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            last = name
            yield name, module


def summary(model: nn.Module) -> str:
    """Describe the adapter in one line."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in model.parameters())
    kinds = Counter(name.rpartition(".")[2] for name, _ in outermost(model))
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    of = f", over {kinds.total()} modules ({listed})" if kinds else ""
    share = 100 * trained / max(1, total)
    return f"{kind_of(model)}, {trained:,} of {counted(total, 'parameter')} train ({share:.3g}%){of}"


def put_over(
    model: nn.Module, source: Callable[[str], Source | None], folder: Path
) -> tuple[nn.Module, Callable[[str], Source | None]]:
    """Put the adapter from a folder, frozen, over an unfilled model.

    `source` provides the base parameters. Return the same model with adapter modules inserted, and one source for base
    and adapter parameters, by name in the adapted model. Raises ConfigError, MissingLibraryError.
    """
    base = BuiltModel(model, lambda _name, _module: None, None, source=source)
    over = Adaptation.saved(folder, "the adapter").over(base, seed=0, trains=False)
    adapted: Any = over.model
    inner: nn.Module = adapted.get_base_model()
    if not any(True for _ in outermost(adapted)):
        raise ConfigError(
            f"{folder} holds an adapter of kind {kind_of(adapted)}, which has no modules in the model (such as a "
            "learned prompt): generation does not support this kind."
        )
    names = {id(parameter): name for name, parameter in adapted.named_parameters()}
    outer = {name: names[id(parameter)] for name, parameter in inner.named_parameters()}
    values: dict[str, Source] = {name: Held(parameter.detach()) for name, parameter in inner.named_parameters()}
    return inner, lambda name: over.source(outer[name]) or values[name]


def write_adapter(
    model: Any,
    values: Mapping[str, torch.Tensor],
    folder: Path,
    files: Mapping[str, bytes],
    removed: Mapping[str, Removed],
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

    check_place(folder.resolve(), replace)
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    by_id = {id(named[name]): value for name, value in values.items() if name in named}
    # PEFT may ask for a tied parameter under another name than `values` has.
    state = dict(values) | {name: by_id[id(p)] for name, p in named.items() if id(p) in by_id}
    with made_folder(folder.resolve(), replace) as made, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(made, state_dict=state, save_embedding_layers=False)
        wanted = peft.get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False)
        if removed:
            config, wanted = as_plain_lora(model, config_of(model), wanted, removed)
            config.save_pretrained(made)
            save_file({name: value.contiguous() for name, value in wanted.items()}, made / WEIGHTS, {"format": "pt"})
        found = load_file(made / WEIGHTS)
        if found.keys() != wanted.keys() or not all(torch.equal(found[name], wanted[name]) for name in wanted):
            raise OffloadError(
                f"{made / WEIGHTS} differs from what was written when it is read back: use another disk."
            )
        for name, data in files.items():
            (made / name).write_bytes(data)
        return sum(value.nbytes for value in found.values())


def _need_peft() -> None:
    if importlib.util.find_spec("peft") is None:
        raise MissingLibraryError(
            'an adapter needs peft, which is not installed: pip install "offload[peft]", or leave the settings of lora '
            "out to train the whole model."
        )


def _rounds(section: LoraSection) -> int:
    """Return the LoftQ rounds in the settings. Raises ConfigError."""
    if not section.init.startswith("loftq"):
        return 0
    if section.use_dora:
        raise ConfigError(
            "lora.init is loftq and lora.use_dora is true: DoRA's norms come from the unquantized weights, and do not "
            "fit LoftQ's initial values. Leave one of the two out."
        )
    return int(section.init.partition("_")[2] or 1)


def _listed(values: tuple[Any, ...] | None) -> list[Any] | None:
    return None if values is None else list(values)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else getattr(value, "value", str(value))


def _read_config(path: Path, said: str) -> Any:
    """Return the PeftConfig in a file. Raises ConfigError."""
    from peft import PeftConfig

    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        refuse_pointers(path)
        raise ConfigError(f"{said} is {path}, which cannot be read as JSON: {error}.") from None
    if not isinstance(values, dict) or "peft_type" not in values:
        raise ConfigError(
            f"{said} is {path}, which has no peft_type, such as LORA: give an adapter_config.json as PEFT's "
            "save_pretrained writes it."
        )
    if values.get("init_lora_weights") == "loftq":
        raise ConfigError(
            f"{said} is {path}, with init_lora_weights loftq, which PEFT computes with bitsandbytes on a GPU, for "
            "another quantized base: leave the file out, and set --lora.init loftq with --offload.frozen_weights nf4."
        )
    values.pop("runtime_config", None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unknown keys, refused below
            config = PeftConfig.from_peft_type(**values)
    except (ValueError, TypeError, KeyError) as error:
        reason = shorten(" ".join(f"{type(error).__name__}: {error}".split()))
        raise ConfigError(f"{said} is {path}, but PEFT cannot build a PeftConfig from it: {reason}.") from error
    known = {field.name for field in fields(config)} | {"peft_version"}
    if unknown := sorted(values.keys() - known):
        has = f"{type(config).__name__} of peft {version('peft')}"
        raise ConfigError(
            f"{said} is {path}, with {unknown[0]}{nearest(unknown[0], sorted(known))}, but {has} has no such field: "
            "leave it out, or use the version of peft that wrote the file."
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
        found: Any = peft.set_peft_model_state_dict(model, values)
    except (RuntimeError, KeyError) as error:  # shapes differ, or a saved module lacks a key
        reason = shorten(" ".join(str(error).split()))
        raise ConfigError(f"{folder} does not fit this model, so it is an adapter of another one: {reason}") from error
    own = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    lacking = sorted(own.intersection(found.missing_keys))
    if found.unexpected_keys or lacking:
        what = f"has {found.unexpected_keys[0]}" if found.unexpected_keys else f"lacks {lacking[0]}"
        raise ConfigError(f"{folder} does not fit this model, so it is an adapter of another one: it {what}.")


def _wrapped(model: nn.Module, config: Any, offer: str) -> Any:
    """Return a model in PEFT's wrapper. Raises ConfigError; the message lists the adaptable modules (`offer`)."""
    import peft

    try:
        return peft.get_peft_model(model, config)
    except (ImportError, ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        reason = shorten(" ".join(str(error).split())).rstrip(".")
        if isinstance(error, AttributeError) and getattr(config, "target_parameters", None):
            reason += " (only --lora.init default and gaussian initialize such parameters)"
        raise ConfigError(f"PEFT cannot add the adapter to {type(model).__name__}: {reason}. {offer}") from error


def _check_targets(model: nn.Module, config: Any, offer: str) -> None:
    """Raise ConfigError for a configured module name without a matching module."""
    names = [name for name, _ in model.named_modules()]
    given = getattr(config, "target_modules", None)
    wanted = [] if given is None or isinstance(given, str) else list(given)
    wanted += list(getattr(config, "modules_to_save", None) or [])
    for each in sorted(wanted):
        if not any(name == each or name.endswith(f".{each}") for name in names):
            ends = sorted({"all-linear", *(name.rpartition(".")[2] for name in names)})
            raise ConfigError(f"{type(model).__name__} has no module {each!r} to adapt{nearest(each, ends)}. {offer}")


def _offer(model: nn.Module) -> str:
    """List the adaptable modules for an error message."""
    kinds = Counter(
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding | nn.modules.conv._ConvNd) or type(module).__name__ == "Conv1D"
    )
    kinds = Counter({name: n for name, n in kinds.items() if not name.isdecimal()})
    listed = ", ".join(f"{name} ({n})" for name, n in kinds.most_common(_NUM_NAMES))
    return f"Modules for --lora.target_modules: {listed}{', ...' if len(kinds) > _NUM_NAMES else ''}."
