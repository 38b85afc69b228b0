"""The directories of the nvme tier: whether they are of use, found out by trying, before anything is put there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shlex
import stat
from collections.abc import Sequence
from pathlib import Path

import psutil

from offload.errors import ConfigError, errno_text

_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


def check_dirs(dirs: Sequence[str | Path]) -> list[Path]:
    """Return the resolved directories after trying each of them. Raises ConfigError for the first that is no use."""
    if not dirs:
        raise ConfigError("the nvme tier has no directory; set --offload.nvme_dir to a folder on a disk.")
    found: dict[tuple[int, int], str] = {}
    places: list[Path] = []
    for given in dirs:
        place, status = _check_dir(str(given))
        key = (status.st_dev, status.st_ino)
        if key in found:
            raise ConfigError(
                f"offload.nvme_dir has {found[key]} and {given}, which are the same directory: what is striped over "
                "them would be on one disk. Give --offload.nvme_dir each directory once."
            )
        found[key] = str(given)
        places.append(place)
    return places


def file_system(path: Path) -> str:
    """Return the type of the file system that holds a resolved path, such as ext4; "unknown" where it is not listed."""
    kind, longest = "unknown", -1
    for partition in psutil.disk_partitions(all=True):
        mounted = Path(partition.mountpoint)
        if len(mounted.parts) >= longest and path.is_relative_to(mounted):  # of two on one point the later is on top
            kind, longest = partition.fstype, len(mounted.parts)
    return kind


def free_bytes(path: Path) -> int:
    """Return what an ordinary user may still put on the file system of `path`."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def _check_dir(given: str) -> tuple[Path, os.stat_result]:
    """Return the resolved directory and its status. Raises ConfigError."""
    try:
        path = Path(given).expanduser()
        status = path.stat()
    except FileNotFoundError:
        several = " (Several directories are separated by spaces.)" if "," in given else ""
        raise ConfigError(
            f"offload.nvme_dir is {given}, which does not exist, and it is not made for you: where a disk should be "
            f"mounted there but is not, the files would fill the disk below. Mount it, or `mkdir -p "
            f"{shlex.quote(str(path))}`, or set --offload.nvme_dir to another directory.{several}"
        ) from None
    except (OSError, RuntimeError) as error:  # RuntimeError: ~NAME of a user that there is not
        raise ConfigError(
            f"offload.nvme_dir is {given}, which cannot be reached: {reason_of(error)}; set --offload.nvme_dir to "
            "another directory."
        ) from None
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(
            f"offload.nvme_dir is {given}, which is a file; set --offload.nvme_dir to a directory on a disk."
        )
    path = path.resolve()
    kind = file_system(path)
    if kind in _IN_MEMORY:
        raise ConfigError(
            f"offload.nvme_dir is {given}, which is on {kind}: that is memory, not a disk, so the nvme tier would use "
            "up what it is there to save. Set --offload.nvme_dir to a directory on a disk, or put these states on the "
            "cpu tier."
        )
    _try_to_write_and_lock(given, path)
    return path, status


def _try_to_write_and_lock(given: str, path: Path) -> None:
    """Make, lock and remove a file: neither rights nor mount options tell what really works. Raises ConfigError."""
    try:
        fd = _nameless_file(path)
    except OSError as error:
        raise ConfigError(
            f"offload.nvme_dir is {given}, which cannot be written to: {reason_of(error)}; change that, or set "
            "--offload.nvme_dir to another directory."
        ) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(
            f"offload.nvme_dir is {given}, whose file system has no file locks: {reason_of(error)}; without them "
            "nobody could tell the files of a living run from those of a dead one. Set --offload.nvme_dir to a "
            "directory on a local disk."
        ) from None
    finally:
        os.close(fd)


def _nameless_file(path: Path) -> int:
    """Return a new file that is in no directory, so that a signal leaves nothing behind. Raises OSError."""
    with contextlib.suppress(OSError):
        return os.open(path, os.O_RDWR | os.O_TMPFILE, 0o600)
    probe = path / f".offload-check-{os.getpid()}-{secrets.token_hex(4)}"  # not every file system has such files
    fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    probe.unlink()
    return fd


def reason_of(error: Exception) -> str:
    """Return what the system says of an error that it gave; else what the error says itself."""
    return errno_text(error.errno) if isinstance(error, OSError) and error.errno else str(error)
