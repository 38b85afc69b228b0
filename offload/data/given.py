"""Rows that are given in Python, as a file that is read like any other: in pieces, as often as need be, by its place in
errors, and recognised by its content when a run goes on.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from offload.errors import ConfigError
from offload.files.user_cache import default_cache_dir


def as_file(rows: Any, name: str) -> str:
    """Write rows as lines of JSON into the cache, in a folder of their hash, and return the path; a path stays what it
    is.

    A row is a text, or a mapping as in `formats`, whose values may be arrays and tensors. `rows`: an iterable, or a
    data set with a length and numbered rows, which is read once; `name`: of the argument. Raises ConfigError.
    """
    if isinstance(rows, str | Path):
        return str(rows)
    folder = default_cache_dir() / "given"
    temporary, digest, number = folder / f".{secrets.token_hex(8)}", xxhash.xxh3_128(), 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as stream:
            for number, row in enumerate(_rows(rows, name), start=1):
                line = _line(row, f"row {number - 1} of {name}")
                digest.update(line)
                stream.write(line)
        if not number:
            raise ConfigError(f"{name} has no rows; give at least one.")
        path = folder / digest.hexdigest() / f"{name}.jsonl"  # by which evaluations call it
        path.parent.mkdir(exist_ok=True)
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(
            f"{name} cannot be written to the data cache {folder}: {error}. Make room there, or set XDG_CACHE_HOME to "
            "another folder."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return str(path)


def _rows(rows: Any, name: str) -> Iterable[Any]:
    if isinstance(rows, Mapping):
        raise ConfigError(f"{name} is a mapping of {', '.join(map(str, rows))}: give the rows of one of them.")
    if isinstance(rows, Iterable):
        return rows
    if hasattr(rows, "__len__") and hasattr(rows, "__getitem__"):
        return _numbered(rows)
    raise ConfigError(f"{name} is a {type(rows).__name__}; it should be a path, a list of rows, or a data set.")


def _numbered(rows: Any) -> Iterator[Any]:
    for index in range(len(rows)):
        yield rows[index]


def _line(row: Any, where: str) -> bytes:
    if isinstance(row, str):
        row = {"text": row}
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where} is a {type(row).__name__}; it should be a text, or a mapping with a format's keys.")
    try:
        return json.dumps(dict(row), default=_as_list, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where} cannot be written as JSON: {error}.") from None


def _as_list(value: Any) -> Any:
    """Take arrays and tensors as the numbers in them."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"it holds a {type(value).__name__}")
