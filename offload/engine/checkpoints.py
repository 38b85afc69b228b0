"""Activation checkpoints below the device: the inputs of units, from their forward to their backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch

from offload.lanes.lanes import Lanes
from offload.lanes.ticket import Fence, Ticket
from offload.partition.layout import align
from offload.telemetry.counters import Counters
from offload.tiers.device import Device
from offload.tiers.host import Arena
from offload.tiers.ledger import Ledger
from offload.tiers.nvme import RING_TILES, Nvme, Stripes

_PAGE_BYTES = 4096


@dataclass(eq=False)
class _Buffer:
    """What stands for a tensor that was put away; on the host it also lies there."""

    memory: torch.Tensor
    fence: Fence = field(default_factory=lambda: Fence("activation checkpoints"))


@dataclass(eq=False)
class _Extent(_Buffer):
    """A buffer on disk: its memory is an address that nobody touches, so that parts of it can be told."""

    file: Stripes | None = None
    offset: int = 0


_B = TypeVar("_B", bound=_Buffer)


class _Place(Protocol[_B]):
    """Where buffers are."""

    def make(self, num_bytes: int) -> _B:
        """Make one more."""

    def put(self, tensor: torch.Tensor, copy: torch.Tensor, buffer: _B) -> Sequence[Ticket]:
        """Move a tensor of the device to a buffer that nobody uses, of which `copy` is the view in its shape."""

    def get(self, part: torch.Tensor, copy: torch.Tensor, buffer: _B) -> Sequence[Ticket]:
        """Move a part of a buffer's view to the device."""


class Checkpoints(Generic[_B]):
    """A pool of buffers, grown to what a step needs and used again by every step after it."""

    def __init__(self, place: _Place[_B], device: Device, counters: Counters) -> None:
        self._place, self._device, self._counters = place, device, counters
        self._free: dict[int, list[_B]] = {}
        self._taken: dict[int, _B] = {}

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Put a tensor away behind compute; return what stands for it, of the same shape."""
        num_bytes = tensor.numel() * tensor.element_size()
        if not num_bytes:
            return tensor
        free = self._free.setdefault(num_bytes, [])
        buffer = free[-1] if free else self._place.make(num_bytes)
        self._taken[buffer.memory.data_ptr()] = buffer
        if free:
            free.pop()
        copy = buffer.memory.view(tensor.dtype).view(tensor.shape)
        buffer.fence.fill(*self._place.put(tensor, copy, buffer))
        self._counters.d2h_bytes += num_bytes
        return copy

    def get(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Sequence[Ticket]]:
        """Return a device copy of what was put away, or of a part of it, and the tickets after which it is there; any
        other tensor as it is.
        """
        buffer = self._taken.get(tensor.untyped_storage().data_ptr())
        if buffer is None:
            return tensor, ()
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device.torch_device)
        self._counters.h2d_bytes += copy.nbytes
        return copy, self._place.get(tensor, copy, buffer)

    def has(self, storage: int) -> bool:
        """True where a storage (by its address) is one of the pool's."""
        return storage in self._taken

    def free(self, storage: int) -> bool:
        """Give a buffer back to the pool; False where it is none of the pool's."""
        buffer = self._taken.get(storage)
        if buffer is not None:
            free = self._free[buffer.memory.nbytes]
            if buffer not in free:
                free.append(buffer)
            del self._taken[storage]
        return buffer is not None

    def reset(self) -> None:
        """Nobody needs any buffer any more."""
        for storage in list(self._taken):
            self.free(storage)


class OnHost:
    """Buffers in host memory: copies go down on the d2h lane, and come back on the h2d lane."""

    def __init__(self, device: Device, lanes: Lanes, host: Ledger) -> None:
        self._device, self._lanes, self._host = device, lanes, host

    def make(self, num_bytes: int) -> _Buffer:
        """Take host memory."""
        self._host.reserve("activation checkpoints", num_bytes)
        return _Buffer(Arena(num_bytes, self._device.pinning).take(num_bytes, torch.uint8))

    def put(self, tensor: torch.Tensor, copy: torch.Tensor, buffer: _Buffer) -> Sequence[Ticket]:
        """Copy down."""
        ticket = self._lanes.d2h.submit(
            partial(self._device.copy, copy, tensor),
            after=self._lanes.mark(),
            behind=buffer.fence.before_fill(),
            name="activations",
            num_bytes=copy.nbytes,
        )
        return (ticket,)

    def get(self, part: torch.Tensor, copy: torch.Tensor, buffer: _Buffer) -> Sequence[Ticket]:
        """Copy up."""
        ticket = self._lanes.h2d.submit(
            partial(self._device.copy, copy, part),
            # The copy's memory may be what compute has just let go of.
            after=(*buffer.fence.before_read(), *self._lanes.mark()),
            name="activations",
            num_bytes=copy.nbytes,
        )
        buffer.fence.read(ticket)
        return (ticket,)


class OnDisk:
    """Buffers in files: tiles go down and up through a ring, in turn by the lanes of the device and of the disk."""

    def __init__(self, device: Device, lanes: Lanes, nvme: Nvme) -> None:
        self._device, self._lanes, self._nvme, self._channel = device, lanes, nvme, nvme.activations
        # A part may begin and end within a page.
        self._tile_bytes = nvme.activations.num_bytes // RING_TILES - 2 * _PAGE_BYTES

    def make(self, num_bytes: int) -> _Extent:
        """Take room in a file."""
        file, offset = self._nvme.extent(align(num_bytes, _PAGE_BYTES))
        return _Extent(Arena(num_bytes).take(num_bytes, torch.uint8), file=file, offset=offset)

    def put(self, tensor: torch.Tensor, copy: torch.Tensor, buffer: _Extent) -> Sequence[Ticket]:
        """Copy down and write, tile by tile."""
        assert buffer.file is not None
        flat, behind, tickets = tensor.reshape(-1).view(torch.uint8), buffer.fence.before_fill(), []
        for begin in range(0, copy.nbytes, self._tile_bytes):
            tile = flat[begin : begin + self._tile_bytes]
            stretch = self._channel.take(align(tile.nbytes, _PAGE_BYTES))
            down = self._lanes.d2h.submit(
                partial(self._device.copy, stretch.flat[: tile.nbytes], tile),
                after=self._lanes.mark(),
                behind=stretch.after,
                name="activations",
                num_bytes=tile.nbytes,
            )
            stretch.fence.fill(down)
            tickets.append(
                self._channel.write(
                    buffer.file,
                    buffer.offset + begin,
                    stretch,
                    stretch.flat.nbytes,
                    after=(down,),
                    behind=behind,
                    name="activations",
                )
            )
            stretch.is_open = False
        return tickets

    def get(self, part: torch.Tensor, copy: torch.Tensor, buffer: _Extent) -> Sequence[Ticket]:
        """Read and copy up, tile by tile."""
        assert buffer.file is not None
        tickets, after, end = [], buffer.fence.before_read(), 0
        target = copy.view(-1).view(torch.uint8)
        for begin, num_rows, row_bytes, run_bytes in _tiles(part, self._tile_bytes):
            first = begin // _PAGE_BYTES * _PAGE_BYTES
            last = align(begin + (num_rows - 1) * row_bytes + run_bytes, _PAGE_BYTES)
            stretch = self._channel.take(last - first)
            reading = self._channel.read(
                buffer.file, buffer.offset + first, stretch, after=after, name="activations", is_ahead=False
            )
            buffer.fence.read(reading)
            size = num_rows * run_bytes
            offset = stretch.flat.storage_offset() + begin - first
            source = stretch.flat.as_strided((num_rows, run_bytes), (row_bytes, 1), offset)
            up = self._lanes.h2d.submit(
                partial(self._device.copy, target[end : end + size].view(num_rows, run_bytes), source),
                after=(reading, *self._lanes.mark()),
                name="activations",
                num_bytes=size,
            )
            stretch.fence.read(up)
            stretch.is_open = False
            tickets.append(up)
            end += size
        return tickets


def _tiles(part: torch.Tensor, most_bytes: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut a part of a contiguous tensor (a range along one of its axes) in tiles, in order: where it begins in the
    tensor, how many rows it has, from row to row, and of each row; all but the second in bytes.
    """
    item, begin = part.element_size(), int(part.storage_offset()) * part.element_size()
    run, axis = 1, part.dim()
    while axis and (part.shape[axis - 1] == 1 or part.stride(axis - 1) == run):
        axis -= 1
        run *= part.shape[axis]
    num_rows, row_bytes, run_bytes = part.numel() // run, 0, run * item
    if axis:
        row_bytes = part.stride(axis - 1) * item
    per_tile = max(1, most_bytes // row_bytes) if row_bytes else 1
    for row in range(0, num_rows, per_tile):
        if per_tile > 1:
            yield begin + row * row_bytes, min(per_tile, num_rows - row), row_bytes, run_bytes
            continue
        for start in range(0, run_bytes, most_bytes):
            yield begin + row * row_bytes + start, 1, 0, min(most_bytes, run_bytes - start)
