"""Byte-exact host memory: arenas of one anonymous mapping each, divided in order."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from itertools import pairwise

import torch

from offload.tiers.pinning import HostMapping, Pinning

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
        self._pinning, self._num_taken, self._begins = pinning, 0, [0]
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
            self._pin(num_bytes, self._pinning)
        self._num_taken += num_bytes
        return flat

    @property
    def pinned_bytes(self) -> int:
        """Pinned bytes from the start, available for copies without staging."""
        return self._map.pinned_bytes

    def pin(self, pinning: Pinning) -> None:
        """Pin all planned memory."""
        address, ends = ctypes.addressof(ctypes.c_char.from_buffer(self._map)), [*self._begins, self.num_bytes]
        pieces = [(address + start, stop - start) for start, stop in pairwise(ends)]
        self._map.pin(pinning, pieces, [address + border for border in self._borders])

    def close(self) -> None:
        """Unpin now. The memory itself lives until the last tensor over it is deleted."""
        self._map.unpin()

    def _pin(self, num_bytes: int, pinning: Pinning) -> None:
        """Start a new piece with the next tensor, of `num_bytes`, if necessary. Pin all pieces after the
        last tensor.
        """
        begin, end = self._num_taken, self._num_taken + num_bytes
        if begin % mmap.PAGESIZE == 0 and begin:
            self._borders.append(begin)
            if end - self._begins[-1] > pinning.largest_bytes:
                self._begins.append(begin)
        if end == self.num_bytes:
            self.pin(pinning)


def trim_heap() -> None:
    """Return freed heap pages to the system, so that converted weights are not resident twice."""
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
