"""Pinned memory: host memory that is registered with a device's driver, which copies from it without staging."""

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
"""Of one registration. Above 512 GiB newer drivers fail."""
_keep: Callable[[object], None] = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))


class Pinning:
    """Pins memory for one device. What its driver refuses stays as it is, and a warning says so once."""

    def __init__(self, driver: Accelerator, largest_bytes: int = LARGEST_BYTES) -> None:
        """`largest_bytes`: of one registration, where it need not be larger."""
        self.largest_bytes, self._driver, self._has_warned, self._error = largest_bytes, driver, False, 0
        self._mappings: set[ref[HostMapping]] = set()

    def holds(self, mapping: HostMapping) -> None:
        """Note a mapping of which something is going to be registered."""
        self._mappings.add(ref(mapping, self._mappings.discard))

    def close(self) -> None:
        """Take back what is registered, also where somebody still holds the memory."""
        for mapping in filter(None, [known() for known in list(self._mappings)]):
            mapping.unpin()

    def register(self, address: int, num_bytes: int) -> bool:
        """Register a range; False where the driver refused it."""
        error = self._driver.register(address, num_bytes)
        if error:
            self._driver.forget_error()
            self._error = error
        return not error

    def unregister(self, addresses: Sequence[int]) -> bool:
        """Take the registrations that begin there back, once no copy can be under way; False where that failed."""
        try:
            self._driver.wait()
        except RuntimeError:  # the device is lost, and whoever uses it is told
            return False
        refused = [address for address in addresses if self._driver.unregister(address)]
        if refused:
            self._driver.forget_error()
        return not refused

    def tell(self, num_bytes: int, of_bytes: int) -> None:
        """Warn once that so many of these bytes were refused."""
        if self._has_warned or not num_bytes:
            return
        self._has_warned = True
        warn(
            f"the driver refused to pin {format_bytes(num_bytes)} of {format_bytes(of_bytes)} of host memory "
            f"(CUDA error {self._error}): they are used as they are, and copies from and to them are staged "
            f"and slower. Pinned memory counts in full against the "
            f"memory limit of the container, pod or job that this runs in: raise that limit, or lower "
            f"offload.host_memory. (This is said once.)"
        )


class HostMapping(mmap.mmap):
    """A mapping that is never unmapped while it is registered: the next one may get its address, and the driver would
    take that for the old pages.

    Every tensor of it holds it; the last one to go takes back the registrations, by `__del__`. (Not by a weak
    reference: mmap's are called after it has unmapped.) Where that cannot be done the mapping stays for ever.
    """

    _pinning: Pinning | None = None
    _process = 0
    _pieces: Sequence[tuple[int, int]] = ()

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are registered."""
        return sum(num_bytes for _, num_bytes in self._pieces)

    def pin(self, pinning: Pinning, pieces: Sequence[tuple[int, int]], borders: Sequence[int]) -> None:
        """Register the pieces, given by address and size; where one is refused, as much as can be of what lies before
        one of the borders within it, and nothing behind.
        """
        self._pinning, self._process = pinning, os.getpid()
        pinning.holds(self)
        waiting, num_bytes = [*reversed(pieces)], sum(size for _, size in pieces)
        while waiting:
            begin, size = piece = waiting.pop()
            if pinning.register(*piece):
                self._pieces = (*self._pieces, piece)
                continue
            inside = [border for border in borders if begin < border < begin + size]
            middle = inside[len(inside) // 2] if inside else begin
            waiting = [(middle, begin + size - middle), (begin, middle - begin)] if inside else []
        pinning.tell(num_bytes - self.pinned_bytes, num_bytes)
        if not self._pieces:
            return
        with suppress(OSError):  # else fork would copy pinned pages at once: the device goes on using the parent's
            self.madvise(mmap.MADV_DONTFORK)

    def unpin(self) -> None:
        """Take all registrations back, after what the device is doing."""
        addresses, self._pieces = [address for address, _ in self._pieces], ()
        if not addresses:
            return
        assert self._pinning is not None
        # In a forked child they are the parent's, and at these addresses may be other memory.
        if os.getpid() != self._process or not self._pinning.unregister(addresses):
            _keep(self)

    def __del__(
        self, is_ending: Callable[[], bool] = sys.is_finalizing, keep: Callable[[object], None] = _keep
    ) -> None:
        if not self._pieces:
            return
        if is_ending():  # neither torch nor this module may be whole any more; the driver cleans up after the process
            keep(self)
        else:
            self.unpin()
