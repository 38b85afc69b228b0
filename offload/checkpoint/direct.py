"""Transfers past the page cache (O_DIRECT), and the memory that they go to and from."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator

import numpy as np
import torch

from offload.layout.regions import align
from offload.tiers.host import Arena

O_DIRECT = getattr(os, "O_DIRECT", 0)


def set_direct(fd: int, is_direct: bool) -> None:
    """Go past the page cache, or through it. Raises OSError."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~O_DIRECT
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | (O_DIRECT if is_direct else 0))


def chunk_buffers(count: int, chunk_bytes: int) -> Iterator[np.ndarray]:
    """Yield memory for so many chunks, whole pages each, at their edges; it is taken at the first use."""
    if size := align(chunk_bytes, mmap.PAGESIZE):
        yield from Arena(count * size).take(count * size, torch.uint8).numpy().reshape(count, size)
