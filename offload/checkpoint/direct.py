"""Transfers past the page cache (O_DIRECT), and the memory that they go to and from."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterator

import numpy as np

O_DIRECT = getattr(os, "O_DIRECT", 0)


def set_direct(fd: int, is_direct: bool) -> None:
    """Go past the page cache, or through it. Raises OSError."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~O_DIRECT
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | (O_DIRECT if is_direct else 0))


def chunk_buffers(count: int, chunk_bytes: int) -> Iterator[np.ndarray]:
    """Yield memory for so many chunks, whole pages each, at their edges; it is taken at the first use."""
    size = -(-chunk_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if not size:
        return
    memory = mmap.mmap(-1, count * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to pin for each transfer
    yield from np.frombuffer(memory, np.uint8).reshape(count, size)
