"""What a run trains: the model as a whole, or an adapter over a base that is frozen; what its checkpoints hold, and
what it leaves.
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
from offload.distributed.outcome import as_one
from offload.engine.engine import Engine
from offload.engine.units.find import describe_parameters
from offload.errors import ConfigError, OffloadError
from offload.hf import reload
from offload.hf.adapters import CONFIG, INITIAL, WEIGHTS, Adaptation, config_bytes, summary, write_adapter
from offload.hf.base_mark import BaseMark, base_config
from offload.hf.freeze import freeze
from offload.hf.loftq import begin_at_loss
from offload.hf.models import BuiltModel, Kind, as_scorer, fill_all, load_model_config
from offload.hf.residual import to_bytes
from offload.hf.sources import Removed
from offload.hf.write import write_configuration
from offload.layout.codecs import EXACT
from offload.layout.planes import DTYPES
from offload.optim.adamw import AdamW
from offload.training.resident import as_computed, master_of
from offload.training.resume import ResumePoint


class Trained(Protocol):
    """What a run trains."""

    trained_only: ClassVar[bool]
    """True where its checkpoints lack what is frozen."""
    main_file: ClassVar[str]
    """The file that every folder that it leaves has."""
    library: ClassVar[str]
    """By which that is loaded; empty where none can."""

    def over(self, built: BuiltModel) -> BuiltModel:
        """Return what is trained, of a model that need not be filled. Raises ConfigError."""

    def name(self, model: Any) -> str:
        """Return what the model is called."""

    def told(self, model: Any) -> Iterator[str]:
        """Yield what should be known of it, a line each."""

    def num_saved(self, model: nn.Module) -> int:
        """Return how many parameters its checkpoints hold."""

    def kept_bytes(self, model: Any, weight_bytes: int) -> int:  # noqa: ARG002
        """Return the bytes of what else its checkpoints hold, where the device uses so many bytes a weight. Raises
        ConfigError for a model that cannot be trained so.
        """
        return 0

    def export_bytes(self, model: nn.Module, weight_bytes: int) -> int:
        """Return the bytes of the weights that `write` writes, where the device uses so many bytes a weight."""

    def base_bytes(self, model: Any) -> int:  # noqa: ARG002
        """Return the bytes of what `load` reads beside what was written, at most."""
        return 0

    def check(self, engine: Engine) -> None:  # noqa: ARG002
        """Refuse an engine that it cannot train in. Raises ConfigError."""
        return

    def before_step(self, engine: Engine, step: int) -> Iterable[str]:  # noqa: ARG002
        """Do what is to be done before a step, counted from 0; return what is to be said of it. Collective."""
        return ()

    def marks(self) -> Mapping[str, Any]:
        """Return what its checkpoints say beside where the run stands, for JSON."""

    def files(self, model: Any) -> Mapping[str, bytes]:
        """Return what lies beside the states in its checkpoints, by name."""

    def write(
        self, engine: Engine, folder: Path, files: Mapping[str, bytes], build_base: Callable[[], BuiltModel]
    ) -> None:
        """Write what the run leaves; `files`, by name, go with it, and an earlier export gives way. `build_base`: as of
        `load`. Collective. Raises as `Engine.export`.
        """

    def load(self, folder: Path, build_base: Callable[[], BuiltModel]) -> Any:
        """Return the model of what `write` wrote, in eval mode, all in memory, of which what the run trains requires a
        gradient, or what stands for that. Raises OffloadError.
        """


@dataclass(frozen=True)
class WholeModel(Trained):
    """The model, all of it."""

    kind: Kind
    """What sort of model it is."""
    frozen: tuple[str, ...] = ()
    """Patterns of what of it does not train, and is in its checkpoints all the same."""
    trained_only: ClassVar[bool] = False
    main_file: ClassVar[str] = "config.json"
    library: ClassVar[str] = "transformers"

    def over(self, built: BuiltModel) -> BuiltModel:
        """Return the model, with what does not train frozen."""
        freeze(built.model, self.frozen)
        return built

    def name(self, model: Any) -> str:
        """Return the name of its class."""
        return type(model).__name__

    def told(self, model: Any) -> Iterator[str]:
        """Yield how much of it trains, where that is not all."""
        if self.frozen:
            num_trained, num_all = self.num_saved(model), sum(each.numel() for each in model.parameters())
            yield f"frozen: {num_all - num_trained:,} parameters (optimizer.freeze); {num_trained:,} train"

    def num_saved(self, model: nn.Module) -> int:
        """Return the number of parameters that train."""
        return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

    def kept_bytes(self, model: nn.Module, weight_bytes: int) -> int:
        """Return the bytes of what is frozen."""
        frozen = (parameter for parameter in model.parameters() if not parameter.requires_grad)
        return sum(each.numel() * max(weight_bytes, each.dtype.itemsize) for each in frozen)

    def export_bytes(self, model: nn.Module, weight_bytes: int) -> int:
        """Return the bytes of all parameters."""
        return weight_bytes * sum(parameter.numel() for parameter in model.parameters())

    def marks(self) -> Mapping[str, Any]:
        """Return nothing."""
        return {}

    def files(self, model: Any) -> Mapping[str, bytes]:  # noqa: ARG002
        """Return nothing: the engine adds the model's configuration."""
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
        """Load the folder with transformers, and freeze what does not train."""
        model = reload.reload(folder, self.kind.auto)
        freeze(model, self.frozen)
        return model


@dataclass(frozen=True)
class GivenModule(WholeModel):
    """A module that is not transformers', all of it."""

    main_file: ClassVar[str] = "model.safetensors"
    library: ClassVar[str] = ""


@dataclass(frozen=True)
class AdapterOverBase(Trained):
    """An adapter of PEFT; the base is frozen, and is in no checkpoint."""

    adaptation: Adaptation
    """The adapter."""
    base: BaseMark
    """What tells the base from others."""
    seed: int
    """Of the adapter's first values."""
    precision: str
    """In which the run computes."""
    frozen_weights: str
    """How the base rests."""
    parameters: str
    """The tier on which the base rests."""
    removed: dict[str, Removed] = field(default_factory=dict, kw_only=True)
    """What the adapter's first values have taken out of the base's weights, by their names, once it was put `over`."""
    trained_only: ClassVar[bool] = True
    main_file: ClassVar[str] = CONFIG
    library: ClassVar[str] = "peft"

    def over(self, built: BuiltModel) -> BuiltModel:
        """Put the adapter over the base."""
        self.adaptation.check_rest(self.parameters)
        names = {parameter: name for name, parameter in built.model.named_parameters()}
        adapted = self.adaptation.over(built, self.seed)
        if self.adaptation.loftq_rounds:
            rule, rests = AdamW(), (self.precision, self.frozen_weights)
            infos = describe_parameters(adapted.model, rule, *rests, adapted.quantized)
            codes = {
                parameter: (info.codec, DTYPES[info.compute])
                for info, parameter in zip(infos, adapted.model.parameters(), strict=True)
                if info.codec is not EXACT and parameter not in adapted.quantized
            }
            begin_at_loss(adapted, names, codes, self.adaptation.loftq_rounds)
        self.removed.update(adapted.removed)
        return adapted

    def name(self, model: Any) -> str:
        """Return the name of the base's class."""
        return type(model.get_base_model()).__name__

    def told(self, model: Any) -> Iterator[str]:
        """Yield how much of it trains, and over what."""
        yield f"adapter: {summary(model)}; frozen: {self.base.name}"

    def num_saved(self, model: nn.Module) -> int:
        """Return the number of parameters that train."""
        return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

    def export_bytes(self, model: nn.Module, weight_bytes: int) -> int:  # noqa: ARG002
        """Return the bytes of what trains, which is written in fp32."""
        return 4 * self.num_saved(model)

    def base_bytes(self, model: Any) -> int:
        """Return the bytes of the base, as its files may have it."""
        return sum(4 * parameter.numel() for parameter in model.parameters())

    def marks(self) -> Mapping[str, Any]:
        """Return what tells the base."""
        return {"base": self.base.to_dict()}

    def files(self, model: Any) -> Mapping[str, bytes]:
        """Return the configurations of base and adapter, and what was taken out of the base."""
        with TemporaryDirectory() as folder:
            write_configuration(model.get_base_model(), Path(folder))
            found = {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}
        initial = {INITIAL: to_bytes(self.removed)} if self.removed else {}
        return {**found, CONFIG: config_bytes(model), **initial}

    def write(
        self,
        engine: Engine,
        folder: Path,
        files: Mapping[str, bytes],
        build_base: Callable[[], BuiltModel],  # noqa: ARG002
    ) -> None:
        """Write the adapter as PEFT saves it."""
        values = dict(engine.named_parameters(trained_only=True))
        with as_one(engine.comm, "export"):
            if engine.rank == 0:
                values = {**buffers_of(engine.model), **values}
                with engine.answering(values):
                    write_adapter(engine.model, values, folder, files, self.removed, replace=True)

    def load(self, folder: Path, build_base: Callable[[], BuiltModel]) -> Any:
        """Load the adapter with PEFT over the base, as the run has used that."""
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
        for parameter in model.parameters():  # a module that trains as a copy has the dtype of the base's
            parameter.data = parameter.detach().float() if parameter.requires_grad else parameter.detach()
        set_peft_model_state_dict(model, load_file(folder / WEIGHTS))
        taken = {id(model.get_base_model().get_parameter(name)): each for name, each in self._taken_in(model)}
        for info, parameter in zip(infos, model.parameters(), strict=True):  # with what the run has computed
            removed, value = taken.get(id(parameter)), parameter.detach()
            value = value if removed is None else removed.out_of(value)
            master = master_of(info, value).to(torch.float32).reshape(-1)
            value = as_computed(info, master).view(parameter.shape)
            parameter.data = value if removed is None else (value + removed.product()).to(value.dtype)
        return model

    def _taken_in(self, model: Any) -> Iterator[tuple[str, Removed]]:
        """Yield what was taken out of weights, by their names beneath an adapter."""
        found = dict(model.get_base_model().named_parameters())
        for name, each in self.removed.items():
            below = f"{name.rpartition('.')[0]}.base_layer.weight"
            yield below if below in found else name, each


def begun_architecture(start: ResumePoint) -> PreTrainedConfig:
    """Return the architecture that a run begins or goes on with. Raises ConfigError.

    Gone on with is the model that was trained; the folder that it was made from may be another one by now. Of an
    adapter, which has no more than that, the base is found again.
    """
    first = next(iter(start.folders), None)
    if first is None:
        found = load_model_config(start.config.model)
    elif start.config.adapts:
        found = base_config(start.config.model, start.base, first)
    else:
        found = load_model_config(ModelSection(path=str(first / "config.json")))
    return as_scorer(found) if start.config.train.method == "reward" else found


def refuse_growth(num_tokens: int, num_rows: int) -> None:
    """Raise ConfigError where the tokenizer has tokens that a frozen embedding has no rows for."""
    if num_tokens > num_rows:
        raise ConfigError(
            f"the tokenizer has {num_tokens:,} tokens, and the model's embedding {num_rows:,} rows, which are frozen "
            "beneath an adapter: resize it first (resize_token_embeddings, then save_pretrained), set --model.path to "
            "that folder and --lora.trainable_tokens to the new tokens, or --lora.modules_to_save to the embedding."
        )


def buffers_of(model: nn.Module) -> dict[str, Any]:
    """Return the buffers that belong to a model's state, on the CPU."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    return {name: value.cpu() for name, value in state.items() if not isinstance(value, nn.Parameter)}
