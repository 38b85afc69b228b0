"""Weights that are read from a mapped file: the pages of what was taken are given back.

transformers maps safetensors files, and a tensor's pages come into memory when they are read. All tensors of a file
share one mapping, which lives as long as the last of them, so without this a loaded model would end up in memory twice:
once as states and once as file pages.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

from torch import nn

_MADV_DONTNEED = 4  # Linux's number; elsewhere the call means something else, so nothing is done there


class MappedWeights:
    """Called as `fill(name, module)` before a module's parameters are taken; drops the pages of those taken before."""

    def __init__(self) -> None:
        self._files = _mapped_files() if sys.platform == "linux" else []
        self._last: list[tuple[nn.Module, str, nn.Parameter]] = []

    def __call__(self, _name: str, module: nn.Module) -> None:
        for owner, key, parameter in self._last:
            if owner._parameters.get(key) is not parameter:  # still in its place: it may have been written to
                self._drop(parameter.data_ptr(), parameter.nbytes)
        self._last = [
            (owner, key, parameter)
            for owner in module.modules()
            for key, parameter in owner._parameters.items()
            if parameter is not None and self._is_mapped(parameter.data_ptr(), parameter.nbytes)
        ]

    def _is_mapped(self, address: int, num_bytes: int) -> bool:
        return any(start <= address and address + num_bytes <= end for start, end in self._files)

    def _drop(self, address: int, num_bytes: int) -> None:
        """Let go of the whole pages inside a range of a file's mapping; a later read would bring them back from the
        file.
        """
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


def _mapped_files() -> list[tuple[int, int]]:
    """Return the address ranges at which this process has weight files mapped."""
    ranges = []
    with Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.rstrip().endswith((".safetensors", ".bin")):
                start, end = line.split(maxsplit=1)[0].split("-")
                ranges.append((int(start, 16), int(end, 16)))
    return ranges
