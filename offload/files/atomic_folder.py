"""Folders appearing complete or not at all.

A growing folder is called NAME.partial-RANDOM. The creating process holds a flock on a file in the folder (`LOCK`). The
kernel releases the flock however the process ends, so a partial folder with a free lock belongs to a dead run. A folder
is renamed before deletion, so a half-deleted folder is never mistaken for a complete one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import io
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from offload.errors import DiskError
from offload.native.io import disk_error

LOCK = "manifest.json"
"""Last file written to a checkpoint; reused as the lock file to avoid a separate one."""
_LEFTOVER = re.compile(r"(.+)\.(partial|replaced|removed)-[0-9a-f]{8}")
_AT_FDCWD = -100  # from linux/fcntl.h
_RENAME_EXCHANGE = 2  # from linux/fs.h


def clear(parent: Path) -> list[Path]:
    """Clean up folders left by dead processes in `parent`. Return the removed folders.

    Partial folders of living processes stay. A folder impossible to remove now is left for the next call.
    """
    removed = []
    for path in sorted(parent.glob("*.*-*")):
        leftover = _LEFTOVER.fullmatch(path.name)
        if not leftover or path.is_symlink() or not path.is_dir():
            continue
        with contextlib.suppress(OSError):
            if leftover[2] == "replaced" and not (target := parent / leftover[1]).exists():
                path.rename(target)  # the process ended between the two renames in `replace_folder`
                continue
            with contextlib.ExitStack() as locks:
                if leftover[2] == "partial":  # the lock of a living process raises BlockingIOError
                    locks.enter_context(_lock_of(path))
                remove(path)
            removed.append(path)
    return removed


def remove(path: Path) -> None:
    """Delete a folder; the rename makes the folder disappear at once. Raises DiskError."""
    doomed = _sibling(path, "removed")
    with as_disk_errors("the removal", path):
        path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)  # `clear` removes any remainder


def make_partial(target: Path) -> tuple[Path, io.FileIO]:
    """Create a partial folder for `target`. Return the folder and the open lock file. Raises OSError."""
    while True:
        path = _sibling(target, "partial")
        path.mkdir()
        try:
            return path, _lock_of(path)
        except (FileNotFoundError, BlockingIOError):  # `clear` in another process came between and removes the folder
            continue


def _lock_of(folder: Path) -> io.FileIO:
    """Open and lock the lock file of a folder; closing the file releases the lock.

    Return a file object rather than a descriptor, because Python closes a file object dropped by an interrupt. Raises
    BlockingIOError if another process holds the lock, FileNotFoundError if another process has just removed the folder,
    and OSError.
    """
    path = folder / LOCK
    file = io.FileIO(path, "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another process may have removed the folder between the opening and the lock.
        if not os.path.samestat(os.fstat(file.fileno()), path.lstat()):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    except BaseException:
        file.close()
        raise
    return file


def replace_folder(path: Path, target: Path) -> Path | None:
    """Rename a complete folder to `target`, atomically if the system can exchange names.

    Return the new path of the folder previously at `target`, or None. Raises OSError.
    """
    try:
        path.rename(target)
        return None
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    if _exchange(path, target):
        return path  # now the name of the old folder
    old = _sibling(target, "replaced")
    target.rename(old)  # `target` is absent until the next rename; after a crash here, `clear` restores the old folder
    try:
        path.rename(target)
    except OSError:
        old.rename(target)
        raise
    return old


def _exchange(one: Path, other: Path) -> bool:
    """Swap the names of two folders atomically. Return False if the system or the file system cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    return call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE)) == 0


def _sibling(path: Path, label: str) -> Path:
    """Return a new name in the folder of `path`; for a leftover, based on the original name."""
    name = path.name
    if leftover := _LEFTOVER.fullmatch(name):
        name = leftover[1]
    return path.with_name(f"{name}.{label}-{secrets.token_hex(4)}")


@contextlib.contextmanager
def as_disk_errors(operation: str, path: Path) -> Iterator[None]:
    try:
        yield
    except DiskError:
        raise
    except OSError as error:
        raise disk_error(operation, path, error) from None
