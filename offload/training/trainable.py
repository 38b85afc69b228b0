"""The trainable part of a run: a whole model, or an adapter over a frozen base.

Defines checkpoint contents and export.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Protocol

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedConfig

from offload.config.sections import ModelSection
from offload.distributed.outcome import share_failure
from offload.engine.engine import Engine
from offload.engine.units.find import describe_parameters
from offload.errors import ConfigError, OffloadError
from offload.hf import reload
from offload.hf.adapters import CONFIG, INITIAL, WEIGHTS, Adaptation, config_bytes, describe_adapter, write_adapter
from offload.hf.base_mark import BaseMark, load_base_config
from offload.hf.freeze import freeze
from offload.hf.loftq import initialize_loftq
from offload.hf.models import BuiltModel, ModelKind, fill_all, load_model_config, to_scorer_config
from offload.hf.residual import to_bytes
from offload.hf.sources import RemovedProduct
from offload.hf.write import write_configuration
from offload.layout.codecs import EXACT
from offload.layout.planes import DTYPES
from offload.optim.adamw import AdamW
from offload.training.resident import as_computed, master_of
from offload.training.resume import ResumePoint


class TrainablePart(Protocol):
    """The trainable part of a run."""

    trained_only: ClassVar[bool]
    """True if checkpoints lack frozen weights."""
    main_file: ClassVar[str]
    """File present in every export."""
    library: ClassVar[str]
    """Library to load the export with; empty: none."""

    def prepare(self, built: BuiltModel) -> BuiltModel:
        """Return the model prepared for training. It may be unfilled. Raises ConfigError."""

    def name(self, model: Any) -> str:
        """Return the model name for messages."""

    def describe(self, model: Any) -> Iterator[str]:
        """Yield lines about the trainable part for the user."""

    def num_saved(self, model: nn.Module) -> int:
        """Return the trained parameter count in checkpoints."""

    def kept_bytes(self, model: Any, weight_bytes: int) -> int:  # noqa: ARG002
        """Return the bytes of further weights in checkpoints. Raises ConfigError for a model without support.

        `weight_bytes`: bytes per weight on the device.
        """
        return 0

    def export_bytes(self, model: nn.Module, weight_bytes: int) -> int:
        """Return the weight bytes in the export. `weight_bytes`: bytes per weight on the device."""

    def base_bytes(self, model: Any) -> int:  # noqa: ARG002
        """Return an upper limit for the bytes that `load` reads beside the export."""
        return 0

    def check(self, engine: Engine) -> None:  # noqa: ARG002
        """Raise ConfigError for an engine without support."""
        return

    def before_step(self, engine: Engine, step: int) -> Iterable[str]:  # noqa: ARG002
        """Do the work due before a step, counted from 0. Return lines to print. Collective."""
        return ()

    def metadata(self) -> Mapping[str, Any]:
        """Return further checkpoint metadata, as a JSON object."""

    def files(self, model: Any) -> Mapping[str, bytes]:
        """Return further checkpoint files, by name."""

    def write(
        self, engine: Engine, folder: Path, files: Mapping[str, bytes], build_base: Callable[[], BuiltModel]
    ) -> None:
        """Write the export. Replaces an earlier one. Collective. Raises like `Engine.export`.

        `files`: further files by name. `build_base`: builds the initial model again, without an adapter.
        """

    def load(self, folder: Path, build_base: Callable[[], BuiltModel]) -> Any:
        """Load an export completely into memory, in eval mode. Raises OffloadError.

        Trained parameters, or their counterparts, require gradients.
        """


@dataclass(frozen=True)
class WholeModel(TrainablePart):
    """The whole model."""

    model_kind: ModelKind
    """Model kind."""
    frozen: tuple[str, ...] = ()
    """Name patterns for frozen parameters. Checkpoints contain them anyway."""
    trained_only: ClassVar[bool] = False
    main_file: ClassVar[str] = "config.json"
    library: ClassVar[str] = "transformers"

    def prepare(self, built: BuiltModel) -> BuiltModel:
        """Return the model with the frozen parameters set."""
        freeze(built.model, self.frozen)
        return built

    def name(self, model: Any) -> str:
        """Return the class name."""
        return type(model).__name__

    def describe(self, model: Any) -> Iterator[str]:
        """Yield the frozen and trained parameter counts, if any are frozen."""
        if self.frozen:
            num_trained, num_all = self.num_saved(model), sum(each.numel() for each in model.parameters())
            yield f"frozen: {num_all - num_trained:,} parameters (optimizer.freeze); {num_trained:,} train"

    def num_saved(self, model: nn.Module) -> int:
        """Return the trained parameter count."""
        return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

    def kept_bytes(self, model: nn.Module, weight_bytes: int) -> int:
        """Return the bytes of frozen parameters."""
        frozen = (parameter for parameter in model.parameters() if not parameter.requires_grad)
        return sum(each.numel() * max(weight_bytes, each.dtype.itemsize) for each in frozen)

    def export_bytes(self, model: nn.Module, weight_bytes: int) -> int:
        """Return the bytes of all parameters."""
        return weight_bytes * sum(parameter.numel() for parameter in model.parameters())

    def metadata(self) -> Mapping[str, Any]:
        """Return nothing."""
        return {}

    def files(self, model: Any) -> Mapping[str, bytes]:  # noqa: ARG002
        """Return nothing: the engine adds the model configuration."""
        return {}

    def write(
        self,
        engine: Engine,
        folder: Path,
        files: Mapping[str, bytes],
        build_base: Callable[[], BuiltModel],  # noqa: ARG002
    ) -> None:
        """Write a Hugging Face folder."""
        engine.export(folder, files=files, replace=True)

    def load(self, folder: Path, build_base: Callable[[], BuiltModel]) -> Any:  # noqa: ARG002
        """Load the folder with transformers, and freeze the same parameters."""
        model = reload.reload(folder, self.model_kind.auto)
        freeze(model, self.frozen)
        return model


@dataclass(frozen=True)
class CustomModule(WholeModel):
    """A whole module outside transformers."""

    main_file: ClassVar[str] = "model.safetensors"
    library: ClassVar[str] = ""


@dataclass(frozen=True)
class AdapterOverBase(TrainablePart):
    """A PEFT adapter over a frozen base. Checkpoints lack the base."""

    adaptation: Adaptation
    """Adapter configuration and initial weights."""
    base: BaseMark
    """Base fingerprint."""
    seed: int
    """Seed for the adapter's initial values."""
    precision: str
    """Compute precision."""
    frozen_weights: str
    """Storage format for the base."""
    parameters: str
    """Memory tier of the base."""
    removed: dict[str, RemovedProduct] = field(default_factory=dict, kw_only=True)
    """Products subtracted from base weights by the initialization, by name. Filled in `prepare`."""
    trained_only: ClassVar[bool] = True
    main_file: ClassVar[str] = CONFIG
    library: ClassVar[str] = "peft"

    def prepare(self, built: BuiltModel) -> BuiltModel:
        """Put the adapter over the base."""
        self.adaptation.check_tier(self.parameters)
        names = {parameter: name for name, parameter in built.model.named_parameters()}
        adapted = self.adaptation.apply_to(built, self.seed)
        if self.adaptation.loftq_rounds:
            rule, rests = AdamW(), (self.precision, self.frozen_weights)
            infos = describe_parameters(adapted.model, rule, *rests, adapted.quantized)
            codes = {
                parameter: (info.codec, DTYPES[info.compute])
                for info, parameter in zip(infos, adapted.model.parameters(), strict=True)
                if info.codec is not EXACT and parameter not in adapted.quantized
            }
            initialize_loftq(adapted, names, codes, self.adaptation.loftq_rounds)
        self.removed.update(adapted.removed)
        return adapted

    def name(self, model: Any) -> str:
        """Return the base class name."""
        return type(model.get_base_model()).__name__

    def describe(self, model: Any) -> Iterator[str]:
        """Yield the adapter summary and the base name."""
        yield f"adapter: {describe_adapter(model)}; frozen: {self.base.name}"

    def num_saved(self, model: nn.Module) -> int:
        """Return the trained parameter count."""
        return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

    def export_bytes(self, model: nn.Module, weight_bytes: int) -> int:  # noqa: ARG002
        """Return the bytes of trained parameters; the export is fp32."""
        return 4 * self.num_saved(model)

    def base_bytes(self, model: Any) -> int:
        """Return an upper limit for the base bytes (fp32)."""
        return sum(4 * parameter.numel() for parameter in model.parameters())

    def metadata(self) -> Mapping[str, Any]:
        """Return the base fingerprint."""
        return {"base": self.base.to_dict()}

    def files(self, model: Any) -> Mapping[str, bytes]:
        """Return the base and adapter configurations, and the products removed from the base."""
        with TemporaryDirectory() as folder:
            write_configuration(model.get_base_model(), Path(folder))
            configuration = {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}
        initial = {INITIAL: to_bytes(self.removed)} if self.removed else {}
        return {**configuration, CONFIG: config_bytes(model), **initial}

    def write(
        self,
        engine: Engine,
        folder: Path,
        files: Mapping[str, bytes],
        build_base: Callable[[], BuiltModel],  # noqa: ARG002
    ) -> None:
        """Write the adapter in PEFT's format."""
        values = dict(engine.named_parameters(trained_only=True))
        with share_failure(engine.comm, "export"):
            if engine.rank == 0:
                values = {**buffers_of(engine.model), **values}
                with engine.answering(values):
                    write_adapter(engine.model, values, folder, files, self.removed, replace=True)

    def load(self, folder: Path, build_base: Callable[[], BuiltModel]) -> Any:
        """Load the adapter with PEFT over the base, with weights as the run used them."""
        from peft import PeftModel, set_peft_model_state_dict

        base: Any = fill_all(build_base())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = PeftModel.from_pretrained(base, str(folder), is_trainable=True).eval()
        except Exception as error:
            raise OffloadError(
                f"the exported adapter {folder} cannot be loaded again: {type(error).__name__}: {error}"
            ) from error
        infos = describe_parameters(model, AdamW(), self.precision, self.frozen_weights)
        for parameter in model.parameters():  # a module trained as a copy has the base dtype
            parameter.data = parameter.detach().float() if parameter.requires_grad else parameter.detach()
        set_peft_model_state_dict(model, load_file(folder / WEIGHTS))
        removed_by_id = {
            id(model.get_base_model().get_parameter(name)): each for name, each in self._reduced_weights(model)
        }
        for info, parameter in zip(infos, model.parameters(), strict=True):  # use the values from the run
            removed, value = removed_by_id.get(id(parameter)), parameter.detach()
            value = value if removed is None else removed.subtract_from(value)
            master = master_of(info, value).to(torch.float32).reshape(-1)
            value = as_computed(info, master).view(parameter.shape)
            parameter.data = value if removed is None else (value + removed.product()).to(value.dtype)
        return model

    def _reduced_weights(self, model: Any) -> Iterator[tuple[str, RemovedProduct]]:
        """Yield (name under the adapter, removed product) for reduced weights."""
        names = dict(model.get_base_model().named_parameters())
        for name, each in self.removed.items():
            below = f"{name.rpartition('.')[0]}.base_layer.weight"
            yield below if below in names else name, each


def load_architecture(start: ResumePoint) -> PreTrainedConfig:
    """Return the architecture for a new or resumed run. Raises ConfigError.

    A resumed run uses the configuration in the checkpoint, because the original folder may have changed. For an
    adapter, the checkpoint lacks the base, so the base is located again.
    """
    first = next(iter(start.folders), None)
    if first is None:
        architecture = load_model_config(start.config.model)
    elif start.config.adapts:
        architecture = load_base_config(start.config.model, start.base, first)
    else:
        architecture = load_model_config(ModelSection(path=str(first / "config.json")))
    return to_scorer_config(architecture) if start.config.train.method == "reward" else architecture


def refuse_growth(num_tokens: int, num_rows: int) -> None:
    """Raise ConfigError if the tokenizer has more tokens than a frozen embedding has rows."""
    if num_tokens > num_rows:
        raise ConfigError(
            f"the tokenizer has {num_tokens:,} tokens, but the model's embedding has {num_rows:,} rows, frozen beneath "
            "the adapter: resize it first (resize_token_embeddings, then save_pretrained), set --model.path to that "
            "folder and --lora.trainable_tokens to the new tokens, or --lora.modules_to_save to the embedding."
        )


def buffers_of(model: nn.Module) -> dict[str, Any]:
    """Return the persistent buffers in a model's state, on the CPU."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    return {name: value.cpu() for name, value in state.items() if not isinstance(value, nn.Parameter)}
