"""Folders that are there as a whole or not at all.

While one grows it is NAME.partial-RANDOM. A file in it (`LOCK`) is locked (flock) by the process that makes it; the
kernel lets go of that lock however the process ends, so a partial folder whose lock can be had is a dead run's. One
that is to be deleted is renamed first, so that half of it is never taken for a whole one.
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
from offload.native.io import disk_error, sync_path

LOCK = "manifest.json"
"""A checkpoint's last file, so that there is none that is there for the lock alone."""
_LEFTOVER = re.compile(r"(.+)\.(partial|replaced|removed)-[0-9a-f]{8}")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h


def clear(parent: Path) -> list[Path]:
    """Put right what dead processes left in a folder of such folders; return what was removed.

    Partial folders of living processes stay. What cannot be removed now is left for the next time.
    """
    removed = []
    for path in sorted(parent.glob("*.*-*")):
        found = _LEFTOVER.fullmatch(path.name)
        if not found or path.is_symlink() or not path.is_dir():
            continue
        with contextlib.suppress(OSError):
            if found[2] == "replaced" and not (target := parent / found[1]).exists():
                path.rename(target)  # the process ended between the two renames of `take_place`
                continue
            with _lock_of(path) if found[2] == "partial" else contextlib.nullcontext():
                remove(path)
            removed.append(path)
    return removed


def remove(path: Path) -> None:
    """Delete a folder or what is left of one, which stops being one at once. Raises DiskError."""
    doomed = _beside(path, "removed")
    with as_disk_errors("the removal", path):
        path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)  # what is left then is removed by `clear`


def write_small(path: Path, text: str) -> None:
    """Replace a small file as a whole, durably. Raises DiskError."""
    fresh = path.with_name(f".{path.name}.new")
    with as_disk_errors("the write", path):
        fresh.write_text(text, encoding="utf-8")
        sync_path(fresh)
        fresh.rename(path)
        sync_path(path.parent)


def make_partial(target: Path) -> tuple[Path, io.FileIO]:
    """Make a folder that will be `target` one day; return it and its lock. Raises OSError."""
    while True:
        path = _beside(target, "partial")
        path.mkdir()
        try:
            return path, _lock_of(path)
        except (FileNotFoundError, BlockingIOError):  # `clear` of another process came between: it removes the folder
            continue


def _lock_of(folder: Path) -> io.FileIO:
    """Return a folder's lock file, made where missing, locked until it is closed: a file that an interrupt drops,
    unlike the number of one, is closed. Raises BlockingIOError where another process has the lock, FileNotFoundError
    where it has just removed the folder; OSError.
    """
    path = folder / LOCK
    file = io.FileIO(path, "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(file.fileno()), path.lstat()):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    except BaseException:
        file.close()
        raise
    return file


def take_place(path: Path, target: Path) -> Path | None:
    """Rename a complete folder to its own name, in one step where the system can do that; return where the one is that
    was there before, if any. Raises OSError.
    """
    try:
        path.rename(target)
        return None
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    if _exchange(path, target):
        return path
    old = _beside(target, "replaced")
    target.rename(old)  # from here on there is none of that name: should the process end, `clear` brings it back
    try:
        path.rename(target)
    except OSError:
        old.rename(target)
        raise
    return old


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders' names in one step; False where the system or the file system cannot do that."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    return call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE)) == 0


def _beside(path: Path, kind: str) -> Path:
    """Return a new name next to `path`, or next to what `path` is the leftover of."""
    found = _LEFTOVER.fullmatch(path.name)
    return path.with_name(f"{found[1] if found else path.name}.{kind}-{secrets.token_hex(4)}")


@contextlib.contextmanager
def as_disk_errors(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except DiskError:
        raise
    except OSError as error:
        raise disk_error(what, path, error) from None
