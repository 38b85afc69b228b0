"""Ring memory in slices, and leases: planes borrowed for one work item in a lane."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

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
    users: list[Ticket]
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
        users = [ticket for other in overlapped for ticket in other.fence.before_fill()]
        ring_slice = RingSlice(self.memory[begin:end], begin, end, users, Fence(self.buffer_type))
        for other in overlapped:
            other.begin = end  # the next user of the rest waits for the same tickets
            other.is_whole = False
        # A slice without memory of its own is forgotten: the new one has taken over its tickets.
        self._slices = [other for other in self._slices if other.begin < other.end] + [ring_slice]
        self._end = end
        return ring_slice

    def take_planned(self, num_bytes: int) -> RingSlice:
        """Return a slice of a ring with planned room for it."""
        ring_slice = self.take(num_bytes)
        assert ring_slice is not None, f"the {self.buffer_type} was planned too small"
        return ring_slice

    def _find(self, num_bytes: int) -> tuple[int, int, list[RingSlice]] | None:
        """Return (begin, end, overlapped slices) of the next slice, or None without room."""
        begin = self._end
        if begin + num_bytes > self.memory.nbytes:  # a slice is never split at the end
            begin = 0
        end = begin + num_bytes
        overlapped = [other for other in self._slices if other.begin < end and begin < other.end]
        if end > self.memory.nbytes or any(other.is_open for other in overlapped):
            return None
        return begin, end, overlapped

    def reset(self) -> None:
        """Close all slices after an interrupted step."""
        for ring_slice in self._slices:
            ring_slice.is_open = False
            ring_slice.is_whole = False  # the content may be incomplete

    def free(self) -> None:
        """Free the memory, once no slice uses it any more."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._slices.clear()


@dataclass(frozen=True)
class Lease:
    """Tile planes borrowed for one work item. Before the next lease, call `done_reading` or `done_writing` with the
    work's ticket.
    """

    planes: dict[str, torch.Tensor]
    """Planes by name."""
    reads: Sequence[Ticket]
    """Tickets to wait for before a read."""
    users: Sequence[Ticket]
    """Additional tickets to wait for before a write."""
    done_reading: Callable[[Ticket], None]
    """Call this if the work only reads the planes."""
    done_writing: Callable[[Ticket], None]
    """Call this if the work changes the planes. Changes are written back."""

    @classmethod
    def of(cls, planes: dict[str, torch.Tensor], fence: Fence, users: Sequence[Ticket] | None = None) -> Lease:
        """Return a lease on memory behind a fence. `users`: replaces the tickets of the fence."""
        if users is None:
            users = fence.before_fill()
        return cls(planes, fence.before_read(), users, fence.record_reader, fence.record_writer)

    def beside(self, fence: Fence, planes: Mapping[str, torch.Tensor] = {}) -> Lease:
        """Return a lease that also reads `planes` in the buffer behind `fence`."""

        def read(ticket: Ticket) -> None:
            fence.record_reader(ticket)
            self.done_reading(ticket)

        def write(ticket: Ticket) -> None:
            fence.record_reader(ticket)
            self.done_writing(ticket)

        reads = (*self.reads, *fence.before_read())
        return replace(self, planes={**self.planes, **planes}, reads=reads, done_reading=read, done_writing=write)

    def staged(
        self,
        ring_slice: RingSlice,
        planes: Mapping[str, torch.Tensor],
        write_back: Callable[[Ticket], object],
        *,
        reads: Sequence[Ticket] = (),
        users: Sequence[Ticket] = (),
    ) -> Lease:
        """Return a lease with further planes in ring memory, after further tickets. The ring memory is free again with
        the end of the lease. `write_back`: called with the ticket of the work, if the work changes the planes.
        """

        def read(ticket: Ticket) -> None:
            ring_slice.fence.record_reader(ticket)
            ring_slice.close()
            self.done_reading(ticket)

        def write(ticket: Ticket) -> None:
            ring_slice.fence.record_writer(ticket)
            write_back(ticket)  # a reader of the slice, so before others may take the memory
            ring_slice.close()
            self.done_writing(ticket)

        return Lease({**self.planes, **planes}, (*self.reads, *reads), (*self.users, *users), read, write)

    @contextmanager
    def opened(self, wait: Callable[..., None], changes: bool = False) -> Iterator[dict[str, torch.Tensor]]:
        """Context with the planes for work by the caller. `wait`: waits for tickets, see `Lanes.wait`. `changes`: the
        work changes the planes, unless an error ends the context.
        """
        end = self.done_reading  # after an error too: half a change is not written back
        users: Sequence[Ticket] = ()
        if changes:
            users = self.users
        try:
            wait(self.reads, users=users)
            yield self.planes
            if changes:
                end = self.done_writing
        finally:
            end(Ticket("compute", is_done=True))

    def give_back(self) -> None:
        """End the lease after work by the caller, or without work, and without changes."""
        self.done_reading(Ticket("compute", is_done=True))


NOTHING = Lease({}, (), (), lambda _: None, lambda _: None)
"""Empty base for leases with disk planes only."""
