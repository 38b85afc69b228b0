"""Unit inputs in a simulation, which wait for their backward in memory or on disk.

What waits for what is as in `offload.engine.units.activation_offload`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offload.lanes.ticket import Fence, Ticket
from offload.schedule.play import Call, Engine
from offload.schedule.virtual_lanes import Compute, VirtualLanes
from offload.schedule.virtual_states import Seconds, ring_of, taken
from offload.schedule.virtual_updates import VirtualStates
from offload.tiers.nvme import RING_TILES


class VirtualInputs:
    """The inputs of a step's calls on their way down and up."""

    def __init__(
        self,
        calls: Sequence[Call],
        engine: Engine,
        seconds: Mapping[str, Seconds],
        states: VirtualStates,
        lanes: VirtualLanes,
        compute: Compute,
    ) -> None:
        self._calls, self._engine, self._seconds = calls, engine, seconds
        self._states, self._lanes, self._compute = states, lanes, compute
        self._ring = ring_of(engine.memory.activations, "activation ring")
        self._tile_bytes = max(1, engine.memory.activations // RING_TILES - 2 * 4096)
        self._saved: dict[int, Fence] = {}
        self._coming: dict[tuple[int, int], list[Ticket]] = {}

    def put_away(self, number: int, call: Call) -> None:
        """A use, by its number, is about to begin: what it was given goes down."""
        if not call.saved_bytes or self._engine.activations == "device":
            return
        fence = self._saved[number] = Fence("activation checkpoints")
        if self._engine.activations == "cpu":
            fence.fill(self._states.submit("d2h", "d2h", call.saved_bytes, self._compute.mark()))
            return
        for size in _tiles(call.saved_bytes, self._tile_bytes):
            stretch = taken(self._ring, size)
            down = self._states.submit("d2h", "d2h", size, self._compute.mark(), stretch.fills)
            seconds = self._seconds["nvme_write"](size)
            written = self._lanes.submit("activation_write", seconds, (down,))
            stretch.fence.fill(down)
            stretch.fence.read(written)
            stretch.is_open = False
            self._states.nvme_written_bytes += size
            fence.fill(written)  # a lane writes in order: who waits for the last waits for all

    def bring_back(self, number: int, call: Call, part: int) -> None:
        """Wait for the saved inputs of a micro-batch, and start on what is needed after them."""
        self._prepare(number, part)
        tickets = self._coming.pop((number, part), None)
        if tickets is None:
            return
        self._compute.compute_after(tickets)
        if self._engine.inline:
            return
        if part + 1 < call.num_parts:
            self._prepare(number, part + 1)
        else:
            earlier = (other for other in reversed(range(number)) if other in self._saved)
            self._prepare(next(earlier, -1), 0)

    def _prepare(self, number: int, part: int) -> None:
        fence = self._saved.get(number)
        if fence is None or (number, part) in self._coming:
            return
        call, lane = self._calls[number], "returning" if self._engine.in_stream else "h2d"
        size, reads = call.saved_bytes // call.num_parts, (*fence.before_read(), *self._compute.mark())
        if part + 1 == call.num_parts:
            del self._saved[number]
        if self._engine.activations == "cpu":
            self._coming[number, part] = [self._states.submit(lane, "h2d", size, reads)]
            return
        tickets = []
        for tile in _tiles(size, self._tile_bytes):
            stretch = taken(self._ring, tile)
            seconds = self._seconds["nvme_read"](tile)
            reading = self._lanes.submit("activation_read", seconds, fence.before_read(), stretch.fills)
            stretch.fence.fill(reading)
            tickets.append(self._states.submit(lane, "h2d", tile, (reading, *self._compute.mark())))
            stretch.fence.read(tickets[-1])
            stretch.is_open = False
        self._coming[number, part] = tickets


def _tiles(num_bytes: int, most: int) -> list[int]:
    """Cut bytes in pieces of at most so many."""
    return [min(most, num_bytes - begin) for begin in range(0, num_bytes, most)]
