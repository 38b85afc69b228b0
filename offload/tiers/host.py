"""Host memory, to the byte: one anonymous mapping per arena, carved in order."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import warnings

import torch

_PIN_CHUNK_BYTES = 1 << 30


class Arena:
    """`num_bytes` of page-aligned zeroed memory. Pages become resident when first touched, or at once where they are
    pinned.

    An arena is a mapping of its own: torch's pinned allocator rounds a block up to a power of two, and the heap keeps
    what it freed.
    """

    def __init__(self, num_bytes: int, pin: bool = False) -> None:
        self.num_bytes = num_bytes
        self.pinned_bytes = 0
        self._taken = 0
        # Private: Python's default for -1 is shared memory, which counts against /dev/shm limits and cannot have huge
        # pages.
        self._map = mmap.mmap(-1, max(num_bytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if num_bytes >= 4 << 20:
            with contextlib.suppress(
                OSError
            ):  # a kernel without transparent huge pages refuses the advice, and nothing is lost
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        if pin and num_bytes:
            self._pin()

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the next `numel` elements as a flat tensor with a storage of its own, zeroed."""
        num_bytes = numel * dtype.itemsize
        assert self._taken + num_bytes <= self.num_bytes, "the arena was planned too small"
        if not numel:
            return torch.empty(0, dtype=dtype)
        flat = torch.frombuffer(self._map, dtype=dtype, count=numel, offset=self._taken)
        self._taken += num_bytes
        return flat

    def close(self) -> None:
        """Unpin. The mapping itself goes with its last tensor."""
        if self.pinned_bytes:
            for offset in range(0, self.pinned_bytes, _PIN_CHUNK_BYTES):
                torch.cuda.cudart().cudaHostUnregister(self._address + offset)
            self.pinned_bytes = 0

    def _pin(self) -> None:
        for offset in range(0, self.num_bytes, _PIN_CHUNK_BYTES):
            size = min(_PIN_CHUNK_BYTES, self.num_bytes - offset)
            status = int(torch.cuda.cudart().cudaHostRegister(self._address + offset, size, 0))
            if status != 0:
                warnings.warn(
                    f"the system pinned {offset} of {self.num_bytes} bytes of host memory and refused the next {size} "
                    f"(CUDA error {status}): copies from the rest are staged by the driver and slower. Raise "
                    f"`ulimit -l`.",
                    stacklevel=2,
                )
                return
            self.pinned_bytes += size


def trim_heap() -> None:
    """Hand freed heap pages back to the system, so that weights which were just taken over are not resident twice."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc: its allocator decides for itself
        ctypes.CDLL(None).malloc_trim(0)
