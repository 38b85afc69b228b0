"""What a unit is called with and what it returns: trees of which each tensor is listed once."""

from __future__ import annotations

import copy
import sys
from collections import UserDict
from collections.abc import Callable, Hashable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

_CONTAINERS = frozenset((tuple, list, dict))
_LEAVES = frozenset((torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str))
"""The types of nearly all arguments, which are opened here: torch's pytree takes ten calls for each leaf."""


class Arguments:
    """Positional and keyword arguments (or a result) as a tree, with each tensor listed once, however often it occurs.

    Mappings that torch's pytree does not open (such as the one in which Gemma 3n passes keys and values on) are opened
    too.
    """

    def __init__(self, tree: Any) -> None:
        self.tensors: list[torch.Tensor] = []
        self.others: list[Any] = []
        self._seen: dict[int, int] = {}
        self._places, self._spec = self._flatten(tree)

    @property
    def structure(self) -> Hashable:
        """Return what two uses of a unit must have in common for what was learned of one to hold for the other."""
        kinds, dims = [place[0] is True for place in self._places], [t.dim() for t in self.tensors]
        return self._spec, tuple(kinds), tuple(dims)

    def fill(self, tensors: Sequence[torch.Tensor], others: Sequence[Any] | None = None) -> Any:
        """Return the tree with other tensors (and other leaves) in the places of the listed ones."""
        return self._fill(self._places, self._spec, tensors, self.others if others is None else others)

    def _flatten(self, tree: Any) -> tuple[list[Any], Hashable]:
        leaves: list[Any] = []
        spec = _open(tree, leaves)
        places: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                index = self._seen.setdefault(id(leaf), len(self.tensors))
                if index == len(self.tensors):
                    self.tensors.append(leaf)
                places.append((True, index))
            elif type(leaf) not in _LEAVES and isinstance(leaf, MutableMapping):
                places.append((_shell(leaf), *self._flatten(dict(leaf))))
            else:
                places.append((False, len(self.others)))
                self.others.append(leaf)
        return places, spec

    def _fill(self, places: list[Any], spec: Hashable, tensors: Sequence[torch.Tensor], others: Sequence[Any]) -> Any:
        leaves = []
        for kind, *place in places:
            if kind is True:
                leaves.append(tensors[place[0]])
            elif kind is False:
                leaves.append(others[place[0]])
            else:
                mapping = copy.copy(kind)
                inner_places, inner_spec = place
                mapping.update(self._fill(inner_places, inner_spec, tensors, others))
                leaves.append(mapping)
        return _close(spec, iter(leaves))


def _shell(mapping: MutableMapping[Any, Any]) -> MutableMapping[Any, Any]:
    """Return a copy that holds nothing: a use that held the mapping itself would hold what the model puts there later,
    its own result too, and that holds the use.
    """
    shell = copy.copy(mapping)
    if isinstance(shell, UserDict):  # of another, the copy may have the same storage
        shell.clear()
    return shell


def _open(tree: Any, leaves: list[Any]) -> Hashable:
    """Append the leaves of a tree; return how it is built of them: None for a leaf, (type, keys, parts), or a spec of
    torch's.
    """
    kind = type(tree)
    if kind not in _CONTAINERS:
        found, spec = tree_flatten(tree)
        leaves += found
        return spec
    parts: list[Hashable] = []
    for part in tree.values() if kind is dict else tree:
        if type(part) in _LEAVES:
            leaves.append(part)
            parts.append(None)
        else:
            parts.append(_open(part, leaves))
    return kind, tuple(tree) if kind is dict else None, tuple(parts)


def _close(spec: Any, leaves: Iterator[Any]) -> Any:
    """Return a tree that is built so."""
    if isinstance(spec, TreeSpec):
        return tree_unflatten([next(leaves) for _ in range(spec.num_leaves)], spec)
    kind, keys, parts = spec
    found = []
    for part in parts:
        found.append(next(leaves) if part is None else _close(part, leaves))  # noqa: PERF401 (a comprehension is a call)
    return kind(found) if keys is None else dict(zip(keys, found, strict=True))


def deliver(filled: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Put a unit's additions into the caller's own mappings; return the result alone."""
    result, additions = filled
    if additions:
        found = mappings(args, kwargs)
        for number, key, value in additions:
            found[number][key] = value
    return result


def mappings(args: Sequence[Any], kwargs: dict[str, Any]) -> list[MutableMapping[Any, Any]]:
    """Return the mappings among the arguments, to which a unit may add."""
    given = (*args, *kwargs.values())
    return [value for value in given if type(value) not in _LEAVES and isinstance(value, MutableMapping)]


def without_caches(
    args: tuple[Any, ...], kwargs: dict[str, Any], put: Callable[[Any], Any] = lambda _: None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Leave key-value caches out of a training call: a recompute would append to them, and nothing reads them. `put`:
    what stands for each instead.
    """
    library = sys.modules.get("transformers.cache_utils")
    if library is None:
        return args, kwargs
    cache = library.Cache
    return (
        tuple(put(value) if isinstance(value, cache) else value for value in args),
        {key: put(value) if isinstance(value, cache) else value for key, value in kwargs.items()},
    )
