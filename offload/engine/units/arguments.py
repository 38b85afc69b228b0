"""Unit arguments and results as trees: each tensor is listed once, each mutable container has a number."""

from __future__ import annotations

import contextvars
import copy
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterator, MutableMapping, MutableSequence, MutableSet, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

_PLAIN = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device))
_MUTABLE = (MutableMapping, MutableSequence, MutableSet)
_LEAVES = _PLAIN | {torch.Tensor, torch.nn.Parameter}
"""The most common argument types. They are handled directly, since torch pytree needs ten calls per leaf."""


class _Keywords(dict[str, Any]):
    """Keyword arguments of a call: a fresh dict, so changes by a unit stay invisible to others."""


class Arguments:
    """Positional and keyword arguments (or a result) as a tree. Each distinct tensor is listed once.

    Expanded are all torch pytree nodes and all mutable containers: lists, sets, mappings (Gemma 3n passes keys and
    values in one) and key-value caches. A container with several occurrences is expanded once.
    """

    def __init__(self, tree: Any, containers: list[Any] | None = None, opens_caches: bool = True) -> None:
        """Flatten `tree`.

        `containers`: known containers, referenced by list index; new containers from `tree` are appended. The list is
        not stored here: a use with a reference to a container would also hold later content, including the use's own
        result, a reference cycle. `opens_caches`: expand key-value caches too.
        """
        self.tensors: list[torch.Tensor] = []
        self.others: list[Any] = []
        self._opens_caches = opens_caches
        self._shells: dict[int, Any] = {}
        leaves: list[Any] = []
        self._spec = self._open(tree, leaves, [] if containers is None else containers)
        seen: dict[int, int] = {}
        self._places: list[tuple[bool, int]] = []  # Per leaf: (is a tensor, index).
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                index = seen.setdefault(id(leaf), len(self.tensors))
                if index == len(self.tensors):
                    self.tensors.append(leaf)
                self._places.append((True, index))
            else:
                self._places.append((False, len(self.others)))
                self.others.append(leaf)

    @property
    def structure(self) -> Hashable:
        """Hashable structure. Traits learned from one use apply to other uses with an equal structure."""
        return self._spec, tuple([is_tensor for is_tensor, _ in self._places]), tuple([t.dim() for t in self.tensors])

    def fill(
        self,
        tensors: Sequence[torch.Tensor | None],
        others: Sequence[Any] | None = None,
        containers: list[Any] | None = None,
    ) -> Any:
        """Return the tree with other tensors (and other non-tensor leaves).

        `containers`: as in `Arguments()`; new containers are appended.
        """
        others = self.others if others is None else others
        leaves = [tensors[index] if is_tensor else others[index] for is_tensor, index in self._places]
        return self._close(self._spec, iter(leaves), [] if containers is None else containers)

    def _open(self, tree: Any, leaves: list[Any], containers: list[Any]) -> Hashable:
        """Append the leaves of `tree` and return the tree spec.

        A spec is None for a leaf, the number of a known container, or (kind, keys, is_container, child specs).
        """
        kind: Any = type(tree)
        keys, parts = None, tree
        is_container = kind is not tuple and kind is not _Keywords
        if kind is _Keywords:
            keys, parts = tuple(tree), tree.values()
        elif is_container:
            for number, known in enumerate(containers):
                if known is tree:
                    return number
            if kind is dict:
                keys, parts = tuple(tree), tree.values()
            elif kind is not list:
                is_container = _is_container(tree) and (self._opens_caches or not isinstance(tree, _cache_types()))
                parts, spec = tree_flatten(tree, lambda part: part is not tree)
                if not spec.is_leaf():
                    kind = spec
                elif is_container:
                    parts, self._shells[len(containers)] = _contents([tree])[0], _refill(_own_copy(tree), [])
                else:
                    leaves.append(tree)
                    return None
            if is_container:
                containers.append(tree)
        specs: list[Hashable] = []
        for part in parts:
            if type(part) in _LEAVES:
                leaves.append(part)
                specs.append(None)
            else:
                specs.append(self._open(part, leaves, containers))
        return kind, keys, is_container, tuple(specs)

    def _close(self, spec: Any, leaves: Iterator[Any], containers: list[Any]) -> Any:
        """Rebuild a tree from a spec."""
        if spec is None:
            return next(leaves)
        if type(spec) is int:
            return containers[spec]
        kind, keys, is_container, specs = spec
        number = len(containers)
        if is_container:
            containers.append(None)  # Reserve the number before the children, in the same order as `_open`.
        parts = []
        for part in specs:
            parts.append(next(leaves) if part is None else self._close(part, leaves, containers))  # noqa: PERF401 (a comprehension is a call)
        tree: Any
        if kind is dict or kind is _Keywords:
            tree = kind(zip(keys, parts, strict=True))
        elif kind is tuple or kind is list:
            tree = kind(parts)
        elif isinstance(kind, TreeSpec):
            tree = tree_unflatten(parts, kind)
        else:
            tree = _refill(_own_copy(self._shells[number]), parts)
        if is_container:
            containers[number] = tree
        return tree


# -- containers ----------------------------------------------------------------------------------------------


def _is_container(value: Any) -> bool:
    """True for a mutable non-tensor value. Objects without `__dict__` are excluded, because copying may fail."""
    if isinstance(value, list | dict | set | deque):
        return True
    return hasattr(value, "__dict__") and isinstance(value, (*_MUTABLE, *_cache_types()))


def _cache_types() -> tuple[type, ...]:
    """Return the transformers classes of key-value caches and cache layers."""
    library = sys.modules.get("transformers.cache_utils")
    names = ("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin")
    return tuple(getattr(library, name) for name in names if hasattr(library, name))


def _own_copy(container: Any) -> Any:
    """Return a copy of a container and of the containers in its attributes. Tensors and elements are shared."""
    own = copy.copy(container)
    for name, value in vars(own).items() if hasattr(own, "__dict__") else ():
        if _is_container(value):
            vars(own)[name] = copy.copy(value)
    return own


def _store(container: Any) -> Any:
    """Return the object that stores the content: for a cache, the attribute dict."""
    return vars(container) if isinstance(container, _cache_types()) else container


def _contents(containers: Sequence[Any]) -> list[list[Any]]:
    """Return the content of each container as a flat list: the items, or for a mapping all keys, then all values."""
    found: list[list[Any]] = []
    for container in containers:
        kind = type(container)  # Runs in every use, mostly for dict and list; the cache type check takes ten calls.
        store = container if kind is dict or kind is list else _store(container)
        is_mapping = kind is dict or (kind is not list and isinstance(store, MutableMapping))
        found.append([*store, *store.values()] if is_mapping else list(store))
    return found


def _refill(container: Any, content: Sequence[Any]) -> Any:
    """Replace the content of a container, in the format of `_contents`, and return the container."""
    store = _store(container)
    if isinstance(store, MutableMapping):
        keys, values = content[: len(content) // 2], content[len(content) // 2 :]
        if list(store) != keys[: len(store)]:  # Some keys are gone or new.
            for key in list(store):
                del store[key]
        for key, value in zip(keys, values, strict=True):
            store[key] = value
    else:
        store.clear()
        (store.update if isinstance(store, set) else store.extend)(content)
    return container


@dataclass(frozen=True)
class _Change:
    """New content of a container after a forward."""

    container: int
    """Container number."""
    places: list[tuple[int, int] | None]
    """For each item, the (container, position) before the forward. None: new item."""


def received(args: tuple[Any, ...], kwargs: dict[str, Any], opens_caches: bool = True) -> tuple[Arguments, list[Any]]:
    """Return the arguments of a call and the caller's own containers, for `deliver`.

    The containers come from the arguments and from context variables, where transformers collects additional layer
    outputs.
    """
    containers: list[Any] = []
    arguments = Arguments((args, _Keywords(kwargs)), containers, opens_caches)
    _, found = collectors(contextvars.copy_context())
    around = found
    if any(found):
        Arguments(found, around := [])
    containers += around
    return arguments, containers


def collectors(context: contextvars.Context) -> tuple[list[contextvars.ContextVar[Any]], list[Any]]:
    """Return the context variables with a dict or list value, and these values."""
    variables, found = [], []
    for variable, value in context.items():
        if type(value) is dict or type(value) is list:
            variables.append(variable)
            found.append(value)
    return variables, found


def copies(
    collected: list[Any], containers: list[Any], keep: Callable[[torch.Tensor], bool] | None = None
) -> list[Any]:
    """Return copies of the values collected in context variables.

    All containers inside are appended to `containers`. `keep`: filter for tensors; rejected ones become None in the
    copy.
    """
    if not any(collected):  # The usual case: nothing to expand.
        begin = len(containers)
        for value in collected:
            containers.append(type(value)())  # noqa: PERF401 (a comprehension is a call)
        return containers[begin:]
    tree, around = Arguments(collected), list[Any]()
    own = tree.fill([t if keep is None or keep(t) else None for t in tree.tensors], containers=around)
    containers += around
    return own


def run_over_copies(
    forward: Callable[..., Any],
    arguments: Arguments,
    tensors: Sequence[torch.Tensor],
    others: Sequence[Any],
) -> Arguments:
    """Call a unit forward on copies of all mutable containers, so the caller's own containers change only in `deliver`.

    Return (result, *changes).
    """
    containers: list[Any] = []
    args, kwargs = arguments.fill(tensors, others, containers)
    variables, found = collectors(contextvars.copy_context())
    try:
        for variable, own in zip(variables, copies(found, containers) if found else (), strict=True):
            variable.set(own)
        before = _contents(containers)
        result = forward(*args, **kwargs)
        return Arguments((result, *_changes(containers, before)), containers)
    finally:
        for variable, value in zip(variables, found, strict=True):
            variable.set(value)


def _changes(containers: Sequence[Any], before: Sequence[list[Any]]) -> list[tuple[_Change, list[Any]]]:
    """Return (change, new items) for each container with changed content."""
    now, changed = _contents(containers), []
    for number, (a, b) in enumerate(zip(before, now, strict=True)):
        if len(a) != len(b) or not all(map(is_, a, b)):
            changed.append(number)
    if not changed:
        return []
    places = {id(item): (number, at) for number, items in enumerate(before) for at, item in enumerate(items)}
    found = []
    for number in changed:
        old = [None if type(item) in _PLAIN else places.get(id(item)) for item in now[number]]
        found.append((_Change(number, old), [item for item, at in zip(now[number], old, strict=True) if at is None]))
    return found


def deliver(result: Arguments, tensors: Sequence[torch.Tensor], containers: list[Any]) -> Any:
    """Return a unit result for the caller, and apply the recorded changes to the caller's own `containers`."""
    value, *found = result.fill(tensors, containers=containers)
    before = _contents(containers) if found else []
    for change, items in found:
        new = iter(items)
        content = [next(new) if at is None else before[at[0]][at[1]] for at in change.places]
        _refill(containers[change.container], content)
    return value
