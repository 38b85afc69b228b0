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

from offload.errors import ConfigError, describe, system_code, warn
from offload.native.io import because, sync_path
from offload.user_cache import hash_paths

T = TypeVar("T")
_DIGESTS = "digests"
"""File in a folder with the digests of the others, see `_digests`."""


def load_or_build(root: Path, name: str, build: Callable[[Path], None], load: Callable[[Path], T]) -> T:
    """Return `load(root / name)`. If the folder is absent or unreadable, `build` fills a new folder first.

    All bytes are read and compared with their digest first: damage would be trained on, and training reads them anyway.
    `load` raises OSError, ValueError or KeyError for an unreadable folder. Raises ConfigError if the cache is not
    writable.
    """

    def checked() -> T:
        folder = root / name
        if (folder / _DIGESTS).read_text() != _digests(folder):
            raise ValueError("its bytes are not those that were written")
        return load(folder)

    # No lock for the usual case: complete folders are renamed into place, so a reader sees all or nothing.
    with suppress(OSError, ValueError, KeyError):
        return checked()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # all ranks arrive at once: one builds, the others wait and load
            # Another process may have built the folder while this one waited for the lock.
            try:
                return checked()
            except (OSError, ValueError, KeyError) as error:
                if (root / name).exists():
                    warn(f"the cached data in {root / name} are damaged ({describe(error)}), and are made again.")
            _build(root, name, build)
            return checked()
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
        (temporary / _DIGESTS).write_text(_digests(temporary))
        # Contents reach the disk before the name: after a power cut, a folder with the final name is complete.
        for path in temporary.rglob("*"):
            sync_path(path)
        if folder.exists():  # damaged
            shutil.rmtree(folder)
        temporary.rename(folder)
        sync_path(root)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _digests(folder: Path) -> str:
    """Return a line with digest and name for each file in a folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _DIGESTS)
    return "".join(f"{hash_paths([path])} {path.relative_to(folder).as_posix()}\n" for path in paths)
