"""Host memory, to the byte: one anonymous mapping per arena, carved in order."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from itertools import pairwise

import torch

from offload.tiers.pinning import HostMapping, Pinning

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Linux's number, which Python names from 3.13 on."""


def copy_in_one_thread(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy within the host, and convert, on a thread beside those that compute: torch would share the copy out over
    all cores, and wait for them.
    """
    if target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous():
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
    else:
        target.data.copy_(source)


class Arena:
    """`num_bytes` of page-aligned zeroed memory. Pages become resident when first touched, or at once where they are
    pinned: with `pinning`, as soon as all of it is taken.

    It is pinned in one piece, as a copy must not reach over two; above `pinning.largest_bytes` in several, each of
    which begins with a tensor, on a page. Where the driver refuses that, as many of the first tensors are pinned as it
    takes: what is used first is to be taken first.

    An arena is a mapping of its own: torch's pinned allocator rounds a block up to a power of two, and the heap keeps
    what it freed.
    """

    def __init__(self, num_bytes: int, pinning: Pinning | None = None) -> None:
        self.num_bytes = num_bytes
        self._pinning, self._taken, self._begins = pinning, 0, [0]
        self._borders: list[int] = []  # where a piece may begin
        # Private: Python's default for -1 is shared memory, which counts against /dev/shm limits and cannot have huge
        # pages.
        # Without a reserve: the plan knows what there is, and a forecast plays engines larger than this machine, whose
        # memory nobody touches.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        self._map = HostMapping(-1, max(num_bytes, mmap.PAGESIZE), flags=flags)
        if num_bytes >= 4 << 20:
            with contextlib.suppress(
                OSError
            ):  # a kernel without transparent huge pages refuses the advice, and nothing is lost
                self._map.madvise(mmap.MADV_HUGEPAGE)

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the next `numel` elements as a flat tensor with a storage of its own, zeroed."""
        num_bytes = numel * dtype.itemsize
        assert self._taken + num_bytes <= self.num_bytes, "the arena was planned too small"
        if not numel:
            return torch.empty(0, dtype=dtype)
        flat = torch.frombuffer(self._map, dtype=dtype, count=numel, offset=self._taken)
        if self._pinning is not None:
            self._pin(num_bytes, self._pinning)
        self._taken += num_bytes
        return flat

    @property
    def pinned_bytes(self) -> int:
        """Bytes that the device can copy from without staging, from the first on."""
        return self._map.pinned_bytes

    def pin(self, pinning: Pinning) -> None:
        """Pin all that was planned."""
        address, ends = ctypes.addressof(ctypes.c_char.from_buffer(self._map)), [*self._begins, self.num_bytes]
        pieces = [(address + start, stop - start) for start, stop in pairwise(ends)]
        self._map.pin(pinning, pieces, [address + border for border in self._borders])

    def close(self) -> None:
        """Unpin. The mapping itself goes with its last tensor, and would take that with it."""
        self._map.unpin()

    def _pin(self, num_bytes: int, pinning: Pinning) -> None:
        """Begin another piece with the tensor of `num_bytes` that comes next, if need be; pin all after the last."""
        begin, end = self._taken, self._taken + num_bytes
        if begin % mmap.PAGESIZE == 0 and begin:
            self._borders.append(begin)
            if end - self._begins[-1] > pinning.largest_bytes:
                self._begins.append(begin)
        if end == self.num_bytes:
            self.pin(pinning)


def trim_heap() -> None:
    """Hand freed heap pages back to the system, so that weights which were just taken over are not resident twice."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc: its allocator decides for itself
        ctypes.CDLL(None).malloc_trim(0)
