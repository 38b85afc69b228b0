"""Folders that are made once and then only read: built under a temporary name, renamed when whole, made by one process
at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from offload.errors import ConfigError
from offload.native.io import sync_path

T = TypeVar("T")


def cached(root: Path, name: str, build: Callable[[Path], None], load: Callable[[Path], T]) -> T:
    """Return `load(root / name)`, after `build` has filled that folder if it was absent or `load` could not read it.

    `load` says that a folder is absent or damaged by raising OSError, ValueError or KeyError. Raises ConfigError when
    the cache cannot be written.
    """
    with suppress(OSError, ValueError, KeyError):
        return load(root / name)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the ranks of a run arrive together: one builds, the others find it made
            with suppress(OSError, ValueError, KeyError):
                return load(root / name)
            _build(root, name, build)
            return load(root / name)
    except OSError as error:
        raise ConfigError(
            f"The data cache {root} cannot be used: {error}. Make room there, or set XDG_CACHE_HOME to another folder."
        ) from error


def _build(root: Path, name: str, build: Callable[[Path], None]) -> None:
    """Fill `root / name`. The caller holds the lock, so any temporary folder of this name was left by a process that
    died."""
    for orphan in root.glob(f"{name}.tmp-*"):
        shutil.rmtree(orphan)
    folder, temporary = root / name, root / f"{name}.tmp-{os.getpid()}"
    temporary.mkdir()
    try:
        build(temporary)
        for path in temporary.rglob("*"):
            sync_path(path)
        if folder.exists():  # damaged
            shutil.rmtree(folder)
        temporary.rename(folder)
        sync_path(root)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
