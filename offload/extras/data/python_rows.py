"""Rows passed from Python, stored as a JSON lines file.

The reader then treats them like any other file: in pieces, repeatedly, with line numbers in errors, and a resumed run
recognizes the content by hash.
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


def write_rows(rows: Any, name: str) -> str:
    """Write rows as JSON lines into the cache, in a folder named by their hash.

    Return the path. A path is returned unchanged. A row is a text, or a mapping as in `formats`; values may be arrays
    and tensors. `rows`: an iterable, or a data set with length and index access; read once. `name`: argument name, for
    errors. Raises ConfigError.
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
        path = folder / digest.hexdigest() / f"{name}.jsonl"  # evaluations show this file name
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
        return _iterate_by_index(rows)
    raise ConfigError(f"{name} is a {type(rows).__name__}; it should be a path, a list of rows, or a data set.")


def _iterate_by_index(rows: Any) -> Iterator[Any]:
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
    """Convert arrays and tensors to lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"it holds a {type(value).__name__}")
