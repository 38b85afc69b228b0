"""Training of a PEFT adapter over a frozen base. Checkpoints have a fingerprint of the base in place of its weights."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import xxhash
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedConfig

from offload.app.config.config import Config
from offload.app.config.sections import ModelSection
from offload.app.hf.companion import companion_at
from offload.app.hf.models import (
    BuiltModel,
    ModelKind,
    fill_all,
    is_found,
    is_pretrained,
    load_model_config,
    locate,
    without_weights,
)
from offload.app.hf.read import weight_files
from offload.app.hf.sources import RemovedProduct
from offload.app.hf.write import write_configuration
from offload.app.training.resident import as_computed, master_of
from offload.app.training.resume import ResumePoint
from offload.app.training.trainable import BuildBase, TrainablePart, buffers_of
from offload.distributed.outcomes import share_failure
from offload.engine.engine import Engine
from offload.engine.units.find import describe_parameters
from offload.errors import ConfigError, OffloadError
from offload.extras.adapters.adapters import (
    CONFIG,
    INITIAL,
    WEIGHTS,
    Adaptation,
    config_bytes,
    describe_adapter,
    keeps_base,
    write_adapter,
)
from offload.extras.adapters.residual import to_bytes
from offload.files.temporary_files import files_written
from offload.optim.adamw import AdamW

_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096
"""Stretches sampled evenly from each weight file, and bytes per stretch."""
_WRITER_KEYS = ("transformers_version", "_name_or_path", "architectures")
"""Configuration keys without influence on the model function."""
_FILE_KEYS = ("dtype", "torch_dtype")
"""Configuration keys about the weight files alone."""


@dataclass(frozen=True)
class BaseMark:
    """Base model fingerprint: from the files, or from configuration and seed for random weights."""

    name: str
    """Base folder, or a description."""
    revision: str | None
    """Commit on the Hugging Face hub. None: not from the hub."""
    mark: str
    """XXH3-128, hexadecimal.

    Input: the configuration and, for each weight file, size, header and 64 evenly spread stretches of 4 KiB. For random
    weights: configuration and seed.
    """

    def check(self, stored_mark: Mapping[str, Any], checkpoint: Path, flag: str = "--model.path") -> None:
        """Raise ConfigError if the checkpoint at `checkpoint` belongs to another base.

        `stored_mark`: the fingerprint in the checkpoint. `flag`: the option named in the error.
        """
        if self.mark != stored_mark["mark"]:
            raise ConfigError(
                f"{checkpoint} holds an adapter trained over {describe_base(stored_mark)} (mark "
                f"{stored_mark['mark'][:12]}), but {self.name} is another model, or has changed since (mark "
                f"{self.mark[:12]}): set {flag} to the weights that the adapter was trained over."
            )


def describe_base(base: Mapping[str, Any]) -> str:
    """Return the base name for messages."""
    if not base["revision"]:
        return base["name"]
    return f"{base['name']}, revision {base['revision']}"


def mark_base(section: ModelSection, config: PreTrainedConfig, seed: int) -> BaseMark:
    """Return the fingerprint for the model in `section`. `seed` applies to random weights. Raises ConfigError."""
    folder = locate(section)
    if folder is None or not is_pretrained(section, folder):
        digest = _hash_config(config.to_diff_dict(), (*_WRITER_KEYS, *_FILE_KEYS))
        digest.update(f"seed {seed}".encode())
        return BaseMark(f"{section.label} with random weights of run.seed {seed}", None, digest.hexdigest())
    # Hash the file, not the parsed configuration: another version of transformers may know other fields.
    digest = _hash_config(json.loads((folder / "config.json").read_text(encoding="utf-8")), _WRITER_KEYS)
    for path in weight_files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(header, size)))
            # Samples: a fingerprint of a 140 GB model by all bytes would take minutes at each start.
            begin, data = 8 + header, max(0, size - 8 - header - _SAMPLE_BYTES)
            for number in range(_NUM_SAMPLES):
                file.seek(begin + data * number // (_NUM_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    whole = folder.resolve()
    revision = None
    if whole.parent.name == "snapshots":  # a download of the hub: the folder is named by the commit
        revision = whole.name
    return BaseMark(str(whole), revision, digest.hexdigest())


def is_base(section: ModelSection, config: Config, model: nn.Module) -> bool:
    """Return whether the model in `section` is the frozen base of the adapted `model`, with the values of the files."""
    own = config.model
    if own.init == "random" or config.lora.restart_every or not keeps_base(model):
        return False
    folder, base = locate(without_weights(section)), locate(without_weights(own))
    return folder is not None and base is not None and folder.is_dir() and folder.resolve() == base.resolve()


def mark_other(config: Config, key: str, name: str, folders: Sequence[Path], *, may_be_gone: bool) -> bytes:
    """Return a mark of the files of the model that the setting `key` names, for the checkpoint file `name`.

    may_be_gone: without these files, return the mark of the newest checkpoint. Raises ConfigError if the checkpoints in
    `folders` have another mark.
    """
    files = [file for folder in folders if (file := folder / name).is_file()]
    with companion_at(config, key) as section:
        if may_be_gone and files and not is_found(section):
            return files[0].read_bytes()
        mark = mark_base(section, load_model_config(section), config.run.seed).mark.encode()
    for file in files:
        if file.read_bytes() != mark:
            raise ConfigError(
                f"{file.parent} is of a run with another {key} than {section.path}, or its files have changed since. "
                f"Set --{key} to the model of that run, or begin a new run in another run.dir."
            )
    return mark


def _hash_config(values: Mapping[str, Any], excluded: Collection[str]) -> xxhash.xxh3_128:
    included = {key: value for key, value in values.items() if key not in excluded}
    return xxhash.xxh3_128(json.dumps(included, sort_keys=True, default=str).encode())


def load_base_config(
    section: ModelSection, stored_mark: Mapping[str, Any], checkpoint: Path, flag: str = "--model.path"
) -> PreTrainedConfig:
    """Return the base configuration for the adapter checkpoint at `checkpoint`.

    Raises ConfigError if the base is not at the path in `section`; the message names both and the option `flag`.
    """
    try:
        return load_model_config(section)
    except ConfigError as error:
        raise ConfigError(
            f"{checkpoint} holds only an adapter, trained over {describe_base(stored_mark)}, and its base is not at "
            f"{section.label}; set {flag} to where the base is now. {error}"
        ) from error


@dataclass(frozen=True)
class AdapterOverBase(TrainablePart):
    """A PEFT adapter over a frozen base. Checkpoints lack the base."""

    adaptation: Adaptation
    base: BaseMark
    seed: int
    """Seed for the adapter's initial values."""
    precision: str
    frozen_weights: str
    """Storage format for the base."""
    parameters: str
    """Memory tier of the base."""
    removed: dict[str, RemovedProduct] = field(default_factory=dict, kw_only=True)
    """Products subtracted from base weights by the initialization, by name. Filled in `prepare`."""
    trained_only: ClassVar[bool] = True
    main_file: ClassVar[str] = CONFIG
    library: ClassVar[str] = "peft"

    @classmethod
    def architecture(cls, start: ResumePoint) -> PreTrainedConfig:
        """Return the architecture of the base, located again for a resumed run: the checkpoint lacks the base."""
        first = next(iter(start.folders), None)
        section = start.config.model
        if first is None:
            return load_model_config(section)
        return load_base_config(section, start.base, first)

    @classmethod
    def of(cls, config: Config, architecture: PreTrainedConfig, kind: ModelKind, start: ResumePoint) -> AdapterOverBase:
        """Return the adapter for the `lora` settings, or from the checkpoint if the run resumes.

        Raises ConfigError, also for another base than in the checkpoint; MissingLibraryError.
        """
        base, first = mark_base(config.model, architecture, config.run.seed), next(iter(start.folders), None)
        if first is None:
            adaptation = Adaptation.of(config.lora, kind.name)
        else:
            base.check(start.base, first)
            adaptation = Adaptation.from_checkpoint(first)
        rests = config.offload.frozen_weights, config.offload.parameters
        return cls(adaptation, base, config.run.seed, str(config.train.precision), *rests)

    def prepare(self, built: BuiltModel) -> BuiltModel:
        self.adaptation.check_tier(self.parameters)
        adapted = self.adaptation.apply_to(built, self.seed)
        self.removed.update(adapted.removed)
        return adapted

    def name(self, model: Any) -> str:
        return type(model.get_base_model()).__name__

    def describe(self, model: Any) -> Iterator[str]:
        yield f"adapter: {describe_adapter(model)}; frozen: {self.base.name}"

    def export_bytes(self, model: nn.Module, weight_bytes: int) -> int:  # noqa: ARG002
        """Return the bytes of trained parameters; the export is fp32."""
        return 4 * self.num_saved(model)

    def base_bytes(self, model: Any) -> int:
        """Return an upper limit for the base bytes (fp32)."""
        return sum(4 * parameter.numel() for parameter in model.parameters())

    def metadata(self) -> Mapping[str, Any]:
        return {"base": asdict(self.base)}

    def files(self, model: Any) -> Mapping[str, bytes]:
        """Return the base and adapter configurations, and the products removed from the base."""
        files = {**files_written(partial(write_configuration, model.get_base_model())), CONFIG: config_bytes(model)}
        if self.removed:
            files[INITIAL] = to_bytes(self.removed)
        return files

    def write(
        self,
        engine: Engine,
        folder: Path,
        files: Mapping[str, bytes],
        build_base: BuildBase,  # noqa: ARG002
    ) -> None:
        values = dict(engine.named_parameters(trained_only=True))
        with share_failure(engine.comm, "export"):
            if engine.rank == 0:
                values = {**buffers_of(engine.model), **values}
                # One rank writes, and PEFT reads some parameters from the model: a read must not exchange with others.
                with engine.answering(values):
                    write_adapter(engine.model, values, folder, files, self.removed, replace=True)

    def load(self, folder: Path, build_base: BuildBase) -> Any:
        """Load the adapter with PEFT over the base that the folder names, with weights as the run used them."""
        from peft import PeftConfig, PeftModel, set_peft_model_state_dict

        name = PeftConfig.from_pretrained(str(folder)).base_model_name_or_path
        base: Any = fill_all(build_base(name or None))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = PeftModel.from_pretrained(base, str(folder), is_trainable=True).eval()
        except Exception as error:
            raise OffloadError(
                f"the exported adapter {folder} cannot be loaded again: {type(error).__name__}: {error}"
            ) from error
        # As in training: the loaded model must have the rounded base of the run.
        infos = describe_parameters(model, AdamW(), self.precision, self.frozen_weights)
        for parameter in model.parameters():
            value = parameter.detach()
            if parameter.requires_grad:  # a module trained as a copy has the base dtype
                value = value.float()
            parameter.data = value
        set_peft_model_state_dict(model, load_file(folder / WEIGHTS))
        # The folder's adapter stands over the original base, and the run's over the reduced one.
        removed_by_id = {
            id(model.get_base_model().get_parameter(name)): each for name, each in self._reduced_weights(model)
        }
        for info, parameter in zip(infos, model.parameters(), strict=True):  # use the values from the run
            removed, value = removed_by_id.get(id(parameter)), parameter.detach()
            if removed is not None:
                value = removed.subtract_from(value)
            master = master_of(info, value).to(torch.float32).reshape(-1)
            value = as_computed(info, master).view(parameter.shape)
            if removed is not None:
                value = (value + removed.product()).to(value.dtype)
            parameter.data = value
        return model

    def _reduced_weights(self, model: Any) -> Iterator[tuple[str, RemovedProduct]]:
        """Yield (name under the adapter, removed product) for reduced weights."""
        names = dict(model.get_base_model().named_parameters())
        for name, each in self.removed.items():
            below = f"{name.rpartition('.')[0]}.base_layer.weight"
            if below in names:  # PEFT wraps the layer
                name = below
            yield name, each
