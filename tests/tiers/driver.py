"""Simulated driver with CUDA's rules for registered host memory, and a CPU device that copies under these rules."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

import torch

from offload.tiers.counters import Ledger
from offload.tiers.device import CpuDevice
from offload.tiers.host import Pinning

ALREADY_REGISTERED, NOT_REGISTERED, OUT_OF_MEMORY = 712, 713, 2


class PlayedDriver:
    """Registered ranges must not overlap. A copy stays in one range or outside all. Memory is unregistered before
    unmapping. The next launch raises the last error.
    """

    def __init__(self) -> None:
        self.ranges: dict[int, int] = {}
        self.registered: list[int] = []  # sizes of all registrations ever made
        self.calls: list[str] = []
        self.limit_bytes: int | None = None
        self.last_error = 0
        self.is_lost = False

    def register(self, address: int, num_bytes: int) -> int:
        self.calls.append("register")
        assert is_mapped(address, num_bytes), "not memory of this process"
        if any(start < address + num_bytes and address < start + size for start, size in self.ranges.items()):
            return self._fail(ALREADY_REGISTERED)
        if self.limit_bytes is not None and sum(self.ranges.values()) + num_bytes > self.limit_bytes:
            return self._fail(OUT_OF_MEMORY)
        self.ranges[address] = num_bytes
        self.registered.append(num_bytes)
        return 0

    def unregister(self, address: int) -> int:
        self.calls.append("unregister")
        if address not in self.ranges:
            return self._fail(NOT_REGISTERED)
        assert is_mapped(address, self.ranges.pop(address)), "it was unmapped before it was unregistered"
        return 0

    def forget_error(self) -> None:
        self.last_error = 0

    def wait(self) -> None:
        self.calls.append("wait")
        if self.is_lost:
            raise RuntimeError("the device is lost")

    def launch(self) -> None:
        error, self.last_error = self.last_error, 0
        assert not error, f"an innocent launch raised error {error}"

    def copy(self, tensor: torch.Tensor) -> None:
        """Check the memory of a copy."""
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        touched = [(start, size) for start, size in self.ranges.items() if start < end and begin < start + size]
        assert not touched or touched[0][0] <= begin <= end <= sum(touched[0]), "invalid argument: more than one range"

    def _fail(self, error: int) -> int:
        self.last_error = error
        return error


class PlayedDevice(CpuDevice):
    """Ordinary memory acting as a device with copies from pinned memory."""

    def __init__(self, pinning: Pinning, driver: PlayedDriver) -> None:
        super().__init__(Ledger("device"), copies_aside=False)
        self.pinning, self._driver = pinning, driver

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._driver.copy(target)
        self._driver.copy(source)
        self._driver.launch()
        super().copy(target, source)


def is_mapped(address: int, num_bytes: int) -> bool:
    """Return whether every page in a range is mapped."""
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    num_pages = -(-(address + num_bytes - first) // mmap.PAGESIZE)
    mincore: Callable[..., int] = ctypes.CDLL(None).mincore
    return not mincore(
        ctypes.c_void_p(first), ctypes.c_size_t(num_pages * mmap.PAGESIZE), (ctypes.c_ubyte * num_pages)()
    )
