"""Memory saved by units from forward to backward: inputs or graphs, and outputs inside a unit."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from offload.engine.units.activation_offload import ActivationOffload, DeviceCopy, TensorLayout
from offload.engine.units.recompute_policy import RecomputePolicy
from offload.lanes.lanes import Lanes
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


@dataclass(eq=False)
class Claim:
    """The memory held by one use of a unit until the backward."""

    unit: str
    """Unit name."""
    user: weakref.ref[Any]
    """Weak reference to the use. The claim is dropped when the use is garbage-collected."""
    entries: list[tuple[int, int]] = field(default_factory=list)
    """(address, bytes) per storage held by the use."""
    is_current: bool = True
    """True while the weights are unchanged since the forward."""


class Claims:
    """Claims of all uses waiting for their backward.

    The weak-reference callback for a dropped use is a C function, `deque.append`. A Python finalizer would swallow
    exceptions, and a Ctrl-C during the finalizer would be lost.
    """

    def __init__(self) -> None:
        self._open: dict[int, Claim] = {}  # by `id` of the weak reference
        self._dropped: deque[weakref.ref[Any]] = deque()  # references to uses that were garbage-collected

    def open(self, user: object, unit: str) -> Claim:
        """Open and return the claim of a use."""
        claim = Claim(unit, weakref.ref(user, self._dropped.append))
        self._open[id(claim.user)] = claim
        return claim

    def has(self, claim: Claim) -> bool:
        """True if the claim is open: neither closed nor reset."""
        return self._open.get(id(claim.user)) is claim

    def mark_stale(self) -> None:
        """Mark all open claims as belonging to old weights."""
        for claim in self._open.values():
            claim.is_current = False

    def close(self, claim: Claim) -> None:
        """Close a claim after the use has released all memory."""
        self._open.pop(id(claim.user), None)

    def next_dropped(self) -> Claim | None:
        """Return the next open claim whose use was garbage-collected, or None."""
        while self._dropped:
            claim = self._open.get(id(self._dropped.popleft()))
            if claim is not None:
                return claim
        return None

    def reset(self) -> None:
        """Drop all claims."""
        self._open.clear()
        self._dropped.clear()


class OffloadedUse(Protocol):
    """A unit use with offloaded inputs."""

    def prepare(self, number: int = 0) -> None:
        """Start the copy to the device for a micro-batch."""


class SavedInputs:
    """Inputs and graphs waiting for their backward: on the device with a ledger entry, or offloaded."""

    def __init__(
        self, device: Device, lanes: Lanes, policy: RecomputePolicy, offload: ActivationOffload | None
    ) -> None:
        self.device = device
        self.policy = policy
        self._lanes = lanes
        self._offload = offload
        self._pools = [pool for pool in (offload, policy.graph_offload) if pool is not None]
        self._ledger_entries: dict[int, tuple[int, str]] = {}  # (number of holders, ledger name) by storage address
        self.is_trial = False
        """True in trial runs: inputs and graphs stay on the device."""
        self.inputs_stay = offload is None
        """True if unit inputs wait on the device."""

        self.prefetches = bool(self._pools) and lanes.overlap
        """True if the copies for a backward begin before it."""
        self._calls: list[weakref.ref[OffloadedUse]] = []  # in forward order; weak, because a loss may be dropped

    def has_room(self, tensor: torch.Tensor) -> bool:
        """True if the device budget has room for a tensor."""
        storage = tensor.untyped_storage()
        return self.device.address(storage) in self._ledger_entries or self.policy.has_room(storage.nbytes())

    def save(
        self,
        tensors: Sequence[torch.Tensor],
        are_movable: Sequence[bool],
        claim: Claim,
        changing: Collection[int] = (),
    ) -> list[torch.Tensor]:
        """Save unit inputs; return the tensors themselves, or stand-ins after offload.

        `changing`: indices of tensors that later code changes in place, so a copy is saved.
        """
        saved = list(tensors)
        if self._offload is None or self.is_trial:
            for number in changing:
                saved[number] = saved[number].clone()
            self.reserve(saved, "unit inputs", claim)
            return saved
        for number, is_movable in enumerate(are_movable):
            # One after the other: each copy leaves the device before the next one is made.
            if number in changing:
                saved[number] = saved[number].clone()
            if is_movable:
                saved[number] = self._offload.put(saved[number])
            # Before the next one moves: after an error there, the claim releases this one.
            self.reserve(saved[number : number + 1], "unit inputs", claim)
        return saved

    def start_copies(self, tensors: Sequence[torch.Tensor]) -> list[DeviceCopy]:
        """Start copying saved inputs to the device."""
        return [self._start_copy(tensor) for tensor in tensors]

    def _start_copy(self, tensor: torch.Tensor) -> DeviceCopy:
        pool = self._pool_of(tensor)
        return DeviceCopy(tensor) if pool is None else pool.get(tensor)

    def _pool_of(self, tensor: torch.Tensor) -> ActivationOffload | None:
        """Return the pool with a stand-in; None: a tensor on the device."""
        key = self.device.address(tensor.untyped_storage())
        return next((pool for pool in self._pools if key in pool.buffers_in_use), None)

    def wait(self, copies: list[DeviceCopy]) -> list[torch.Tensor]:
        """Let compute wait for the copies; return the tensors in their original layout."""
        tickets = [ticket for copy in copies for ticket in copy.tickets]
        if tickets:
            self._lanes.compute_after(tickets)
        for number, (tensor, _, layout) in enumerate(copies):
            # Kernels choose the order of sums by the layout, and the forward had the original one.
            if layout is not None and layout != TensorLayout.of(tensor):
                copies[number] = DeviceCopy(layout.copy(tensor))
        return [copy.tensor for copy in copies]

    def put_below(self, tensors: Sequence[torch.Tensor], claim: Claim) -> list[torch.Tensor]:
        """Move tensors to the tier of graphs; return the stand-ins, or nothing without room."""
        pool = self.policy.graph_offload
        if pool is None or not pool.has_room(sum(t.nbytes for t in tensors)):
            return []
        moved = []
        for tensor in tensors:
            moved.append(pool.put(tensor))
            self.reserve(moved[-1:], "kept tensors", claim)  # at once: after an error the claim releases it
        return moved

    def add_use(self, call: OffloadedUse) -> None:
        """Register a use waiting for the backward."""
        if self.prefetches:
            self._calls.append(weakref.ref(call))

    def prefetch_previous(self, call: OffloadedUse, number: int = 0) -> None:
        """Start the copies for micro-batch `number` in the use preceding `call`.

        Called before and after the `call` backward.
        """
        while self._calls:
            previous = self._calls.pop()()
            if previous is not None and previous is not call:
                previous.prepare(number)
                self._calls.append(weakref.ref(previous))  # a later call asks for its next micro-batch
                return

    def reserve(self, tensors: Iterable[torch.Tensor], name: str, claim: Claim) -> None:
        """Enter waiting tensors in the claim and, where they are on the device, in its ledger.

        A tensor shared by several units counts once.
        """
        if self.is_trial:
            return
        has_new = False
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key, num_bytes = self.device.address(storage), storage.nbytes()
            if self._pool_of(tensor) is None:
                count, first = self._ledger_entries.get(key, (0, name))
                if not count:
                    self.device.ledger.reserve(name, num_bytes, _FIXES[name])
                    has_new = True
                self._ledger_entries[key] = (count + 1, first)
            claim.entries.append((key, num_bytes))
        if has_new and name != "kept tensors":  # A graph has many tensors; a single update at the end is enough.
            self.policy.update_peaks()

    def release(self, claim: Claim, since: int = 0) -> None:
        """Release the entries of a claim, except the first `since` entries."""
        released: dict[str, int] = {}
        for key, num_bytes in claim.entries[since:]:
            # A stand-in and its buffer have one address.
            for pool in self._pools:
                if pool.free(key):
                    break
            else:
                count, name = self._ledger_entries[key]
                if count > 1:
                    self._ledger_entries[key] = (count - 1, name)
                else:
                    del self._ledger_entries[key]
                    released[name] = released.get(name, 0) + num_bytes
        del claim.entries[since:]
        for name, num_bytes in released.items():
            self.device.ledger.release(name, num_bytes)

    @contextmanager
    def trial_mode(self) -> Iterator[None]:
        """Keep inputs on the device, without ledger entries, during the context (trial runs on a few rows)."""
        with self.policy.measurements_discarded():
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
        self._ledger_entries.clear()
        for name in _FIXES:
            self.device.ledger.drop(name)
        for pool in self._pools:
            pool.reset()


class KeptOutputs:
    """Outputs from one micro-batch in call order, such as outputs of streamed experts.

    With saved outputs, experts are fetched twice per step (forward and backward), not three times.
    """

    def __init__(self) -> None:
        self._recorded: list[torch.Tensor] | None = None
        self._replayed: Iterator[torch.Tensor] = iter(())

    @contextmanager
    def recorded_in(self, outputs: list[torch.Tensor]) -> Iterator[None]:
        """Append outputs to `outputs` during the context (a forward)."""
        self._recorded = outputs
        try:
            yield
        finally:
            self._recorded = None

    @contextmanager
    def replayed(self, outputs: list[torch.Tensor]) -> Iterator[None]:
        """Replay these outputs during the context (a recomputation). An empty list: no replay."""
        self._replayed = iter(outputs)
        try:
            yield
        finally:
            self._replayed = iter(())

    def record(self, output: torch.Tensor, copies: bool = True) -> None:
        """Save an output, by default a copy: the caller may change the original in place afterwards."""
        if self._recorded is None:
            return
        if copies:
            output = output.detach().clone()
        self._recorded.append(output)

    def next_replayed(self) -> torch.Tensor | None:
        """Return the saved output from the same call. None: compute the output, as in a first forward."""
        return next(self._replayed, None)
