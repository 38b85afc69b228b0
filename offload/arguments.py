"""Runtime checks of call arguments: types against annotations, and paths of folders."""

from __future__ import annotations

import inspect
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from offload.errors import ConfigError, shorten
from offload.setting_texts import KEYS


def check_types(of: Any, arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError if an argument or a dataclass field does not match its annotation.

    `of`: function or dataclass with the annotations. The message names the configuration key for the argument.
    """
    hints = _hints(of)
    for name, value in arguments.items():
        if name in hints and not _fits(value, hints[name]):
            own = f"{of.__qualname__.removesuffix('.__init__')}.{name}"
            key = KEYS.get(name, own)
            expected = re.sub(r"\w+\.(?=\w)", "", inspect.formatannotation(hints[name]))
            raise ConfigError(f"{key} is {shorten(repr(value))}; it must be {expected}.")


def as_folder(path: Any) -> Path:
    """Return the path of a folder. A link is followed, so a folder is replaced behind the link. Raises ConfigError."""
    if not isinstance(path, str | os.PathLike) or not isinstance(text := os.fspath(path), str):
        raise ConfigError(f"the folder is {shorten(repr(path))}; it must be a text, or a path of pathlib.")
    if "\0" in text:
        raise ConfigError(f"the folder is {shorten(repr(text))}, and no path has a zero character.")
    folder = Path(text)
    try:
        if not folder.is_absolute():
            Path.cwd()  # raises here, and not in the middle of a save
        if folder.is_symlink():
            return folder.resolve()
        return folder
    except FileNotFoundError:
        raise ConfigError(
            f"the folder {text} is relative, and the working directory is gone: give an absolute path, or change to a "
            "folder that exists."
        ) from None
    except (OSError, RuntimeError) as error:  # a circle of links is a RuntimeError up to Python 3.12
        raise ConfigError(f"the folder {text} is a link that cannot be followed: {error}.") from None


_hints = cache(typing.get_type_hints)


def _fits(value: Any, annotation: Any) -> bool:
    origin = typing.get_origin(annotation) or annotation
    parts = typing.get_args(annotation)
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
