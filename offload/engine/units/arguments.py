"""Unit arguments and results as trees: each tensor is listed once, each mutable container has a number."""

from __future__ import annotations

import contextvars
import copy
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterator, MutableMapping, MutableSequence, MutableSet, Sequence
from dataclasses import dataclass, is_dataclass
from operator import is_, itemgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_iter, tree_unflatten

_PLAIN = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device))
_MUTABLE = (MutableMapping, MutableSequence, MutableSet)
_LEAVES = _PLAIN | {torch.Tensor, torch.nn.Parameter}
"""The most common argument types. They are handled directly, since torch pytree needs ten calls per leaf."""


class _Call(NamedTuple):
    """Arguments of a call."""

    args: tuple[Any, ...]
    """Positional arguments."""
    kwargs: dict[str, Any]
    """Keyword arguments: a fresh dict, so changes by a unit stay invisible to others."""


class Arguments:
    """Positional and keyword arguments (or a result) as a tree. Each distinct tensor is listed once.

    Expanded are all torch pytree nodes and all mutable containers: lists, sets, mappings (Gemma 3n passes keys and
    values in one), key-value caches, and dataclasses with tensors. A container with several occurrences is expanded
    once.
    """

    def __init__(self, tree: Any, containers: list[Any] | None = None, opens_caches: bool = True) -> None:
        """Flatten `tree`.

        `containers`: known containers, referenced by list index; new containers from `tree` are appended. The list is
        not stored here: a use with a reference to a container would also hold later content, including the use's own
        result, a reference cycle. `opens_caches`: expand key-value caches too.
        """
        if containers is None:
            containers = []
        self.tensors: list[torch.Tensor] = []
        self.others: list[Any] = []
        self._opens_caches = opens_caches
        self._shells: dict[int, Any] = {}  # containers of other types without their content, by number
        leaves: list[Any] = []
        self._spec = self._flatten(tree, leaves, containers)
        self._places: list[tuple[bool, int]] = []  # Per leaf: (is a tensor, index).
        seen: dict[int, int] = {}
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
        are_tensors = tuple(map(itemgetter(0), self._places))
        return self._spec, are_tensors, tuple(map(torch.Tensor.dim, self.tensors))

    def fill(
        self,
        tensors: Sequence[torch.Tensor | None],
        others: Sequence[Any] | None = None,
        containers: list[Any] | None = None,
    ) -> Any:
        """Return the tree with other tensors (and other non-tensor leaves).

        `containers`: as in `Arguments()`; new containers are appended.
        """
        if others is None:
            others = self.others
        if containers is None:
            containers = []
        leaves: list[Any] = []
        for is_tensor, index in self._places:
            leaves.append(tensors[index] if is_tensor else others[index])
        return self._rebuild(self._spec, iter(leaves), containers)

    def _flatten(self, tree: Any, leaves: list[Any], containers: list[Any]) -> Hashable:
        """Append the leaves of `tree` and return the tree spec.

        A spec is None for a leaf, the number of a known container, or (kind, keys, is_container, child specs).
        """
        node_type: Any = type(tree)
        keys, parts = None, tree
        is_container = node_type is not tuple and node_type is not _Call
        if node_type is _Call:
            keys, parts = (len(tree.args), *tree.kwargs), [*tree.args, *tree.kwargs.values()]
        elif is_container:
            for number, known in enumerate(containers):
                if known is tree:
                    return number
            if node_type is dict:
                keys, parts = tuple(tree), tree.values()
            elif node_type is not list:
                is_container = _is_container(tree) and (self._opens_caches or not isinstance(tree, _cache_types()))
                parts, spec = _open_node(tree)
                if not spec.is_leaf():
                    node_type = spec
                elif is_container:
                    parts, self._shells[len(containers)] = _contents([tree])[0], _refill(_copy_container(tree), [])
                else:
                    leaves.append(tree)
                    return None
            if is_container:
                containers.append(tree)
        specs: list[Hashable] = []
        for part in parts:
            if type(part) in _LEAVES:  # most parts; a call for each would be slow
                leaves.append(part)
                specs.append(None)
            else:
                specs.append(self._flatten(part, leaves, containers))
        return node_type, keys, is_container, tuple(specs)

    def _rebuild(self, spec: Any, leaves: Iterator[Any], containers: list[Any]) -> Any:
        """Rebuild a tree from a spec."""
        if spec is None:
            return next(leaves)
        if type(spec) is int:
            return containers[spec]
        node_type, keys, is_container, specs = spec
        number = len(containers)
        if is_container:
            containers.append(None)  # Reserve the number before the children, in the same order as `_flatten`.
        parts = []
        for part in specs:
            parts.append(next(leaves) if part is None else self._rebuild(part, leaves, containers))  # noqa: PERF401 (a comprehension is a call)
        tree: Any
        if node_type is _Call:
            num_args, *names = keys
            tree = _Call(tuple(parts[:num_args]), dict(zip(names, parts[num_args:], strict=True)))
        elif node_type is dict:
            tree = dict(zip(keys, parts, strict=True))
        elif node_type is tuple or node_type is list:
            tree = node_type(parts)
        elif isinstance(node_type, TreeSpec):
            tree = tree_unflatten(parts, node_type)
        else:
            tree = _refill(_copy_container(self._shells[number]), parts)
        if is_container:
            containers[number] = tree
        return tree


# -- containers ----------------------------------------------------------------------------------------------


def _open_node(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Return the direct parts of a tree and the spec for them; `[tree]` for a leaf.

    torch's function is a reference cycle, so a filter with a tensor would keep it until a garbage collection.
    """
    root = [tree]
    try:
        return tree_flatten(tree, lambda part: part is not root[0])
    finally:
        root.clear()


def _is_container(value: Any) -> bool:
    """True for a mutable non-tensor value. Objects without `__dict__` are excluded, because copying may fail."""
    if isinstance(value, list | dict | set | deque):
        return True
    if not hasattr(value, "__dict__"):
        return False
    return isinstance(value, (*_MUTABLE, *_cache_types())) or _is_record(value)


def _is_record(value: Any, outer: Sequence[Any] = ()) -> bool:
    """True for a dataclass or a SimpleNamespace with a tensor in an attribute, also in a record there.

    Others, such as configurations, stay whole. `outer`: records around this one.
    """
    if not (is_dataclass(value) or type(value) is SimpleNamespace) or isinstance(value, type | torch.nn.Module):
        return False
    if any(value is other for other in outer):
        return False
    leaves = tree_iter([*getattr(value, "__dict__", {}).values()])
    return any(isinstance(leaf, torch.Tensor) or _is_record(leaf, (*outer, value)) for leaf in leaves)


def _cache_types() -> tuple[type, ...]:
    """Return the transformers classes of key-value caches and cache layers."""
    library = sys.modules.get("transformers.cache_utils")
    names = ("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin")
    return tuple(getattr(library, name) for name in names if hasattr(library, name))


def _copy_container(container: Any) -> Any:
    """Return a copy of a container and of the containers in its attributes. Tensors and elements are shared."""
    own = copy.copy(container)
    attributes = getattr(own, "__dict__", {})
    for name, value in attributes.items():
        if _is_container(value):
            attributes[name] = copy.copy(value)
    return own


def _store(container: Any) -> Any:
    """Return the object that stores the content: for a cache or a dataclass, the attribute dict."""
    if isinstance(container, _MUTABLE) and not isinstance(container, _cache_types()):
        return container
    return vars(container)


def _contents(containers: Sequence[Any]) -> list[list[Any]]:
    """Return the content of each container as a flat list: the items, or for a mapping all keys, then all values."""
    contents: list[list[Any]] = []
    for container in containers:
        kind = type(container)
        store = container
        # Runs in every use, mostly for dict and list; the cache type check takes ten calls.
        if kind is not dict and kind is not list:
            store = _store(container)
        content = list(store)
        if kind is dict or (kind is not list and isinstance(store, MutableMapping)):
            content += store.values()
        contents.append(content)
    return contents


def _refill(container: Any, content: Sequence[Any]) -> Any:
    """Replace the content of a container, in the format of `_contents`, and return the container."""
    store = _store(container)
    if isinstance(store, MutableMapping):
        keys, values = content[: len(content) // 2], content[len(content) // 2 :]
        if list(store) != keys[: len(store)]:  # Some keys are gone or new: the order must be that of `content`.
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


def receive_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], opens_caches: bool = True
) -> tuple[Arguments, list[Any]]:
    """Return the arguments of a call and the caller's own containers, for `deliver_result`.

    The containers come from the arguments and from context variables, where transformers collects additional layer
    outputs.
    """
    containers: list[Any] = []
    arguments = Arguments(_Call(args, kwargs), containers, opens_caches)
    _, collected = find_collectors(contextvars.copy_context())
    more_containers = collected
    if any(collected):  # containers inside count too; the numbers are those of `copy_collected`
        Arguments(collected, more_containers := [])
    containers += more_containers
    return arguments, containers


def find_collectors(context: contextvars.Context) -> tuple[list[contextvars.ContextVar[Any]], list[Any]]:
    """Return the context variables with a dict or list value, and these values."""
    variables, values = [], []
    for variable, value in context.items():
        if type(value) is dict or type(value) is list:
            variables.append(variable)
            values.append(value)
    return variables, values


def copy_collected(
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
    tree, more_containers = Arguments(collected), list[Any]()
    copied = tree.fill([t if keep is None or keep(t) else None for t in tree.tensors], containers=more_containers)
    containers += more_containers
    return copied


def run_over_copies(
    forward: Callable[..., Any],
    arguments: Arguments,
    tensors: Sequence[torch.Tensor],
    others: Sequence[Any],
) -> Arguments:
    """Call a unit forward on copies of all mutable containers. Return (result, *changes).

    The caller's own containers change only in `deliver_result`.
    """
    containers: list[Any] = []  # in the order of `receive_call`, so that numbers mean the same containers
    args, kwargs = arguments.fill(tensors, others, containers)
    variables, collected = find_collectors(contextvars.copy_context())
    try:
        if collected:
            for variable, own in zip(variables, copy_collected(collected, containers), strict=True):
                variable.set(own)
        before = _contents(containers)
        result = forward(*args, **kwargs)
        return Arguments((result, *_find_changes(containers, before)), containers)
    finally:
        for variable, value in zip(variables, collected, strict=True):
            variable.set(value)


def _find_changes(containers: Sequence[Any], before: Sequence[list[Any]]) -> list[tuple[_Change, list[Any]]]:
    """Return (change, new items) for each container with changed content."""
    now, changed = _contents(containers), []
    for number, (a, b) in enumerate(zip(before, now, strict=True)):
        if len(a) != len(b) or not all(map(is_, a, b)):  # one call; a generator would take one for each item
            changed.append(number)
    if not changed:
        return []
    places = {id(item): (number, place) for number, items in enumerate(before) for place, item in enumerate(items)}
    changes = []
    for number in changed:
        # A plain value has no identity: the same number may be in several containers.
        kept_places = [None if type(item) in _PLAIN else places.get(id(item)) for item in now[number]]
        new_items = [item for item, place in zip(now[number], kept_places, strict=True) if place is None]
        changes.append((_Change(number, kept_places), new_items))
    return changes


def deliver_result(result: Arguments, tensors: Sequence[torch.Tensor], containers: list[Any]) -> Any:
    """Return a unit result for the caller, and apply the recorded changes to the caller's own `containers`."""
    value, *changes = result.fill(tensors, containers=containers)
    if not changes:
        return value
    before = _contents(containers)  # of all first: an item may have moved from one container to another
    for change, items in changes:
        new = iter(items)
        content = [next(new) if place is None else before[place[0]][place[1]] for place in change.places]
        _refill(containers[change.container], content)
    return value
