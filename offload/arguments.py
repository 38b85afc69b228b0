"""Runtime type checks for call arguments against their annotations."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

from offload.errors import ConfigError, shorten


def check_types(of: Any, arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError if an argument or a dataclass field does not match its annotation.

    `of`: function or dataclass with the annotations. The message names the configuration key for the argument.
    """
    hints = _hints(of)
    for name, value in arguments.items():
        if name in hints and not _fits(value, hints[name]):
            own = f"{of.__qualname__.removesuffix('.__init__')}.{name}"
            keys = import_module("offload.app.config.config").all_keys()  # for the message alone
            key = next((key for key in keys if key.endswith(f".{name}")), own)
            expected = re.sub(r"\w+\.(?=\w)", "", inspect.formatannotation(hints[name]))
            raise ConfigError(f"{key} is {shorten(repr(value))}; it must be {expected}.")


_hints = cache(typing.get_type_hints)


def _fits(value: Any, annotation: Any) -> bool:
    origin, parts = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if annotation is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if annotation in (int, float):  # an integer counts as a float, and a bool does not
        return isinstance(value, int | annotation) and not isinstance(value, bool)
    if origin in (tuple, Sequence):  # a list counts as a tuple; a string is no list
        if not isinstance(value, tuple | list):
            return False
        annotations = parts if origin is tuple and ... not in parts else parts[:1] * len(value)
        return len(annotations) == len(value) and all(map(_fits, value, annotations))
    if origin is Mapping and isinstance(value, Mapping):
        return all(_fits(pair, types.GenericAlias(tuple, parts)) for pair in value.items())
    return isinstance(value, origin)
