"""What may be kept for the user from run to run: made again where it is gone or damaged, never needed.

A kept value is found by a key. A key is a hash of everything that the computation of the value is given; `code_hash` is
the code's part of it.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import secrets
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import xxhash

_BLOCK_BYTES = 1 << 20
_PACKAGE = Path(__file__).parents[1]


def default_cache_dir() -> Path:
    """Return `$XDG_CACHE_HOME/offload`, by default `~/.cache/offload`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "offload"


def hash_paths(paths: Iterable[Path]) -> str:
    """Return 32 hex digits that name the contents of files, in their order. Raises OSError."""
    found = xxhash.xxh3_128()
    for path in paths:
        num_bytes = 0
        with path.open("rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                found.update(block)
                num_bytes += len(block)
        found.update(f"\0{num_bytes}\0".encode())
    return found.hexdigest()


def class_hash(classes: Iterable[type]) -> str:
    """Return a hash of the files that define classes and their bases. Where a class has no file, such as one of an
    interactive session, the hash is a random one: no other process takes the class for the same.
    """
    bases = {base for kind in classes for base in kind.__mro__ if base is not object}
    try:
        return hash_paths(sorted({Path(inspect.getfile(base)) for base in bases}))
    except (OSError, TypeError):
        return secrets.token_hex(16)


@cache
def code_hash(folder: str = "") -> str:
    """Return a hash of the Python code in a folder of this package; by default of all its code, kernels included.

    An edit or a release makes another key by itself: no version number has to be raised by hand.
    """
    files = sorted((_PACKAGE / folder).rglob("*.py"))
    core = None if folder else find_spec("offload._core")  # an editable install keeps it in another folder
    return hash_paths([*files, *(Path(each.origin) for each in (core,) if each is not None and each.origin)])


def read_json(path: Path) -> Any:
    """Return what a file holds; None where there is none, or half of one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def keep_json(path: Path, value: Any) -> None:
    """Put a value into a file in one step, so that who reads it meanwhile sees the old one or the new; a folder that
    cannot be written to is left as it is.
    """
    temporary = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
