"""What the device's budget leaves is given to the slots, and taken back when a step needs it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from offload.distributed.comm import Comm
from offload.engine.gradients.flow import GradientFlow
from offload.planning.memory import BUFFER, SLOT
from offload.planning.plan import Plan
from offload.tiers.device import Device
from offload.tiers.slots import Slots

_ALIGNMENT_BYTES = 4096


def shared_out(room_bytes: int, slots: tuple[int, int], buffer: tuple[int, int]) -> tuple[int, int]:
    """Return what of the device's room goes to the slots and to the gradient buffer, given the least and the most that
    each can use, in bytes. A second gradient buffer comes first.
    """
    buffer_bytes = buffer[1] if room_bytes >= buffer[1] + slots[0] else buffer[0]
    slots_bytes = min((room_bytes - buffer_bytes) // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES, slots[1])
    return (slots_bytes, buffer_bytes) if slots_bytes > slots[0] else (slots[0], buffer[0])


class SpareMemory:
    """After a step that needed no more than the one before it, the room beside everything else goes to a second
    gradient buffer, so that one fills while the other empties, and to the slots, so that units come early and stay.

    How much else a step needs is not known before it ran: unit inputs, kept graphs and, on a GPU, the temporaries of
    operations. A run therefore begins with the least that it can do with.
    """

    def __init__(
        self, comm: Comm, device: Device, slots: Slots, gradients: GradientFlow, plan: Plan, moved: Callable[[], None]
    ) -> None:
        """`moved` is called when weights have no place any more."""
        self._comm, self._device, self._slots, self._gradients = comm, device, slots, gradients
        self._slots_bytes, self._buffer_bytes, self._moved = plan.range(SLOT), plan.range(BUFFER), moved
        self._is_moving = False
        self._others = -1
        self._most_elements = 0

    def begin_step(self, num_elements: int) -> None:
        """A step on a batch of so many elements begins: one larger than all before may need the room. (Once units are
        updated within it, it could not run again.)
        """
        if num_elements > self._most_elements:
            self._most_elements = num_elements
            self.give_back()

    def end_step(self, peak_bytes: int) -> None:
        """A step is over in which the device held so much at once, and nothing waits for a backward."""
        budget = self._device.ledger.budget_bytes
        if budget is None:
            return
        mine = self._slots.capacity_bytes + self._gradients.buffer_bytes
        told = self._comm.gather_objects((peak_bytes - mine, -budget), "room on the device")
        others, budget = (max(found) for found in zip(*told, strict=True))  # the same for all: so are their schedules
        budget = -budget
        settled, self._others = others <= self._others, max(self._others, others)
        room_bytes = budget - self._others - self._device.late_bytes
        slots_bytes, buffer_bytes = shared_out(room_bytes, self._slots_bytes, self._buffer_bytes)
        if settled and slots_bytes > self._slots.capacity_bytes:
            self._take(slots_bytes, buffer_bytes)

    def give_back(self) -> bool:
        """Go back to the least; False where that is what there is."""
        if (self._slots.capacity_bytes, self._gradients.buffer_bytes) <= (self._slots_bytes[0], self._buffer_bytes[0]):
            return False
        self._take(self._slots_bytes[0], self._buffer_bytes[0])
        self._others = -1
        self._device.take_recent_peak()  # what was given back is no need of others
        return True

    def retreat(self) -> bool:
        """The allocator found no room beside what was taken: go back, and never take more than half as much again."""
        taken = self._slots.capacity_bytes
        if not self.give_back():
            return False
        least = self._slots_bytes[0]
        self._slots_bytes = least, max(least, taken // 2)
        return True

    def give_up(self) -> None:
        """What was interrupted while it moved goes back to the least."""
        if self._is_moving:
            self._take(self._slots_bytes[0], self._buffer_bytes[0])

    def _take(self, slots_bytes: int, buffer_bytes: int) -> None:
        self._is_moving = True
        self._moved()
        self._slots.resize(0)  # both go before either comes: the budget holds at every moment
        failed = False
        try:
            self._gradients.resize(buffer_bytes)
            self._slots.resize(slots_bytes)
        except torch.OutOfMemoryError:  # the allocator's fragments were larger than thought
            failed = True
        if self._comm.any(failed, "room for more units"):
            self._slots.resize(0)
            self._gradients.resize(self._buffer_bytes[0])
            self._slots.resize(self._slots_bytes[0])
        self._is_moving = False
