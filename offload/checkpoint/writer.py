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
import re
import shutil
import threading
import weakref
from collections.abc import Collection, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import aiofiles
import aiofiles.os
import numpy as np
import torch

from offload.checkpoint.manifest import (
    CHUNK_BYTES,
    MANIFEST,
    AttachedFile,
    Contents,
    DataFile,
    Manifest,
    RankManifest,
    Slice,
    check_span,
    checksum,
    gather,
    raw,
)
from offload.checkpoint.reader import chunk_buffers, set_direct
from offload.errors import CheckpointError, ConfigError, DiskError
from offload.files.atomic_folder import as_disk_errors, make_partial, remove, replace_folder
from offload.native.io import disk_error, sync_path

_IN_FLIGHT = 4  # measured: with one write at a time, the disk is idle during hashing and copying
_BUFFERS = _IN_FLIGHT + 1  # plus one being filled

_T = TypeVar("_T")


def share_bytes(contents: Contents, num_ranks: int) -> int:
    """Return a rank's share of a checkpoint, in bytes."""
    num_bytes = sum(
        entry.count(name) * dtype.itemsize for entry in contents.values() for name, dtype in entry.planes.items()
    )
    return num_bytes // num_ranks


def copy_bytes(num_bytes: int, budget_bytes: int | None, held_bytes: int, free_bytes: int) -> int:
    """Return the spare host memory, in bytes, for a copy of `num_bytes`, a rank's share of a checkpoint.

    Full disk speed needs no copy. With the copy, training continues while the disk writes.

    budget_bytes: limit for this rank, of which `held_bytes` are in use. All the rest is for the copy, and given back on
    demand. None: no limit; then half of the `free_bytes` of the machine, this rank's part.
    """
    room_bytes = free_bytes // 2
    if budget_bytes is not None:
        room_bytes = budget_bytes - held_bytes
    return max(0, min(num_bytes + CHUNK_BYTES, room_bytes))


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
        self.contents = contents
        self._chunk_bytes = chunk_bytes

        # Of the manifest.
        self._slices: list[tuple[str, str, Slice]] = []
        self._checksums: dict[int, str] = {}  # by chunk index, because writes end in any order

        # Buffers.
        # Last in, first out: reuse warm buffers, so only the needed part of the spare memory is ever touched.
        self._free: queue.LifoQueue[np.ndarray] = queue.LifoQueue()
        try:
            buffers = list(chunk_buffers(_BUFFERS + spare_bytes // chunk_bytes, chunk_bytes))
        except OSError:  # address-space limit, or strict overcommit
            spare_bytes = 0
            buffers = list(chunk_buffers(_BUFFERS, chunk_bytes))
        self.spare_bytes = spare_bytes
        for buffer in buffers:
            self._free.put(buffer)
        self._chunk: np.ndarray | None = None  # being filled

        # Writes in the event loop.
        self._error: Exception | None = None  # the first one
        self._writes: set[asyncio.Task[Any]] = set()  # own ones alone: two closes would wait for each other
        self._turns = asyncio.Semaphore(_IN_FLIGHT)  # a write still waiting here is skipped after an error
        self._closing = asyncio.Lock()
        self._ended: Future[None] | None = None  # set by `end`
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
                self._chunk = self._free.get()  # waits for the disk
                if self._error:  # a failed write gives its buffer back too
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
    def num_on_disk(self) -> int:
        """Bytes on disk so far, in whole chunks. Any thread may ask."""
        return min(len(self._checksums) * self._chunk_bytes, self.num_bytes)

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
        end = begin + tensor.numel()
        offset = self.num_bytes
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
    rest = data.data
    at = offset
    while rest:
        # Partial pages (end of file, or a short write on a full disk) must go through the page cache.
        if (len(rest) | at) % mmap.PAGESIZE:
            set_direct(fd, False)
        count = os.pwrite(fd, rest, at)  # Python retries after a signal
        rest = rest[count:]
        at += count
    return checksum(data)


_write = aiofiles.os.wrap(_write_now)
_sync = aiofiles.os.wrap(os.fsync)
_OWN_FILE = re.compile(r"manifest\.json|rank-[0-9]+\.bin")


class Save:
    """A save on one disk. One rank per disk creates the folder for all ranks there, and publishes the checkpoint.

        with Save(target) as save:                   # every rank: Writer(save.path, ...)
            save.commit(contents, parts, meta)       # parts: from all ranks

    path: temporary folder for the data files. An earlier checkpoint at `target` stays until replaced. Leaving the
    `with` block without `commit` removes the temporary folder.
    """

    def __init__(self, target: Path) -> None:
        """Raises DiskError. Raises ConfigError if `target` exists and is no checkpoint; the folder stays."""
        if foreign := foreign_names(target):
            raise ConfigError(
                f"{target} holds {', '.join(foreign[:3])}, so it is not a checkpoint, and saving a checkpoint there "
                "would delete this; give another folder."
            )
        self.target = target
        self._attached: dict[str, AttachedFile] = {}
        with as_disk_errors("the making", target.parent):
            if not target.parent.is_dir():
                target.parent.mkdir(parents=True, exist_ok=True)
                sync_path(target.parent.parent)
            self.path, self._lock = make_partial(target)

    def attach(self, name: str, data: bytes) -> None:
        """Store a small file with the states. Raises DiskError, or FileExistsError for a name already in use."""
        path = self.path / name
        with as_disk_errors(f"the write of {len(data)} bytes", path):
            with path.open("xb") as stream:
                stream.write(data)
            sync_path(path)
        self._attached[name] = AttachedFile(num_bytes=len(data), checksum=checksum(data))

    def commit(
        self,
        contents: Contents,
        parts: Sequence[Mapping[str, Any]],
        meta: Mapping[str, Any],
        elsewhere: Collection[str] = (),
    ) -> Path:
        """Publish the data written by all ranks. Return `target`.

        elsewhere: data files on other disks. meta: JSON-serializable data, returned on load. Raises ValueError unless
        the parts contain each plane in `contents` exactly once and meta is JSON-serializable. Raises DiskError. After
        an error, the previous checkpoint is still at `target`.
        """
        manifest = gather(contents, parts, meta, self._attached)
        data = manifest.encode()
        for name, file in manifest.files.items():
            if name not in elsewhere:
                written = self.path / name
                with as_disk_errors("the look at what another rank has written", written):
                    size = written.lstat().st_size
                if size != file.num_bytes:
                    raise DiskError(f"{written} has {size} bytes, but {file.num_bytes} were written.", 0, written)
        path = self.path / MANIFEST
        with as_disk_errors(f"the write of {len(data)} bytes", path):
            with open(self._lock.fileno(), "wb", closefd=False) as stream:
                stream.write(data)
            os.fsync(self._lock.fileno())
            sync_path(self.path)  # from here on the folder is complete, even after a crash
        with as_disk_errors("the publishing", self.target):
            old = replace_folder(self.path, self.target)
            self._lock.close()
            sync_path(self.target.parent)  # durable before the old one is removed
        if old:
            with contextlib.suppress(DiskError):  # the new checkpoint is published in any case
                remove(old)
        return self.target

    def abort(self) -> None:
        """Remove all written data; no effect after `commit`."""
        if not self._lock.closed:
            shutil.rmtree(self.path, ignore_errors=True)  # `clear` removes any remainder
            self._lock.close()

    def __enter__(self) -> Save:
        return self

    def __exit__(self, *_error: object) -> None:
        self.abort()


def foreign_names(folder: Path) -> list[str]:
    """Return names in a folder foreign to a checkpoint; an empty list without a folder."""
    if folder.is_dir():
        names = {path.name for path in folder.iterdir() if not _OWN_FILE.fullmatch(path.name)}
        if names:  # only the manifest lists attached files
            with contextlib.suppress(CheckpointError, OSError):
                names -= Manifest.decode((folder / MANIFEST).read_bytes(), folder).attached.keys()
        return sorted(names)
    if not (folder.exists() or folder.is_symlink()):
        return []
    return [folder.name]
