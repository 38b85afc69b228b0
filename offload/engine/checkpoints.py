"""Activation checkpoints on the host: the inputs of units, from their forward to their backward."""

from __future__ import annotations

import torch

from offload.telemetry.counters import Counters
from offload.tiers.device import Device
from offload.tiers.host import Arena
from offload.tiers.ledger import Ledger


class HostCheckpoints:
    """A pool of host buffers, grown to what a step needs and used again by every step after it."""

    def __init__(self, device: Device, host: Ledger, counters: Counters) -> None:
        self._device, self._host, self._counters = device, host, counters
        self._free: dict[int, list[torch.Tensor]] = {}
        self._taken: dict[int, torch.Tensor] = {}

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the host; return the copy, of the same shape."""
        num_bytes = tensor.numel() * tensor.element_size()
        if not num_bytes:
            return tensor
        free = self._free.setdefault(num_bytes, [])
        if free:
            buffer = free.pop()
        else:
            self._host.reserve("activation checkpoints", num_bytes)
            buffer = Arena(num_bytes, pin=self._device.pins_host_memory).take(num_bytes, torch.uint8)
        self._taken[buffer.data_ptr()] = buffer
        copy = buffer.view(tensor.dtype).view(tensor.shape)
        self._device.copy(copy, tensor)
        self._counters.d2h_bytes += num_bytes
        return copy

    def get(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a device copy of what was put away, or of a part of it; any other tensor as it is."""
        if not self.has(tensor.untyped_storage().data_ptr()):
            return tensor
        copy = torch.empty_like(tensor, device=self._device.torch_device)
        self._device.copy(copy, tensor)
        self._counters.h2d_bytes += copy.numel() * copy.element_size()
        return copy

    def has(self, storage: int) -> bool:
        """True where a storage (by its address) is one of the pool's."""
        return storage in self._taken

    def free(self, storage: int) -> bool:
        """Give a buffer back to the pool; False where it is none of the pool's."""
        buffer = self._taken.pop(storage, None)
        if buffer is not None:
            self._free[buffer.nbytes].append(buffer)
        return buffer is not None
