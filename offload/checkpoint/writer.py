"""One rank's data file of a checkpoint, written in the background while training makes the next pieces.

    with Writer(folder, rank, contents) as writer:
        writer.write("lm_head.weight", "exp_avg", begin, tensor)     # copied: the tensor may change at once
        part = writer.finish()                                       # on the disk; for `Save.commit` on rank 0

Pieces are copied one after another into chunks, and a full chunk is hashed and written with aiofiles by an event loop
in a thread of its own, a few at a time. Memory is bounded by `_BUFFERS` chunks and the spare memory that a writer is
given; where all of it waits for the disk, `write` waits too. After `end` the rest goes to the disk by itself. Writes go
past the page cache (O_DIRECT) where the file system has that.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import queue
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import aiofiles
import aiofiles.os
import numpy as np
import torch

from offload.checkpoint.manifest import CHUNK_BYTES, Contents, DataFile, RankManifest, Slice, check_span, checksum, raw
from offload.checkpoint.reader import chunk_buffers, set_direct
from offload.native.io import disk_error

_IN_FLIGHT = 4  # measured: one write at a time leaves the disk idle while the next is hashed and copied
_BUFFERS = _IN_FLIGHT + 1  # and one that is being filled

_T = TypeVar("_T")


class Writer:
    """Writes slices of parameters into `folder`, which a `Save` made. Used from one thread.

    contents: of the whole checkpoint. num_bytes: handed in so far. spare_bytes: of the spare memory; 0 where there was
    none to be had. A failed write is raised as DiskError by a later `write` or by `finish`; nothing is written after
    it. Leaving the `with` block before `finish` has returned removes the file.
    """

    def __init__(
        self, folder: Path, rank: int, contents: Contents, *, chunk_bytes: int = CHUNK_BYTES, spare_bytes: int = 0
    ) -> None:
        """`contents`: of the whole checkpoint, on every rank the same. `spare_bytes`: of memory, for chunks that wait
        for the disk. Raises DiskError.
        """
        self.path = folder / f"rank-{rank}.bin"
        self.num_bytes = 0
        self.contents, self._chunk_bytes = contents, chunk_bytes
        self._slices: list[tuple[str, str, Slice]] = []
        self._checksums: dict[int, str] = {}
        # The one that was given back last comes first: of the spare memory only what is needed is ever touched.
        self._free: queue.LifoQueue[np.ndarray] = queue.LifoQueue()
        try:
            buffers = list(chunk_buffers(_BUFFERS + spare_bytes // chunk_bytes, chunk_bytes))
        except OSError:  # a limit on addresses, or a system that promises no more than it has
            spare_bytes, buffers = 0, list(chunk_buffers(_BUFFERS, chunk_bytes))
        self.spare_bytes = spare_bytes
        for buffer in buffers:
            self._free.put(buffer)
        self._chunk: np.ndarray | None = None
        self._error: Exception | None = None
        self._writes: set[asyncio.Task[Any]] = set()
        self._turns = asyncio.Semaphore(_IN_FLIGHT)  # who waits for his turn writes nothing after an error
        self._closing = asyncio.Lock()
        self._ended: Future[None] | None = None
        self._is_open = True
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="offload-checkpoint"))
        self._thread = threading.Thread(target=self._loop.run_forever, name="offload-checkpoint", daemon=True)
        # An interrupt may keep the one who opens it from closing it.
        self._dropped = weakref.finalize(self, _end, self._loop)
        self._thread.start()
        try:
            self._file = self._run(_open(self.path))
        except BaseException as error:
            self._stop()
            if isinstance(error, OSError):
                raise disk_error("the opening", self.path, error) from None
            raise

    def write(self, name: str, plane: str, begin: int, tensor: torch.Tensor) -> None:
        """Save elements from `begin` on of a flat parameter's plane. Waits while all buffers are being written.

        tensor: contiguous, on the CPU, of the plane's dtype, any shape. Raises ValueError where it is not that or not
        within the parameter, DiskError where an earlier write failed.
        """
        check_span(self.contents, name, plane, begin, tensor)
        if not tensor.numel():
            return
        self._note(name, plane, begin, tensor)
        data = raw(tensor)
        while len(data):
            at = self.num_bytes % self._chunk_bytes
            if self._chunk is None:
                self._chunk = self._free.get()
                if self._error:
                    raise self._error
            size = min(len(data), self._chunk_bytes - at)
            self._chunk[at : at + size] = data[:size]
            data = data[size:]
            self.num_bytes += size
            if at + size == self._chunk_bytes:
                self._send()

    def end(self) -> None:
        """All is handed in: what is left goes to the disk meanwhile."""
        if self._ended is None:
            if self._chunk is not None:
                self._send()
            self._ended = asyncio.run_coroutine_threadsafe(self._close(syncs=True), self._loop)

    @property
    def has_ended(self) -> bool:
        """True once all is handed in."""
        return self._ended is not None

    @property
    def is_done(self) -> bool:
        """True once all is on the disk, or has failed: `finish` does not wait then."""
        return self._ended is not None and self._ended.done()

    def wait(self) -> None:
        """Wait until all is on the disk, or has failed, and give the memory back. From any thread, after `end`."""
        assert self._ended is not None
        self._ended.result()
        self._free = queue.LifoQueue()

    def finish(self) -> dict[str, Any]:
        """Wait until all is on the disk; return this rank's part of the manifest, for JSON. Raises DiskError."""
        self.end()
        self.wait()
        if self._error:
            raise self._error
        self._stop()
        checksums = [self._checksums[index] for index in range(len(self._checksums))]
        file = DataFile(num_bytes=self.num_bytes, chunk_bytes=self._chunk_bytes, checksums=checksums)
        return RankManifest(files={self.path.name: file}, slices=self._slices).model_dump(mode="json")

    def abort(self) -> None:
        """Remove the file, and write nothing more; nothing to do after `finish`."""
        if self._is_open:
            self._error = self._error or CancelledError()
            self._run(self._close(syncs=False))
            self._stop()
            with contextlib.suppress(OSError):
                self.path.unlink()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_error: object) -> None:
        self.abort()

    def _note(self, name: str, plane: str, begin: int, tensor: torch.Tensor) -> None:
        """Add a slice, or lengthen the last one where this piece is its continuation."""
        end, offset = begin + tensor.numel(), self.num_bytes
        if self._slices:
            last_name, last_plane, last = self._slices[-1]
            if (last_name, last_plane, last.end) == (name, plane, begin):
                self._slices.pop()
                begin, offset = last.begin, last.offset
        self._slices.append((name, plane, Slice(begin, end, self.path.name, offset)))

    def _send(self) -> None:
        """Have the chunk at hand written."""
        assert self._chunk is not None
        index = (self.num_bytes - 1) // self._chunk_bytes
        writing = self._put(index, self._chunk, self.num_bytes - index * self._chunk_bytes)
        self._chunk = None
        asyncio.run_coroutine_threadsafe(writing, self._loop)

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _put(self, index: int, chunk: np.ndarray, num_bytes: int) -> None:
        """Write a chunk and give its buffer back; in the loop's thread."""
        task = asyncio.current_task()
        assert task is not None
        self._writes.add(task)
        async with self._turns:
            if self._error is None:
                offset = index * self._chunk_bytes
                what = f"the write of {num_bytes} bytes at offset {offset}"
                try:
                    self._checksums[index] = await _write(self._file.fileno(), offset, chunk[:num_bytes])
                except OSError as error:
                    self._error = self._error or disk_error(what, self.path, error, offset, num_bytes)
                except Exception as error:  # whoever waits for a buffer must get it
                    self._error = self._error or error
        self._free.put(chunk)

    async def _close(self, syncs: bool) -> None:
        """Wait for all writes, whoever still waits for them; then close the file. Again, it does nothing; whoever was
        interrupted while he waited for it may come again before it has begun.
        """
        async with self._closing:
            await asyncio.gather(*self._writes)
            if self._file.closed:
                return
            try:
                if syncs and self._error is None:
                    await _sync(self._file.fileno())
                await self._file.close()
            except OSError as error:
                self._error = self._error or disk_error("the flush (fsync)", self.path, error)

    def _stop(self) -> None:
        self._is_open = False
        self._run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._dropped.detach()  # what is raised in a finalizer is lost, a Ctrl-C too


def _end(loop: asyncio.AbstractEventLoop) -> None:
    with contextlib.suppress(RuntimeError):  # an interrupt came after it was closed
        loop.call_soon_threadsafe(loop.stop)


async def _open(path: Path) -> Any:
    file = await aiofiles.open(path, "xb", buffering=0)
    with contextlib.suppress(OSError):  # a file system that has none
        set_direct(file.fileno(), True)
    return file


def _write_now(fd: int, offset: int, data: np.ndarray) -> str:
    """Write a chunk; return its checksum."""
    left, at = data.data, offset
    while left:
        # What is no whole pages, the end of the file or what a full disk has no room for, has to go through the cache.
        if (len(left) | at) % mmap.PAGESIZE:
            set_direct(fd, False)
        count = os.pwrite(fd, left, at)  # Python calls again after a signal
        left, at = left[count:], at + count
    return checksum(data)


_write = aiofiles.os.wrap(_write_now)
_sync = aiofiles.os.wrap(os.fsync)
