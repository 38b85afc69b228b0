"""Merge an adapter into the base one module at a time.

The result is bit-equal to `merge_and_unload`, because PEFT's own `merge` runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from offload.app.hf.models import BuiltModel
from offload.app.hf.names import untie
from offload.errors import ConfigError, shorten
from offload.extras.adapters.adapters import adapter_type, outermost_modules
from offload.layout.codecs import Codec, decoded

Values = Callable[[str], torch.Tensor | None]


class MergedWeights:
    """Base weights with the adapter merged in.

    A parameter outside the adapter modules comes straight from the base. The others are merged on demand, together with
    all parameters in the same modules, and freed when the next group is merged.
    """

    def __init__(
        self,
        base: BuiltModel,
        model: Any,
        names: dict[int, str],
        trained_value: Values,
        codecs: Mapping[str, tuple[Codec, torch.dtype]],
    ) -> None:
        """Prepare the merge.

        - base: unfilled model. Only ties cut by the adapter are changed in it.
        - model: a second unfilled model with the same architecture under the adapter, with adapter values filled.
        - names: base parameter names in `model`, by parameter id.
        - trained_value(name): the new value if the adapter trains a base parameter directly, for example a bias. None:
          not trained.
        - codecs: codec and dtype for base weights to be read as dequantized values.

        Raises ConfigError for an adapter without a merge.
        """
        self._base = base
        self._names = names
        self._trained_value = trained_value
        self._codecs = codecs
        self._targets = dict(outermost_modules(model))
        can_merge = all(
            hasattr(each, "merge") or hasattr(each, "unload_and_optionally_merge_module")
            for each in self._targets.values()
        )
        try:
            if not self._targets or not can_merge:
                raise ValueError(f"an adapter of kind {adapter_type(model)} has no weights to merge into the model")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model.base_model._check_merge_allowed()  # PEFT's own refusals, before any weight is read
        except ValueError as error:
            raise ConfigError(
                f"the adapter cannot be merged: {shorten(' '.join(str(error).split()))}. Export it without --merge."
            ) from error
        self._cut_ties()
        self._aliases = _aliases(base.model)
        self._modules = {name: self._modules_around(aliases) for name, aliases in self._aliases.items()}
        self._merged_values: dict[str, torch.Tensor] = {}  # of the group merged last: a weight is read in pieces

    def read(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Return elements `begin` to `end` of a flat parameter, by its first name in the base. Raises DiskError."""
        if name not in self._merged_values:
            if not self._modules[name]:
                is_unchanged = self._trained_value(name) is None and name not in self._codecs
                # A part alone is read: a base may be larger than memory.
                if is_unchanged and (source := self._base.source(name)) is not None:
                    return source.read(begin, end)
                return self._current_value(name).reshape(-1)[begin:end]
            self._merged_values = self._merge(self._modules[name])
        return self._merged_values[name].reshape(-1)[begin:end]

    def has_changes(self) -> bool:
        """Return whether any weight differs from the base. Without a difference all weights are merged."""
        for name, parameter in self._base.model.named_parameters():
            if self._modules[name] or self._trained_value(name) is not None:
                value = self.read(name, 0, parameter.numel())  # compared as written: rounding may lose a change
                if not torch.equal(value.to(parameter.dtype), self._base_value(name).reshape(-1)):
                    return True
        return False

    def _modules_around(self, aliases: list[str]) -> list[str]:
        """Return the adapter modules around any of the parameter names, in model order."""
        return [target for target in self._targets if any(_is_inside(alias, target) for alias in aliases)]

    def _cut_ties(self) -> None:
        """Give a tied base parameter separate memory if the adapter trains a copy.

        Raises ConfigError for a LoRA delta on one name of a tied weight, because the merge would change the other.
        """
        from peft.tuners.lora import LoraLayer
        from peft.utils.other import ModulesToSaveWrapper

        model: Any = self._base.model
        for aliases in _aliases(model).values():
            targets = [self._targets[target] for target in self._modules_around(aliases)]
            if len(aliases) > 1 and any(isinstance(target, LoraLayer) for target in targets):
                raise ConfigError(
                    f"the adapter cannot be merged: {' and '.join(aliases)} share one weight, but the adapter changes "
                    f"only {', '.join(self._modules_around(aliases))}. Export it without --merge."
                )
            if any(isinstance(target, ModulesToSaveWrapper) for target in targets):
                for alias in aliases[1:]:
                    untie(model, alias)
                    # Both: a vision model has the setting twice, for the text and for the whole.
                    model.config.get_text_config().tie_word_embeddings = False
                    model.config.tie_word_embeddings = False

    def _current_value(self, name: str) -> torch.Tensor:
        value = self._trained_value(name)
        if value is None:
            return self._base_value(name)
        return value

    def _base_value(self, name: str) -> torch.Tensor:
        """Return base values for a parameter: a new tensor if read from a file or dequantized."""
        parameter, source = self._base.model.get_parameter(name), self._base.source(name)
        if source is None:
            self._base.fill(name, self._base.model.get_submodule(name.rpartition(".")[0]))
            value = parameter.detach()
        else:
            value = source.read(0, parameter.numel()).view(parameter.shape)
        if name not in self._codecs:
            return value
        codec, dtype = self._codecs[name]
        return decoded(codec, value.reshape(-1), dtype).view(parameter.shape)

    def _merge(self, targets: list[str]) -> dict[str, torch.Tensor]:
        """Merge some adapter modules. Return their parameters by first name in the base."""
        unfilled: dict[nn.Parameter, torch.Tensor] = {}
        for target in targets:
            for parameter in self._targets[target].parameters():
                name = self._names.get(id(parameter))
                if name is not None and parameter not in unfilled:
                    # Values are put back below, so one group of modules is in memory at a time.
                    unfilled[parameter] = parameter.data
                    # A copy: PEFT merges in place, and the value may be memory of the base.
                    parameter.data = self._current_value(name).to(parameter.dtype, copy=True)
        merged = {target: _merge_module(self._targets[target]) for target in targets}
        values: dict[str, torch.Tensor] = {}
        for name, aliases in self._aliases.items():
            for alias in aliases:
                for target in targets:
                    if _is_inside(alias, target):
                        values[name] = merged[target].get_parameter(alias[len(target) + 1 :]).data
        for parameter, data in unfilled.items():
            parameter.data = data
        return values


def _merge_module(target: Any) -> nn.Module:
    """Return the base module with the adapter merged, as `merge_and_unload` leaves it."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if hasattr(target, "unload_and_optionally_merge_module"):
            module = target.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        else:
            target.merge(safe_merge=False, adapter_names=None)
            module = target.get_base_layer()
    for each in target.modules():
        if hasattr(each, "merged_adapters"):
            each.merged_adapters.clear()  # the base weights in it are freed
    return module


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Return all names for each parameter, by first name."""
    first_names: dict[int, str] = {}
    aliases: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(first_names.setdefault(id(parameter), name), []).append(name)
    return aliases


def _is_inside(name: str, module: str) -> bool:
    return name.startswith(f"{module}.")


def fill_adapter(
    model: nn.Module, names: Mapping[int, str], values: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Load `values` into an adapted model.

    Return separately the values that belong to base parameters, by base name. `names`: base parameter names by
    parameter id. Raises ConfigError for a value without a place in the model.
    """
    base_values, own = {}, model.state_dict(keep_vars=True)
    if unknown := values.keys() - own.keys():
        raise ConfigError(
            f"the adapter has {min(unknown)}, but the model has no such parameter with this version of peft."
        )
    with torch.no_grad():
        for name, tensor in own.items():
            if name in values and id(tensor) in names:
                base_values[names[id(tensor)]] = values[name].to(tensor.dtype)
            elif name in values:
                tensor.copy_(values[name])
    return base_values
