"""Host memory: byte-exact arenas of one anonymous mapping each, and pinning (registration with the device driver, for
copies without staging).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from weakref import ref

import torch

from offload.accelerators import PINNING_ADVICE, Accelerator
from offload.errors import format_bytes, warn

LARGEST_BYTES = 64 << 30
"""Maximum bytes per registration. Newer drivers fail above 512 GiB."""
MARGIN_BYTES = 256 << 20
"""Memory left to pin after a refusal, for small buffers: as much as all staging buffers take."""
_keep: Callable[[object], None] = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))
"""Keeps an object forever: one reference more than Python knows of."""


class Pinning:
    """Pins memory for one device. If the driver refuses, the memory stays unpinned, with one warning."""

    def __init__(
        self, driver: Accelerator, largest_bytes: int = LARGEST_BYTES, margin_bytes: int = MARGIN_BYTES
    ) -> None:
        """`largest_bytes`: target maximum per registration. `margin_bytes`: given back after a refusal."""
        self.largest_bytes = largest_bytes
        self.margin_bytes = margin_bytes
        self._driver = driver
        self._has_warned = False
        self._error = 0  # the driver's last error, for the warning
        self._mappings: set[ref[HostMapping]] = set()
        """Registered memory, for `close`. Weak, because a mapping ends with the last tensor over it."""

    def add(self, mapping: HostMapping) -> None:
        """Record a mapping before its registration."""
        self._mappings.add(ref(mapping, self._mappings.discard))

    def close(self) -> None:
        """Unregister all memory, even if tensors still use it."""
        for mapping in filter(None, [reference() for reference in list(self._mappings)]):
            mapping.unpin()

    def register(self, address: int, num_bytes: int) -> bool:
        """Register a range. Returns False if the driver refuses."""
        error = self._driver.register(address, num_bytes)
        if error:
            self._driver.forget_error()  # torch would raise it after the next launch
            self._error = error
        return not error

    def unregister(self, addresses: Sequence[int]) -> bool:
        """Unregister ranges by start address, after all pending copies. Returns False on failure."""
        try:
            self._driver.wait()
        except RuntimeError:  # the device is lost, reported to its users elsewhere
            return False
        refused = [address for address in addresses if self._driver.unregister(address)]
        if refused:
            self._driver.forget_error()
        return not refused

    def warn_unpinned(self, num_bytes: int, of_bytes: int) -> None:
        """Warn once about unpinned bytes."""
        if self._has_warned or not num_bytes:
            return
        self._has_warned = True
        warn(
            f"the driver refused to pin all of {format_bytes(of_bytes)} of host memory (CUDA error {self._error}): "
            f"{format_bytes(num_bytes)} stay unpinned, a margin for small buffers included, and copies from and to "
            f"them are slower. {PINNING_ADVICE}"
        )


class HostMapping(mmap.mmap):
    """Memory mapping with a guarantee: no unmapping while registered. Otherwise a new mapping could get the same
    address, and the driver would use the old pages.

    All tensors in the mapping keep the mapping alive; after the last one `__del__` unregisters the memory. (Not a weak
    reference callback: mmap calls those after the unmapping.) If unregistering fails, the mapping stays forever.
    """

    _pinning: Pinning | None = None
    _process = 0  # process of the registration, because a fork inherits the object but no registration
    _pieces: Sequence[tuple[int, int]] = ()  # registered ranges (address, bytes)

    @property
    def pinned_bytes(self) -> int:
        """Registered bytes."""
        return sum(num_bytes for _, num_bytes in self._pieces)

    def pin(self, pinning: Pinning, pieces: Sequence[tuple[int, int]], borders: Sequence[int]) -> None:
        """Register pieces (address, bytes) in order. If the driver refuses a piece, register the part before a border
        inside the piece, as large as possible, and nothing behind: tensors used first come first.

        borders: addresses of tensors that begin at a page, ascending. A part ends at no other address, because a copy
        must not cross two registrations.
        """
        self._pinning = pinning
        self._process = os.getpid()
        pinning.add(self)
        waiting = [*reversed(pieces)]
        num_bytes = sum(size for _, size in pieces)
        while waiting:
            piece = waiting.pop()
            begin, size = piece
            if pinning.register(*piece):
                self._pieces = (*self._pieces, piece)
                continue
            # Halve the refused piece until a part fits, or no border is left.
            waiting = []
            inside = [border for border in borders if begin < border < begin + size]
            if inside:
                middle = inside[len(inside) // 2]
                waiting = [(middle, begin + size - middle), (begin, middle - begin)]
        if self.pinned_bytes < num_bytes:
            self._give_back(pinning, borders)
        pinning.warn_unpinned(num_bytes - self.pinned_bytes, num_bytes)
        if not self._pieces:
            return
        # A forked child does not get this mapping. Otherwise fork would copy all pinned pages, or this process would
        # get new pages at its next writes, while the device keeps the old ones.
        with contextlib.suppress(OSError):  # a refusal concerns only a process that forks
            self.madvise(mmap.MADV_DONTFORK)

    def _give_back(self, pinning: Pinning, borders: Sequence[int]) -> None:
        """Unregister the end of the memory, up to a border: small buffers find the margin of `pinning` there."""
        waiting_bytes = pinning.margin_bytes
        while waiting_bytes > 0 and self._pieces:
            *kept, (begin, size) = self._pieces
            if not pinning.unregister([begin]):
                return
            stays = max((b for b in borders if begin < b <= begin + size - waiting_bytes), default=begin)
            if stays > begin and pinning.register(begin, stays - begin):
                kept.append((begin, stays - begin))
            self._pieces = kept
            waiting_bytes -= begin + size - stays

    def unpin(self) -> None:
        """Unregister all pieces after pending device work."""
        addresses = [address for address, _ in self._pieces]
        self._pieces = ()
        if not addresses:
            return
        assert self._pinning is not None
        # In a forked child the registrations belong to the parent, and the addresses may hold other memory.
        if os.getpid() != self._process or not self._pinning.unregister(addresses):
            _keep(self)

    def __del__(
        self, is_ending: Callable[[], bool] = sys.is_finalizing, keep: Callable[[object], None] = _keep
    ) -> None:
        if not self._pieces:
            return
        if is_ending():  # torch and this module may be partly destroyed; the driver cleans up after the process
            keep(self)
        else:
            self.unpin()


_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Linux value, a Python constant only since 3.13."""


def copy_in_one_thread(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy within the host, with conversion, in one thread. torch would split the copy over all cores, and would wait
    for compute threads.
    """
    if target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous():
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
    else:
        target.data.copy_(source)


class Arena:
    """`num_bytes` of zeroed page-aligned memory. Pages become resident at first touch. With `pinning`, all pages become
    resident and pinned as soon as the last byte is taken.

    Pinning covers one piece, since a copy must not cross two registrations. Above `pinning.largest_bytes` there are
    several pieces, each starting with a tensor at a page border. If the driver refuses, the arena pins as many of the
    first tensors as possible, so take the first-used tensors first.

    An arena is a separate mapping, because the pinned allocator of torch rounds blocks up to powers of two, and the
    heap keeps freed memory.
    """

    def __init__(self, num_bytes: int, pinning: Pinning | None = None) -> None:
        self.num_bytes = num_bytes
        self._pinning = pinning
        self._num_taken = 0
        self._begins = [0]  # starts of pieces
        self._borders: list[int] = []  # possible starts of pieces
        # MAP_PRIVATE: Python defaults to shared memory for -1, which is limited like /dev/shm and has no huge pages.
        # MAP_NORESERVE: the plan knows the available memory, and a forecast simulates engines larger than this machine,
        # without touching the pages.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        self._map = HostMapping(-1, max(num_bytes, mmap.PAGESIZE), flags=flags)
        if num_bytes >= 4 << 20:
            with contextlib.suppress(OSError):  # a kernel without transparent huge pages refuses; no loss
                self._map.madvise(mmap.MADV_HUGEPAGE)

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the next `numel` elements as a zeroed flat tensor with a separate storage."""
        num_bytes = numel * dtype.itemsize
        assert self._num_taken + num_bytes <= self.num_bytes, "the arena was planned too small"
        if not numel:
            return torch.empty(0, dtype=dtype)
        flat = torch.frombuffer(self._map, dtype=dtype, count=numel, offset=self._num_taken)
        if self._pinning is not None:
            begin, end = self._num_taken, self._num_taken + num_bytes
            if begin % mmap.PAGESIZE == 0 and begin:  # a piece may start here
                self._borders.append(begin)
                if end - self._begins[-1] > self._pinning.largest_bytes:
                    self._begins.append(begin)
            if end == self.num_bytes:
                self.pin(self._pinning)
        self._num_taken += num_bytes
        return flat

    @property
    def pinned_bytes(self) -> int:
        """Pinned bytes from the start, available for copies without staging."""
        return self._map.pinned_bytes

    def pin(self, pinning: Pinning) -> None:
        """Pin all planned memory, touched by all threads before: the driver touches pages in one."""
        torch.frombuffer(self._map, dtype=torch.uint8)[:: mmap.PAGESIZE].add_(0)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        ends = [*self._begins, self.num_bytes]
        pieces = [(address + start, stop - start) for start, stop in pairwise(ends)]
        self._map.pin(pinning, pieces, [address + border for border in self._borders])

    def close(self) -> None:
        """Unpin now. The memory itself lives until the last tensor over it is deleted."""
        self._map.unpin()


@cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def discard_pages(address: int, num_bytes: int) -> None:
    """Return the pages of an arena to the system. The addresses stay valid, and hold zeros."""
    with contextlib.suppress(OSError, AttributeError):
        _c_library().madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), mmap.MADV_DONTNEED)


def trim_heap() -> None:
    """Return freed heap pages to the system, so that converted weights are not resident twice."""
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        _c_library().malloc_trim(0)
