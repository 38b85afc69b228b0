"""Memory saved by units from forward to backward: inputs or graphs."""

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
    "unit inputs": (
        "These are unit inputs saved for activation recomputation. Move them with --offload.activations cpu, lower "
        "--train.batch_size or --data.sequence_length, or raise --offload.device_memory."
    ),
    "kept tensors": (
        "These are tensors of saved autograd graphs. Set --train.recompute auto or always, move them with "
        "--offload.graphs cpu, or raise --offload.device_memory."
    ),
}


@dataclass(frozen=True)
class Returning:
    """Saved inputs during the copy to the device."""

    tensors: list[torch.Tensor]
    """Device tensors."""
    tickets: list[Ticket]
    """Copy tickets."""
    layouts: list[Layout | None]
    """Original memory layouts. None: the tensor stayed on the device."""


class Returns(Protocol):
    """A unit use with offloaded inputs."""

    def prepare(self, number: int = 0) -> None:
        """Start the copy to the device for a micro-batch."""


class SavedInputs:
    """Inputs and graphs waiting for their backward: on the device with a ledger entry, or offloaded."""

    def __init__(
        self, device: Device, lanes: Lanes, policy: RecomputePolicy, offload: ActivationOffload | None
    ) -> None:
        self._device, self._lanes, self.policy, self._offload = device, lanes, policy, offload
        self._pools = [pool for pool in (offload, policy.below) if pool is not None]
        self._held: dict[int, tuple[int, str]] = {}
        self.is_trial = False
        """True in trial runs: inputs and graphs stay on the device."""
        self._calls: list[weakref.ref[Returns]] = []
        self.inputs_stay = offload is None
        """True if unit inputs wait on the device."""
        self.looks_back = bool(self._pools) and lanes.overlap

    def has_room(self, tensor: torch.Tensor) -> bool:
        """True if the device budget has room for a tensor."""
        storage = tensor.untyped_storage()
        return storage.data_ptr() in self._held or self.policy.has_room(storage.nbytes())

    def put_away(self, tensor: torch.Tensor, movable: bool) -> torch.Tensor:
        """Return the tensor to save for a unit input: the tensor itself, or a stand-in after offload."""
        return self._offload.put(tensor) if self._offload is not None and movable and not self.is_trial else tensor

    def has_room_below(self, num_bytes: int) -> bool:
        """True if graph offload has room for `num_bytes` more."""
        return self.policy.below is not None and self.policy.below.has_room(num_bytes)

    def put_below(self, stretch: torch.Tensor, claim: Claim) -> torch.Tensor:
        """Offload a byte range of a graph; return the stand-in."""
        assert self.policy.below is not None
        stands = self.policy.below.put(stretch)
        claim.entries.append((stands.data_ptr(), stands.nbytes))
        return stands

    def bring_back(self, tensors: Sequence[torch.Tensor], *, of_graph: bool = False) -> Returning:
        """Start copying saved inputs, or graph memory ranges (`of_graph`), to the device."""
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
        """Let compute wait for the copies; return the tensors in their original layout."""
        if returning.tickets:
            self._lanes.compute_after(returning.tickets)
        for number, layout in enumerate(returning.layouts):
            if layout is not None and layout != Layout.of(returning.tensors[number]):
                returning.tensors[number] = layout.copy(returning.tensors[number])
        return returning.tensors

    def opened(self, call: Returns) -> None:
        """Register a use waiting for the backward."""
        if self.looks_back:
            self._calls.append(weakref.ref(call))

    def look_back(self, call: Returns, number: int = 0) -> None:
        """Start the copies for micro-batch `number` in the use preceding `call`.

        Called before and after the `call` backward.
        """
        while self._calls:
            found = self._calls.pop()()
            if found is not None and found is not call:
                found.prepare(number)
                self._calls.append(weakref.ref(found))
                return

    def hold(self, tensor: torch.Tensor, name: str, claim: Claim) -> None:
        """Enter a waiting tensor in the device ledger. A tensor shared by several units counts once."""
        if self.is_trial:
            return
        storage = tensor.untyped_storage()
        key, num_bytes = storage.data_ptr(), storage.nbytes()
        if self._offload is None or key not in self._offload.taken:
            count, first = self._held.get(key, (0, name))
            if not count:
                self._device.ledger.reserve(name, num_bytes, _FIXES[name])
                if name != "kept tensors":  # A graph has many tensors; a single update at the end is enough.
                    self.policy.saw()
            self._held[key] = (count + 1, first)
        claim.entries.append((key, num_bytes))

    def let_go(self, claim: Claim, since: int = 0) -> None:
        """Release the entries of a claim, except the first `since` entries."""
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
        """Keep inputs on the device, without ledger entries, during the context (trial runs on a few rows)."""
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
        """End a step; return the peak device memory in bytes."""
        for pool in self._pools:
            pool.end_step()
        return self.policy.end_step()

    def reset(self) -> None:
        """Release everything after an aborted pass."""
        self._held.clear()
        for name in _FIXES:
            self._device.ledger.drop(name)
        for pool in self._pools:
            pool.reset()
