"""Pinned memory: host memory registered with the device driver for copies without staging."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from weakref import ref

from offload.accelerators import Accelerator
from offload.errors import format_bytes, warn

LARGEST_BYTES = 64 << 30
"""Maximum bytes per registration. Newer drivers fail above 512 GiB."""
_keep: Callable[[object], None] = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))


class Pinning:
    """Pins memory for one device. If the driver refuses, the memory stays unpinned, with one warning."""

    def __init__(self, driver: Accelerator, largest_bytes: int = LARGEST_BYTES) -> None:
        """`largest_bytes`: target maximum per registration."""
        self.largest_bytes, self._driver, self._has_warned, self._error = largest_bytes, driver, False, 0
        self._mappings: set[ref[HostMapping]] = set()

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
            self._driver.forget_error()
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
            f"the driver refused to pin {format_bytes(num_bytes)} of {format_bytes(of_bytes)} of host memory (CUDA "
            f"error {self._error}): this memory stays unpinned, and copies from and to it are slower. Pinned memory "
            "counts in full against the memory limit of the container, pod or job: raise that limit, or lower "
            "--offload.host_memory. (Shown once.)"
        )


class HostMapping(mmap.mmap):
    """Memory mapping with a guarantee: no unmapping while registered. Otherwise a new mapping could get the same
    address, and the driver would use the old pages.

    All tensors in the mapping keep the mapping alive; after the last one `__del__` unregisters the memory. (Not a weak
    reference callback: mmap calls those after the unmapping.) If unregistering fails, the mapping stays forever.
    """

    _pinning: Pinning | None = None
    _process = 0
    _pieces: Sequence[tuple[int, int]] = ()

    @property
    def pinned_bytes(self) -> int:
        """Registered bytes."""
        return sum(num_bytes for _, num_bytes in self._pieces)

    def pin(self, pinning: Pinning, pieces: Sequence[tuple[int, int]], borders: Sequence[int]) -> None:
        """Register pieces (address, bytes). If the driver refuses a piece, register the part before a border inside the
        piece, as large as possible, and nothing behind.
        """
        self._pinning, self._process = pinning, os.getpid()
        pinning.add(self)
        waiting, num_bytes = [*reversed(pieces)], sum(size for _, size in pieces)
        while waiting:
            begin, size = piece = waiting.pop()
            if pinning.register(*piece):
                self._pieces = (*self._pieces, piece)
                continue
            inside = [border for border in borders if begin < border < begin + size]
            middle = inside[len(inside) // 2] if inside else begin
            waiting = [(middle, begin + size - middle), (begin, middle - begin)] if inside else []
        pinning.warn_unpinned(num_bytes - self.pinned_bytes, num_bytes)
        if not self._pieces:
            return
        # otherwise fork would copy pinned pages at once, and the device would keep using the parent pages
        with suppress(OSError):
            self.madvise(mmap.MADV_DONTFORK)

    def unpin(self) -> None:
        """Unregister all pieces after pending device work."""
        addresses, self._pieces = [address for address, _ in self._pieces], ()
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
