"""One rank's data file of a checkpoint, written in the background while training makes the next pieces.

    with Writer(folder, rank, contents) as writer:
        writer.write("lm_head.weight", "exp_avg", begin, tensor)     # copied: the tensor may change at once
        part = writer.finish()                                       # on the disk; for `Save.commit` on rank 0

Pieces are copied one after another into chunks, and a full chunk is written and hashed by one of a few threads. Memory
is bounded by `_BUFFERS` chunks and the spare memory that a writer is given; where all of it waits for the disk, `write`
waits too. After `end` the rest goes to the disk by itself. Writes go past the page cache (O_DIRECT) where the file
system has that.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload.checkpoint.manifest import CHUNK_BYTES, Contents, DataFile, RankManifest, Slice, check_span, checksum, raw
from offload.checkpoint.reader import chunk_buffers, set_direct
from offload.native.io import disk_error

_IN_FLIGHT = 4  # measured: one write at a time leaves the disk idle while the next is hashed and copied
_BUFFERS = _IN_FLIGHT + 1  # and one that is being filled


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
        self._writes: list[Future[None]] = []
        self._ended: Future[None] | None = None
        self._is_open = True
        try:
            self._file = self.path.open("xb", buffering=0)
        except OSError as error:
            raise disk_error("the opening", self.path, error) from None
        with contextlib.suppress(OSError):  # a file system that has none
            set_direct(self._file.fileno(), True)
        self._pool = ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="offload-checkpoint")

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
            self._ended = self._pool.submit(self._close)

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
            self._stop()
            self._file.close()
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
        num_bytes = self.num_bytes - index * self._chunk_bytes
        self._writes.append(self._pool.submit(self._put, index, self._chunk, num_bytes))
        self._chunk = None

    def _put(self, index: int, chunk: np.ndarray, num_bytes: int) -> None:
        """Write a chunk, unless something has failed, and give its buffer back; in a thread of the pool."""
        if self._error is None:
            offset = index * self._chunk_bytes
            try:
                self._checksums[index] = _write(self._file.fileno(), offset, chunk[:num_bytes])
            except OSError as error:
                what = f"the write of {num_bytes} bytes at offset {offset}"
                self._error = self._error or disk_error(what, self.path, error, offset, num_bytes)
            except Exception as error:  # whoever waits for a buffer must get it
                self._error = self._error or error
        self._free.put(chunk)

    def _close(self) -> None:
        """Close the file after all writes; in a thread of the pool, which has begun with all of them by then."""
        wait(self._writes)
        try:
            if self._error is None:
                os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            self._error = self._error or disk_error("the flush (fsync)", self.path, error)

    def _stop(self) -> None:
        """End the threads; what waits for its turn is not written where something has failed."""
        self._pool.shutdown()
        self._is_open = False


def _write(fd: int, offset: int, data: np.ndarray) -> str:
    """Write a chunk; return its checksum."""
    left, at = data.data, offset
    while left:
        # What is no whole pages, the end of the file or what a full disk has no room for, has to go through the cache.
        if (len(left) | at) % mmap.PAGESIZE:
            set_direct(fd, False)
        count = os.pwrite(fd, left, at)  # Python calls again after a signal
        left, at = left[count:], at + count
    return checksum(data)
