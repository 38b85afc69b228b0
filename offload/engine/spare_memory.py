"""Spare device memory: lent to the slots and the gradient buffer, taken back when a step needs the memory."""

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


def divide_memory(room_bytes: int, slots: tuple[int, int], buffer: tuple[int, int]) -> tuple[int, int]:
    """Divide device memory between the slots and the gradient buffer; return both sizes in bytes.

    `slots`, `buffer`: (least, most) useful bytes. A second gradient buffer has priority over larger slots.
    """
    buffer_bytes = buffer[1] if room_bytes >= buffer[1] + slots[0] else buffer[0]
    slots_bytes = min((room_bytes - buffer_bytes) // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES, slots[1])
    return (slots_bytes, buffer_bytes) if slots_bytes > slots[0] else (slots[0], buffer[0])


class SpareMemory:
    """Lends spare device memory after a step that needed no more than the previous step.

    A second gradient buffer lets one buffer fill while the other empties. Larger slots let units be prefetched earlier
    and stay.

    Other needs of a step are unknown before the step runs: unit inputs, saved autograd graphs, and on a GPU the
    temporaries of operations. A run therefore begins with the least memory for slots and buffer.
    """

    def __init__(
        self,
        comm: Comm,
        device: Device,
        slots: Slots,
        gradients: GradientFlow,
        plan: Plan,
        forget_addresses: Callable[[], None],
    ) -> None:
        """`forget_addresses`: called before the weights lose their memory."""
        self._comm = comm
        self._device = device
        self._slots = slots
        self._gradients = gradients
        self._slots_bytes = plan.range(SLOT)
        self._buffer_bytes = plan.range(BUFFER)
        self._forget_addresses = forget_addresses
        self._is_moving = False
        self._other_bytes = -1
        self._most_elements = 0

    def begin_step(self, num_elements: int) -> None:
        """Prepare for a batch with `num_elements` elements: if larger than all before, give the memory back.

        After the first update within the step a retry would be impossible.
        """
        if num_elements > self._most_elements:
            self._most_elements = num_elements
            self.give_back()

    def end_step(self, peak_bytes: int) -> None:
        """Lend memory after a step.

        `peak_bytes`: peak device memory in the step. No inputs may be waiting for a backward.
        """
        budget = self._device.ledger.budget_bytes
        if budget is None:
            return
        own_bytes = self._slots.capacity_bytes + self._gradients.buffer_bytes
        ranks = self._comm.gather_objects((peak_bytes - own_bytes, -budget), "room on the device")
        other_bytes, budget = map(max, zip(*ranks, strict=True))  # equal on all ranks, like the schedules
        budget = -budget
        settled, self._other_bytes = other_bytes <= self._other_bytes, max(self._other_bytes, other_bytes)
        room_bytes = budget - self._other_bytes - self._device.late_bytes
        slots_bytes, buffer_bytes = divide_memory(room_bytes, self._slots_bytes, self._buffer_bytes)
        if settled and slots_bytes > self._slots.capacity_bytes:
            self._resize(slots_bytes, buffer_bytes)

    def give_back(self) -> bool:
        """Shrink to the least sizes. Return False if already there."""
        if (self._slots.capacity_bytes, self._gradients.buffer_bytes) <= (self._slots_bytes[0], self._buffer_bytes[0]):
            return False
        self._resize(self._slots_bytes[0], self._buffer_bytes[0])
        self._other_bytes = -1
        self._device.take_recent_peak()  # the returned memory must not count as a need of others
        return True

    def retreat(self) -> bool:
        """Shrink after an allocator failure, and from now on give the slots at most half as much."""
        capacity_bytes = self._slots.capacity_bytes
        if not self.give_back():
            return False
        least = self._slots_bytes[0]
        self._slots_bytes = least, max(least, capacity_bytes // 2)
        return True

    def give_up(self) -> None:
        """Shrink to the least sizes if a resize was interrupted."""
        if self._is_moving:
            self._resize(self._slots_bytes[0], self._buffer_bytes[0])

    def _resize(self, slots_bytes: int, buffer_bytes: int) -> None:
        self._is_moving = True
        self._forget_addresses()
        self._slots.resize(0)  # free both before allocating either: the budget holds at every moment
        failed = False
        try:
            self._gradients.resize(buffer_bytes)
            self._slots.resize(slots_bytes)
        except torch.OutOfMemoryError:  # allocator fragments were larger than expected
            failed = True
        if self._comm.any(failed, "room for more units"):
            self._slots.resize(0)
            self._gradients.resize(self._buffer_bytes[0])
            self._slots.resize(self._slots_bytes[0])
        self._is_moving = False
