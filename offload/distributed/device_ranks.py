"""Communicators for accelerators: native backend (NCCL for CUDA), or gloo with host copies where torch
has no backend.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from offload.accelerators import open_accelerator
from offload.distributed.comm import Coding, Groups, pieces_of
from offload.distributed.ranks import CollectiveQueue, Ranks, make_group
from offload.distributed.watchdog import Position
from offload.errors import RankLostError


class _AcceleratorRanks(Ranks):
    """Several ranks with one accelerator each."""

    def _open_queues(self, groups: Groups) -> None:
        super()._open_queues(groups)
        self._accelerator = open_accelerator(self.device)
        self._accelerator.enter()

    def _enter(self) -> None:
        self._accelerator.enter()

    def _finish_copies(self) -> None:
        """Wait on the host for earlier copies, because they may still use host buffers of the collective."""
        copied = self._accelerator.event(sleeps=True)
        copied.record(self._accelerator.current_stream())
        copied.synchronize()


class DeviceRanks(_AcceleratorRanks):
    """Several ranks with one accelerator each. Tensors use the native backend, without host waits; host values use
    gloo.
    """

    def _open_queues(self, groups: Groups) -> None:
        super()._open_queues(groups)
        self._all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # name since torch 2.13
        self._group = make_group(groups, self._accelerator.backend, self._timeout)
        self._enqueued: deque[tuple[Position, torch.Event]] = deque()
        self._looking = threading.Lock()

    @contextmanager
    def _exchange(self, operation: str, numel: int, queue: CollectiveQueue | None = None) -> Iterator[None]:
        with super()._exchange(operation, numel, queue):
            yield
            if queue is None:
                event = self._accelerator.event()  # no thread waits for this event
                event.record()
                self._enqueued.append((self._tensors.position, event))

    def _own_positions(self) -> tuple[Position, Position]:
        """Return the oldest collective not yet done on the device as the position of the tensor queue."""
        with self._looking:  # not the queue lock, which is held during a collective
            while self._enqueued:
                position, event = self._enqueued[0]
                if not event.query():
                    return position, self._values.position
                self._enqueued.popleft()
        return super()._own_positions()

    def _send(self, data: torch.Tensor, source: int) -> None:
        if data.is_cpu:
            self._finish_copies()
            super()._send(data, source)
        else:
            self._hold(data)
            dist.broadcast(data, group=self._group, group_src=source)

    def _gather(self, full: torch.Tensor, queue: CollectiveQueue) -> None:
        if full.is_cpu:
            super()._gather(full, queue)
            return
        self._hold(full)
        self._all_gather(full, pieces_of(full, self.size)[self.rank], group=self._group)

    def _swap(self, received: list[torch.Tensor], pieces: list[torch.Tensor]) -> list[Any]:
        if pieces[0].is_cpu:
            self._finish_copies()
            return super()._swap(received, pieces)
        self._hold(*received, *pieces)
        dist.all_to_all(received, pieces, group=self._group)  # grouped sends and receives without staging copies
        return []

    def _hold(self, *tensors: torch.Tensor) -> None:
        """Mark tensors as used by the current stream, so that the allocator does not reuse freed memory too early."""
        for tensor in tensors:
            tensor.record_stream(self._accelerator.current_stream())

    def _abandon(self, error: RankLostError | None) -> None:
        super()._abandon(error)
        for group in self._device_groups():
            group._get_backend(self.device).abort()  # ends the kernels, and so every wait for the device

    def _destroy(self) -> None:
        if not self._owns_default and self.is_alive:
            for group in self._device_groups():
                dist.destroy_process_group(group)
        super()._destroy()

    def _device_groups(self) -> list[Any]:
        return [part._group for part in self._all_parts() if isinstance(part, DeviceRanks)]


class StagedRanks(_AcceleratorRanks):
    """Several ranks with one accelerator each, over gloo with D2H and H2D copies. The host waits for all copies."""

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, operation: str) -> None:
        host = _on_host(full)
        super().all_gather(host, shard.cpu(), operation)
        _take_up(full, host)

    def reduce_scatter(
        self,
        shard: torch.Tensor,
        full: torch.Tensor,
        operation: str,
        scratch: torch.Tensor,
        coding: Coding | None = None,
    ) -> None:
        host = _on_host(shard)
        super().reduce_scatter(host, full.cpu(), operation, _on_host(scratch), coding)
        _take_up(shard, host)

    def all_to_all(self, received: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor], operation: str) -> None:
        self._finish_copies()
        hosts = [_on_host(tensor) for tensor in received]
        super().all_to_all(hosts, [piece.cpu() for piece in pieces], operation)
        for tensor, host in zip(received, hosts, strict=True):
            _take_up(tensor, host)

    def sum_in_order(self, values: Any, operation: str) -> Any:
        if not isinstance(values, torch.Tensor):
            return super().sum_in_order(values, operation)
        return super().sum_in_order(values.cpu(), operation).to(values.device)

    def broadcast(self, flat: torch.Tensor, source: int, operation: str) -> None:
        self._finish_copies()
        host = flat.cpu()
        super().broadcast(host, source, operation)
        _take_up(flat, host)


def _on_host(flat: torch.Tensor) -> torch.Tensor:
    """Return a host buffer for `flat`: the tensor itself if already on the host."""
    return flat if flat.is_cpu else torch.empty_like(flat, device="cpu")


def _take_up(flat: torch.Tensor, host: torch.Tensor) -> None:
    if flat is not host:
        flat.copy_(host)
