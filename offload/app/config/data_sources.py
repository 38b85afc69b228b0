"""Data sources in a configuration: mappings with axolotl keys, validated separately."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from offload.errors import nearest, shorten

Format = Literal["auto", "text", "jsonl", "messages", "sharegpt", "alpaca", "prompt-completion", "preference", "tokens"]
_FORMATS = {**{name: name for name in get_args(Format)}, "completion": "jsonl", "chat_template": "messages"}
"""Format names; the last two come from axolotl."""
_KEYS = ("path", "type", "split", "name", "revision", "weight", "columns")


def as_sources(value: Any) -> Any:
    """Convert a path, a source mapping, or a list with either to a tuple (mappings only). Raises ValueError.

    A value with another type is returned unchanged; the field type then rejects the value.
    """
    if value is None or value == "none":
        return ()
    if isinstance(value, str | Mapping):
        value = [value]
    return tuple(map(_as_source, value)) if isinstance(value, list | tuple) else value


def _as_source(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        value = {"path": value}
    if not isinstance(value, Mapping):
        raise ValueError(
            f"a source is a path or a mapping such as {{path: FILE, weight: 0.5}}, not {shorten(repr(value))}"
        )
    for key in value:
        if key not in _KEYS:
            raise ValueError(
                f"a source has no key {shorten(repr(key))}{nearest(str(key), _KEYS)}; its keys are {', '.join(_KEYS)}"
            )
    source = {key: value[key] for key in _KEYS if value.get(key) is not None}
    for key in ("path", "type", "split", "name", "revision"):
        if key in source and (not isinstance(source[key], str) or not source[key]):
            raise ValueError(f"{key} of a source should be a text, not {shorten(repr(source[key]))}")
    if "path" not in source:
        raise ValueError("a source needs its path: a file, a folder, a glob, a URL or the name of a data set")
    if "type" in source:
        if source["type"] not in _FORMATS:
            close = nearest(source["type"], _FORMATS)
            raise ValueError(f"type of a source should be one of {', '.join(_FORMATS)}, not {source['type']!r}{close}")
        source["type"] = _FORMATS[source["type"]]
    if "weight" in source:
        weight = source["weight"]
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise ValueError(f"weight of a source should be a number above 0, not {shorten(repr(weight))}")
    if "columns" in source:
        source["columns"] = as_columns(source["columns"])
    return source


def as_columns(value: Any) -> Any:
    """Return {format key: column name} as a dict. Raises ValueError."""
    if value is None or value == "none":
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(k, str) and isinstance(v, str) for k, v in value.items()):
        raise ValueError("it should say which column is meant by a key, such as {text: body}")
    return dict(value)
