"""ReLoRA: every few steps the adapter is merged into the base and restarted.

Lialin et al., arXiv:2307.05695, algorithm 1. Over several cycles the learned change has a higher rank than the adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedConfig
from xxhash import xxh3_64_intdigest

from offload.app.config.config import Config
from offload.app.config.sections import LoraSection
from offload.app.hf.models import BuiltModel, ModelKind
from offload.app.hf.names import Shape
from offload.app.training.resume import ResumePoint
from offload.app.training.trainable import WholeModel, buffers_of
from offload.distributed.comm import share_failure
from offload.engine.engine import Engine
from offload.errors import ConfigError
from offload.extras.adapters.lora_layers import LoraLayers
from offload.extras.adapters.merge import MergedWeights, fill_adapter
from offload.extras.adapters.over_base import AdapterOverBase
from offload.files.sources import ReadValues, ReopenFile


def seed_of(seed: int, number: int) -> int:
    """Return the seed for the matrices sampled at restart `number`, counted from 1."""
    return xxh3_64_intdigest(f"restart {number}".encode(), seed)


@dataclass(frozen=True)
class RestartingAdapter(AdapterOverBase):
    """An adapter with restarts. Checkpoints also contain changed base weights, and the export is the whole model."""

    model_kind: ModelKind
    """Base model kind."""
    section: LoraSection
    """Restart settings."""
    main_file: ClassVar[str] = "config.json"
    library: ClassVar[str] = "transformers"

    @classmethod
    def of(
        cls, config: Config, architecture: PreTrainedConfig, kind: ModelKind, start: ResumePoint
    ) -> RestartingAdapter:
        """Return the adapter, see `AdapterOverBase.of`."""
        adapter = AdapterOverBase.of(config, architecture, kind, start)
        return cls(**vars(adapter), model_kind=kind, section=config.lora)

    def prepare(self, built: BuiltModel) -> BuiltModel:
        """Put the adapter over the base. Raises ConfigError for an adapted weight stored quantized."""
        adapted = super().prepare(built)
        for name in LoraLayers(adapted.model).weights if adapted.quantized else ():
            if (codec := adapted.quantized.get(adapted.model.get_parameter(name))) is not None:
                raise ConfigError(
                    f"lora.restart_every is {self.section.restart_every}, but {name} is quantized in the model's "
                    f"folder ({codec.name}): rounding would lose the merged adapter. Leave --lora.restart_every out, "
                    "or give a folder of the unquantized model."
                )
        return adapted

    def kept_bytes(self, model: Any, weight_bytes: int) -> int:
        """Return the bytes of changed base weights. Raises ConfigError for an adapter without restart support."""
        changed = map(model.get_parameter, LoraLayers(model).weights)
        return sum(each.numel() * max(weight_bytes, each.dtype.itemsize) for each in changed)

    def export_bytes(self, model: nn.Module, weight_bytes: int) -> int:
        """Return an upper limit for the bytes of all weights."""
        return WholeModel(self.model_kind).export_bytes(model, weight_bytes)

    def base_bytes(self, model: Any) -> int:  # noqa: ARG002
        """Return 0: the export is complete without the base."""
        return 0

    def check(self, engine: Engine) -> None:
        """Raise ConfigError if base weights cannot be changed."""
        engine.check_edit(LoraLayers(engine.model).weights)

    def before_step(self, engine: Engine, step: int) -> Iterator[str]:
        """Restart before each step with a number (from 0) divisible by `restart_every`, except step 0.

        A checkpoint at this step contains the state before the restart; a resumed run restarts first.
        """
        number, is_within = divmod(step, self.section.restart_every)
        if is_within or not number:
            return
        layers = LoraLayers(engine.model)
        values = dict(engine.named_parameters(trained_only=True))
        for name, value in engine.edit(layers.weights):
            value.copy_(layers.merge(name, value, [values[each] for each in layers.matrices(name)]))
        initial = layers.new_matrices(seed_of(self.seed, number))
        for name, value in engine.edit(initial):
            value.copy_(initial[name])
        engine.prune_moments(initial, self.section.restart_prune)
        yield (
            f"step {step}  restart {number}: the adapter is merged into {len(layers.weights)} base weights and "
            f"initialized again; {100 * self.section.restart_prune:g}% of its moments are set to zero"
        )

    def write(
        self, engine: Engine, folder: Path, files: Mapping[str, bytes], build_base: Callable[[], BuiltModel]
    ) -> None:
        """Write the base with the adapter merged in, one module at a time, as a Hugging Face folder."""
        values = {**buffers_of(engine.model), **dict(engine.named_parameters(trained_only=True))}
        with ExitStack() as opened:
            with share_failure(engine.comm, "making of the merged model"):
                base, beneath = (opened.enter_context(closing(build_base())) for _ in range(2))
                merged = _MergedModel(base, beneath, self, engine.model, values)
            engine.export(folder, files=files, replace=True, made=merged)

    def load(self, folder: Path, build_base: Callable[[], BuiltModel]) -> Any:
        """Load the folder with transformers."""
        return WholeModel(self.model_kind).load(folder, build_base)


class _MergedModel:
    """The engine's base with the adapter merged in: summed in fp32, in the compute dtypes."""

    def __init__(
        self,
        base: BuiltModel,
        beneath: BuiltModel,
        trainable: AdapterOverBase,
        model: nn.Module,
        values: Mapping[str, torch.Tensor],
    ) -> None:
        """`base`, `beneath`: unfilled base models, one to write and one under the adapter.

        `model`: the engine's model. `values`: trained values in it.
        """
        self._names = {id(parameter): name for name, parameter in beneath.model.named_parameters()}
        self._base, self._adapted = base, trainable.prepare(beneath).model
        parameters = dict(self._adapted.named_parameters())
        self._outer = {self._names[id(each)]: name for name, each in parameters.items() if id(each) in self._names}
        self._values = fill_adapter(self._adapted, self._names, values)
        dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        for name, parameter in base.model.named_parameters():
            parameter.data = torch.empty(parameter.shape, dtype=dtypes[self._outer[name]])
        for parameter in parameters.values():
            if id(parameter) in self._names:
                parameter.data = torch.empty(parameter.shape)
        self.model = base.model

    def get_reader(self, get: ReadValues) -> ReadValues:
        """Return a reader for base weights with the adapter's delta."""
        shapes = {name: tuple(parameter.shape) for name, parameter in self.model.named_parameters()}
        base = replace(self._base, source=lambda name: _EngineParameter(get, self._outer[name], shapes[name]))
        return MergedWeights(base, self._adapted, self._names, self._values.get, {}).read


@dataclass
class _EngineParameter:
    """A `Source` over an engine parameter, by the engine's name."""

    get: ReadValues
    name: str
    shape: Shape
    dtype: torch.dtype = torch.float32

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Return the elements, fp32."""
        return self.get(self.name, begin, end)

    def reopen_files(self, _reopen: ReopenFile) -> _EngineParameter:
        """Return self: the values are in no file."""
        return self
