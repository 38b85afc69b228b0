"""The run's own folders on the disks of the nvme tier: made safely, and gone when the run is.

A folder DIR/offload-PID-RANDOM belongs to the process that holds the flock on its `lock` file. The kernel lets go of
that lock however the process ends, so a folder whose lock can be had is one that nobody removed: a stale one. The path
of a lock file is removed only by whoever holds the lock on it; that is all that runs and cleaners need to agree on.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import re
import secrets
import shlex
import signal
import socket
import stat
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import psutil

from offload.errors import ConfigError, DoesNotFitError, format_bytes
from offload.tiers.directories import check_dirs, free_bytes, reason_of

_NAME = re.compile(r"offload-(\d{1,7})-[0-9a-f]{8}")
_LOCK = "lock"
_GRACE_S = 300.0  # a folder without a filled lock file may be one that is being made; after so long its maker died
_PATIENCE_S = 1.0  # a cleaner waits so long for somebody who only looks
_IN_USE = "another process uses it or is removing it"
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class RunFolders:
    """One new, empty folder in each of `dirs`, for a run that will put `num_bytes` in them, striped evenly.

    They are removed, with all that is in them then, by `close`, at exit, and by SIGTERM and SIGHUP where the program
    left these at their default action; a signal waits for the main thread to come back from C. What kill -9 leaves is
    reported by the next run, see `find_stale`. In a forked child the folders are the parent's.

    paths: the folders, in the order of `dirs`. Raises ConfigError for a directory that cannot be used, DoesNotFitError
    where a file system has too little space; nothing was made then.
    """

    def __init__(self, dirs: Sequence[str | Path], num_bytes: int) -> None:
        places = check_dirs(dirs)
        stale = find_stale(places)
        _check_space(places, num_bytes, stale)
        if stale:
            warnings.warn(
                f"{_are_left(stale)} on the disks of the nvme tier by runs that ended without removing what they had "
                f"there; remove it with `{_clean_command(stale)}`.",
                stacklevel=2,
            )
        held = _Held(os.getpid())
        self._finalizer = weakref.finalize(self, _release, held)  # runs at interpreter exit as well
        _open.append(held)
        _catch_signals()
        try:
            self.paths = [_make_folder(place, held) for place in places]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove the folders. What cannot be removed is left, with a warning."""
        self._finalizer()

    def __enter__(self) -> RunFolders:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True)
class StaleFolder:
    """A folder whose run is gone. num_bytes: what it holds on the disk. started: ISO 8601, None where that is lost."""

    path: Path
    num_bytes: int
    pid: int
    started: str | None


@dataclass
class Cleaned:
    """What `remove_stale` did: the folders that it removed, and those that it could not, each with the reason."""

    removed: list[StaleFolder] = field(default_factory=list)
    failed: list[tuple[StaleFolder, str]] = field(default_factory=list)


def find_stale(dirs: Sequence[str | Path]) -> list[StaleFolder]:
    """Return the folders in `dirs` that dead runs left. Those of other users cannot be looked into and are left out."""
    found = []
    for folder in _candidates(dirs):
        with contextlib.suppress(OSError), _held_if_stale(folder, fcntl.LOCK_SH) as stale:
            if stale:
                found.append(stale)
    return found


def remove_stale(dirs: Sequence[str | Path], pids: Collection[int] | None = None) -> Cleaned:
    """Remove what `find_stale` returns, each folder under its lock; with `pids` only what these processes made."""
    cleaned = Cleaned()
    for stale in find_stale(dirs):
        if pids is not None and stale.pid not in pids:
            continue
        reason = ""
        try:
            with _held_if_stale(stale.path, fcntl.LOCK_EX) as still:
                if still:
                    reason = _remove_folder(stale.path)
                elif stale.path.exists():
                    reason = _IN_USE
                else:
                    continue  # another cleaner was faster
        except FileNotFoundError:
            continue
        except FileExistsError:  # another cleaner has just made the lock file that was missing
            reason = _IN_USE
        except OSError as error:
            reason = reason_of(error)
        if reason:
            cleaned.failed.append((stale, reason))
        else:
            cleaned.removed.append(stale)
    return cleaned


def _check_space(places: Sequence[Path], num_bytes: int, stale: Sequence[StaleFolder]) -> None:
    """Raise DoesNotFitError where a file system has less free space than its directories are to get."""
    share = -(-num_bytes // len(places))
    on_disk: dict[int, list[Path]] = {}
    for place in places:
        on_disk.setdefault(place.stat().st_dev, []).append(place)
    for device, here in on_disk.items():
        need, free = share * len(here), free_bytes(here[0])
        if need <= free:
            continue
        names = ", ".join(map(str, here))
        left = [each for each in stale if each.path.parent.stat().st_dev == device]
        clean = f"{_are_left(left)} there by dead runs: remove it with `{_clean_command(left)}`. " if left else ""
        raise DoesNotFitError(
            f"the run needs {format_bytes(need)} ({need} bytes) under {names} and that file system has "
            f"{format_bytes(free)} ({free} bytes) free, {format_bytes(need - free)} ({need - free} bytes) too little; "
            f"all of the nvme tier is {num_bytes} bytes, striped evenly over {len(places)} "
            f"{'directory' if len(places) == 1 else 'directories'}. Nothing was made. {clean}Free space, set "
            "--offload.nvme_dir to directories on larger or on more disks, or let the nvme tier hold less with "
            "--offload.nvme_memory."
        )


def _make_folder(place: Path, held: _Held) -> Path:
    """Return a new folder whose lock is held. Raises ConfigError."""
    try:
        while True:
            path = place / f"offload-{os.getpid()}-{secrets.token_hex(4)}"
            held.folders[path] = -1  # before it exists, so that a signal cannot come in between
            path.mkdir(mode=0o700)
            with contextlib.suppress(FileExistsError, FileNotFoundError):  # a cleaner took it for stale, and was faster
                held.folders[path] = fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                if _try_lock(fd, fcntl.LOCK_EX) and _is_at(fd, path / _LOCK):
                    os.write(fd, json.dumps(_about_this_process()).encode())
                    return path
                _remove_folder(path)
                os.close(fd)
            del held.folders[path]
    except OSError as error:
        raise ConfigError(
            f"offload.nvme_dir has {place}, in which no folder can be made: {reason_of(error)}; set "
            "--offload.nvme_dir to another directory."
        ) from None


def _about_this_process() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "uid": os.getuid(),
        "command": shlex.join(sys.orig_argv),
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def _candidates(dirs: Sequence[str | Path]) -> Iterator[Path]:
    seen = set()
    for given in dirs:
        try:
            place = Path(given).expanduser().resolve()
            entries = [] if place in seen else list(os.scandir(place))
        except (OSError, RuntimeError):  # where nothing can be listed nothing can be found
            continue
        seen.add(place)
        for entry in entries:
            if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                yield place / entry.name


@contextlib.contextmanager
def _held_if_stale(folder: Path, how: int) -> Iterator[StaleFolder | None]:
    """Lock a folder, LOCK_SH to look at it or LOCK_EX to remove it, and yield what it is.

    None where its run lives or is about to, where it vanished, and where it is not ours. Raises OSError.
    """
    lock, removing = folder / _LOCK, how == fcntl.LOCK_EX
    is_new = False
    try:
        flags = (os.O_RDWR if removing else os.O_RDONLY) | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(lock, flags)
    except FileNotFoundError:
        if not _is_abandoned(folder, folder.lstat()):
            yield None
            return
        if not removing:
            yield _describe(folder, "")
            return
        # Should its run yet come to make the lock file, it finds this one and goes for another folder.
        fd, is_new = os.open(lock, flags | os.O_CREAT | os.O_EXCL, 0o600), True
    try:
        status = os.fstat(fd)
        may_be = stat.S_ISREG(status.st_mode) and (status.st_size or is_new or _is_abandoned(folder, status))
        if may_be and _try_lock(fd, how, _PATIENCE_S if removing else 0) and _is_at(fd, lock):
            yield _describe(folder, os.read(fd, 1 << 20).decode(errors="replace"))
        else:
            yield None
    finally:
        os.close(fd)


def _is_abandoned(folder: Path, status: os.stat_result) -> bool:
    """Tell whether whoever was making the folder has died, by the age of the file and by the process."""
    return time.time() - status.st_mtime > _GRACE_S and not psutil.pid_exists(_pid_of(folder))


def _pid_of(folder: Path) -> int:
    return int(folder.name.split("-")[1])


def _describe(folder: Path, text: str) -> StaleFolder | None:
    """Return what is known of a folder from its lock file; None if the file is not one that we write."""
    about: Any = {}
    if text.strip("\0"):  # after the power failed the file may be empty, or zeros
        try:
            about = json.loads(text)
        except ValueError:
            return None
        if not isinstance(about, dict) or "pid" not in about:
            return None
    num_bytes = 0
    for _, _, names, fd in os.fwalk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                num_bytes += os.stat(name, dir_fd=fd, follow_symlinks=False).st_blocks * 512
    return StaleFolder(folder, num_bytes, _pid_of(folder), about.get("started"))


def _try_lock(fd: int, how: int, patience_s: float = 0.0) -> bool:
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.02)
        else:
            return True


def _is_at(fd: int, path: Path) -> bool:
    """Tell whether the open file is the one at that path, rather than one that was removed before it was locked."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def _remove_folder(folder: Path) -> str:
    """Remove a folder whose lock is held, the lock file last; return why that failed, "" if it did not.

    What somebody else removes meanwhile is as good.
    """
    reasons: list[str] = []

    @contextlib.contextmanager
    def noted(path: Path) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            pass
        except OSError as error:
            reasons.append(f"{path}: {reason_of(error)}")

    with noted(folder):
        for parent, folders, files, fd in os.fwalk(folder, topdown=False):  # by descriptor: no link leads it astray
            here = Path(parent)
            for name in files:
                if here != folder or name != _LOCK:
                    with noted(here / name):
                        os.unlink(name, dir_fd=fd)
            for name in folders:
                with noted(here / name):
                    try:
                        os.rmdir(name, dir_fd=fd)
                    except NotADirectoryError:  # a link to one
                        os.unlink(name, dir_fd=fd)
    if not reasons:  # else it stays recognisable as ours, for the next who tries
        with noted(folder / _LOCK):
            (folder / _LOCK).unlink()
        with noted(folder):
            folder.rmdir()
    return "; ".join(reasons)


@dataclass
class _Held:
    """The folders of one RunFolders with the descriptors of their locks, and the process that made them."""

    process: int
    folders: dict[Path, int] = field(default_factory=dict)


# Of the process, as signals and forks are: all that is held in it.
_open: list[_Held] = []


def _release(held: _Held) -> None:
    """Remove the folders. Called again, also by a signal in the middle of it, it does what is left to do."""
    if held.process != os.getpid():
        return
    reasons = [reason for path in held.folders if (reason := _remove_folder(path))]
    while held.folders:
        with contextlib.suppress(OSError, KeyError):
            os.close(held.folders.popitem()[1])
    with contextlib.suppress(ValueError):
        _open.remove(held)
    if not _open:
        _leave_signals()
    if reasons:
        warnings.warn(f"files of the nvme tier could not be removed: {'; '.join(reasons)}.", stacklevel=3)


def _catch_signals() -> None:
    if threading.current_thread() is threading.main_thread():  # Python allows it nowhere else
        for number in _SIGNALS:
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, _on_signal)


def _leave_signals() -> None:
    if threading.current_thread() is not threading.main_thread():  # the handler stays, and does the default action
        return
    # Python drops a signal that comes while `signal.signal` changes its handler ("ignored due to race condition"): in a
    # loop of open and close one of some 500 was lost. Blocked, it waits in the kernel.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        for number in _SIGNALS:
            if signal.getsignal(number) is _on_signal:
                signal.signal(number, signal.SIG_DFL)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _on_signal(number: int, _frame: FrameType | None) -> None:
    """Remove all folders, then end the process as the signal would have, so that its parent sees that."""
    try:
        for held in tuple(_open):
            _release(held)
    finally:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def _forget_in_child() -> None:
    """Let go of the parent's locks without releasing them, or they would outlive the parent in its children."""
    for held in _open:
        for fd in held.folders.values():
            with contextlib.suppress(OSError):
                os.close(fd)
    _open.clear()
    _leave_signals()


os.register_at_fork(after_in_child=_forget_in_child)


def _are_left(stale: Sequence[StaleFolder]) -> str:
    size = format_bytes(sum(each.num_bytes for each in stale))
    return f"{size} in 1 folder is left" if len(stale) == 1 else f"{size} in {len(stale)} folders are left"


def _clean_command(stale: Sequence[StaleFolder]) -> str:
    dirs = shlex.join(dict.fromkeys(str(each.path.parent) for each in stale))
    return f"python -m offload.doctor --clean --nvme-dir {dirs}"
