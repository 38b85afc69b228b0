"""Activation checkpoints on the host: the inputs of units, from their forward to their backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from offload.lanes.lanes import Lanes
from offload.lanes.ticket import Fence, Ticket
from offload.telemetry.counters import Counters
from offload.tiers.device import Device
from offload.tiers.host import Arena
from offload.tiers.ledger import Ledger


@dataclass(eq=False)
class _Buffer:
    memory: torch.Tensor
    fence: Fence = field(default_factory=lambda: Fence("activation checkpoints"))


class HostCheckpoints:
    """A pool of host buffers, grown to what a step needs and used again by every step after it. Copies go down behind
    compute on the d2h lane, and come back on the h2d lane.
    """

    def __init__(self, device: Device, host: Ledger, lanes: Lanes, counters: Counters) -> None:
        self._device, self._host, self._lanes, self._counters = device, host, lanes, counters
        self._free: dict[int, list[_Buffer]] = {}
        self._taken: dict[int, _Buffer] = {}

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the host; return the copy, of the same shape, which fills later."""
        num_bytes = tensor.numel() * tensor.element_size()
        if not num_bytes:
            return tensor
        free = self._free.setdefault(num_bytes, [])
        if free:
            buffer = free.pop()
        else:
            self._host.reserve("activation checkpoints", num_bytes)
            arena = Arena(num_bytes, pin=self._device.pins_host_memory)
            buffer = _Buffer(arena.take(num_bytes, torch.uint8))
        self._taken[buffer.memory.data_ptr()] = buffer
        copy = buffer.memory.view(tensor.dtype).view(tensor.shape)
        buffer.fence.fill(
            self._lanes.d2h.submit(
                lambda: self._device.copy(copy, tensor),
                after=self._lanes.mark(),
                behind=buffer.fence.before_fill(),
                name="activations",
                num_bytes=num_bytes,
            )
        )
        self._counters.d2h_bytes += num_bytes
        return copy

    def get(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Sequence[Ticket]]:
        """Return a device copy of what was put away, or of a part of it, and the tickets after which it is there; any
        other tensor as it is.
        """
        buffer = self._taken.get(tensor.untyped_storage().data_ptr())
        if buffer is None:
            return tensor, ()
        copy = torch.empty_like(tensor, device=self._device.torch_device)
        num_bytes = copy.numel() * copy.element_size()
        ticket = self._lanes.h2d.submit(
            lambda: self._device.copy(copy, tensor),
            # The copy's memory may be what compute has just let go of.
            after=(*buffer.fence.before_read(), *self._lanes.mark()),
            name="activations",
            num_bytes=num_bytes,
        )
        buffer.fence.read(ticket)
        self._counters.h2d_bytes += num_bytes
        return copy, (ticket,)

    def has(self, storage: int) -> bool:
        """True where a storage (by its address) is one of the pool's."""
        return storage in self._taken

    def free(self, storage: int) -> bool:
        """Give a buffer back to the pool; False where it is none of the pool's."""
        buffer = self._taken.pop(storage, None)
        if buffer is not None:
            self._free[buffer.memory.nbytes].append(buffer)
        return buffer is not None
