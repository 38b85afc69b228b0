"""Directories for the nvme tier, tested for write access and free space before use, and nameless files in them.

The kernel frees a nameless file when the last process with an open descriptor ends, however the process ends. A forked
child shares the descriptor; a program started with exec does not.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shlex
import stat
from collections.abc import Sequence
from pathlib import Path

import psutil

from offload.errors import ConfigError, DoesNotFitError, errno_text, format_bytes

_O_TMPFILE: int = getattr(os, "O_TMPFILE", 0)
_HAS_NONE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)  # file system, old kernel, or an unsupported flag


def open_nameless(directory: str | os.PathLike[str], flags: int) -> int:
    """Return the descriptor of a new empty file without a name. flags: as for os.open, for example os.O_RDWR.

    On a file system without nameless files, the file is created and unlinked at once. Only a kill between both calls
    leaves the name `.offload-RANDOM` behind, with an empty file, since no space is reserved yet. Raises OSError.
    """
    try:
        return os.open(directory, flags | _O_TMPFILE | os.O_EXCL, 0o600)  # O_EXCL: no later link to a name
    except OSError as error:
        if error.errno not in _HAS_NONE:
            raise
    path = Path(directory) / f".offload-{secrets.token_hex(8)}"
    fd = -1
    try:
        fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    finally:  # some file systems reject O_DIRECT only after creating the file
        try:
            path.unlink(missing_ok=True)
        except OSError:
            with contextlib.suppress(OSError):
                os.close(fd)
            raise
    return fd


_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


def check_dirs(dirs: Sequence[str | Path]) -> list[Path]:
    """Test each directory and return the resolved paths. Raises ConfigError for the first unusable one."""
    if not dirs:
        raise ConfigError("the nvme tier has no directory; set --offload.nvme_dir to a folder on a disk.")
    seen: dict[tuple[int, int], str] = {}
    places: list[Path] = []
    for directory in dirs:
        place, status = _check_dir(str(directory))
        key = (status.st_dev, status.st_ino)  # a directory may have several names
        if key in seen:
            raise ConfigError(
                f"offload.nvme_dir has {seen[key]} and {directory}, which are the same directory, so striping would "
                "use one disk only. Give --offload.nvme_dir each directory once."
            )
        seen[key] = str(directory)
        places.append(place)
    return places


def check_space(places: Sequence[Path], num_bytes: int) -> None:
    """Raise DoesNotFitError if a file system lacks space for the share of `num_bytes` in its directories. The bytes are
    striped evenly over all directories.
    """
    share = -(-num_bytes // len(places))
    on_disk: dict[int, list[Path]] = {}  # by file system: directories there share its space
    for place in places:
        on_disk.setdefault(place.stat().st_dev, []).append(place)
    for same_disk in on_disk.values():
        need = share * len(same_disk)
        free = free_bytes(same_disk[0])
        if need <= free:
            continue
        raise DoesNotFitError(
            f"the run needs {format_bytes(need)} ({need} bytes) under {', '.join(map(str, same_disk))} and that file "
            f"system has {format_bytes(free)} ({free} bytes) free, {format_bytes(need - free)} ({need - free} bytes) "
            f"too little; the whole nvme tier has {num_bytes} bytes, striped evenly over {len(places)} "
            f"{'directory' if len(places) == 1 else 'directories'}. Nothing was created. Free space (files of other "
            "runs have no names: `lsof +L1` shows them), set --offload.nvme_dir to directories on larger or more "
            "disks, or make the nvme tier smaller with --offload.nvme_memory."
        )


def file_system(path: Path) -> str:
    """Return the file system type for a resolved path, for example ext4; "unknown" if no mount is listed."""
    type_name = "unknown"
    longest = -1
    for partition in psutil.disk_partitions(all=True):
        mounted = Path(partition.mountpoint)
        if len(mounted.parts) >= longest and path.is_relative_to(mounted):  # on one mount point, the later mount wins
            type_name = partition.fstype
            longest = len(mounted.parts)
    return type_name


def free_bytes(path: Path) -> int:
    """Return the free bytes available to an ordinary user on the file system of `path`."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize  # not f_bfree: a part is kept for root


def _check_dir(directory: str) -> tuple[Path, os.stat_result]:
    """Return the resolved directory and the stat result. Raises ConfigError."""
    try:
        path = Path(directory).expanduser()
        status = path.stat()
    except FileNotFoundError:
        several = " (Several directories are separated by spaces.)" if "," in directory else ""
        raise ConfigError(
            f"offload.nvme_dir is {directory}, which does not exist, and it is not created for you: if a disk is "
            "missing from its mount point, the files would fill the disk below. Mount it, or `mkdir -p "
            f"{shlex.quote(str(path))}`, or set --offload.nvme_dir to another directory.{several}"
        ) from None
    except (OSError, RuntimeError) as error:  # RuntimeError: ~NAME for an unknown user
        raise ConfigError(
            f"offload.nvme_dir is {directory}, which cannot be reached: {reason_of(error)}; set --offload.nvme_dir to "
            "another directory."
        ) from None
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(
            f"offload.nvme_dir is {directory}, which is a file; set --offload.nvme_dir to a directory on a disk."
        )
    path = path.resolve()  # a link may lead to memory
    type_name = file_system(path)
    if type_name in _IN_MEMORY:
        raise ConfigError(
            f"offload.nvme_dir is {directory}, which is on {type_name}: that is memory, not a disk, so the nvme "
            "tier would use up the memory it should save. Set --offload.nvme_dir to a directory on a disk, or put "
            "these states on the cpu tier."
        )
    try:  # permissions and mount options do not predict success
        os.close(open_nameless(path, os.O_RDWR))
    except OSError as error:
        raise ConfigError(
            f"offload.nvme_dir is {directory}, which cannot be written to: {reason_of(error)}; change that, or set "
            "--offload.nvme_dir to another directory."
        ) from None
    return path, status


def reason_of(error: Exception) -> str:
    """Return the system text for an errno, or the message of the exception."""
    if isinstance(error, OSError) and error.errno:
        return errno_text(error.errno)
    return str(error)
