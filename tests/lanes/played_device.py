"""Simulated torch device module for lanes: streams complete at once, events are timed, threads have a current
device.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from offload.accelerators import CudaAccelerator

DEVICE = 3


class PlayedEvent:
    """Event registered with the module at creation and at each wait."""

    def __init__(self, module: PlayedModule, enable_timing: bool = False, blocking: bool = False) -> None:
        self._module, self._timed, self.blocking = module, enable_timing, blocking
        self.at: float | None = None
        module.events.append(self)

    def record(self, stream: Any = None) -> None:
        self._module.touch()
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        self._module.touch()
        self._module.waited.append(self)

    def query(self) -> bool:
        self._module.touch()
        return True

    def elapsed_time(self, end: PlayedEvent) -> float:
        assert self._timed
        assert self.at is not None
        assert end.at is not None
        return (end.at - self.at) * 1e3


class PlayedStream:
    def __init__(self, module: PlayedModule) -> None:
        self._module = module

    def wait_event(self, event: PlayedEvent) -> None:
        self._module.touch()

    def synchronize(self) -> None:
        self._module.touch()


class PlayedModule:
    """GPU `DEVICE` among several. `strays`: threads that touched the device while another was current."""

    def __init__(self) -> None:
        self.events: list[PlayedEvent] = []
        self.waited: list[PlayedEvent] = []
        self.strays: set[str] = set()
        self.entered: set[str] = set()
        self._thread = threading.local()
        self._compute = PlayedStream(self)
        self.set_device(DEVICE)

    def touch(self) -> None:
        if self.current_device() != DEVICE:
            self.strays.add(threading.current_thread().name)

    def set_device(self, device: Any) -> None:
        self._thread.device = torch.device(device).index if not isinstance(device, int) else device
        self.entered.add(threading.current_thread().name)

    def current_device(self) -> int:
        return int(getattr(self._thread, "device", 0))

    def set_stream(self, stream: PlayedStream) -> None:
        self.touch()

    def current_stream(self, device: torch.device) -> PlayedStream:
        return self._compute

    def Stream(self, device: torch.device) -> PlayedStream:
        return PlayedStream(self)

    def Event(self, **kind: bool) -> PlayedEvent:
        return PlayedEvent(self, **kind)


def played_accelerator() -> CudaAccelerator:
    """Return GPU `DEVICE`, made current for this thread."""
    return CudaAccelerator(torch.device("cuda", DEVICE), PlayedModule())
