"""A buffer whose stretches are taken in turn."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from offload.lanes.ticket import Fence, Ticket


@dataclass(eq=False)
class RingSlice:
    """Memory of a ring that somebody has taken."""

    flat: torch.Tensor
    """The memory, uint8."""
    begin: int
    """The first byte, counted from the ring's beginning."""
    end: int
    """The byte behind the memory."""
    fills: list[Ticket]
    """The tickets that must be over before the memory is filled."""
    fence: Fence
    """Who fills the memory, and who reads it."""
    is_open: bool = True
    """True until the memory is closed: nobody else gets it."""
    is_whole: bool = True
    """True until somebody else was given any of the memory."""

    def close(self) -> None:
        """Others may have the memory, once those are over whom the fence knows."""
        self.is_open = False


@dataclass(eq=False)
class Ring:
    """Hands out stretches of memory one after the other, from the beginning again at the end."""

    memory: torch.Tensor
    """The memory of the ring, flat uint8."""
    kind: str
    """What the fences of the stretches are called."""
    _end: int = 0
    _taken: list[RingSlice] = field(default_factory=list)

    def has_room(self, num_bytes: int) -> bool:
        """True where so much could be taken beside what is open."""
        return self._find(num_bytes) is not None

    def take(self, num_bytes: int) -> RingSlice | None:
        """Return a stretch, or None where the buffer is too small beside what is open."""
        found = self._find(num_bytes)
        if found is None:
            return None
        begin, end, over = found
        fills = [ticket for other in over for ticket in other.fence.before_fill()]
        stretch = RingSlice(self.memory[begin:end], begin, end, fills, Fence(self.kind))
        for other in over:
            other.begin, other.is_whole = end, False  # who takes the rest of it has to wait for the same
        self._taken = [other for other in self._taken if other.begin < other.end] + [stretch]
        self._end = end
        return stretch

    def _find(self, num_bytes: int) -> tuple[int, int, list[RingSlice]] | None:
        """Return from where to where the next stretch lies, and over which others; None where it cannot."""
        begin = self._end if self._end + num_bytes <= self.memory.nbytes else 0
        end = begin + num_bytes
        over = [other for other in self._taken if other.begin < end and begin < other.end]
        return None if end > self.memory.nbytes or any(other.is_open for other in over) else (begin, end, over)

    def reset(self) -> None:
        """Whoever took a stretch has given it up."""
        for stretch in self._taken:
            stretch.is_open = stretch.is_whole = False
