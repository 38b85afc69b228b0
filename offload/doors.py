"""Doors: objects by name, from the core, from extras and from other packages.

An extra is imported at the first use of one of the names, so an unused extra costs nothing:

    METHODS: Door[type[Method]] = Door("method", {"backward": Backward})
    METHODS["forwards"]                       # imports offload.extras.zeroth
    METHODS.register("my_method", MyMethod)   # from another package

`offload.extras.ENTRIES` lists the names of the extras in this package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from operator import attrgetter
from typing import Any, Generic, TypeVar

from offload.errors import ConfigError, nearest

T = TypeVar("T")


class Door(Mapping[str, T], Generic[T]):
    """Objects of one kind by name."""

    def __init__(self, kind: str, own: Mapping[str, T]) -> None:
        """`kind`: name of the door, in messages and in `ENTRIES`. `own`: objects of the core."""
        extras = import_module("offload.extras")
        self._kind = kind
        self._objects = dict(own)
        self._places: Mapping[str, str] = extras.ENTRIES.get(kind, {})
        self._unused: Mapping[str, tuple[str, object]] = extras.UNUSED.get(kind, {})

    def register(self, name: str, value: T) -> None:
        """Add an object. Raises ConfigError if the name is taken."""
        if name in self:
            raise ConfigError(f"the {self._kind} {name!r} exists already: register yours under another name.")
        self._objects[name] = value

    def used_with(self, settings: object) -> Iterator[T]:
        """Yield the objects for these settings, without an import of those left out by `offload.extras.UNUSED`."""
        for name in self:
            setting, value = self._unused.get(name, ("", None))
            if not setting or attrgetter(setting)(settings) != value:
                yield self[name]

    def __getitem__(self, name: str) -> T:
        if name not in self._objects:
            if name not in self._places:
                raise ConfigError(f"there is no {self._kind} {name!r}{nearest(name, self)}.")
            module, _, attribute = self._places[name].partition(":")
            place: Any = import_module(module)
            if attribute:
                place = getattr(place, attribute)
            self._objects[name] = place
        return self._objects[name]

    def __contains__(self, name: Any) -> bool:
        return name in self._objects or name in self._places

    def __iter__(self) -> Iterator[str]:
        """Iterate over names of the core, of other packages, and of the extras: in one order, whatever was imported."""
        return iter([*(name for name in self._objects if name not in self._places), *self._places])

    def __len__(self) -> int:
        return sum(1 for _ in self)
