"""What units keep from their forward to their backward: their inputs, or their graphs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from offload.engine.units.activation_offload import ActivationOffload, Layout
from offload.engine.units.claims import Claim
from offload.engine.units.recompute_policy import RecomputePolicy
from offload.lanes.lanes import Lanes
from offload.lanes.ticket import Ticket
from offload.tiers.device import Device

_FIXES = {
    "unit inputs": "These are the inputs that units keep for their recompute. Move them with --offload.activations "
    "cpu, lower --train.batch_size or --data.sequence_length, or raise --offload.device_memory.",
    "kept tensors": "These are tensors of graphs that are kept instead of recomputed. Set --train.recompute auto "
    "or always, move them with --offload.graphs cpu, or raise --offload.device_memory.",
}


@dataclass(frozen=True)
class Returning:
    """Saved inputs on their way back to the device."""

    tensors: list[torch.Tensor]
    """The inputs, on the device."""
    tickets: list[Ticket]
    """The tickets after which the inputs are there."""
    layouts: list[Layout | None]
    """How the inputs lay when they were saved; None for those that stayed on the device."""


class Returns(Protocol):
    """A use of a unit whose inputs can be brought back."""

    def prepare(self, number: int = 0) -> None:
        """Start to bring back those of a micro-batch."""


class SavedInputs:
    """The inputs and graphs that wait for their backward: on the device, entered in its ledger, or put away."""

    def __init__(
        self, device: Device, lanes: Lanes, policy: RecomputePolicy, offload: ActivationOffload | None
    ) -> None:
        self._device, self._lanes, self.policy, self._offload = device, lanes, policy, offload
        self._pools = [pool for pool in (offload, policy.below) if pool is not None]
        self._held: dict[int, tuple[int, str]] = {}
        self.is_trial = False
        """True where passes are tried, whose inputs and graphs stay on the device."""
        self._calls: list[weakref.ref[Returns]] = []
        self.inputs_stay = offload is None
        """True where the inputs of units wait for their backward on the device."""
        self.looks_back = bool(self._pools) and lanes.overlap

    def has_room(self, tensor: torch.Tensor) -> bool:
        """True where the device's budget has room to hold a tensor."""
        storage = tensor.untyped_storage()
        return storage.data_ptr() in self._held or self.policy.has_room(storage.nbytes())

    def put_away(self, tensor: torch.Tensor, movable: bool) -> torch.Tensor:
        """Return what to save of a unit's input: the tensor, or its copy on the host where activations live there."""
        return self._offload.put(tensor) if self._offload is not None and movable and not self.is_trial else tensor

    def has_room_below(self, num_bytes: int) -> bool:
        """True where so much more of graphs can wait below the device."""
        return self.policy.below is not None and self.policy.below.has_room(num_bytes)

    def put_below(self, stretch: torch.Tensor, claim: Claim) -> torch.Tensor:
        """Put a part of a graph away, bytes; return what stands for it."""
        assert self.policy.below is not None
        stands = self.policy.below.put(stretch)
        claim.entries.append((stands.data_ptr(), stands.nbytes))
        return stands

    def bring_back(self, tensors: Sequence[torch.Tensor], *, of_graph: bool = False) -> Returning:
        """Start to bring saved inputs, or a micro-batch of them, or a part `of_graph`s back to the device."""
        pool = self.policy.below if of_graph else self._offload
        if pool is None:
            return Returning(list(tensors), [], [])
        returning = Returning([], [], [])
        for tensor in tensors:
            found, tickets, layout = pool.get(tensor)
            returning.tensors.append(found)
            returning.tickets.extend(tickets)
            returning.layouts.append(layout)
        return returning

    def wait(self, returning: Returning) -> list[torch.Tensor]:
        """Let compute come after what returns."""
        if returning.tickets:
            self._lanes.compute_after(returning.tickets)
        for number, layout in enumerate(returning.layouts):
            if layout is not None and layout != Layout.of(returning.tensors[number]):
                returning.tensors[number] = layout.copy(returning.tensors[number])
        return returning.tensors

    def opened(self, call: Returns) -> None:
        """A call waits for its backward."""
        if self.looks_back:
            self._calls.append(weakref.ref(call))

    def look_back(self, call: Returns, number: int = 0) -> None:
        """A call's backward is about to compute, or has: start to bring back what the one before it has saved of a
        micro-batch.
        """
        while self._calls:
            found = self._calls.pop()()
            if found is not None and found is not call:
                found.prepare(number)
                self._calls.append(weakref.ref(found))
                return

    def hold(self, tensor: torch.Tensor, name: str, claim: Claim) -> None:
        """Enter a tensor that waits for the backward in the device's ledger; one that many units receive counts
        once.
        """
        if self.is_trial:
            return
        storage = tensor.untyped_storage()
        key, num_bytes = storage.data_ptr(), storage.nbytes()
        if self._offload is None or key not in self._offload.taken:
            count, first = self._held.get(key, (0, name))
            if not count:
                self._device.ledger.reserve(name, num_bytes, _FIXES[name])
                if name != "kept tensors":  # of a graph, whose tensors are many, it is enough to look once
                    self.policy.saw()
            self._held[key] = (count + 1, first)
        claim.entries.append((key, num_bytes))

    def let_go(self, claim: Claim, since: int = 0) -> None:
        """What a claim has, or has taken after its first `since` entries, is no longer waited for."""
        released: dict[str, int] = {}
        for key, num_bytes in claim.entries[since:]:
            for pool in self._pools:
                if pool.free(key):
                    break
            else:
                count, name = self._held[key]
                if count > 1:
                    self._held[key] = (count - 1, name)
                else:
                    del self._held[key]
                    released[name] = released.get(name, 0) + num_bytes
        del claim.entries[since:]
        for name, num_bytes in released.items():
            self._device.ledger.release(name, num_bytes)

    @contextmanager
    def tried(self) -> Iterator[None]:
        """Within, passes are tried on a few rows, whose inputs stay on the device and are in no ledger."""
        with self.policy.unmoved():
            self.is_trial = True
            try:
                yield
            finally:
                self.is_trial = False

    def begin_step(self) -> None:
        """Start a step."""
        self._calls.clear()
        self.policy.begin_step()

    def end_step(self) -> int:
        """A step is over; return the most that the device held at once in it."""
        for pool in self._pools:
            pool.end_step()
        return self.policy.end_step()

    def reset(self) -> None:
        """Every pass so far was given up."""
        self._held.clear()
        for name in _FIXES:
            self._device.ledger.drop(name)
        for pool in self._pools:
            pool.reset()
