"""Activation offload: unit inputs or graphs in host or NVMe memory from forward to backward."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from bisect import bisect_left, insort_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import torch

from offload.lanes.lanes import Lanes
from offload.lanes.ticket import Fence, Ticket
from offload.layout.regions import align
from offload.machine.limits import memory
from offload.tiers.counters import Counters, Ledger
from offload.tiers.device import Device
from offload.tiers.host import Arena
from offload.tiers.nvme import RING_TILES, Nvme, Stripes

CHECKPOINTS, GRAPHS = "activation checkpoints", "graphs"
"""Host ledger names for unit inputs and for saved graph tensors."""
_FIXES = {
    GRAPHS: (
        "These are saved autograd graphs. Set --train.recompute always, which saves only graphs that fit, or raise "
        "--offload.host_memory."
    )
}
_PAGE_BYTES = 4096
_LINE_BYTES = 64


@dataclass(frozen=True)
class TensorLayout:
    """Memory layout of a tensor.

    Kernels choose the summation order by layout (MKL products by 16-byte operand alignment, batch norm by axis order),
    so a copy in another layout has other last bits.
    """

    strides: tuple[int, ...]
    """Strides in elements."""
    begin: int
    """Start within a 64-byte cache line, in elements."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorLayout:
        """Return the layout of a tensor."""
        return cls(tensor.stride(), tensor.data_ptr() % _LINE_BYTES // tensor.element_size())

    def part(self, part: torch.Tensor, whole: Sequence[int]) -> TensorLayout:
        """Return the original layout of a tensor part. `part`: view into a contiguous copy with shape `whole`."""
        begin, rest = self.begin, int(part.storage_offset())
        for axis, stride in enumerate(self.strides):  # the copy is contiguous: its offset tells the index on each axis
            index, rest = divmod(rest, math.prod(whole[axis + 1 :]))
            begin += index * stride
        return TensorLayout(self.strides, begin % (_LINE_BYTES // part.element_size()))

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy with this layout."""
        # Expanded axes have stride 0.
        shape = [size if stride else 1 for size, stride in zip(tensor.shape, self.strides, strict=True)]
        span = 1 + sum(max(size - 1, 0) * stride for size, stride in zip(shape, self.strides, strict=True))
        room = torch.empty(self.begin + span, dtype=tensor.dtype, device=tensor.device)
        room.as_strided(shape, self.strides, self.begin).copy_(tensor.as_strided(shape, tensor.stride()))
        return room.as_strided(tensor.shape, self.strides, self.begin)


class DeviceCopy(NamedTuple):
    """A saved tensor on the device, valid after the copy."""

    tensor: torch.Tensor
    """Device tensor."""
    tickets: Sequence[Ticket] = ()
    """Copy tickets."""
    layout: TensorLayout | None = None
    """Original memory layout. None: the tensor stayed on the device."""


@dataclass(eq=False)
class _Buffer:
    """Stand-in for an offloaded tensor."""

    memory: torch.Tensor
    """Host memory with the tensor. Disk buffer: an unused address range, only to identify parts."""
    file: Stripes | None = None
    """File of a disk buffer."""
    arena: Arena | None = None
    """Host memory to be pinned. None: pinned already, or on disk."""
    offset: int = 0
    """File offset in bytes."""
    shape: torch.Size = torch.Size()  # noqa: RUF009 (immutable)
    """Tensor shape."""
    layout: TensorLayout = TensorLayout((), 0)
    """Layout on the device."""
    fence: Fence = field(default_factory=lambda: Fence("activation checkpoints"))
    """Writers and readers of the memory."""


_size = attrgetter("memory.nbytes")


def stretch_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor as bytes.

    This is the whole storage, or only the tensor's part if the storage is at least twice as large.
    """
    storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    if tensor.is_contiguous() and 2 * tensor.nbytes <= storage.nbytes:
        begin = tensor.storage_offset() * tensor.itemsize
        return storage[begin : begin + tensor.nbytes]
    return storage


class ActivationOffload(ABC):
    """Buffer pool.

    Buffers are reused in every step; the smallest sufficient buffer is taken. Before a larger one is made, all free
    (too small) buffers are dropped, so the pool never exceeds the largest simultaneous use.
    """

    def __init__(self, device: Device, lanes: Lanes, counters: Counters, most_bytes: int | None = None) -> None:
        self._device = device
        self._lanes = lanes
        self._counters = counters
        self._most_bytes = sys.maxsize if most_bytes is None else most_bytes
        self._allocated_bytes = 0
        self._free: list[_Buffer] = []  # Sorted by size.
        self.buffers_in_use: dict[int, _Buffer] = {}
        """Buffers in use, keyed by storage address."""

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Offload a tensor after preceding compute; return a stand-in with the same shape."""
        num_bytes = tensor.numel() * tensor.element_size()
        if not num_bytes:
            return tensor
        buffer = self._take(num_bytes)
        buffer.shape = tensor.shape
        buffer.layout = TensorLayout.of(tensor)
        copy = buffer.memory[:num_bytes].view(tensor.dtype).view(tensor.shape)
        buffer.fence.record_writer(*self._copy_out(tensor, copy, buffer))
        self._counters.count("d2h_bytes", num_bytes)
        return copy

    def _take(self, num_bytes: int) -> _Buffer:
        """Take the smallest sufficient buffer, or a new one."""
        number = bisect_left(self._free, num_bytes, key=_size)
        if number < len(self._free):
            buffer = self._free[number]
            self.buffers_in_use[buffer.memory.data_ptr()] = buffer
            del self._free[number]
            return buffer
        self._drop()
        buffer = self.make(num_bytes)
        self.buffers_in_use[buffer.memory.data_ptr()] = buffer
        self._allocated_bytes += num_bytes
        return buffer

    def get(self, tensor: torch.Tensor) -> DeviceCopy:
        """Start a copy to the device. A tensor not offloaded is returned unchanged."""
        buffer = self.buffers_in_use.get(tensor.untyped_storage().data_ptr())
        if buffer is None:
            return DeviceCopy(tensor)
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device.torch_device)
        self._counters.count("h2d_bytes", copy.nbytes)
        return DeviceCopy(copy, self._copy_in(tensor, copy, buffer), buffer.layout.part(tensor, buffer.shape))

    @property
    def room_bytes(self) -> int:
        """Free bytes for further offload."""
        return self._new_bytes

    def has_room(self, num_bytes: int) -> bool:
        """True if `num_bytes` can be offloaded at once."""
        return (bool(self._free) and _size(self._free[-1]) >= num_bytes) or num_bytes <= self._new_bytes

    def free(self, storage: int) -> bool:
        """Return a buffer to the pool. False: not a buffer of this pool."""
        buffer = self.buffers_in_use.get(storage)
        if buffer is None:
            return False
        if buffer not in self._free:
            insort_left(self._free, buffer, key=_size)
        del self.buffers_in_use[storage]
        return True

    def reset(self) -> None:
        """Return all buffers to the pool."""
        for storage in list(self.buffers_in_use):
            self.free(storage)

    def end_step(self) -> None:  # noqa: B027 (files need nothing)
        """End a step and prepare new buffers for the next step."""

    @abstractmethod
    def make(self, num_bytes: int) -> _Buffer:
        """Make a buffer."""

    @property
    @abstractmethod
    def _new_bytes(self) -> int:
        """Bytes available for new buffers."""

    @property
    def _free_bytes(self) -> int:
        return sum(map(_size, self._free))

    def _drop(self) -> None:  # noqa: B027 (files cannot return memory)
        """Drop free buffers if this releases memory."""

    @abstractmethod
    def _copy_out(self, tensor: torch.Tensor, copy: torch.Tensor, buffer: _Buffer) -> Sequence[Ticket]:
        """Copy a device tensor to a free buffer. `copy`: buffer view with the tensor shape."""

    @abstractmethod
    def _copy_in(self, part: torch.Tensor, copy: torch.Tensor, buffer: _Buffer) -> Sequence[Ticket]:
        """Copy part of a buffer to the device."""


class HostActivationOffload(ActivationOffload):
    """Buffers in host memory: D2H copies on the d2h lane, H2D copies on a separate lane.

    New buffers are pinned after the step, because memory registration blocks every stream.
    """

    def __init__(
        self,
        device: Device,
        lanes: Lanes,
        counters: Counters,
        host: Ledger,
        name: str = CHECKPOINTS,
        most_bytes: int | None = None,
    ) -> None:
        super().__init__(device, lanes, counters, most_bytes)
        self._host, self._name = host, name

    @property
    def _new_bytes(self) -> int:
        # A tenth of the free memory stays for others.
        available_bytes, budget = memory().get("available_bytes", sys.maxsize) * 9 // 10, self._host.budget_bytes
        if budget is not None:
            available_bytes = min(available_bytes, budget - self._host.current_bytes)
        # Free buffers are dropped before a new one is made.
        return min(available_bytes, self._most_bytes - self._allocated_bytes) + self._free_bytes

    def make(self, num_bytes: int) -> _Buffer:
        self._host.reserve(self._name, num_bytes, _FIXES.get(self._name, ""))
        arena = Arena(num_bytes)
        return _Buffer(arena.take(num_bytes, torch.uint8), arena=arena)

    def end_step(self) -> None:
        pinning = self._device.pinning
        for buffer in self._free:
            if buffer.arena is not None and pinning is not None:
                buffer.arena.pin(pinning)
                buffer.arena = None  # pinned once

    def _drop(self) -> None:
        # Unpinned memory too. Memory still used by a copy is freed with the copy.
        num_bytes = sum(map(_size, self._free))
        self._free.clear()
        self._allocated_bytes -= num_bytes
        self._host.release(self._name, num_bytes)

    def _copy_out(self, tensor: torch.Tensor, copy: torch.Tensor, buffer: _Buffer) -> Sequence[Ticket]:
        ticket = self._lanes.d2h.submit(
            partial(self._device.copy, copy, tensor),
            reads=self._lanes.mark(),
            users=buffer.fence.before_fill(),
            name="activations",
            num_bytes=copy.nbytes,
        )
        return (ticket,)

    def _copy_in(self, part: torch.Tensor, copy: torch.Tensor, buffer: _Buffer) -> Sequence[Ticket]:
        ticket = self._lanes.returning.submit(
            partial(self._device.copy, copy, part),
            # The memory may have been released by compute just now.
            reads=(*buffer.fence.before_read(), *self._lanes.mark()),
            name="activations",
            num_bytes=copy.nbytes,
        )
        buffer.fence.record_reader(ticket)
        return (ticket,)


class DiskActivationOffload(ActivationOffload):
    """Buffers in files: tiles pass through a ring, alternating between device and disk lanes.

    Buffers are never dropped, because a file cannot return memory from the middle.
    """

    def __init__(
        self, device: Device, lanes: Lanes, counters: Counters, nvme: Nvme, most_bytes: int | None = None
    ) -> None:
        super().__init__(device, lanes, counters, most_bytes)
        self._nvme, self._channel = nvme, nvme.activations
        # A part may begin and end within a page.
        self._tile_bytes = nvme.activations.num_bytes // RING_TILES - 2 * _PAGE_BYTES

    def make(self, num_bytes: int) -> _Buffer:
        file, offset = self._nvme.extent(align(num_bytes, _PAGE_BYTES))
        return _Buffer(Arena(num_bytes).take(num_bytes, torch.uint8), file, offset=offset)

    @property
    def room_bytes(self) -> int:
        return self._new_bytes + self._free_bytes

    @property
    def _new_bytes(self) -> int:
        return min(self._nvme.room_bytes, self._most_bytes - self._allocated_bytes)

    def _copy_out(self, tensor: torch.Tensor, copy: torch.Tensor, buffer: _Buffer) -> Sequence[Ticket]:
        assert buffer.file is not None
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        users = buffer.fence.before_fill()
        tickets = []
        for begin in range(0, copy.nbytes, self._tile_bytes):
            tile = flat[begin : begin + self._tile_bytes]
            stretch = self._channel.ring.take_planned(align(tile.nbytes, _PAGE_BYTES))
            d2h_ticket = self._lanes.d2h.submit(
                partial(self._device.copy, stretch.flat[: tile.nbytes], tile),
                reads=self._lanes.mark(),
                users=stretch.users,
                name="activations",
                num_bytes=tile.nbytes,
            )
            stretch.fence.record_writer(d2h_ticket)
            tickets.append(
                self._channel.write(
                    buffer.file,
                    buffer.offset + begin,
                    stretch,
                    stretch.flat.nbytes,
                    reads=(d2h_ticket,),
                    users=users,
                    name="activations",
                )
            )
            stretch.close()
        return tickets

    def _copy_in(self, part: torch.Tensor, copy: torch.Tensor, buffer: _Buffer) -> Sequence[Ticket]:
        assert buffer.file is not None
        reads = buffer.fence.before_read()
        target = copy.view(-1).view(torch.uint8)
        tickets = []
        end = 0  # of the bytes in `target` so far
        for begin, num_rows, row_bytes, run_bytes in _tiles(part, self._tile_bytes):
            # Disk reads begin and end at pages.
            first = begin // _PAGE_BYTES * _PAGE_BYTES
            last = align(begin + (num_rows - 1) * row_bytes + run_bytes, _PAGE_BYTES)
            stretch = self._channel.ring.take_planned(last - first)
            read_ticket = self._channel.read(
                buffer.file, buffer.offset + first, stretch, reads=reads, name="activations", is_ahead=False
            )
            buffer.fence.record_reader(read_ticket)
            size = num_rows * run_bytes
            offset = stretch.flat.storage_offset() + begin - first
            source = stretch.flat.as_strided((num_rows, run_bytes), (row_bytes, 1), offset)
            h2d_ticket = self._lanes.returning.submit(
                partial(self._device.copy, target[end : end + size].view(num_rows, run_bytes), source),
                reads=(read_ticket, *self._lanes.mark()),
                name="activations",
                num_bytes=size,
            )
            stretch.fence.record_reader(h2d_ticket)
            stretch.close()
            tickets.append(h2d_ticket)
            end += size
        return tickets


def _tiles(part: torch.Tensor, most_bytes: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut a part of a contiguous tensor (a range along one axis) into tiles, in order.

    Yields (begin, rows, row stride, row length), in bytes except the row count.
    """
    item, begin = part.element_size(), int(part.storage_offset()) * part.element_size()
    run, axis = 1, part.dim()
    while axis and (part.shape[axis - 1] == 1 or part.stride(axis - 1) == run):  # the last axes are one run
        axis -= 1
        run *= part.shape[axis]
    num_rows = part.numel() // run
    run_bytes = run * item
    row_bytes = 0
    per_tile = 1  # rows; a row above the tile size is cut
    if axis:
        row_bytes = part.stride(axis - 1) * item
        per_tile = max(1, most_bytes // row_bytes)
    for row in range(0, num_rows, per_tile):
        if per_tile > 1:
            yield begin + row * row_bytes, min(per_tile, num_rows - row), row_bytes, run_bytes
            continue
        for start in range(0, run_bytes, most_bytes):
            yield begin + row * row_bytes + start, 1, 0, min(most_bytes, run_bytes - start)
