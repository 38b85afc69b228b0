"""Page-aligned memory for O_DIRECT transfers."""

from __future__ import annotations

import mmap

import numpy as np


def pages(num_bytes: int, seed: int | None = None) -> np.ndarray:
    """Return uint8 [num_bytes], page-aligned: zeros, or noise from `seed`."""
    mapping = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(mapping, dtype=np.uint8, count=num_bytes)
    if seed is not None:
        array[:] = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
    return array
