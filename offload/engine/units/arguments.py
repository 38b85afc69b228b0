"""What a unit is called with and what it returns: trees of which each tensor is listed once."""

from __future__ import annotations

import copy
import sys
from collections.abc import Hashable, MutableMapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


class Arguments:
    """Positional and keyword arguments (or a result) as a tree, with each tensor listed once, however often it occurs.

    Mappings that torch's pytree does not open (such as the one in which Gemma 3n passes keys and values on) are opened
    too.
    """

    def __init__(self, tree: Any) -> None:
        self.tensors: list[torch.Tensor] = []
        self.others: list[Any] = []
        self._seen: dict[int, int] = {}
        self._leaves, self._spec = self._flatten(tree)

    @property
    def structure(self) -> Hashable:
        """Return what two uses of a unit must have in common for what was learned of one to hold for the other."""
        return self._spec, tuple(kind is True for kind, *_ in self._leaves), tuple(t.dim() for t in self.tensors)

    def fill(self, tensors: Sequence[torch.Tensor], others: Sequence[Any] | None = None) -> Any:
        """Return the tree with other tensors (and other leaves) in the places of the listed ones."""
        return self._fill(self._leaves, self._spec, tensors, self.others if others is None else others)

    def _flatten(self, tree: Any) -> tuple[list[Any], TreeSpec]:
        leaves, spec = tree_flatten(tree)
        places: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                index = self._seen.setdefault(id(leaf), len(self.tensors))
                if index == len(self.tensors):
                    self.tensors.append(leaf)
                places.append((True, index))
            elif isinstance(leaf, MutableMapping):
                places.append((leaf, *self._flatten(dict(leaf))))
            else:
                places.append((False, len(self.others)))
                self.others.append(leaf)
        return places, spec

    def _fill(self, places: list[Any], spec: TreeSpec, tensors: Sequence[torch.Tensor], others: Sequence[Any]) -> Any:
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
        return tree_unflatten(leaves, spec)


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
    return [value for value in (*args, *kwargs.values()) if isinstance(value, MutableMapping)]


def without_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Leave key-value caches out of a training call: a recompute would append to them, and nothing reads them."""
    library = sys.modules.get("transformers.cache_utils")
    if library is None:
        return args, kwargs
    cache = library.Cache
    return (
        tuple(None if isinstance(value, cache) else value for value in args),
        {key: None if isinstance(value, cache) else value for key, value in kwargs.items()},
    )
