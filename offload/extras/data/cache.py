"""Folders that are built once, by one process at a time, and then only read.

A folder is built under a temporary name and renamed when complete.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from offload.errors import ConfigError, system_code
from offload.native.io import because, sync_path

T = TypeVar("T")


def load_or_build(root: Path, name: str, build: Callable[[Path], None], load: Callable[[Path], T]) -> T:
    """Return `load(root / name)`. If the folder is absent or unreadable, `build` fills a new folder first.

    `load` raises OSError, ValueError or KeyError for an absent or damaged folder. Raises ConfigError if the cache is
    not writable.
    """
    # No lock for the usual case: complete folders are renamed into place, so a reader sees all or nothing.
    with suppress(OSError, ValueError, KeyError):
        return load(root / name)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # all ranks arrive at once: one builds, the others wait and load
            # Another process may have built the folder while this one waited for the lock.
            with suppress(OSError, ValueError, KeyError):
                return load(root / name)
            _build(root, name, build)
            return load(root / name)
    except Exception as error:
        if system_code(error) is None:
            raise
        raise unusable(root, error) from error


def unusable(folder: Path, error: Exception) -> ConfigError:
    """Return the error for a data cache that cannot be written."""
    code = system_code(error)
    reason = f": {error}."
    # With a code of the system, the reason also names the limit that was met, such as a full disk.
    if code:
        reason = because(code, folder)
    return ConfigError(f"The data cache {folder} cannot be used{reason} Set XDG_CACHE_HOME to another folder.")


def _build(root: Path, name: str, build: Callable[[Path], None]) -> None:
    """Fill `root / name`.

    The caller holds the lock, so a temporary folder with this name is left over from a dead process.
    """
    for orphan in root.glob(f"{name}.tmp-*"):
        shutil.rmtree(orphan)
    # The process id names the folder for people alone: the lock keeps other builders out.
    folder, temporary = root / name, root / f"{name}.tmp-{os.getpid()}"
    temporary.mkdir()
    try:
        build(temporary)
        # Contents reach the disk before the name: after a power cut, a folder with the final name is complete.
        for path in temporary.rglob("*"):
            sync_path(path)
        if folder.exists():  # damaged
            shutil.rmtree(folder)
        temporary.rename(folder)
        sync_path(root)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
