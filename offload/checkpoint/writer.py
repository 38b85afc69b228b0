"""Checkpoint writer: one data file per rank, written in the background while the caller produces the next pieces.

    with Writer(folder, rank, contents) as writer:
        writer.write("lm_head.weight", "exp_avg", begin, tensor)     # copied: the tensor may change at once
        part = writer.finish()                                       # on the disk; for `Save.commit` on rank 0

Pieces are copied in sequence into chunks. A separate thread runs an event loop (aiofiles), which hashes and writes
several full chunks at a time, bypassing the page cache (O_DIRECT) if possible. Memory is limited to `_BUFFERS` chunks
plus the spare memory given to the writer; `write` blocks while all buffers wait for the disk. After `end`, the
remaining writes finish in the background.
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

_IN_FLIGHT = 4  # measured: with one write at a time, the disk is idle during hashing and copying
_BUFFERS = _IN_FLIGHT + 1  # plus one being filled

_T = TypeVar("_T")


class Writer:
    """Writes parameter slices into a folder created by `Save`. For use from one thread.

    contents: entries for the whole checkpoint. num_bytes: bytes passed in so far. spare_bytes: size of the spare
    memory; 0 if the allocation failed. A later `write` or `finish` raises a failed write as DiskError, and nothing is
    written after the failure. Leaving the `with` block before `finish` has returned removes the file.
    """

    def __init__(
        self, folder: Path, rank: int, contents: Contents, *, chunk_bytes: int = CHUNK_BYTES, spare_bytes: int = 0
    ) -> None:
        """Open the data file of a rank. Raises DiskError.

        contents: entries for the whole checkpoint, equal on every rank. spare_bytes: extra memory for chunks waiting
        for the disk.
        """
        self.path = folder / f"rank-{rank}.bin"
        self.num_bytes = 0
        self.contents, self._chunk_bytes = contents, chunk_bytes
        self._slices: list[tuple[str, str, Slice]] = []
        self._checksums: dict[int, str] = {}
        # Last in, first out: reuse warm buffers, so only the needed part of the spare memory is ever touched.
        self._free: queue.LifoQueue[np.ndarray] = queue.LifoQueue()
        try:
            buffers = list(chunk_buffers(_BUFFERS + spare_bytes // chunk_bytes, chunk_bytes))
        except OSError:  # address-space limit, or strict overcommit
            spare_bytes, buffers = 0, list(chunk_buffers(_BUFFERS, chunk_bytes))
        self.spare_bytes = spare_bytes
        for buffer in buffers:
            self._free.put(buffer)
        self._chunk: np.ndarray | None = None
        self._error: Exception | None = None
        self._writes: set[asyncio.Task[Any]] = set()
        self._turns = asyncio.Semaphore(_IN_FLIGHT)  # a write still waiting here is skipped after an error
        self._closing = asyncio.Lock()
        self._ended: Future[None] | None = None
        self._is_open = True
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="offload-checkpoint"))
        self._thread = threading.Thread(target=self._loop.run_forever, name="offload-checkpoint", daemon=True)
        # An interrupt may prevent the owner from closing the writer.
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
        """Save plane elements of a flat parameter, from `begin` on. Blocks while all buffers are in use.

        tensor: contiguous CPU tensor with the plane dtype, any shape. Raises ValueError for an unsuitable tensor or
        range, DiskError if an earlier write failed.
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
        """Declare the data complete. The remaining writes continue in the background."""
        if self._ended is None:
            if self._chunk is not None:
                self._send()
            self._ended = asyncio.run_coroutine_threadsafe(self._close(syncs=True), self._loop)

    @property
    def has_ended(self) -> bool:
        """True after `end`."""
        return self._ended is not None

    @property
    def is_done(self) -> bool:
        """True if all data are on disk or a write has failed: `finish` then returns without a wait."""
        return self._ended is not None and self._ended.done()

    def wait(self) -> None:
        """Wait until all data are on disk or a write has failed, then free the buffers. Call after `end`, from any
        thread.
        """
        assert self._ended is not None
        self._ended.result()
        self._free = queue.LifoQueue()

    def finish(self) -> dict[str, Any]:
        """Wait until all data are on disk. Return the manifest part of this rank as JSON data. Raises DiskError."""
        self.end()
        self.wait()
        if self._error:
            raise self._error
        self._stop()
        checksums = [self._checksums[index] for index in range(len(self._checksums))]
        file = DataFile(num_bytes=self.num_bytes, chunk_bytes=self._chunk_bytes, checksums=checksums)
        return RankManifest(files={self.path.name: file}, slices=self._slices).model_dump(mode="json")

    def abort(self) -> None:
        """Stop writing and remove the file; no effect after `finish`."""
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
        """Record a slice, merged with the previous one if adjacent."""
        end, offset = begin + tensor.numel(), self.num_bytes
        if self._slices:
            last_name, last_plane, last = self._slices[-1]
            if (last_name, last_plane, last.end) == (name, plane, begin):
                self._slices.pop()
                begin, offset = last.begin, last.offset
        self._slices.append((name, plane, Slice(begin, end, self.path.name, offset)))

    def _send(self) -> None:
        """Queue the current chunk for writing."""
        assert self._chunk is not None
        index = (self.num_bytes - 1) // self._chunk_bytes
        writing = self._put(index, self._chunk, self.num_bytes - index * self._chunk_bytes)
        self._chunk = None
        asyncio.run_coroutine_threadsafe(writing, self._loop)

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _put(self, index: int, chunk: np.ndarray, num_bytes: int) -> None:
        """Write a chunk and release the buffer. Runs in the event-loop thread."""
        task = asyncio.current_task()
        assert task is not None
        self._writes.add(task)
        async with self._turns:
            if self._error is None:
                offset = index * self._chunk_bytes
                action = f"the write of {num_bytes} bytes at offset {offset}"
                try:
                    self._checksums[index] = await _write(self._file.fileno(), offset, chunk[:num_bytes])
                except OSError as error:
                    self._error = self._error or disk_error(action, self.path, error, offset, num_bytes)
                except Exception as error:  # a caller waiting for a buffer must receive one
                    self._error = self._error or error
        self._free.put(chunk)

    async def _close(self, syncs: bool) -> None:
        """Wait for all writes, then close the file. A second call has no effect; after an interrupt the caller may call
        again before the first call has run.
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
        self._dropped.detach()  # a finalizer would swallow exceptions, including Ctrl-C


def _end(loop: asyncio.AbstractEventLoop) -> None:
    with contextlib.suppress(RuntimeError):  # already closed when the interrupt came
        loop.call_soon_threadsafe(loop.stop)


async def _open(path: Path) -> Any:
    file = await aiofiles.open(path, "xb", buffering=0)
    with contextlib.suppress(OSError):  # unsupported by the file system
        set_direct(file.fileno(), True)
    return file


def _write_now(fd: int, offset: int, data: np.ndarray) -> str:
    """Write a chunk. Return the checksum."""
    rest, at = data.data, offset
    while rest:
        # Partial pages (end of file, or a short write on a full disk) must go through the page cache.
        if (len(rest) | at) % mmap.PAGESIZE:
            set_direct(fd, False)
        count = os.pwrite(fd, rest, at)  # Python retries after a signal
        rest, at = rest[count:], at + count
    return checksum(data)


_write = aiofiles.os.wrap(_write_now)
_sync = aiofiles.os.wrap(os.fsync)
