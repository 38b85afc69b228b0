"""Ring buffer with slices in cyclic order."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from offload.lanes.ticket import Fence, Ticket


@dataclass(eq=False)
class RingSlice:
    """Taken part of a ring."""

    flat: torch.Tensor
    """Memory, uint8."""
    begin: int
    """First byte in the ring."""
    end: int
    """End byte (exclusive)."""
    fills: list[Ticket]
    """Tickets to wait for before a write."""
    fence: Fence
    """Slice writers and readers."""
    is_open: bool = True
    """True until `close`: the memory is reserved."""
    is_whole: bool = True
    """True while no later slice overlaps this memory."""

    def close(self) -> None:
        """Release the memory. The next user waits for all users in the fence."""
        self.is_open = False


@dataclass(eq=False)
class Ring:
    """Ring buffer: gives out slices one after the other, and wraps at the end."""

    memory: torch.Tensor
    """Ring memory, flat uint8."""
    buffer_type: str
    """Buffer type of the fences, see `Fence`."""
    _end: int = 0
    _slices: list[RingSlice] = field(default_factory=list)

    def has_room(self, num_bytes: int) -> bool:
        """Return True if `num_bytes` fit beside the open slices."""
        return self._find(num_bytes) is not None

    def take(self, num_bytes: int) -> RingSlice | None:
        """Return a slice, or None without room beside the open slices."""
        span = self._find(num_bytes)
        if span is None:
            return None
        begin, end, overlapped = span
        fills = [ticket for other in overlapped for ticket in other.fence.before_fill()]
        ring_slice = RingSlice(self.memory[begin:end], begin, end, fills, Fence(self.buffer_type))
        for other in overlapped:
            other.begin, other.is_whole = end, False  # the next user of the rest waits for the same tickets
        self._slices = [other for other in self._slices if other.begin < other.end] + [ring_slice]
        self._end = end
        return ring_slice

    def _find(self, num_bytes: int) -> tuple[int, int, list[RingSlice]] | None:
        """Return (begin, end, overlapped slices) of the next slice, or None without room."""
        begin = self._end if self._end + num_bytes <= self.memory.nbytes else 0
        end = begin + num_bytes
        overlapped = [other for other in self._slices if other.begin < end and begin < other.end]
        return (
            None if end > self.memory.nbytes or any(other.is_open for other in overlapped) else (begin, end, overlapped)
        )

    def reset(self) -> None:
        """Close all slices after an interrupted step."""
        for ring_slice in self._slices:
            ring_slice.is_open = ring_slice.is_whole = False
