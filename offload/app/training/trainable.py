"""The trainable part of a run: a whole model, or an adapter over a frozen base.

Defines checkpoint contents, export, and the disk space for both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import nn
from transformers import PreTrainedConfig

from offload.app.config.config import Config
from offload.app.config.sections import ModelSection
from offload.app.hf import reload
from offload.app.hf.models import BuiltModel, ModelKind, freeze, load_model_config, trained_config
from offload.app.training.parts import make_update_rule
from offload.app.training.resume import ResumePoint
from offload.doors import Door
from offload.engine.engine import Engine
from offload.errors import ConfigError, DoesNotFitError, counted, format_bytes
from offload.files.directories import free_bytes
from offload.layout.planes import DTYPES


class BuildBase(Protocol):
    """Builds the initial model of a run again, without an adapter."""

    def __call__(self, path: str | None = None, /) -> BuiltModel:
        """Return the unfilled model. `path`: folder or hub name of the weights; None: as configured."""


class TrainablePart(Protocol):
    """The trainable part of a run. Door: a class under a name in `TRAINABLE`."""

    trained_only: ClassVar[bool]
    """True if checkpoints lack frozen weights."""
    main_file: ClassVar[str]
    """File present in every export."""
    library: ClassVar[str]
    """Library to load the export with; empty: none."""

    @classmethod
    def architecture(cls, start: ResumePoint) -> PreTrainedConfig:
        """Return the architecture for a new or resumed run. Raises ConfigError."""

    @classmethod
    def of(cls, config: Config, architecture: PreTrainedConfig, kind: ModelKind, start: ResumePoint) -> TrainablePart:
        """Return the part for a configuration, or from the checkpoint of a resumed run. Raises ConfigError."""

    def prepare(self, built: BuiltModel) -> BuiltModel:
        """Return the model prepared for training. It may be unfilled. Raises ConfigError."""

    def name(self, model: Any) -> str:
        """Return the model name for messages."""

    def describe(self, model: Any) -> Iterator[str]:
        """Yield lines about the trainable part for the user."""

    def num_saved(self, model: nn.Module) -> int:
        """Return the trained parameter count in checkpoints."""
        return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

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
        return {}

    def files(self, model: Any) -> Mapping[str, bytes]:  # noqa: ARG002
        """Return further checkpoint files, by name. The engine adds the model configuration."""
        return {}

    def write(self, engine: Engine, folder: Path, files: Mapping[str, bytes], build_base: BuildBase) -> None:
        """Write the export. Replaces an earlier one. Collective. Raises like `Engine.export`.

        `files`: further files by name. `build_base`: see `BuildBase`.
        """

    def load(self, folder: Path, build_base: BuildBase) -> Any:
        """Load an export completely into memory, in eval mode. Raises OffloadError.

        Trained parameters, or their counterparts, require gradients.
        """


@dataclass(frozen=True)
class WholeModel(TrainablePart):
    """The whole model."""

    model_kind: ModelKind
    frozen: tuple[str, ...] = ()
    """Name patterns for frozen parameters. Checkpoints contain them anyway."""
    reset_every: int = 0
    """Number of steps between resets of the optimizer states. 0: never."""
    trained_only: ClassVar[bool] = False
    main_file: ClassVar[str] = "config.json"
    library: ClassVar[str] = "transformers"

    @classmethod
    def architecture(cls, start: ResumePoint) -> PreTrainedConfig:
        """Return the architecture, from the checkpoint of a resumed run: the original folder may have changed."""
        section = start.config.model
        if start.folders:
            section = ModelSection(path=str(start.folders[0] / "config.json"))
        return load_model_config(section)

    @classmethod
    def of(cls, config: Config, architecture: PreTrainedConfig, kind: ModelKind, start: ResumePoint) -> WholeModel:  # noqa: ARG003
        whole_class = WholeModel
        if kind.auto is None:
            whole_class = CustomModule
        return whole_class(kind, config.optimizer.freeze, config.optimizer.reset_every)

    def prepare(self, built: BuiltModel) -> BuiltModel:
        freeze(built.model, self.frozen)
        return built

    def name(self, model: Any) -> str:
        return type(model).__name__

    def describe(self, model: Any) -> Iterator[str]:
        """Yield the frozen and trained parameter counts, if any are frozen."""
        if self.frozen:
            num_trained, num_all = self.num_saved(model), sum(each.numel() for each in model.parameters())
            yield f"frozen: {num_all - num_trained:,} parameters (optimizer.freeze); {num_trained:,} train"

    def kept_bytes(self, model: nn.Module, weight_bytes: int) -> int:
        """Return the bytes of frozen parameters."""
        frozen = (parameter for parameter in model.parameters() if not parameter.requires_grad)
        return sum(each.numel() * max(weight_bytes, each.dtype.itemsize) for each in frozen)

    def export_bytes(self, model: nn.Module, weight_bytes: int) -> int:
        return weight_bytes * sum(parameter.numel() for parameter in model.parameters())

    def before_step(self, engine: Engine, step: int) -> Iterator[str]:
        """Reset the optimizer states before each step with a number (from 0) divisible by `reset_every`, except step 0.

        Momentum reset, Glentis et al., arXiv:2505.22922. As in the authors' code (Stable-SPAM), all moments become zero
        and the update count starts again, so the first update after a reset is corrected like the first one of a run.
        A checkpoint at this step contains the state before the reset; a resumed run resets first.
        """
        if self.reset_every and step and not step % self.reset_every:
            parameters = engine.model.named_parameters()
            # Without states a parameter begins as in the first step.
            engine.load_moments({name: {} for name, parameter in parameters if parameter.requires_grad})
            yield f"step {step}  the optimizer states are reset"

    def write(
        self,
        engine: Engine,
        folder: Path,
        files: Mapping[str, bytes],
        build_base: BuildBase,  # noqa: ARG002
    ) -> None:
        engine.export(folder, files=files, replace=True)

    def load(self, folder: Path, build_base: BuildBase) -> Any:  # noqa: ARG002
        """Load the folder with transformers, and freeze the same parameters."""
        # The check gives trained weights their link format, and frozen ones have none.
        model = reload.reload(folder, self.model_kind.auto)
        freeze(model, self.frozen)
        return model


@dataclass(frozen=True)
class CustomModule(WholeModel):
    """A whole module outside transformers."""

    main_file: ClassVar[str] = "model.safetensors"
    library: ClassVar[str] = ""


TRAINABLE: Door[type[TrainablePart]] = Door("trainable", {"whole": WholeModel})
"""Trainable parts by name."""


def trainable_class(config: Config) -> type[TrainablePart]:
    if not config.lora.adapts:
        return TRAINABLE["whole"]
    if config.lora.restart_every:
        return TRAINABLE["restarts"]
    return TRAINABLE["adapter"]


def load_architecture(start: ResumePoint) -> PreTrainedConfig:
    """Return the architecture for a new or resumed run. Raises ConfigError."""
    architecture = trainable_class(start.config).architecture(start)
    return trained_config(architecture, start.config.train.method)


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


@dataclass(frozen=True)
class DiskNeeds:
    """Bytes needed in the run folder.

    export_bytes: weights in the Hugging Face folder; 0 without an export. states_bytes: one checkpoint.
    """

    export_bytes: int
    states_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes for one checkpoint and the export."""
        return self.export_bytes + self.states_bytes

    @classmethod
    def of(cls, config: Config, trainable: TrainablePart, model: nn.Module) -> DiskNeeds:
        """Return the needs for a resolved configuration and a model. Raises ConfigError for an untrainable model."""
        rule = make_update_rule(config)
        weight_bytes = DTYPES[str(config.train.precision)].itemsize
        num_saved, kept_bytes = trainable.num_saved(model), trainable.kept_bytes(model, weight_bytes)
        # By the first rule, the rule of most parameters: the need is a forecast.
        moments = sum(plane.num_bytes(num_saved) for plane in rule.parts[0].moments)
        master_bytes = weight_bytes
        if rule.has_low:
            master_bytes = 4
        export_bytes = 0
        if config.checkpoint.export:
            export_bytes = trainable.export_bytes(model, weight_bytes)
        return cls(export_bytes, master_bytes * num_saved + moments + kept_bytes)

    def check(self, path: Path, config: Config, num_done: int) -> Iterator[str]:
        """Yield a note if some checkpoints will not fit on the disk, after `num_done` completed steps.

        Raises DoesNotFitError if the export will not fit.
        """
        free, section = free_bytes(path), config.checkpoint
        location = f"{path} is on a disk with {format_bytes(free)} ({free} bytes) free"
        if free < self.export_bytes:
            raise DoesNotFitError(
                f"{location}, and the export at the end takes {format_bytes(self.export_bytes)} ({self.export_bytes} "
                f"bytes), {self.export_bytes - free} bytes more. Make room, set --run.dir to a folder on another disk, "
                "or leave the export out with --checkpoint.export false."
            )
        # One more for a stop request; the next one is written before the oldest is removed. Without regular checkpoints
        # only a stop request saves, and a run to the end needs no room.
        num = 0
        if section.every is not None:
            num = 1 + (section.keep or 1)
        if section.keep is None and isinstance(section.every, int) and config.train.steps:  # all of them stay
            num = math.ceil((config.train.steps - num_done) / section.every)
        num += section.keep_best
        if free < (needed := self.export_bytes + num * self.states_bytes):
            export = ""
            if self.export_bytes:
                export = "the export with "
            yield (
                f"note: {location}, and {export}up to {counted(num, 'checkpoint')} of "
                f"{format_bytes(self.states_bytes)} need {format_bytes(needed)}: some checkpoints may not be saved. "
                "Make room, set --run.dir to a folder on another disk, or lower --checkpoint.keep."
            )
