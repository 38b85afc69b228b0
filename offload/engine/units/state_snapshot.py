"""Non-parameter model state: attributes, containers, objects, tensors, random generators."""

from __future__ import annotations

import inspect
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import nn

from offload.engine.comparison import same_bits

_ATOMS = (str, bytes, int, float, complex, bool, type(None))
_MUTABLE = (MutableMapping, list, deque, set)
_HOOKS = frozenset(key for key in vars(nn.Module()) if "_hooks" in key)
_FOREIGN = (sys.stdlib_module_names - {"types", "argparse", "collections", "dataclasses"}) | {"offload", "torch"}
"""Packages whose own objects (loggers, locks, process groups) are not model state."""
_COMMON_ATTRIBUTES = frozenset(vars(nn.Module())) | {"forward", "config"}

AttributePlace = tuple[nn.Module | type, str]
"""(module or class, attribute name) of a non-buffer attribute with a value mutable in place."""


def find_mutable_attributes(modules: Iterable[nn.Module]) -> set[AttributePlace]:
    """Return all module attributes with mutable values.

    Containers of the classes are included. Configurations are excluded: they are shared between modules, and a forward
    is not expected to change them.
    """
    own = {
        (module, key)
        for module in modules
        for key, value in vars(module).items()
        if key not in _COMMON_ATTRIBUTES and _is_mutable(value)
    }
    classes = {owner for kind in set(map(type, modules)) for owner in kind.__mro__}
    return own.union((owner, key) for owner in classes for key, _ in _containers_of(owner))


def _containers_of(owner: type) -> Iterator[tuple[str, Any]]:
    """Yield (name, container) of a class, except for constants with texts and numbers."""
    if (owner.__module__ or "").partition(".")[0] in _FOREIGN:
        return
    for key, value in vars(owner).items():
        if key.startswith("__") or not isinstance(value, _MUTABLE) or _has_weights(value):
            continue
        # An empty one is no constant: something is collected there.
        if not value or not all(isinstance(each, _ATOMS) for each in _values_in(value)):
            yield key, value


def _is_mutable(value: Any) -> bool:
    if isinstance(value, nn.Module | nn.Parameter | type):
        return False
    if isinstance(value, tuple):
        return any(map(_is_mutable, value))
    is_known = isinstance(
        value, torch.Tensor | torch.Generator | random.Random | np.random.Generator | np.random.RandomState | np.ndarray
    )
    is_container = isinstance(value, _MUTABLE) and not _has_weights(value)
    return is_known or is_container or (_has_attributes(value) and not _is_foreign(value))


def _has_attributes(value: Any) -> bool:
    return hasattr(value, "__dict__") or bool(_slots(value))


def _slots(value: Any) -> list[str]:
    """Return the object attributes outside `__dict__`, as with `dataclass(slots=True)`."""
    names: list[str] = []
    for owner in type(value).__mro__:
        declared = vars(owner).get("__slots__", ())
        if isinstance(declared, str):  # Python allows one name without a tuple
            declared = (declared,)
        names += declared
    return [name for name in names if not name.startswith("__") and hasattr(value, name)]


def _values_in(container: Any) -> Any:
    """Return the values of a mapping, or the elements of another container."""
    if isinstance(container, Mapping):
        return container.values()
    return container


def _has_weights(container: Any) -> bool:
    """True for a container with parameters or weak references (torch RNNs keep references to their parameters)."""
    return any(isinstance(value, nn.Parameter | weakref.ref) for value in _values_in(container))


def _is_foreign(value: Any) -> bool:
    owner = value
    if not isinstance(value, types.FunctionType):
        owner = type(value)
    return (owner.__module__ or "").partition(".")[0] in _FOREIGN


def restore_dict(live: MutableMapping[Any, Any], saved: Mapping[Any, Any]) -> None:
    """Restore the items of a dict one by one, since other code may read at any time."""
    for key in [key for key in live if key not in saved]:
        del live[key]
    for key, value in saved.items():
        if key not in live or live[key] is not value:
            live[key] = value


def _restore_elements(live: Any, saved: Sequence[Any]) -> None:
    """Restore the elements of a list, deque or set, unless they are the same objects."""
    if len(live) == len(saved) and all(map(is_, live, saved)):
        return
    live.clear()
    if isinstance(live, set):
        live.update(saved)
    else:
        live.extend(saved)


def _has_graph(restore: Any) -> bool:
    """True for the restoring function of a tensor with a graph."""
    if not isinstance(restore, partial):
        return False
    tensor = restore.args[0]
    return isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None


def _restore_values(tensor: torch.Tensor, saved: torch.Tensor) -> None:
    """Restore tensor values, unless they have the same bits: a write would invalidate saved graphs."""
    if not tensor.is_inference() and tensor.shape == saved.shape and not same_bits(tensor, saved):
        with torch.no_grad():
            tensor.copy_(saved)


class ContainerSnapshot:
    """Snapshot: lists, sets and dicts outside the model in which hooks and forwards of `modules` collect tensors.

    Within reach: closures, objects of bound methods, and globals of forwards. Other state there is not the model's.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        forwards = {type(module).forward for module in modules if not _is_foreign(type(module).forward)}
        hooks = [hook for m in modules for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
        within_reach = {id(value): value for each in (*hooks, *forwards) for value in _reach(each)}
        containers = [
            value for value in within_reach.values() if isinstance(value, _MUTABLE) and not _has_weights(value)
        ]
        self._saved: list[tuple[Any, Any]] = []  # (container, copy)
        for each in containers:
            content: Any = list(each)
            if isinstance(each, MutableMapping):
                content = dict(each)
            self._saved.append((each, content))

    def put_back(self) -> None:
        """Restore each container that has a tensor with a gradient."""
        for live, saved in self._saved:
            if not any(isinstance(each, torch.Tensor) and each.requires_grad for each in _values_in(live)):
                continue
            if isinstance(live, MutableMapping):
                restore_dict(live, saved)
            else:
                _restore_elements(live, saved)


def _reach(function: Any) -> Iterator[Any]:
    """Yield the values in closure cells, globals, bound objects and bound arguments of a function."""
    if isinstance(function, partial):
        yield from (*function.args, *function.keywords.values(), *_reach(function.func))
    elif isinstance(function, types.MethodType):
        yield from (*getattr(function.__self__, "__dict__", {}).values(), *_reach(function.__func__))
    elif isinstance(function, types.FunctionType):
        yield from inspect.getclosurevars(function).nonlocals.values()
        yield from (function.__globals__.get(name) for name in function.__code__.co_names)


def without_graph(value: Any) -> Any:
    """Return a tensor without the graph, and any other value unchanged."""
    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
        return value.detach()
    return value


class DictSnapshots:
    """Snapshot: several dicts (module attributes or buffers) with copies."""

    def __init__(self, dicts: Iterable[dict[str, Any]]) -> None:
        self._dicts = list(dicts)
        self._saved = list(map(dict.copy, self._dicts))

    @property
    def are_unchanged(self) -> bool:
        """True if the dicts have the same keys and identical value objects. Called in every use of a unit."""
        live, saved = self._dicts, self._saved
        # Each `all` is one call; a comparison by dict would take one for each module.
        return (
            list(map(len, live)) == list(map(len, saved))
            and all(map(is_, chain.from_iterable(map(dict.values, live)), chain.from_iterable(map(dict.values, saved))))
            and all(map(is_, chain.from_iterable(live), chain.from_iterable(saved)))
        )

    def drop_graphs(self) -> None:
        """Hold values instead of tensors with a graph."""
        self._saved = [{key: without_graph(value) for key, value in saved.items()} for saved in self._saved]

    def pairs(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield each live dict with the snapshot copy."""
        return zip(self._dicts, self._saved, strict=True)

    def put_back(self) -> None:
        """Restore the dicts."""
        if self.are_unchanged:
            return
        for live, before in self.pairs():
            restore_dict(live, before)


class StateSnapshot:
    """Snapshot of all state reachable from `roots` (named modules, batches, functions).

    Includes container and object contents, tensor values except engine weights, and generator states. `put_back`
    restores the same objects in place. `leaves` maps paths, for example "blocks.0.stats['n']", to values; two snapshots
    are compared by path, not by object identity.
    """

    def __init__(
        self, roots: Mapping[str, Any], ignores: Callable[[torch.Tensor], bool], *, gradients: bool = False
    ) -> None:
        """`ignores`: True for a tensor over engine weights. `gradients`: include the `grad` of leaf tensors."""
        self.leaves: dict[str, Any] = {}
        self._ignores = ignores
        self._has_gradients = gradients
        self._saved: list[tuple[Callable[[Any], Any], Any]] = []  # (restoring function, saved content)
        self._dicts: list[dict[str, Any]] = []
        """Attributes, hooks and buffers of modules: many, and few change."""
        self._seen: dict[int, Any] = {}  # by `id`; the objects live here, so that no other gets the same number
        for path, root in roots.items():
            self._visit(root, path)
        self._own = DictSnapshots(self._dicts)

    def put_back(self) -> None:
        """Restore the snapshot."""
        self._own.put_back()
        for restore, content in self._saved:
            restore(content)

    def drop_graphs(self) -> None:
        """Hold values instead of tensors with a graph: the graph may hold this snapshot, and earlier ones behind it."""
        self._seen.clear()
        self._own.drop_graphs()
        for number, (restore, content) in enumerate(self._saved):
            if isinstance(content, list):
                self._saved[number] = restore, [*map(without_graph, content)]
            elif isinstance(content, dict):
                self._saved[number] = restore, {key: without_graph(value) for key, value in content.items()}
        self._saved = [each for each in self._saved if not _has_graph(each[0])]

    def differences(self, other: StateSnapshot) -> Iterator[tuple[str, Any, Any]]:
        """Yield (path, value here, value in `other`) for each path with different values."""
        for path in [*self.leaves, *(path for path in other.leaves if path not in self.leaves)]:
            mine, theirs = self.leaves.get(path, "nothing"), other.leaves.get(path, "nothing")
            if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
                is_same = same_bits(mine, theirs)
            else:  # NaN equals NaN
                is_same = type(mine) is type(theirs) and bool(mine == theirs or mine != mine)
            if not is_same:
                yield path, mine, theirs

    # -- the walk --------------------------------------------------------------------------------------------

    def _visit(self, value: Any, path: str) -> None:
        if isinstance(value, _ATOMS):
            self.leaves[path] = value
            return
        if id(value) in self._seen or isinstance(value, type | types.ModuleType):
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            self._visit_tensor(value, path)
        elif isinstance(value, nn.Module):
            self._visit_module(value, path)
        elif isinstance(value, Mapping):
            if isinstance(value, MutableMapping) and not _has_weights(value):
                self._add_dict(value)
            for number, (key, each) in enumerate(list(value.items())):
                self._visit(each, f"{path}[{key!r}]" if isinstance(key, _ATOMS) else f"{path}[key {number}]")
        elif isinstance(value, list | deque | set):
            if not _has_weights(value):
                self._saved.append((partial(_restore_elements, value), list(value)))
            self._visit_each(value, path)
        elif isinstance(value, tuple | frozenset):
            self._visit_each(value, path)
        elif isinstance(value, partial):
            self._visit_each((value.func, value.args, value.keywords), path)
        elif isinstance(value, types.MethodType):
            self._visit(value.__self__, path)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value, path)
        else:
            self._visit_object(value, path)

    def _add_dict(self, live: MutableMapping[Any, Any]) -> None:
        self._saved.append((partial(restore_dict, live), dict(live)))

    def _visit_each(self, values: Any, path: str) -> None:
        self.leaves[f"the length of {path}"] = len(values)
        if isinstance(values, set | frozenset):  # two runs may build equal sets in another order
            values = sorted(values, key=repr)
        for number, each in enumerate(values):
            self._visit(each, f"{path}[{number}]")

    def _visit_tensor(self, tensor: torch.Tensor, path: str) -> None:
        if self._ignores(tensor) or tensor.device.type == "meta" or tensor.layout is not torch.strided:
            return
        self._seen[id(tensor)] = tensor
        self.leaves[path] = value = tensor.detach().clone()
        self._saved.append((partial(_restore_values, tensor), value))
        if self._has_gradients and tensor.is_leaf and tensor.requires_grad:
            gradient = tensor.grad
            self.leaves[f"{path}.grad"] = None
            self._saved.append((partial(setattr, tensor, "grad"), gradient))
            if gradient is not None:  # first the object, then its values
                self.leaves[f"{path}.grad"] = values = gradient.detach().clone()
                self._saved.append((partial(_restore_values, gradient), values))

    def _visit_module(self, module: nn.Module, path: str) -> None:
        own = dict(vars(module))
        begin = f"{path}." if path else ""
        own.pop("forward", None)  # restored, but not followed: it may refer to a whole trainer
        self._dicts.append(vars(module))
        for key, value in own.items():
            if isinstance(value, _ATOMS):
                self.leaves[begin + key] = value
            elif key in _HOOKS:  # Hook state belongs to the code registering the hook.
                self._dicts.append(value)
            elif key == "_modules":
                for name, child in value.items():
                    self._visit(child, f"{begin}{name}")
            elif key == "_buffers":
                self._dicts.append(value)
                for name, buffer in value.items():
                    if buffer is not None and id(buffer) not in self._seen:
                        self._visit_tensor(buffer, f"{begin}{name}")
            elif key == "_parameters":  # Parameters of a module outside the engine, for example a loss function.
                for name, parameter in value.items():
                    self._visit(parameter, f"{begin}{name}")
            elif key != "_non_persistent_buffers_set":
                self._visit(value, f"{begin}{key}")
        for owner in type(module).__mro__:  # containers of a class are shared by all of its modules
            if id(owner) not in self._seen:
                self._seen[id(owner)] = owner
                for key, value in _containers_of(owner):
                    self._visit(value, f"{begin}{key}")

    def _visit_function(self, function: types.FunctionType, path: str) -> None:
        if _is_foreign(function):
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # Not assigned yet.
                continue
            self._saved.append((partial(setattr, cell, "cell_contents"), value))
            self._visit(value, f"{path}.{name}")

    def _visit_object(self, value: Any, path: str) -> None:
        own = getattr(value, "__dict__", None)
        if isinstance(value, torch.Generator):
            self._add_state(value.set_state, value.get_state(), path)
        elif isinstance(value, random.Random):
            self._add_state(value.setstate, value.getstate(), path)
        elif isinstance(value, np.random.Generator):
            self._add_state(partial(setattr, value.bit_generator, "state"), value.bit_generator.state, path)
        elif isinstance(value, np.random.RandomState):
            self._add_state(value.set_state, value.get_state(legacy=False), path)
        elif isinstance(value, np.ndarray):
            self._add_state(partial(np.copyto, value), value.copy(), path)
        elif _has_attributes(value) and not _is_foreign(value):
            if isinstance(own, dict) and not _has_weights(own):
                self._add_dict(own)
            slots = {name: getattr(value, name) for name in _slots(value)}
            self._saved += [(partial(object.__setattr__, value, name), each) for name, each in slots.items()]
            for key, each in [*(own or {}).items(), *slots.items()]:
                self._visit(each, f"{path}.{key}")

    def _add_state(self, restore: Callable[[Any], Any], state: Any, path: str) -> None:
        self._saved.append((restore, state))
        self.leaves[path] = state if isinstance(state, torch.Tensor) else repr(state)
