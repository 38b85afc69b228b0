"""Optional per-user cache between runs. A lost or damaged value is computed again.

A value is stored under a key, a hash over all inputs to the computation; `code_hash` is the part for the code.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import secrets
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import xxhash

from offload.errors import ConfigError

_BLOCK_BYTES = 1 << 20
_DIGEST_BYTES = 16
_PACKAGE = Path(__file__).parent


def default_cache_dir() -> Path:
    """Return `$XDG_CACHE_HOME/offload`, by default `~/.cache/offload`. Raises ConfigError."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return Path(base or Path.home() / ".cache") / "offload"
    except RuntimeError:
        raise ConfigError(
            "HOME is not set, and this user has no home folder, so the cache has no place; set XDG_CACHE_HOME to a "
            "folder."
        ) from None


def hash_paths(paths: Iterable[Path]) -> str:
    """Return 32 hex digits identifying the contents of files, in order. Raises OSError."""
    digest = xxhash.xxh3_128()
    for path in paths:
        num_bytes = 0
        with path.open("rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                digest.update(block)
                num_bytes += len(block)
        # With the length, the end of a file cannot pass for the begin of the next one.
        digest.update(f"\0{num_bytes}\0".encode())
    return digest.hexdigest()


def class_hash(classes: Iterable[type]) -> str:
    """Return a hash over the files defining the classes and all base classes.

    For a class without a file, for example from an interactive session, the hash is random: no other process treats the
    class as identical.
    """
    # With the bases: a method may come from any of these files.
    bases = {base for cls in classes for base in cls.__mro__ if base is not object}
    try:
        return hash_paths(sorted({Path(inspect.getfile(base)) for base in bases}))
    except (OSError, TypeError):
        return secrets.token_hex(16)


@cache
def code_hash(folder: str = "") -> str:
    """Return a hash over the Python code in a subfolder of this package; default: the whole package and the kernels.

    Any edit or release changes the hash, so there is no version number to maintain by hand.
    """
    files = sorted((_PACKAGE / folder).rglob("*.py"))
    assert files, f"no code in {folder}"
    # An editable install stores the library elsewhere.
    if not folder and (core := find_spec("offload._core")) is not None and core.origin:
        files.append(Path(core.origin))
    return hash_paths(files)


def read_json(path: Path) -> Any:
    """Return the value in a file by `write_json`; None if the file is missing or damaged."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["digest"] == _digest_of(kept["value"]):
            return kept["value"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        pass
    return None


def write_json(path: Path, value: Any) -> None:
    """Write a value atomically, so a concurrent reader sees the old or the new value. Does nothing in a read-only
    folder.
    """
    _write(path, (json.dumps({"value": value, "digest": _digest_of(value)}, indent=2) + "\n").encode())


def _digest_of(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value).encode())


def kept_bytes(kind: str, inputs: Iterable[str], make: Callable[[], bytes]) -> bytes:
    """Return the result of `make`: kept in the folder `kind` for the next process, by a hash of all its `inputs`.

    A file begins with the digest of the rest. A damaged file is made anew.
    """
    key = xxhash.xxh3_128()
    for text in inputs:
        key.update(f"{len(text)}\0{text}".encode())
    try:
        path = default_cache_dir() / kind / key.hexdigest()
    except ConfigError:  # user without a home directory
        return make()
    with contextlib.suppress(OSError):
        kept = path.read_bytes()
        content = kept[_DIGEST_BYTES:]
        if kept[:_DIGEST_BYTES] == xxhash.xxh3_128_digest(content):
            return content
    content = make()
    _write(path, xxhash.xxh3_128_digest(content) + content)
    return content


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError:  # the value is computed again next time
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
