"""Merge and reinitialize LoRA layers one at a time, with PEFT's own code."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from offload.app.config.sections import ModelSection
from offload.app.hf.models import empty_model
from offload.errors import ConfigError
from offload.extras.adapters.adapters import Adaptation, adapter_config, adapter_type, outermost_modules

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
        self._adapter, self._init = twin.active_adapter, config.init_lora_weights
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
            layer.merge(safe_merge=False)
        merged: torch.Tensor = layer.get_base_layer().weight.detach()
        return merged

    def new_matrices(self, seed: int) -> dict[str, torch.Tensor]:
        """Return freshly initialized matrices, fp32, by name.

        Values are sampled layer by layer from `seed`. The caller's random generator is unchanged.
        """
        from peft.tuners.lora.layer import Linear

        matrices: dict[str, torch.Tensor] = {}
        with torch.random.fork_rng(devices=[]):
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
    layer = copy.deepcopy(layer)
    layer.load_state_dict(values, strict=False, assign=True)
    return layer
