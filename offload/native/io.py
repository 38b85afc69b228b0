"""Background file I/O, directly between disk and host memory.

    with IoEngine() as engine:
        file = engine.open(path, num_bytes=1 << 30)          # creates and preallocates the file, O_DIRECT
        engine.register(tile)                                # optional: less kernel work per transfer
        reading = engine.read(file, offset, tile)            # returns at once
        reading.wait()                                       # sleeps without the GIL; raises DiskError

Only this module, `offload.native.kernels`, `offload.extras.quant.kernels` and `offload.extras.zeroth.directions` call
the C++ module `offload._core`. Three engines have the same interface: io_uring; C++ threads, if the kernel or a sandbox
refuses io_uring; and slower Python threads, without C++. An `IoEngine` selects one at creation.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from offload.errors import ConfigError, DiskError, errno_text, format_bytes, nearest
from offload.native.arrays import memory
from offload.native.core import core as _core
from offload.native.core import missing_because as _missing_because

ENGINES = ("io_uring", "threads", "python")
ALIGNMENT_BYTES = 4096  # of offset, size and address, for a file with O_DIRECT
_END_OF_FILE = -1  # kEndOfFile in csrc/io_engine.h
_MOST_DEPTH = 4096
_MOST_BLOCK_BYTES = 1 << 30
_MOST_PYTHON_THREADS = 16
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)

# 0, an errno or _END_OF_FILE; then for the failed block: offset, bytes, bytes moved.
_Outcome = tuple[int, int, int, int]


class Ticket:
    """Handle of a transfer. Keeps a reference to the array until the end. Wait for every ticket."""

    __slots__ = ("_array", "_engine", "_request", "file", "is_write")

    def __init__(self, engine: IoEngine, file: File, is_write: bool, request: Any, array: Any) -> None:
        self.file = file
        self.is_write = is_write
        self._engine = engine
        self._request = request
        self._array = array

    def is_done(self) -> bool:
        """Return True after the end of the transfer, failed or not. Does not wait."""
        return self._engine._backend.is_done(self._request)

    def wait(self) -> None:
        """Sleep until all bytes are transferred. Callable repeatedly and from any thread. Raises DiskError."""
        code, offset, num_bytes, moved = self._engine._wait(self._request)
        self._array = None  # nothing writes there any more
        self._engine._in_flight.discard(self)
        if code:
            raise _transfer_error(self, code, offset, num_bytes, moved)


class File:
    """Open file of an `IoEngine`, created by `IoEngine.open`.

    is_direct: O_DIRECT is active. why_buffered: reason for a refused O_DIRECT, as text for a warning; "" otherwise.
    """

    def __init__(self, engine: IoEngine, path: Path, fd: int, is_direct: bool, why_buffered: str) -> None:
        self.path = path
        self.is_direct = is_direct
        self.why_buffered = why_buffered
        self.fd = fd
        self._engine = engine

    def reserve(self, begin: int, num_bytes: int) -> None:
        """Allocate disk space for `num_bytes` from `begin` on. Raises DiskError.

        Some file systems emulate the allocation: they read and rewrite bytes, so no other thread may write there
        meanwhile.
        """
        try:
            os.posix_fallocate(self.fd, begin, num_bytes)
        except OSError as error:
            raise disk_error(f"the reservation of {num_bytes} bytes", self.path, error) from None

    def sync(self) -> None:
        """Flush all finished writes to the disk (fsync). Raises DiskError."""
        try:
            os.fsync(self.fd)
        except OSError as error:
            raise disk_error("the flush (fsync)", self.path, error) from None

    def close(self) -> None:
        """Wait for all transfers of the file and close the file. Raises the DiskError of any ticket without a wait."""
        if self.fd < 0:
            return
        try:
            wait_for_all(ticket for ticket in tuple(self._engine._in_flight) if ticket.file is self)
        finally:
            self._engine._files.discard(self)
            self._engine._backend.remove_file(self.fd)
            fd = self.fd
            self.fd = -1  # first: a closed number may be reused at once
            os.close(fd)


class IoEngine:
    """Transfers blocks between files and host memory, `depth` blocks at a time.

    kind: an engine from `ENGINES`, or "auto" for the first available one. Transfers are split into blocks of
    `block_bytes`; reads and writes alternate. All methods are thread-safe. Overlapping transfers, in file or memory,
    have no order: wait for one before the next. The engine does not work in a forked child.

    name: selected engine. why: reason for not selecting an earlier engine in `ENGINES`, or "". registered_bytes: memory
    registered with the kernel. why_unregistered: reason for a refused registration.
    """

    def __init__(self, kind: str = "auto", *, depth: int = 32, block_bytes: int = 1 << 20) -> None:
        self._closed = True  # until construction succeeds
        if kind not in (*ENGINES, "auto"):
            raise ConfigError(
                f"the I/O engine is {kind!r}{nearest(kind, ENGINES)}; it must be auto or one of {', '.join(ENGINES)}."
            )
        if not 1 <= depth <= _MOST_DEPTH:
            raise ConfigError(f"the I/O depth is {depth}; it must be at least 1 and at most {_MOST_DEPTH} blocks.")
        if not ALIGNMENT_BYTES <= block_bytes <= _MOST_BLOCK_BYTES or block_bytes % ALIGNMENT_BYTES:
            raise ConfigError(
                f"the I/O block has {block_bytes} bytes; it must be a multiple of {ALIGNMENT_BYTES}, at most "
                f"{format_bytes(_MOST_BLOCK_BYTES)}."
            )
        self.depth = depth
        self.block_bytes = block_bytes
        self.registered_bytes = 0
        self.why_unregistered = ""
        self._in_flight: set[Ticket] = set()
        """Also keeps the arrays alive: the kernel writes into them."""
        self._files: set[File] = set()
        self._registered: list[Any] = []  # kept alive, because the kernel keeps using registered pages
        self._process = os.getpid()  # a forked child has no threads of the engine
        name, why, backend = _choose(kind, depth, block_bytes)
        self.name = name
        self.why = why
        self._backend = backend
        self._closed = False

    def open(
        self,
        path: str | os.PathLike[str],
        *,
        num_bytes: int | None = None,
        writable: bool = True,
        direct: bool = True,
        opener: Callable[[Path, int], int] = lambda path, flags: os.open(path, flags, 0o600),
    ) -> File:
        """Open a file, with O_DIRECT unless `direct` is False or the file system refuses.

        num_bytes: create a missing file and allocate at least this space (None: the file must exist). opener: returns a
        descriptor for (path, flags); error messages show this path in any case. Raises DiskError.
        """
        self._check_open()
        path = Path(path)
        flags = os.O_CLOEXEC | os.O_RDONLY  # a program started with exec must not keep the file open
        if writable:
            flags = os.O_CLOEXEC | os.O_RDWR
        if num_bytes is not None:
            flags |= os.O_CREAT
        why_buffered = ""
        try:
            try:
                fd = opener(path, flags | direct * _O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                # tmpfs and some network file systems.
                why_buffered = (
                    f"the file system of {path} refuses O_DIRECT: transfers go through the page cache, which is slower"
                )
                direct = False
                fd = opener(path, flags)
        except OSError as error:
            raise disk_error("the opening", path, error) from None
        file = File(self, path, fd, direct and _O_DIRECT != 0, why_buffered)
        if num_bytes:
            try:
                file.reserve(0, num_bytes)
            except DiskError:
                os.close(fd)
                raise
        self._backend.add_file(fd)
        self._files.add(file)
        return file

    def register(self, array: Any) -> bool:
        """Register an array for transfers of the array or parts. Returns True if all bytes are registered.

        Registration only speeds up io_uring; other engines ignore it. The engine keeps a reference to the array until
        `close`. For an ordinary user the kernel counts registered memory against RLIMIT_MEMLOCK. After a refusal
        `why_unregistered` has the reason.
        """
        self._check_open()
        address, num_bytes = memory("array", array, writable=False)
        if num_bytes == 0:
            return True
        registered_bytes, code = self._backend.add_memory(address, num_bytes)
        if registered_bytes:
            self._registered.append(array)
            self.registered_bytes += registered_bytes
        if code:
            missing = format_bytes(num_bytes - registered_bytes)
            why = errno_text(code)
            if code == errno.ENOMEM:  # not a lack of memory: the limit on locked memory
                why = f"this user {_locked_memory()}"
            self.why_unregistered = (
                f"{missing} of memory are not registered with the kernel, which costs some CPU time: {why}"
            )
        return registered_bytes == num_bytes

    def read(self, file: File, offset: int, array: Any) -> Ticket:
        """Start to fill `array` from byte `offset` of the file.

        array: contiguous CPU array of torch or numpy, any dtype and shape. Do not touch the array until the ticket is
        done. On a direct file, offset, size and address must be multiples of `ALIGNMENT_BYTES`. Raises ConfigError at
        once; the ticket raises later errors.
        """
        return self._begin(False, file, offset, array)

    def write(self, file: File, offset: int, array: Any) -> Ticket:
        """Start to write `array` to byte `offset` of the file. See `read`."""
        return self._begin(True, file, offset, array)

    def close(self) -> None:
        """Finish all started transfers, then close all files.

        Raises the first DiskError among tickets without a wait.
        """
        if self._closed:
            return
        self._closed = True
        self._backend.close()  # unregister first: a closed descriptor number may be reused
        unseen = tuple(self._in_flight)
        for file in self._files:
            os.close(file.fd)
            file.fd = -1
        self._files.clear()
        self._registered.clear()
        if os.getpid() == self._process:  # a forked child cannot wait for the parent's transfers
            wait_for_all(unseen)

    def __enter__(self) -> IoEngine:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            self.close()
        except DiskError:
            if error_class is None:  # an error from inside came first, and says more
                raise

    def __del__(self) -> None:  # runs before the arrays of pending transfers are freed
        with suppress(DiskError):
            self.close()

    def _begin(self, is_write: bool, file: File, offset: int, array: Any) -> Ticket:
        self._check_open()
        if file.fd < 0 or file._engine is not self:
            raise ConfigError(f"{file.path} is not open in this engine; open it with the engine that is to use it.")
        address, num_bytes = memory("array", array, writable=not is_write)
        if offset < 0 or (file.is_direct and (offset | num_bytes | address) % ALIGNMENT_BYTES):
            raise ConfigError(
                f"a transfer of {num_bytes} bytes at offset {offset} of {file.path} with memory at {address:#x}: the "
                "file is open with O_DIRECT, so the offset must be at least 0, and all three must be multiples of "
                f"{ALIGNMENT_BYTES}; open it with direct=False for other transfers."
            )
        request = self._backend.submit(is_write, file.fd, offset, address, num_bytes)
        ticket = Ticket(self, file, is_write, request, array)
        self._in_flight.add(ticket)
        return ticket

    def _wait(self, request: Any) -> _Outcome:
        if os.getpid() != self._process:
            raise ConfigError(_FORKED)
        return self._backend.wait(request)

    def _check_open(self) -> None:
        if os.getpid() != self._process:
            raise ConfigError(_FORKED)
        if self._closed:
            raise ConfigError("the I/O engine is closed; create another one.")


_FORKED = (
    "the I/O engine belongs to the parent process and cannot be used in this forked child; create another one here."
)


class _Backend(Protocol):
    """Common interface of the C++ engines and `_PythonEngine`. Requests are opaque."""

    def submit(self, is_write: bool, fd: int, offset: int, address: int, num_bytes: int, /) -> Any: ...
    def wait(self, request: Any, /) -> _Outcome: ...
    def is_done(self, request: Any, /) -> bool: ...
    def add_file(self, fd: int, /) -> int: ...
    def remove_file(self, fd: int, /) -> None: ...
    def add_memory(self, address: int, num_bytes: int, /) -> tuple[int, int]: ...
    def close(self) -> None: ...


class _PythonEngine:
    """Fallback engine: one Python thread per request, block by block."""

    def __init__(self, depth: int, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        # System calls release Python's lock, so the threads do overlap.
        self._pool = ThreadPoolExecutor(min(depth, _MOST_PYTHON_THREADS), thread_name_prefix="offload-io")

    def submit(self, is_write: bool, fd: int, offset: int, address: int, num_bytes: int) -> Future[_Outcome]:
        return self._pool.submit(self._move, is_write, fd, offset, address, num_bytes)

    def wait(self, request: Future[_Outcome]) -> _Outcome:
        return request.result()

    def is_done(self, request: Future[_Outcome]) -> bool:
        return request.done()

    def add_file(self, _fd: int) -> int:
        return 0

    def remove_file(self, _fd: int) -> None:
        pass

    def add_memory(self, _address: int, _num_bytes: int) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None:
        self._pool.shutdown()

    def _move(self, is_write: bool, fd: int, offset: int, address: int, num_bytes: int) -> _Outcome:
        for begin in range(0, num_bytes, self._block_bytes):
            size = min(self._block_bytes, num_bytes - begin)
            code, moved = _move_block(is_write, fd, offset + begin, address + begin, size)
            if code:
                return code, offset + begin, size, moved
        return 0, 0, 0, 0


def _move_block(is_write: bool, fd: int, offset: int, address: int, num_bytes: int) -> tuple[int, int]:
    """Transfer one block, like IoBlock::advance in csrc/io_engine.cpp. Return (0, errno or _END_OF_FILE;
    bytes moved).
    """
    view = memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")
    call: Callable[..., int] = os.preadv
    at_end = _END_OF_FILE
    if is_write:
        call, at_end = os.pwritev, errno.EIO  # the file would grow
    moved = resume = 0
    while moved < num_bytes:
        try:
            count = call(fd, [view[resume:]], offset + resume)
        except BlockingIOError:
            time.sleep(0.001)
            continue
        except OSError as error:
            if error.errno == errno.EINVAL and resume % ALIGNMENT_BYTES:
                resume -= resume % ALIGNMENT_BYTES  # O_DIRECT after a short transfer: repeat the last few bytes
                continue
            return error.errno or errno.EIO, moved
        if resume + count <= moved:  # nothing beyond the repeated bytes
            return at_end, moved
        moved = resume = resume + count
    return 0, moved


def _choose(kind: str, depth: int, block_bytes: int) -> tuple[str, str, _Backend]:
    """Return (engine name, reasons against better engines, engine)."""
    refusals: dict[str, str] = {}
    for name in ENGINES if kind == "auto" else (kind,):
        if name == "python":
            return name, "; ".join(refusals.values()), _PythonEngine(depth, block_bytes)
        if _core is None:
            refusals["C++"] = f"the C++ module is missing ({_missing_because})"
            continue
        backend, code = _core.io_engine(name == "io_uring", depth, block_bytes)
        if backend is not None:
            return name, "; ".join(refusals.values()), backend
        refusals[name] = f"the system refuses {name}: {errno_text(code)}"
        if code == errno.ENOMEM:
            refusals[name] += f"; this user {_locked_memory()}"
    raise ConfigError(f"the I/O engine {kind} does not work here: {'; '.join(refusals.values())}; use auto.")


def wait_for_all(tickets: Iterable[Ticket]) -> None:
    """Wait for all tickets, then raise the first error."""
    first = None
    for ticket in tickets:
        try:
            ticket.wait()
        except DiskError as error:
            first = first or error
    if first:
        raise first


_ADVICE: Mapping[int, str] = {
    errno.ENOSPC: "the file system is full: free space on it, or use a folder on another one",
    errno.EDQUOT: "the quota of this user is used up: free space, or use a folder on another file system",
    errno.EFBIG: "a limit on the size of files is reached: raise it (`ulimit -f`), or use another file system",
    errno.EIO: "the device failed, so its contents cannot be trusted: check the kernel log, and use another disk",
    errno.EBADF: "the file is not open for this operation",
    errno.EACCES: "this user lacks permission: change the permissions, or use another folder",
    errno.EROFS: "the file system is mounted read-only: use another folder",
    errno.ENOENT: "create the folder, or use another one",
    errno.EINVAL: "the file system requires another alignment or does not support this operation: use another folder",
}


def _transfer_error(ticket: Ticket, code: int, offset: int, num_bytes: int, moved: int) -> DiskError:
    path = ticket.file.path
    verb = "read"
    if ticket.is_write:
        verb = "write"
    transfer = f"the {verb} of {num_bytes} bytes at offset {offset} of {path}"
    if code == _END_OF_FILE:
        message = (
            f"{transfer} reached the end of the file after {moved} bytes: another program has truncated or replaced "
            "the file, and the missing data are lost."
        )
        return DiskError(message, 0, path, offset, num_bytes)
    return DiskError(f"{transfer} failed{because(code, path)}", code, path, offset, num_bytes)


def sync_path(path: Path) -> None:
    """Flush a file or a directory to the disk (fsync). Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def disk_error(
    operation: str, path: Path, error: OSError, offset: int | None = None, num_bytes: int | None = None
) -> DiskError:
    """Return the DiskError for a failed system call, with an operation name such as "the opening"."""
    code = error.errno or 0
    return DiskError(f"{operation} of {path} failed{because(code, path)}", code, path, offset, num_bytes)


def because(code: int, path: Path) -> str:
    """Return the reason for a failure with `path`, as the end of a sentence: the system's words, the free bytes of a
    full disk, and advice.
    """
    text = errno_text(code)
    if code == errno.ENOSPC:
        text += _free_text(path)
    if code in _ADVICE:
        text += f"; {_ADVICE[code]}"
    return f": {text}."


def _free_text(path: Path) -> str:
    for place in (path, *path.parents):  # the file may not exist, when its opening failed
        with contextlib.suppress(OSError):
            status = os.statvfs(place)
            return f", with {format_bytes(status.f_bavail * status.f_frsize)} free"
    return ""


def _locked_memory() -> str:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    amount = "any amount"
    if limit != resource.RLIM_INFINITY:
        amount = format_bytes(limit)
    return f"may lock {amount} of memory (`ulimit -l`)"
