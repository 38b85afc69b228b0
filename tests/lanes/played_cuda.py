"""As much of torch.cuda as lanes use: streams that are done at once, events with a time, and a device by thread."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import Any

import pytest
import torch

DEVICE = 3


class PlayedEvent:
    """An event that counts how many there are, and notes in which threads it was waited for."""

    def __init__(self, cuda: PlayedCuda, enable_timing: bool = False, blocking: bool = False) -> None:
        self._cuda, self._timed, self.blocking = cuda, enable_timing, blocking
        self.at: float | None = None
        cuda.events.append(self)

    def record(self, stream: Any = None) -> None:
        self._cuda.touch()
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        self._cuda.touch()
        self._cuda.waited.append(self)

    def query(self) -> bool:
        self._cuda.touch()
        return True

    def elapsed_time(self, end: PlayedEvent) -> float:
        assert self._timed
        assert self.at is not None
        assert end.at is not None
        return (end.at - self.at) * 1e3


class PlayedStream:
    def __init__(self, cuda: PlayedCuda) -> None:
        self._cuda = cuda

    def wait_event(self, event: PlayedEvent) -> None:
        self._cuda.touch()

    def synchronize(self) -> None:
        self._cuda.touch()


class PlayedCuda:
    """GPU `DEVICE` of several. `strays`: threads that touched the device while theirs was another."""

    def __init__(self) -> None:
        self.events: list[PlayedEvent] = []
        self.waited: list[PlayedEvent] = []
        self.strays: set[str] = set()
        self.entered: set[str] = set()
        self._thread = threading.local()

    def touch(self) -> None:
        if self.current_device() != DEVICE:
            self.strays.add(threading.current_thread().name)

    def set_device(self, device: Any) -> None:
        self._thread.device = torch.device(device).index if not isinstance(device, int) else device
        self.entered.add(threading.current_thread().name)

    def current_device(self) -> int:
        return int(getattr(self._thread, "device", 0))

    @contextmanager
    def device(self, device: torch.device) -> Any:
        before = self.current_device()
        self._thread.device = device.index
        yield
        self._thread.device = before

    @contextmanager
    def stream(self, stream: PlayedStream) -> Any:
        yield

    def play(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be torch.cuda, with this thread on GPU `DEVICE`."""
        for name in ("set_device", "current_device", "device", "stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        compute = PlayedStream(self)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: compute)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: PlayedStream(self))
        monkeypatch.setattr(torch.cuda, "Event", lambda **kind: PlayedEvent(self, **kind))
        self.set_device(DEVICE)
