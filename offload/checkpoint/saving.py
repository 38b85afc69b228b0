"""A checkpoint in the making: a folder under another name, which takes its own in one step when it is complete.

While it grows it is NAME.partial-RANDOM. Its `manifest.json`, still empty, is locked (flock) by the process that makes
it; the kernel lets go of that lock however the process ends, so a partial folder whose lock can be had is a dead run's.
A folder that is to be deleted is renamed first, so that half of it is never taken for a checkpoint.
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from offload.checkpoint.manifest import MANIFEST, Attached, Contents, Manifest, checksum, gather
from offload.errors import CheckpointError, ConfigError, DiskError
from offload.native_io import disk_error, sync_path

_LEFTOVER = re.compile(r"(.+)\.(partial|replaced|removed)-[0-9a-f]{8}")
_OWN_FILE = re.compile(r"manifest\.json|rank-[0-9]+\.bin")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h


class Save:
    """Rank 0's part in a save: makes the folder that all ranks write into, and publishes it.

        with Save(target) as save:                   # every rank: Writer(save.path, ...)
            save.commit(contents, parts, meta)       # parts: of all ranks

    path: the folder to write into. An earlier checkpoint at `target` stays until the new one takes its place. Leaving
    the `with` block without `commit` removes the folder.
    """

    def __init__(self, target: Path) -> None:
        """Raises DiskError; ConfigError where `target` is something else than a checkpoint, which is left alone."""
        if foreign := foreign_names(target):
            raise ConfigError(
                f"{target} holds {', '.join(foreign[:3])}, so it is not a checkpoint, and saving one there would "
                "delete that; give another folder."
            )
        self.target = target
        self._attached: dict[str, Attached] = {}
        with as_disk_errors("the making", target.parent):
            if not target.parent.is_dir():
                target.parent.mkdir(parents=True, exist_ok=True)
                sync_path(target.parent.parent)
            self.path, self._lock = _make_partial(target)

    def attach(self, name: str, data: bytes) -> None:
        """Keep a small file with the states. Raises DiskError; FileExistsError where there is one of that name."""
        path = self.path / name
        with as_disk_errors(f"the write of {len(data)} bytes", path), path.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        self._attached[name] = Attached(num_bytes=len(data), checksum=checksum(data))

    def commit(self, contents: Contents, parts: Sequence[Mapping[str, Any]], meta: Mapping[str, Any]) -> Path:
        """Publish what the ranks wrote; return `target`.

        meta: anything for JSON, given back as JSON gives it back. Raises ValueError where the parts do not hold each
        plane of `contents` exactly once or meta is not for JSON; DiskError. What was at `target` is there still then.
        """
        manifest = gather(contents, parts, meta, self._attached)
        data = manifest.encode()
        for name, file in manifest.files.items():
            self._check_size(self.path / name, file.num_bytes)
        path = self.path / MANIFEST
        with as_disk_errors(f"the write of {len(data)} bytes", path):
            with open(self._lock.fileno(), "wb", closefd=False) as stream:
                stream.write(data)
            os.fsync(self._lock.fileno())
            sync_path(self.path)  # after this the folder is complete, whatever happens
        with as_disk_errors("the publishing", self.target):
            old = take_place(self.path, self.target)
            self._lock.close()
            sync_path(self.target.parent)  # before the old one goes
        if old:
            with contextlib.suppress(DiskError):  # the new one is there all the same
                remove(old)
        return self.target

    def abort(self) -> None:
        """Remove what was written; nothing to do after `commit`."""
        if not self._lock.closed:
            shutil.rmtree(self.path, ignore_errors=True)  # what is left then is removed by `clear`
            self._lock.close()

    def __enter__(self) -> Save:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.abort()

    def _check_size(self, path: Path, num_bytes: int) -> None:
        try:
            found = path.lstat().st_size
        except FileNotFoundError:
            raise DiskError(
                f"{path}, which another rank has written, is not to be seen by rank 0: checkpoints need a folder that "
                "all machines share.",
                errno.ENOENT,
                path,
            ) from None
        if found != num_bytes:
            raise DiskError(f"{path} has {found} bytes where {num_bytes} were written.", 0, path)


def clear(parent: Path) -> list[Path]:
    """Put right what dead processes left in a folder of checkpoints; return what was removed.

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
            with _lock_manifest(path) if found[2] == "partial" else contextlib.nullcontext():
                remove(path)
            removed.append(path)
    return removed


def remove(path: Path) -> None:
    """Delete a checkpoint or what is left of one, which stops being one at once. Raises DiskError."""
    doomed = _beside(path, "removed")
    with as_disk_errors("the removal", path):
        path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)  # what is left then is removed by `clear`


def foreign_names(folder: Path) -> list[str]:
    """Return what is in a folder that no checkpoint holds; nothing where there is no folder."""
    if folder.is_dir():
        names = {path.name for path in folder.iterdir() if not _OWN_FILE.fullmatch(path.name)}
        if names:  # what is attached is known by the manifest alone
            with contextlib.suppress(CheckpointError, OSError):
                names -= Manifest.decode((folder / MANIFEST).read_bytes(), folder).attached.keys()
        return sorted(names)
    return [folder.name] if folder.exists() or folder.is_symlink() else []


def write_small(path: Path, text: str) -> None:
    """Replace a small file as a whole, durably. Raises DiskError."""
    fresh = path.with_name(f".{path.name}.new")
    with as_disk_errors("the write", path):
        with fresh.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        fresh.rename(path)
        sync_path(path.parent)


def _make_partial(target: Path) -> tuple[Path, io.FileIO]:
    """Make a partial folder; return it and its locked manifest. Raises OSError."""
    while True:
        path = _beside(target, "partial")
        path.mkdir()
        try:
            return path, _lock_manifest(path)
        except (FileNotFoundError, BlockingIOError):  # `clear` of another process came between: it removes the folder
            continue


def _lock_manifest(folder: Path) -> io.FileIO:
    """Return a folder's manifest, made where missing, locked until it is closed: a file that an interrupt drops, unlike
    the number of one, is closed. Raises BlockingIOError where another process has the lock, FileNotFoundError where it
    has just removed the folder; OSError.
    """
    path = folder / MANIFEST
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
