"""Checkpoint reader: any slice from any parameter, with every byte verified before use.

    with Reader(folder) as reader:                                  # manifest verified, sizes compared
        reader.read("lm_head.weight", "exp_avg", begin, out)

Threads read and verify a few chunks ahead, bypassing the page cache (O_DIRECT) if the file system supports this. A
chunk stays in memory until the last byte was requested or another chunk needs the buffer, at most `_KEPT_CHUNKS`.
Reading in file order therefore verifies each chunk once.
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

_AHEAD = 4  # chunks in flight: with one, the disk is idle during verification and copy
_KEPT_CHUNKS = 8 + _AHEAD  # 8: two for each plane read in turn; 48 MiB in total
_BEGIN = attrgetter("begin")
CHANGED = "changed"
"""Meta key: frozen parameters stored in a trainable-only checkpoint because they have changed."""

Span = tuple[str, str, int, int]
"""Parameter name, plane, first element, number of elements."""
_Key = tuple[str, int]  # chunk key: file name and chunk index
Report = Callable[[int], object]
"""Receives a number of bytes that were read."""


class _Chunk(NamedTuple):
    """A chunk buffer, and the pending read."""

    buffer: np.ndarray
    reading: Future[None]


class Reader:
    """An open checkpoint, for use from one thread.

    meta: data passed to `Save.commit`. contents: stored parameters and planes. attached: verified paths of attached
    files, by name. num_bytes_of: size of each data file. absent: data files on the disks of other machines. Any damage,
    and any disk failure, raises CheckpointError with the file name.
    """

    def __init__(self, folder: Path, *, in_part: bool = False) -> None:
        """Verify everything except the data checksums: the manifest, attached files, and presence and sizes of
        data files.

        in_part: data files may be absent; absent files cannot be read.
        """
        self.path = folder
        self._files: dict[str, io.FileIO] = {}

        # Chunks in memory.
        self._kept: OrderedDict[_Key, _Chunk] = OrderedDict()  # least recently requested first
        self._coming: Iterator[_Key] = iter(())  # chunks to read next
        self._ahead: set[_Key] = set()  # chunks from `_coming` in memory but not yet requested
        self._is_announced = False  # True while the caller has told the next reads
        self._report: Report = lambda _num_bytes: None
        with contextlib.ExitStack() as opened:
            with _as_checkpoint_errors(folder):
                fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # same folder even after a rename
                opened.callback(os.close, fd)
                with os.scandir(fd) as entries:
                    names = {entry.name for entry in entries}
            self._manifest = Manifest.decode(_read_all(folder, fd, MANIFEST), folder / MANIFEST)
            self.meta: dict[str, Any] = self._manifest.meta
            self.contents: dict[str, Entry] = self._manifest.contents()
            self.attached = {name: folder / name for name in self._manifest.attached}
            if extra := sorted(names - self._manifest.files.keys() - self.attached.keys() - {MANIFEST}):
                raise CheckpointError(f"{folder / extra[0]} is not a file of the checkpoint.", folder / extra[0])
            for name, attached in self._manifest.attached.items():
                if checksum(_read_all(folder, fd, name, attached.num_bytes)) != attached.checksum:
                    path = folder / name
                    raise CheckpointError(f"{path} is damaged: its checksum does not match.", path)
            self.num_bytes_of = {name: file.num_bytes for name, file in self._manifest.files.items()}
            self.absent = self.num_bytes_of.keys() - names if in_part else set()
            self._folder_fd = fd
            self._opened = opened
            self.open_data()
            chunk_bytes = max((file.chunk_bytes for file in self._manifest.files.values()), default=0)
            self._free = list(chunk_buffers(_KEPT_CHUNKS, chunk_bytes))
            self._pool = ThreadPoolExecutor(_AHEAD, thread_name_prefix="offload-checkpoint")
            opened.callback(self._pool.shutdown, cancel_futures=True)  # before the files close
            self._opened = opened.pop_all()

    def open_data(self) -> None:
        """Open all present data files, including recently added ones. Raises CheckpointError."""
        self.absent = {name for name in self.absent if not (self.path / name).exists()}
        for name in sorted(self.num_bytes_of.keys() - self.absent - self._files.keys()):
            stream = self._files[name] = self._opened.enter_context(_open(self.path, self._folder_fd, name))
            _check_size(self.path / name, os.fstat(stream.fileno()).st_size, self.num_bytes_of[name])
            with contextlib.suppress(OSError):  # unsupported by the file system
                set_direct(stream.fileno(), True)

    def files_of(self, spans: Iterable[Span]) -> set[str]:
        """Return the data files containing the given spans."""
        return {file for span in spans for file, _, _ in self._stretches(span)}

    def expect(self, spans: Iterable[Span], report: Report = lambda _num_bytes: None) -> None:
        """Announce the next reads in order, so they can be prefetched.

        report: called with the size of each read.
        """
        self._report = report
        self._plan(self._chunks(spans))
        self._is_announced = True

    def read(self, name: str, plane: str, begin: int, out: torch.Tensor) -> None:
        """Fill `out` with elements of one stored plane (the weights or one moment of a parameter, flat), from
        `begin` on.

        out: contiguous CPU tensor with the plane dtype, any shape. Raises ValueError for an unsuitable tensor or
        missing elements, CheckpointError for damage. After an error, `out` is undefined.
        """
        check_span(self.contents, name, plane, begin, out)
        span = name, plane, begin, out.numel()
        if not self._is_announced:
            self._plan(self._chunks([span]))
        data = raw(out)
        for file, offset, size in self._stretches(span):
            self._copy(file, offset, data[:size])
            data = data[size:]
        self._report(out.nbytes)

    @property
    def changed(self) -> set[str]:
        """Names of frozen parameters stored in a trainable-only checkpoint because they have changed."""
        return set(self.meta["engine"].get(CHANGED, ()))

    @property
    def num_bytes(self) -> int:
        """Total bytes in all data files."""
        return sum(self.num_bytes_of.values())

    def verify(self, report: Report = lambda _num_bytes: None) -> None:
        """Read everything and compare with the checksums. Raises CheckpointError for the first mismatch.

        report: called with the size of each verified chunk.
        """
        sizes = {
            (name, index): file.chunk_size(index)
            for name, file in self._manifest.files.items()
            for index in range(len(file.checksums))
        }
        self._plan(iter(sizes))
        for key, num_bytes in sizes.items():
            self._chunk(key)
            self._release(key)
            report(num_bytes)

    def close(self) -> None:
        """Stop the threads and close the files."""
        self._opened.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _stretches(self, span: Span) -> Iterator[tuple[str, int, int]]:
        """Yield (file, byte offset, bytes) for each stored part of a span."""
        name, plane, begin, numel = span
        slices = self._manifest.parameters[name].planes[plane].slices
        end = begin + numel
        width = self.contents[name].planes[plane].itemsize
        index = bisect.bisect_right(slices, begin, key=_BEGIN) - 1
        while begin < end:
            stored = slices[index]
            stop = min(end, stored.end)
            yield stored.file, stored.offset + (begin - stored.begin) * width, (stop - begin) * width
            begin = stop
            index += 1

    def _chunks(self, spans: Iterable[Span]) -> Iterator[_Key]:
        """Yield the chunk keys covered by spans, possibly with repetitions."""
        for span in spans:
            for name, offset, size in self._stretches(span):
                chunk_bytes = self._manifest.files[name].chunk_bytes
                for index in range(offset // chunk_bytes, (offset + size - 1) // chunk_bytes + 1):
                    yield name, index

    def _plan(self, coming: Iterator[_Key]) -> None:
        self._coming = coming
        self._is_announced = False
        self._ahead.clear()

    def _copy(self, name: str, offset: int, out: np.ndarray) -> None:
        """Fill `out` with verified bytes from a file."""
        file = self._manifest.files[name]
        while len(out):
            index, within = divmod(offset, file.chunk_bytes)
            whole = file.chunk_size(index)
            size = min(len(out), whole - within)
            out[:size] = self._chunk((name, index))[within : within + size]
            if within + size == whole:
                self._release((name, index))
            out = out[size:]
            offset += size

    def _chunk(self, key: _Key) -> np.ndarray:
        """Return a verified chunk, and start to read the next ones."""
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
        except Exception:  # a later request may succeed
            self._release(key)
            raise
        return chunk.buffer

    def _begin(self, key: _Key) -> None:
        """Start to read and verify a chunk."""
        if not self._free:
            self._release(next(iter(self._kept)))
        buffer = self._free.pop()
        self._kept[key] = _Chunk(buffer, self._pool.submit(partial(self._load, *key, buffer)))

    def _release(self, key: _Key) -> None:
        """Release a chunk buffer for reuse."""
        chunk = self._kept.pop(key)
        self._ahead.discard(key)
        if not chunk.reading.cancel():  # a running read still fills the buffer
            wait([chunk.reading])
        self._free.append(chunk.buffer)

    def _load(self, name: str, index: int, buffer: np.ndarray) -> None:
        """Read a chunk into the beginning of `buffer` and verify the checksum. Runs in a pool thread."""
        path = self.path / name
        fd = self._files[name].fileno()
        file = self._manifest.files[name]
        offset = index * file.chunk_bytes
        size = file.chunk_size(index)
        done = 0
        is_refused = False
        memory = buffer.data[: -(-size // mmap.PAGESIZE) * mmap.PAGESIZE]  # whole pages, even at the file end
        with _as_checkpoint_errors(path):
            while done < size:
                if (offset + done) % mmap.PAGESIZE:  # after a short read
                    set_direct(fd, False)
                try:
                    count = os.preadv(fd, [memory[done:]], offset + done)
                except OSError as error:
                    if error.errno != errno.EINVAL or is_refused:
                        raise
                    is_refused = True  # the file system accepts the O_DIRECT flag but rejects the transfer
                    set_direct(fd, False)
                    continue
                if not count:
                    raise CheckpointError(f"{path} was truncated while it was read.", path)
                done += count
        if checksum(buffer.data[:size]) != file.checksums[index]:
            raise CheckpointError(
                f"{path} is damaged: the checksum of the {size} bytes at offset {offset} does not match.", path
            )


def verify(folder: Path) -> None:
    """Verify every byte of a checkpoint. Raises CheckpointError for the first fault."""
    with Reader(folder) as reader:
        reader.verify()


def _open(folder: Path, folder_fd: int, name: str) -> io.FileIO:
    """Open a file read-only. Raises CheckpointError, also for a symbolic link, because the target could be anywhere."""
    path = folder / name

    def opener(_path: str, _flags: int) -> int:
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder_fd)  # no wait on a pipe

    with _as_checkpoint_errors(path):
        try:
            file = io.FileIO(path, opener=opener)  # closed even when dropped by an interrupt
        except IsADirectoryError:
            raise CheckpointError(f"{path} is not a regular file.", path) from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise CheckpointError(f"{path} is not a regular file.", path)
    return file


def _read_all(folder: Path, folder_fd: int, name: str, num_bytes: int | None = None) -> bytes:
    """Return the content of a small file; `num_bytes`: expected size (None: any). Raises CheckpointError."""
    with _open(folder, folder_fd, name) as file, _as_checkpoint_errors(folder / name):
        if num_bytes is not None:
            _check_size(folder / name, os.fstat(file.fileno()).st_size, num_bytes)
        return file.readall()


def _check_size(path: Path, actual_bytes: int, num_bytes: int) -> None:
    if actual_bytes != num_bytes:
        change = "was truncated" if actual_bytes < num_bytes else "has grown"
        raise CheckpointError(f"{path} {change}: it has {actual_bytes} bytes instead of {num_bytes}.", path)


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
    """Enable or disable O_DIRECT, which bypasses the page cache. Raises OSError."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~O_DIRECT
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | (O_DIRECT if is_direct else 0))


def chunk_buffers(count: int, chunk_bytes: int) -> Iterator[np.ndarray]:
    """Yield `count` page-aligned chunk buffers. Physical memory is allocated at first use."""
    if size := align(chunk_bytes, mmap.PAGESIZE):
        yield from Arena(count * size).take(count * size, torch.uint8).numpy().reshape(count, size)
