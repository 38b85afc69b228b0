"""What an engine holds of a model: who may have it, what is refused of it meanwhile, and what was changed behind it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from offload.engine.units.undo import Undo
from offload.engine.units.unit import Unit
from offload.errors import ConfigError
from offload.layout.regions import ParameterInfo
from offload.tiers.device import Device

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_ANEW = (
    "Change the model before Engine(); of this one, engine.close(restore=True) first gives back what was trained, and "
    "engine.save_checkpoint(folder) saves it as it is."
)
_HELD = (
    "belongs to an engine that was not closed: its weights are in that engine, and in their place is NaN. Call "
    "close(restore=True) on it first. Where nothing refers to it any more, its weights are gone: build the model anew."
)
_SPENT = (
    "belonged to an engine that was closed without restore=True: its weights are gone, and in their place is NaN. "
    "Build the model anew, or load what engine.export wrote."
)
_FAILED = (
    "was given to an engine that could not be made: some of its weights are gone, and in their place is NaN. Build "
    "the model anew."
)
_HOLDS: weakref.WeakSet[Hold] = weakref.WeakSet()
"""Of the models that live, those whose weights are not in them."""


def refuse_held(model: nn.Module) -> None:
    """Raise ConfigError where weights of `model` are in an engine, or went with one."""
    for hold in list(_HOLDS):
        hold.refuse_overlap(model)


def refuse_nan(what: str) -> NoReturn:
    """Raise the ConfigError for what would read or write weights past the engine that has them."""
    raise ConfigError(
        f"{what} sees NaN: the weights of this model are in an engine, or went with one that was closed without "
        "restore=True. engine.export(folder) writes them as a Hugging Face folder, engine.save_checkpoint(folder) "
        "writes all states, and engine.close(restore=True) gives the model its weights back. Where the engine is "
        "closed already, or could not be made, build the model anew."
    )


class Resting(nn.Parameter):
    """Stands for a parameter while its weights are elsewhere: one NaN, expanded, which is not to be saved or replaced.

    Device, dtype and shape are right, the storage is one element, and a stray read is NaN. (On `meta` some operations
    return uninitialised memory without a word.) As of a Parameter, what is computed of it is a plain tensor.
    """

    @property
    def data(self) -> Any:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # Module.to and its kin come here too; where there is nothing to convert they give a tensor its own data.
        if (value.data_ptr(), value.shape, value.dtype) != (self.data_ptr(), self.shape, self.dtype):
            raise ConfigError(
                f"a parameter of shape {list(self.shape)} and {self.dtype} was to become {list(value.shape)} and "
                f"{value.dtype} (by half, to, resize_token_embeddings, .data); its weights are in an engine. {_ANEW}"
            )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        refuse_nan("copy.deepcopy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_nan("pickle (torch.save)")


class Hold:
    """An engine's hold on a model, from when its weights are taken until they are given back, or for good.

    It makes what hangs in the model while the weights are elsewhere, and every module refuses to be saved, loaded and
    copied. It is known to the modules, by their hooks, and keeps none of them alive: what is left of a model neither
    keeps the rest of it nor its engine.
    """

    def __init__(
        self, model: nn.Module, infos: Sequence[ParameterInfo], units: Sequence[Unit], device: torch.device
    ) -> None:
        dtypes = {_DTYPES[info.compute] for info in infos}
        # All of a dtype lie in one tensor, so that one look tells whether somebody wrote to any of them.
        self.nans = {dtype: torch.full((len(infos),), float("nan"), dtype=dtype, device=device) for dtype in dtypes}
        self.resting = [
            Resting(self.nans[_DTYPES[info.compute]][info.index].expand(info.shape), requires_grad=info.trainable)
            for info in infos
        ]
        self._units = [weakref.ref(unit) for unit in units]
        # Modules without weights may be anybody's: transformers gives several models one and the same activation.
        self._names = weakref.WeakKeyDictionary(
            {module: name for name, module in model.named_modules() if next(module.parameters(), None) is not None}
        )
        self._state, self._may_read = _HELD, False
        self._handles: list[Any] = []

    def guard(self) -> None:
        """The weights are taken: from here on every module refuses what would see NaN."""
        for module in self._names:
            self._handles.append(module.register_state_dict_pre_hook(self._on_state_dict))
            self._handles.append(module.register_load_state_dict_pre_hook(self._on_load))
        _HOLDS.add(self)

    def refuse_overlap(self, model: nn.Module) -> None:
        """Raise ConfigError where another engine is to have modules or parameters of this model."""
        mine = {id(parameter) for parameter in self.resting}
        for unit in filter(None, (known() for known in self._units)):
            mine.update(id(place.module._parameters.get(place.key)) for place in unit.places if unit.resident)
        for name, module in model.named_modules():
            shared = any(id(parameter) in mine for parameter in module._parameters.values())
            if shared or module in self._names:
                raise ConfigError(f"{name or 'the model'} ({type(module).__name__}) {self._state}")

    @contextmanager
    def reading(self, undo: Undo) -> Iterator[None]:
        """Within, the engine itself asks for names, shapes and buffers."""

        def restore() -> None:
            self._may_read = False

        with undo.afterwards(restore):
            self._may_read = True
            yield

    def release(self) -> None:
        """The model has its weights back, and is anybody's."""
        for handle in self._handles:
            handle.remove()
        _HOLDS.discard(self)

    def spend(self, failed: bool = False) -> None:
        """The weights are gone (`failed`: before an engine was there); the model is good for nothing any more."""
        if not self._handles:
            self.guard()
        self._units, self._state = [], _FAILED if failed else _SPENT
        for module in self._names:
            module.register_forward_pre_hook(self._on_forward)

    def _on_state_dict(self, *_: Any) -> None:
        if not self._may_read:
            refuse_nan("state_dict()")

    def _on_load(self, *_: Any) -> None:
        refuse_nan("load_state_dict()")

    def _on_forward(self, module: nn.Module, *_: Any) -> None:
        raise ConfigError(f"{self._names.get(module) or 'the model'} ({type(module).__name__}) {self._state}")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:  # reached by pickle and copy of any module
        refuse_nan("pickle (torch.save) or copy.deepcopy")


class Snapshot:
    """The modules and parameters of a model as an engine took them over."""

    def __init__(
        self, model: nn.Module, infos: Sequence[ParameterInfo], units: Sequence[Unit], hold: Hold, device: Device
    ) -> None:
        self._infos, self._units, self._hold, self._device = infos, units, hold, device
        self._names = {module: name for name, module in model.named_modules()}
        self._tree = [(m, tuple(m._modules.items()), tuple(m._parameters)) for m in self._names]
        self._num_trainable = sum(info.trainable for info in infos)
        self.frozen: frozenset[int] = frozenset()

    def check(self, trains: bool) -> Callable[[], None]:
        """Raise ConfigError where the model is not the one that was taken over, because the change would do nothing.
        Return what does so where weights were written to, and waits for the device to say it, the first time.

        trains: whether it matters which parameters take gradients. What was to be trained may be frozen and thawed
        again between steps; what was not has no states. It compares identities, and reads one number.
        """
        frozen: set[int] = set()
        for module, children, keys in self._tree:
            if tuple(module._modules.items()) != children or tuple(module._parameters) != keys:
                self._refuse_tree(module, dict(children), keys)
        for unit in self._units:
            for place in unit.places:
                found, info = place.module._parameters[place.key], self._infos[place.parameter]
                if found is None:
                    self._refuse(place.module, place.key, "was removed")
                if found is not self._hold.resting[place.parameter] and not unit.has(found, _DTYPES[info.compute]):
                    self._refuse(place.module, place.key, "was replaced")
                if info.trainable and not found.requires_grad:
                    frozen.add(place.parameter)
                elif trains and found.requires_grad != info.trainable:
                    self._refuse(place.module, place.key, "was given requires_grad=True")
        asked = [(*each, self._device.bring_down(each[1].isnan().all())) for each in self._hold.nans.items()]

        def confirm() -> None:
            while asked:
                dtype, nans, is_whole = asked.pop()
                if not is_whole():
                    written = [i.name for i in self._infos if _DTYPES[i.compute] == dtype and not nans[i.index].isnan()]
                    raise ConfigError(f"{written[0]} was written to after Engine(), which has the weights. {_ANEW}")

        if len(frozen) == self._num_trainable:
            if trains:
                raise ConfigError("every parameter is frozen by now (requires_grad=False): there is nothing to train.")
        elif frozen != self.frozen:
            self.frozen = frozenset(frozen)
            for unit in self._units:
                unit.freeze(self.frozen)
        return confirm

    def _refuse_tree(self, module: nn.Module, children: dict[str, nn.Module | None], keys: Sequence[str]) -> NoReturn:
        for key in {**children, **module._modules}:
            if (found := module._modules.get(key)) is not children.get(key):
                self._refuse(module, key, "was removed" if found is None else f"became another {type(found).__name__}")
        changed = sorted(set(keys) ^ set(module._parameters)) or keys
        self._refuse(module, changed[0], "was added or removed")

    def _refuse(self, module: nn.Module, key: str, what: str) -> NoReturn:
        name = f"{self._names[module]}.{key}".lstrip(".")
        raise ConfigError(f"{name} {what} after Engine() took the model over, which would not see it. {_ANEW}")
