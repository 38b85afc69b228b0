"""Exchanges by an accelerator's own backend, which is NCCL for CUDA. (Nothing here runs where there is none.)"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from offload.accelerators import open_accelerator
from offload.distributed.comm import Ranks, Row, pieces_of
from offload.distributed.watchdog import Position
from offload.errors import RankLostError


class DeviceRanks(Ranks):
    """Several ranks, each on an accelerator; values of the host go over gloo. No host waits for an exchange of it."""

    def _open_device(self) -> None:
        self._accelerator = open_accelerator(self.device)
        self._accelerator.enter()
        self._all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the name since torch 2.13
        self._group = dist.new_group(backend=self._accelerator.backend, timeout=self._timeout)
        self._enqueued: deque[tuple[Position, torch.Event]] = deque()
        self._looking = threading.Lock()

    def _enter(self) -> None:
        self._accelerator.enter()

    @contextmanager
    def _exchange(self, what: str, numel: int, row: Row | None = None) -> Iterator[None]:
        with super()._exchange(what, numel, row):
            yield
            if row is None:
                event = self._accelerator.event()  # which nobody waits for
                event.record()
                self._enqueued.append((self._tensors.now, event))

    def look(self) -> Sequence[Position]:
        """The oldest exchange that the device has not done is where this rank is."""
        with self._looking:  # not the lock of exchanges, which is held through them
            while self._enqueued:
                place, event = self._enqueued[0]
                if not event.query():
                    return place, self._values.now
                self._enqueued.popleft()
        return super().look()

    def _send(self, data: torch.Tensor, source: int) -> None:
        if data.is_cpu:
            copied = self._accelerator.event(sleeps=True)  # copies that it comes after may still use the memory
            copied.record(self._accelerator.current_stream())
            copied.synchronize()
            super()._send(data, source)
        else:
            self._hold(data)
            dist.broadcast(data, source, group=self._group)

    def _gather(self, full: torch.Tensor, row: Row) -> None:
        if full.is_cpu:
            super()._gather(full, row)
            return
        self._hold(full)
        self._all_gather(full, pieces_of(full, self.size)[self.rank], group=self._group)

    def _swap(self, received: list[torch.Tensor], pieces: list[torch.Tensor]) -> list[Any]:
        self._hold(*received, *pieces)
        dist.all_to_all(received, pieces, group=self._group)  # grouped sends and receives, from and to where data is
        return []

    def _hold(self, *tensors: torch.Tensor) -> None:
        """Freed memory must not be handed out again before this stream is done with it."""
        for tensor in tensors:
            tensor.record_stream(self._accelerator.current_stream())

    def _abandon(self, error: RankLostError | None) -> None:
        super()._abandon(error)
        self._group._get_backend(self.device).abort()  # its kernels end, and with them every wait for the device

    def _destroy(self) -> None:
        if not self._owns_default and self.stands:
            dist.destroy_process_group(self._group)
        super()._destroy()
