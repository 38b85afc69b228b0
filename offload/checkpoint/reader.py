"""A checkpoint on disk: any slice of any parameter, each byte verified before it is handed out.

    with Reader(folder) as reader:                                  # the manifest verified, sizes compared
        reader.read("lm_head.weight", "exp_avg", begin, out)

Memory is bounded by a few chunks. A chunk of which all is wanted goes straight to where it is wanted; one at the edge
of a slice is kept for the neighbouring slice, so that reading in the order of the file verifies nothing twice.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from offload.checkpoint.manifest import MANIFEST, Entry, Manifest, check_span, checksum, raw
from offload.errors import CheckpointError, errno_text

_KEPT_CHUNKS = 8  # two for each of the planes that are read by turns: 32 MiB
_BEGIN = attrgetter("begin")


class Reader:
    """An open checkpoint. Used from one thread.

    meta: what the caller of `Save.commit` gave. contents: what there is to read. attached: the files that `Save.attach`
    was given, by name, verified. Every way in which the checkpoint is
    not whole raises CheckpointError, which names the file; that also holds for a disk that fails.
    """

    def __init__(self, folder: Path) -> None:
        """Check all but the data's checksums: the manifest, what is attached, and that the files are there, alone, and
        of their size.
        """
        self.path = folder
        self._kept: OrderedDict[tuple[str, int], np.ndarray] = OrderedDict()
        self._fds: dict[str, int] = {}
        with contextlib.ExitStack() as opened:
            with _as_checkpoint_errors(folder):
                fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # the same folder, should it be renamed meanwhile
                opened.callback(os.close, fd)
                with os.scandir(fd) as found_here:
                    names = {entry.name for entry in found_here}
            self._manifest = Manifest.decode(_read_all(folder, fd, MANIFEST), folder / MANIFEST)
            self.meta: dict[str, Any] = self._manifest.meta
            self.contents: dict[str, Entry] = self._manifest.contents()
            self.attached = {name: folder / name for name in self._manifest.attached}
            if extra := sorted(names - self._manifest.files.keys() - self.attached.keys() - {MANIFEST}):
                raise CheckpointError(f"{folder / extra[0]} does not belong to the checkpoint.", folder / extra[0])
            for name, attached in self._manifest.attached.items():
                if checksum(_read_all(folder, fd, name, attached.num_bytes)) != attached.checksum:
                    path = folder / name
                    raise CheckpointError(f"{path} is damaged: it does not agree with its checksum.", path)
            for name, file in self._manifest.files.items():
                self._fds[name], found = _open(folder, fd, name)
                opened.callback(os.close, self._fds[name])
                _check_size(folder / name, found, file.num_bytes)
            self._chunk_bytes = max((file.chunk_bytes for file in self._manifest.files.values()), default=0)
            self._opened = opened.pop_all()

    def read(self, name: str, plane: str, begin: int, out: torch.Tensor) -> None:
        """Fill `out` with the elements from `begin` on of a flat parameter's plane.

        out: contiguous, on the CPU, of the plane's dtype, any shape. Raises ValueError where it is not that or the
        checkpoint has no such elements, CheckpointError for damage; nothing in `out` is of use then.
        """
        check_span(self.contents, name, plane, begin, out)
        data, width = raw(out), out.itemsize
        slices = self._manifest.parameters[name].planes[plane].slices
        index = bisect.bisect_right(slices, begin, key=_BEGIN) - 1
        while len(data):
            found = slices[index]
            size = min(len(data), (found.end - begin) * width)
            self._copy(found.file, found.offset + (begin - found.begin) * width, data[:size])
            data, begin, index = data[size:], found.end, index + 1

    @property
    def num_bytes(self) -> int:
        """Of all data files."""
        return sum(file.num_bytes for file in self._manifest.files.values())

    def verify(self, tell: Callable[[int], object] = lambda _num_bytes: None) -> None:
        """Read all there is and compare it with its checksums; `tell` is called with the size of each piece. Raises
        CheckpointError for the first that differs.
        """
        buffer = np.empty(self._chunk_bytes, np.uint8)
        for name, file in self._manifest.files.items():
            for index in range(len(file.checksums)):
                self._load(name, index, buffer[: file.chunk_size(index)])
                tell(file.chunk_size(index))

    def close(self) -> None:
        """Close the files."""
        self._opened.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _copy(self, name: str, offset: int, out: np.ndarray) -> None:
        """Fill `out` with verified bytes of a file."""
        file = self._manifest.files[name]
        while len(out):
            index, within = divmod(offset, file.chunk_bytes)
            whole = file.chunk_size(index)
            size = min(len(out), whole - within)
            if size == whole and (name, index) not in self._kept:
                self._load(name, index, out[:size])
            else:
                out[:size] = self._chunk(name, index, whole)[within : within + size]
            out, offset = out[size:], offset + size

    def _chunk(self, name: str, index: int, size: int) -> np.ndarray:
        """Return a verified chunk out of those that are kept."""
        key = (name, index)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        if len(self._kept) < _KEPT_CHUNKS:
            buffer = np.empty(self._chunk_bytes, np.uint8)
        else:
            buffer = self._kept.popitem(last=False)[1]
        self._load(name, index, buffer[:size])
        self._kept[key] = buffer
        return buffer

    def _load(self, name: str, index: int, out: np.ndarray) -> None:
        """Fill `out` with a chunk and verify it."""
        path, fd = self.path / name, self._fds[name]
        offset, done = index * self._manifest.files[name].chunk_bytes, 0
        with _as_checkpoint_errors(path):
            while done < len(out):
                count = os.preadv(fd, [out.data[done:]], offset + done)
                if not count:
                    raise CheckpointError(f"{path} was truncated while it was read.", path)
                done += count
        if checksum(out) != self._manifest.files[name].checksums[index]:
            raise CheckpointError(
                f"{path} is damaged: the {len(out)} bytes at offset {offset} do not agree with their checksum.", path
            )


def verify(folder: Path) -> None:
    """Check all of a checkpoint: every byte of every file. Raises CheckpointError for the first fault."""
    with Reader(folder) as reader:
        reader.verify()


def _open(folder: Path, folder_fd: int, name: str) -> tuple[int, int]:
    """Return a file's descriptor and size. Raises CheckpointError, also for a link, which could lead anywhere."""
    path = folder / name
    with _as_checkpoint_errors(path):
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder_fd)  # nor wait for a pipe
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise CheckpointError(f"{path} is not a regular file.", path)
    if hasattr(os, "posix_fadvise"):  # a wider window; telling the kernel chunk by chunk what comes next was slower
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return fd, status.st_size


def _read_all(folder: Path, folder_fd: int, name: str, num_bytes: int | None = None) -> bytes:
    """Return the bytes of a small file, which are to be `num_bytes`. Raises CheckpointError."""
    fd, found = _open(folder, folder_fd, name)
    with _as_checkpoint_errors(folder / name), os.fdopen(fd, "rb") as stream:
        if num_bytes is not None:
            _check_size(folder / name, found, num_bytes)
        return stream.read()


def _check_size(path: Path, found: int, num_bytes: int) -> None:
    if found != num_bytes:
        how = "was truncated" if found < num_bytes else "has grown"
        raise CheckpointError(f"{path} {how}: it has {found} bytes instead of {num_bytes}.", path)


@contextlib.contextmanager
def _as_checkpoint_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.", path) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {errno_text(error.errno or 0)}.", path) from None
