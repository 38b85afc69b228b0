"""Check of modules and parameters before a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from torch import nn

from offload.engine.units.residency import ModelOwnership, refuse_change
from offload.engine.units.snapshots import past_subclasses
from offload.engine.units.unit import Unit
from offload.errors import ConfigError
from offload.layout.planes import DTYPES
from offload.layout.regions import ParameterInfo


class ModelStructure:
    """Model structure (modules and parameters) at engine construction."""

    def __init__(
        self, model: nn.Module, infos: Sequence[ParameterInfo], units: Sequence[Unit], ownership: ModelOwnership
    ) -> None:
        self._infos = infos
        self._units = units
        self._ownership = ownership
        self._names = {module: name for name, module in model.named_modules()}
        # Without order: a parameter removed and added again by a forward moves to the end.
        self._tree = [(m, tuple(m._modules.items()), frozenset(m._parameters)) for m in self._names]
        self._num_trainable = sum(info.trainable for info in infos)
        self.frozen: frozenset[int] = frozenset()
        """Trainable parameters with requires_grad=False at the last check, by model index."""

    def check(self, trains: bool) -> None:
        """Raise ConfigError if the model differs from the one at construction, since the change would have no effect.

        `trains`: check trainability too. Trainable parameters may be frozen and unfrozen between steps; others have no
        optimizer state. Objects are compared by identity.
        """
        past_subclasses(self._check, trains)  # Otherwise each parameter access is a `__torch_function__` call.

    def _check(self, trains: bool) -> None:
        frozen: set[int] = set()
        for module, children, keys in self._tree:
            if tuple(module._modules.items()) != children or module._parameters.keys() != keys:
                self._refuse_tree(module, dict(children), keys)
        for unit in self._units:
            for place in unit.places:
                parameter, info = place.module._parameters[place.key], self._infos[place.parameter]
                if parameter is None:
                    self._refuse(place.module, place.key, "was removed")
                if parameter is not self._ownership.placeholders[place.parameter] and not unit.has(
                    parameter, DTYPES[info.compute]
                ):
                    self._refuse(place.module, place.key, "was replaced")
                if info.trainable and not parameter.requires_grad:
                    frozen.add(place.parameter)
                elif trains and parameter.requires_grad != info.trainable:
                    self._refuse(place.module, place.key, "was given requires_grad=True")
        if frozen != self.frozen and (trains or len(frozen) < self._num_trainable):
            self.frozen = frozenset(frozen)
            for unit in self._units:
                unit.freeze(self.frozen)

    def refuse_all_frozen(self) -> None:
        """Raise ConfigError if the last `check` found no trainable parameter."""
        if len(self.frozen) == self._num_trainable:
            raise ConfigError("every parameter is now frozen (requires_grad=False): there is nothing to train.")

    def _refuse_tree(self, module: nn.Module, children: dict[str, nn.Module | None], keys: frozenset[str]) -> NoReturn:
        for key in {**children, **module._modules}:
            child = module._modules.get(key)
            if child is children.get(key):
                continue
            if child is None:
                self._refuse(module, key, "was removed")
            if key not in children:
                self._refuse(module, key, "was added")
            self._refuse(module, key, f"became another {type(child).__name__}")
        self._refuse(module, min(keys ^ module._parameters.keys()), "was added or removed")

    def _refuse(self, module: nn.Module, key: str, change: str) -> NoReturn:
        refuse_change(f"{self._names[module]}.{key}".lstrip("."), change)
