"""A checkpoint on disk: any slice of any parameter, each byte verified before it is handed out.

    with Reader(folder) as reader:                                  # the manifest verified, sizes compared
        reader.read("lm_head.weight", "exp_avg", begin, out)

What is wanted next is on its way meanwhile: a few chunks at a time are read and verified by threads, past the page
cache (O_DIRECT) where the file system has that. A chunk is kept until its end was asked for, or others need its memory,
which is bounded by `_KEPT_CHUNKS` of them: reading in the order of the file verifies nothing twice.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import fcntl
import io
import mmap
import os
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from offload.checkpoint.manifest import MANIFEST, Entry, Manifest, check_span, checksum, raw
from offload.errors import CheckpointError, errno_text
from offload.layout.regions import align
from offload.tiers.host import Arena

_AHEAD = 4  # chunks on their way: with one, the disk is idle while it is verified and copied
_KEPT_CHUNKS = 8 + _AHEAD  # and two for each of the planes that are read by turns: 48 MiB
_BEGIN = attrgetter("begin")
CHANGED = "changed"
"""What an engine calls the frozen parameters that a checkpoint of trained ones has all the same."""

Span = tuple[str, str, int, int]
"""Name, plane, first element, number of elements."""
_Key = tuple[str, int]  # of a chunk: its file, and its number there


class _Chunk(NamedTuple):
    """Memory, and the reading of a chunk into it."""

    buffer: np.ndarray
    reading: Future[None]


class Reader:
    """An open checkpoint. Used from one thread.

    meta: what the caller of `Save.commit` gave. contents: what there is to read. attached: the files that `Save.attach`
    was given, by name, verified. num_bytes_of: each data file. absent: those that are on the disks of other machines.
    Every way in which the checkpoint is not whole raises CheckpointError, which names the file; that also holds for a
    disk that fails.
    """

    def __init__(self, folder: Path, *, in_part: bool = False) -> None:
        """Check all but the data's checksums: the manifest, what is attached, and that the files are there, alone, and
        of their size. `in_part`: data files may be absent, and are not read then.
        """
        self.path = folder
        self._kept: OrderedDict[_Key, _Chunk] = OrderedDict()  # the one that was asked for least lately comes first
        self._files: dict[str, io.FileIO] = {}
        self._coming: Iterator[_Key] = iter(())
        self._ahead: set[_Key] = set()  # those of `_coming` that are kept, and were not asked for yet
        self._is_announced = False
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
            self.num_bytes_of = {name: file.num_bytes for name, file in self._manifest.files.items()}
            self.absent = self.num_bytes_of.keys() - names if in_part else set()
            self._folder_fd = fd
            self._opened = opened
            self.open_data()
            chunk_bytes = max((file.chunk_bytes for file in self._manifest.files.values()), default=0)
            self._free = list(chunk_buffers(_KEPT_CHUNKS, chunk_bytes))
            self._pool = ThreadPoolExecutor(_AHEAD, thread_name_prefix="offload-checkpoint")
            opened.callback(self._pool.shutdown, cancel_futures=True)  # before the files are closed
            self._opened = opened.pop_all()

    def open_data(self) -> None:
        """Open the data files that are there, those that have come since as well. Raises CheckpointError."""
        self.absent = {name for name in self.absent if not (self.path / name).exists()}
        for name in sorted(self.num_bytes_of.keys() - self.absent - self._files.keys()):
            stream = self._files[name] = self._opened.enter_context(_open(self.path, self._folder_fd, name))
            _check_size(self.path / name, os.fstat(stream.fileno()).st_size, self.num_bytes_of[name])
            with contextlib.suppress(OSError):  # a file system that has none
                set_direct(stream.fileno(), True)

    def files_of(self, spans: Iterable[Span]) -> set[str]:
        """Return the data files in which spans lie."""
        return {file for span in spans for file, _, _ in self._stretches(span)}

    def expect(self, spans: Iterable[Span]) -> None:
        """Say what will be read next, and in which order, so that it is on its way by then."""
        self._plan(self._chunks(spans))
        self._is_announced = True

    def read(self, name: str, plane: str, begin: int, out: torch.Tensor) -> None:
        """Fill `out` with the elements from `begin` on of a flat parameter's plane.

        out: contiguous, on the CPU, of the plane's dtype, any shape. Raises ValueError where it is not that or the
        checkpoint has no such elements, CheckpointError for damage; nothing in `out` is of use then.
        """
        check_span(self.contents, name, plane, begin, out)
        span = name, plane, begin, out.numel()
        if not self._is_announced:
            self._plan(self._chunks([span]))
        data = raw(out)
        for file, offset, size in self._stretches(span):
            self._copy(file, offset, data[:size])
            data = data[size:]

    @property
    def changed(self) -> set[str]:
        """Return the names of the frozen parameters that a checkpoint of trained ones has, since they were changed."""
        return set(self.meta["engine"].get(CHANGED, ()))

    @property
    def num_bytes(self) -> int:
        """Of all data files."""
        return sum(self.num_bytes_of.values())

    def verify(self, tell: Callable[[int], object] = lambda _num_bytes: None) -> None:
        """Read all there is and compare it with its checksums; `tell` is called with the size of each piece. Raises
        CheckpointError for the first that differs.
        """
        sizes = {
            (name, index): file.chunk_size(index)
            for name, file in self._manifest.files.items()
            for index in range(len(file.checksums))
        }
        self._plan(iter(sizes))
        for key, num_bytes in sizes.items():
            self._chunk(key)
            self._let_go(key)
            tell(num_bytes)

    def close(self) -> None:
        """End the threads, and close the files."""
        self._opened.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _stretches(self, span: Span) -> Iterator[tuple[str, int, int]]:
        """Yield where a span lies: (file, offset there, bytes)."""
        name, plane, begin, numel = span
        slices, end = self._manifest.parameters[name].planes[plane].slices, begin + numel
        width = self.contents[name].planes[plane].itemsize
        index = bisect.bisect_right(slices, begin, key=_BEGIN) - 1
        while begin < end:
            found = slices[index]
            stop = min(end, found.end)
            yield found.file, found.offset + (begin - found.begin) * width, (stop - begin) * width
            begin, index = stop, index + 1

    def _chunks(self, spans: Iterable[Span]) -> Iterator[_Key]:
        """Yield the chunks in which spans lie, some again and again."""
        for span in spans:
            for name, offset, size in self._stretches(span):
                chunk_bytes = self._manifest.files[name].chunk_bytes
                for index in range(offset // chunk_bytes, (offset + size - 1) // chunk_bytes + 1):
                    yield name, index

    def _plan(self, coming: Iterator[_Key]) -> None:
        self._coming, self._is_announced = coming, False
        self._ahead.clear()

    def _copy(self, name: str, offset: int, out: np.ndarray) -> None:
        """Fill `out` with verified bytes of a file."""
        file = self._manifest.files[name]
        while len(out):
            index, within = divmod(offset, file.chunk_bytes)
            whole = file.chunk_size(index)
            size = min(len(out), whole - within)
            out[:size] = self._chunk((name, index))[within : within + size]
            if within + size == whole:
                self._let_go((name, index))
            out, offset = out[size:], offset + size

    def _chunk(self, key: _Key) -> np.ndarray:
        """Return a verified chunk; those that are wanted next are on their way."""
        if key not in self._kept:
            self._begin(key)
        self._kept.move_to_end(key)
        self._ahead.discard(key)
        while len(self._ahead) < _AHEAD:
            coming = next(self._coming, None)
            if coming is None:
                self._is_announced = False
                break
            if coming not in self._kept:
                self._begin(coming)
                self._ahead.add(coming)
        chunk = self._kept[key]
        try:
            chunk.reading.result()
        except Exception:  # whoever asks again may have better luck
            self._let_go(key)
            raise
        return chunk.buffer

    def _begin(self, key: _Key) -> None:
        """Have a chunk read and verified."""
        if not self._free:
            self._let_go(next(iter(self._kept)))
        buffer = self._free.pop()
        self._kept[key] = _Chunk(buffer, self._pool.submit(partial(self._load, *key, buffer)))

    def _let_go(self, key: _Key) -> None:
        """Give a chunk's memory to the next."""
        chunk = self._kept.pop(key)
        self._ahead.discard(key)
        if not chunk.reading.cancel():
            wait([chunk.reading])
        self._free.append(chunk.buffer)

    def _load(self, name: str, index: int, buffer: np.ndarray) -> None:
        """Fill the beginning of `buffer` with a chunk and verify it; in a thread of the pool."""
        path, fd, file = self.path / name, self._files[name].fileno(), self._manifest.files[name]
        offset, size, done, is_refused = index * file.chunk_bytes, file.chunk_size(index), 0, False
        memory = buffer.data[: -(-size // mmap.PAGESIZE) * mmap.PAGESIZE]  # whole pages, also at the end of the file
        with _as_checkpoint_errors(path):
            while done < size:
                if (offset + done) % mmap.PAGESIZE:
                    set_direct(fd, False)
                try:
                    count = os.preadv(fd, [memory[done:]], offset + done)
                except OSError as error:
                    if error.errno != errno.EINVAL or is_refused:
                        raise
                    is_refused = True  # the file system takes the flag, and refuses the transfer
                    set_direct(fd, False)
                    continue
                if not count:
                    raise CheckpointError(f"{path} was truncated while it was read.", path)
                done += count
        if checksum(buffer.data[:size]) != file.checksums[index]:
            raise CheckpointError(
                f"{path} is damaged: the {size} bytes at offset {offset} do not agree with their checksum.", path
            )


def verify(folder: Path) -> None:
    """Check all of a checkpoint: every byte of every file. Raises CheckpointError for the first fault."""
    with Reader(folder) as reader:
        reader.verify()


def _open(folder: Path, folder_fd: int, name: str) -> io.FileIO:
    """Return an open file. Raises CheckpointError, also for a link, which could lead anywhere."""
    path = folder / name

    def opener(_path: str, _flags: int) -> int:
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder_fd)  # nor wait for a pipe

    with _as_checkpoint_errors(path):
        try:
            file = io.FileIO(path, opener=opener)  # an interrupt that drops it closes it
        except IsADirectoryError:
            raise CheckpointError(f"{path} is not a regular file.", path) from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise CheckpointError(f"{path} is not a regular file.", path)
    return file


def _read_all(folder: Path, folder_fd: int, name: str, num_bytes: int | None = None) -> bytes:
    """Return the bytes of a small file, which are to be `num_bytes`. Raises CheckpointError."""
    with _open(folder, folder_fd, name) as file, _as_checkpoint_errors(folder / name):
        if num_bytes is not None:
            _check_size(folder / name, os.fstat(file.fileno()).st_size, num_bytes)
        return file.readall()


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


O_DIRECT = getattr(os, "O_DIRECT", 0)


def set_direct(fd: int, is_direct: bool) -> None:
    """Go past the page cache, or through it. Raises OSError."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~O_DIRECT
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | (O_DIRECT if is_direct else 0))


def chunk_buffers(count: int, chunk_bytes: int) -> Iterator[np.ndarray]:
    """Yield memory for so many chunks, whole pages each, at their edges; it is taken at the first use."""
    if size := align(chunk_bytes, mmap.PAGESIZE):
        yield from Arena(count * size).take(count * size, torch.uint8).numpy().reshape(count, size)
