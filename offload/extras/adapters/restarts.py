"""ReLoRA: every few steps the adapter is merged into the base and restarted.

Lialin et al., arXiv:2307.05695, algorithm 1. Over several cycles the learned change has a higher rank than the adapter.
Layers are merged and initialized again one at a time, with PEFT's own code.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedConfig
from xxhash import xxh3_64_intdigest

from offload.app.config.config import Config
from offload.app.config.sections import LoraSection, ModelSection
from offload.app.hf.models import BuiltModel, ModelKind, empty_model
from offload.app.hf.names import Shape
from offload.app.training.resume import ResumePoint
from offload.app.training.trainable import BuildBase, WholeModel, buffers_of
from offload.distributed.outcomes import share_failure
from offload.engine.engine import Engine
from offload.errors import ConfigError
from offload.extras.adapters.adapters import Adaptation, adapter_config, adapter_type, outermost_modules
from offload.extras.adapters.merge import MergedWeights, fill_adapter
from offload.extras.adapters.over_base import AdapterOverBase
from offload.files.sources import ReadValues, ReopenFile

_INITS = (True, "gaussian", "orthogonal")
"""init_lora_weights settings with a zero product: a reinitialized layer changes no output."""


class LoraLayers:
    """Shape-only LoRA layers for an adapted model. The model parameters stay untouched; names are the model's."""

    def __init__(self, model: Any) -> None:
        """Raises ConfigError for an adapter with deltas outside a single weight."""
        config = adapter_config(model)
        if (
            adapter_type(model) != "lora"
            or config.use_dora
            or config.lora_bias
            or config.init_lora_weights not in _INITS
        ):
            raise ConfigError(
                f"lora.restart_every is set, but the adapter is of kind {adapter_type(model)} with use_dora "
                f"{getattr(config, 'use_dora', None)}, lora_bias {getattr(config, 'lora_bias', None)} and "
                f"init_lora_weights {getattr(config, 'init_lora_weights', None)}: only a LoRA without DoRA and biases "
                "can restart, with init_lora_weights true, gaussian or orthogonal."
            )
        from peft.tuners.lora.layer import Embedding, Linear, LoraLayer, _ConvNd

        twin: Any = Adaptation(config).apply_to_shapes(empty_model(ModelSection(), model.get_base_model().config))
        named = list(twin.named_parameters(remove_duplicate=False))
        # For the initial values at a restart.
        self._adapter = twin.active_adapter
        self._init = config.init_lora_weights
        self._layers: dict[str, tuple[str, Any]] = {}
        for path, layer in outermost_modules(twin):
            if not isinstance(layer, LoraLayer):
                continue
            if not isinstance(layer, Linear | Embedding | _ConvNd):
                raise ConfigError(
                    f"lora.restart_every is set, but a restart cannot merge the {type(layer).__name__} of {path} into "
                    f"one base weight: leave {path} out of --lora.target_modules and --lora.target_parameters."
                )
            names = [name for name, parameter in named if parameter is layer.get_base_layer().weight]
            if len(names) > 1:
                raise ConfigError(
                    f"lora.restart_every is set, but {' and '.join(names)} share one weight: merging the adapter of "
                    "one would change both. Leave these modules out of --lora.target_modules."
                )
            self._layers[names[0]] = next(name for name, each in twin.named_modules() if each is layer), layer
        if not self._layers:
            raise ConfigError("lora.restart_every is set, but no module has a LoRA: set --lora.target_modules.")

    @property
    def weights(self) -> list[str]:
        """Names in model order for the adapted base weights."""
        return list(self._layers)

    def matrices(self, weight: str) -> list[str]:
        """Return the LoRA matrix names over one of `weights`."""
        prefix, layer = self._layers[weight]
        return [f"{prefix}.{name}" for name, each in layer.named_parameters() if each.requires_grad]

    def merge(self, weight: str, value: torch.Tensor, matrices: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a weight with its delta merged: W + s B A, fp32 on the CPU.

        `value` is changed in place. `matrices` follow the order in `self.matrices(weight)`, each fp32 in its own shape.
        """
        prefix, layer = self._layers[weight]
        names = [weight, *self.matrices(weight)]
        layer = _fill_copy(layer, {n[len(prefix) + 1 :]: v for n, v in zip(names, (value, *matrices), strict=True)})
        with torch.no_grad():
            layer.merge(safe_merge=False)  # PEFT's check for NaN would copy the weight
        merged: torch.Tensor = layer.get_base_layer().weight.detach()
        return merged

    def new_matrices(self, seed: int) -> dict[str, torch.Tensor]:
        """Return freshly initialized matrices, fp32, by name.

        Values are sampled layer by layer from `seed`. The caller's random generator is unchanged.
        """
        from peft.tuners.lora.layer import Linear

        matrices: dict[str, torch.Tensor] = {}
        with torch.random.fork_rng(devices=[]):  # the matrices are on the CPU
            torch.manual_seed(seed)
            for prefix, layer in self._layers.values():
                initial = {
                    name: torch.empty(each.shape) for name, each in layer.named_parameters() if each.requires_grad
                }
                layer = _fill_copy(layer, initial)
                # As in PEFT's update_layer: only Linear layers have an orthogonal initialization.
                if self._init == "orthogonal" and isinstance(layer, Linear):
                    layer.orthogonal_init(self._adapter)
                else:
                    layer.reset_lora_parameters(self._adapter, self._init)
                matrices |= {f"{prefix}.{name}": layer.get_parameter(name).detach() for name in initial}
        return matrices


def _fill_copy(layer: Any, values: Mapping[str, torch.Tensor]) -> Any:
    """Return a filled copy of a shape-only layer. `values`: by names within the layer."""
    # A copy, so the values of one layer are freed before the next one is merged.
    layer = copy.deepcopy(layer)
    layer.load_state_dict(values, strict=False, assign=True)
    return layer


def seed_of(seed: int, number: int) -> int:
    """Return the seed for the matrices sampled at restart `number`, counted from 1."""
    return xxh3_64_intdigest(f"restart {number}".encode(), seed)


@dataclass(frozen=True)
class RestartingAdapter(AdapterOverBase):
    """An adapter with restarts. Checkpoints also contain changed base weights, and the export is the whole model."""

    model_kind: ModelKind
    section: LoraSection
    main_file: ClassVar[str] = "config.json"
    library: ClassVar[str] = "transformers"

    @classmethod
    def of(
        cls, config: Config, architecture: PreTrainedConfig, kind: ModelKind, start: ResumePoint
    ) -> RestartingAdapter:
        adapter = AdapterOverBase.of(config, architecture, kind, start)
        return cls(**vars(adapter), model_kind=kind, section=config.lora)

    def prepare(self, built: BuiltModel) -> BuiltModel:
        """Put the adapter over the base. Raises ConfigError for an adapted weight stored quantized."""
        adapted = super().prepare(built)
        if not adapted.quantized:
            return adapted
        for name in LoraLayers(adapted.model).weights:
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
        # By the step alone, so a resumed run restarts at the same steps.
        number, is_within = divmod(step, self.section.restart_every)
        if is_within or not number:
            return
        layers = LoraLayers(engine.model)
        # All matrices are read before the first edit, and each weight merges with the values of this moment.
        values = dict(engine.named_parameters(trained_only=True))
        for name, value in engine.edit(layers.weights):
            value.copy_(layers.merge(name, value, [values[each] for each in layers.matrices(name)]))
        initial = layers.new_matrices(seed_of(self.seed, number))
        for name, value in engine.edit(initial):
            value.copy_(initial[name])
        engine.prune_moments(initial, self.section.restart_prune)  # they are of the matrices before
        yield (
            f"step {step}  restart {number}: the adapter is merged into {len(layers.weights)} base weights and "
            f"initialized again; {100 * self.section.restart_prune:g}% of its moments are set to zero"
        )

    def write(self, engine: Engine, folder: Path, files: Mapping[str, bytes], build_base: BuildBase) -> None:
        """Write the base with the adapter merged in, one module at a time, as a Hugging Face folder."""
        values = {**buffers_of(engine.model), **dict(engine.named_parameters(trained_only=True))}
        with ExitStack() as opened:
            with share_failure(engine.comm, "making of the merged model"):
                base, beneath = (opened.enter_context(closing(build_base())) for _ in range(2))
                merged = _MergedModel(base, beneath, self, engine.model, values)
            engine.export(folder, files=files, replace=True, made=merged)

    def load(self, folder: Path, build_base: BuildBase) -> Any:
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
        self._base = base
        self._adapted = trainable.prepare(beneath).model
        parameters = dict(self._adapted.named_parameters())
        self._outer = {self._names[id(each)]: name for name, each in parameters.items() if id(each) in self._names}
        self._values = fill_adapter(self._adapted, self._names, values)
        dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        # Dtypes alone: the pages of an empty tensor are never touched. The sum is in fp32, the result in the run's
        # dtype.
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
        return self.get(self.name, begin, end)

    def reopen_files(self, _reopen: ReopenFile) -> _EngineParameter:
        """Return self: the values are in no file."""
        return self
