"""Training of a PEFT adapter over a frozen base. Checkpoints lack the base, and the export is the adapter."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedConfig

from offload.app.config.config import Config
from offload.app.hf.models import BuiltModel, ModelKind, fill_all, load_model_config
from offload.app.hf.sources import RemovedProduct
from offload.app.hf.write import write_configuration
from offload.app.training.resident import as_computed, master_of
from offload.app.training.resume import ResumePoint
from offload.app.training.trainable import TrainablePart, buffers_of
from offload.distributed.outcomes import share_failure
from offload.engine.engine import Engine
from offload.engine.units.find import describe_parameters
from offload.errors import OffloadError
from offload.extras.adapters.adapters import (
    CONFIG,
    INITIAL,
    WEIGHTS,
    Adaptation,
    config_bytes,
    describe_adapter,
    write_adapter,
)
from offload.extras.adapters.base_mark import BaseMark, load_base_config, mark_base
from offload.extras.adapters.residual import to_bytes
from offload.optim.adamw import AdamW


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

    @classmethod
    def architecture(cls, start: ResumePoint) -> PreTrainedConfig:
        """Return the architecture of the base, located again for a resumed run: the checkpoint lacks the base."""
        first = next(iter(start.folders), None)
        section = start.config.model
        return load_model_config(section) if first is None else load_base_config(section, start.base, first)

    @classmethod
    def of(cls, config: Config, architecture: PreTrainedConfig, kind: ModelKind, start: ResumePoint) -> AdapterOverBase:
        """Return the adapter for the `lora` settings, or from the checkpoint if the run resumes.

        Raises ConfigError, also for another base than in the checkpoint; MissingLibraryError.
        """
        base, first = mark_base(config.model, architecture, config.run.seed), next(iter(start.folders), None)
        if first is not None:
            base.check(start.base, first)
        adaptation = Adaptation.of(config.lora, kind.name) if first is None else Adaptation.from_checkpoint(first)
        rests = config.offload.frozen_weights, config.offload.parameters
        return cls(adaptation, base, config.run.seed, str(config.train.precision), *rests)

    def prepare(self, built: BuiltModel) -> BuiltModel:
        """Put the adapter over the base."""
        self.adaptation.check_tier(self.parameters)
        adapted = self.adaptation.apply_to(built, self.seed)
        self.removed.update(adapted.removed)
        return adapted

    def name(self, model: Any) -> str:
        """Return the base class name."""
        return type(model.get_base_model()).__name__

    def describe(self, model: Any) -> Iterator[str]:
        """Yield the adapter summary and the base name."""
        yield f"adapter: {describe_adapter(model)}; frozen: {self.base.name}"

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
