"""What the units of one engine share: the slots, the gradients, the inputs that wait for their backward, and who
is computing.
"""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from offload.engine.call import Arguments, Call, call_unit, call_unit_without_graph, deliver
from offload.engine.checkpoints import Checkpoints, Layout
from offload.engine.claims import Claim, Claims
from offload.engine.gradients import GradientFlow
from offload.engine.keeping import Keeping, Shapes
from offload.engine.learned import DepartedError, Rows
from offload.engine.undo import Undo, Where
from offload.errors import OffloadError
from offload.lanes.lanes import Lanes
from offload.lanes.ticket import Ticket
from offload.partition.comm import Comm
from offload.partition.layout import Region
from offload.schedule.execute import Executor
from offload.tiers.device import Device
from offload.tiers.slots import Slots

if TYPE_CHECKING:
    from offload.engine.record import Recording
    from offload.engine.unit import Unit

_FIXES = {
    "unit inputs": "These are the inputs that units keep for their recompute. Move them with --offload.activations "
    "cpu, lower --train.batch_size or --data.sequence_length, or raise --offload.device_memory.",
    "kept tensors": "These are tensors of graphs that are kept instead of recomputed. Set --train.recompute auto "
    "or always, or raise --offload.device_memory.",
}


@dataclass(frozen=True)
class Returning:
    """Saved inputs on their way back to the device, there after `tickets`, and how they lay when they were saved."""

    tensors: list[torch.Tensor]
    tickets: list[Ticket]
    layouts: list[Layout]


class Stream:
    """Serves the units' calls. A unit's use goes enter -> run -> leave, in forward and again in backward.

    `batch_rows` and `micro_batch_rows`: while both are set, every unit whose inputs grow with the batch runs micro-
    batch by micro-batch, under one fetch (layered gradient accumulation, arXiv:2106.02679).
    """

    def __init__(
        self,
        device: Device,
        lanes: Lanes,
        slots: Slots,
        executor: Executor,
        gradients: GradientFlow,
        keeping: Keeping,
        checkpoints: Checkpoints[Any] | None,
        *,
        seed: int,
        comm: Comm,
    ) -> None:
        self.device, self.slots, self.gradients = device, slots, gradients
        self._lanes, self._executor = lanes, executor
        self.anchor = torch.zeros((), requires_grad=True)
        self.recording: Recording | None = None
        self.step_number = 0
        self._keeping, self._checkpoints, self._seed, self._comm = keeping, checkpoints, seed, comm
        self.has_peers = comm.size > 1
        self._batch: tuple[int, int] | None = None
        self._is_cut = False
        self._inside: Unit | None = None
        self._uses: dict[str, int] = {}
        self._num_calls: dict[str, int] = {}
        self._held: dict[int, tuple[int, str]] = {}
        self.looks_back = checkpoints is not None and lanes.overlap
        self._calls: list[weakref.ref[Call]] = []
        self.claims, self.undo = Claims(), Undo()
        self.where = Where.NOWHERE
        """ENGINE between two calls: one was interrupted in the engine's own code, and has to be given up."""
        self.give_up: Callable[[], None] = self.reset

    # -- a use of a unit -------------------------------------------------------------------------------------

    def call(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit's forward, as the module would."""
        if self.recording is not None:
            return self.recording.call(unit, args, kwargs)
        if self.where is Where.ENGINE:
            self.give_up()
        self.where = Where.ENGINE
        with_grad = torch.is_grad_enabled()
        try:
            self.collect()
            result = self._call(unit, args, kwargs)
        except BaseException:
            torch.set_grad_enabled(with_grad)  # an interrupt may have come right before torch's own way out
            raise
        self.where = Where.NOWHERE
        return result

    def _call(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._num_calls[unit.name] = self._num_calls.get(unit.name, 0) + 1
        is_step = torch.is_grad_enabled() or self._batch is not None
        arguments = Arguments(without_caches(args, kwargs) if is_step else (args, kwargs))
        is_known = unit.recall(arguments.structure) and unit.learned.is_compared
        if self._is_cut:
            # The others would wait for the exchanges of a rank that left the pass by itself, so all of them leave here.
            departs = self._batch is not None and not (is_known and unit.learned.can_cut(arguments, self._batch[0]))
            if self._comm.any(departs, f"how unit {unit.name} is called"):
                raise DepartedError(is_own=departs)
        if torch.is_grad_enabled() and (unit.trainable or any(t.requires_grad for t in arguments.tensors)):
            self._uses[unit.name] = self._uses.get(unit.name, 0) + 1
            return deliver(call_unit(unit, self, arguments), args, kwargs)
        return deliver(call_unit_without_graph(unit, self, arguments), args, kwargs)

    def enter(self, unit: Unit, backward: bool = False) -> None:
        """Bring the unit's weights up, and with `backward` make room for its gradients: both are its own until
        `leave`.
        """
        before, self.where = self.where, Where.ENGINE
        if self._inside is not None:
            raise OffloadError(
                f"unit {unit.name} was called from inside unit {self._inside.name}, which did not happen in the "
                "recording pass: one unit computes at a time."
            )
        self._inside = unit
        if self._uses.get(unit.name, 0) > 1 and not self.gradients.accumulates:
            for region in unit.regions:
                self.gradients.make_lasting(region, for_good=False)
        with _normally():
            self._executor.enter(unit.regions, backward)
        if backward:
            self.gradients.open(unit.regions)
        self._name, self._begun = f"{'backward' if backward else 'forward'} {unit.name}", self._lanes.now()
        self.where = before

    def leave(self) -> None:
        """What the unit needed is free for others."""
        before, self.where = self.where, Where.ENGINE
        unit = self._inside
        if unit is not None:
            self._lanes.computed(self._name, self._begun)
            with _normally():
                self._executor.leave(unit.regions)
        self._inside = None
        self.where = before

    @contextmanager
    def recorded(self, recording: Recording) -> Iterator[None]:
        """Within, the units' calls go to a recording, and gradients nowhere."""

        def restore() -> None:
            self.recording, self.gradients.drops = None, False

        with self.undo.afterwards(restore):
            self.recording, self.gradients.drops = recording, True
            yield

    def finish(self, claim: Claim) -> None:
        """A use of a unit has had its backward, or will have none."""
        if self.claims.is_current(claim):
            self.let_go(claim)
            self._uses[claim.unit] = max(0, self._uses.get(claim.unit, 0) - 1)
            self.claims.close(claim)

    def collect(self) -> None:
        """Give back what was held by uses that were dropped without a backward."""
        while (claim := self.claims.next_dropped()) is not None:
            self.finish(claim)

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a result of a unit as something that outlives the slot."""
        return Layout.of(tensor).copy(tensor) if self.slots.streams(tensor.data_ptr()) else tensor

    def make_live(self, regions: Sequence[Region]) -> dict[int, nn.Parameter]:
        """Return Parameters over the device's copy of `regions`, whose gradients go to the flow as soon as they
        are there.
        """
        with _normally():
            live = self.slots.parameters(regions)
        flow = weakref.proxy(self.gradients)  # torch hides its hooks from gc
        for index, parameter in live.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p, index=index: flow.take(index, p))
        return live

    # -- micro-batches ---------------------------------------------------------------------------------------

    @contextmanager
    def micro_batches(self, batch_rows: int, rows: int, is_cut: bool) -> Iterator[None]:
        """Within, every unit runs `rows` rows of the batch at a time. `is_cut`: on some rank these are not all."""

        def restore() -> None:
            self._batch, self._is_cut, self.gradients.is_wide = None, False, False

        with self.undo.afterwards(restore):
            self._batch, self._is_cut = (batch_rows, rows) if rows < batch_rows else None, is_cut
            self.gradients.is_wide = is_cut
            yield

    @contextmanager
    def whole_batch(self) -> Iterator[None]:
        """Within, units run on what they are given (the chunks of a head)."""
        before = self._batch, self._is_cut

        def restore() -> None:
            self._batch, self._is_cut = before

        with self.undo.afterwards(restore):
            self._batch, self._is_cut = None, False
            yield

    def rows_of(self, unit: Unit) -> list[Rows | None]:
        """Return the micro-batches of a use of a unit, or None for all that it is given."""
        if self._batch is None or not unit.learned.grows:
            return [None]
        total, step = self._batch
        return [(start, min(start + step, total), total) for start in range(0, total, step)]

    def seed(self, unit: Unit, part: int) -> None:
        """Seed the generators for one micro-batch of a unit: a function of (seed, step, unit, its use, micro-batch,
        rank).
        """
        key = (self._seed, self.step_number, unit.number, self._num_calls[unit.name], part, self._comm.rank)
        torch.manual_seed(generator_seed(*key))

    # -- what waits for the backward -------------------------------------------------------------------------

    def keeps_graph(self, unit: Unit, shapes: Shapes) -> bool:
        """True where a use of a unit keeps its graph instead of recomputing it."""
        return self._keeping.keeps(unit, shapes)

    def surely_keeps_graph(self, unit: Unit) -> bool:
        """True where no use of a unit is ever recomputed."""
        return self._keeping.keeps(unit, ()) and not self._keeping.may_give_up

    def measure_kept(
        self, unit: Unit, shapes: Shapes, inputs: Sequence[torch.Tensor], num_parts: int
    ) -> AbstractContextManager[None]:
        """Around a recompute: learn what keeping its graph would have cost beside its inputs."""
        return self._keeping.measure(unit, shapes, inputs if self.inputs_stay else (), num_parts, self.undo)

    @property
    def may_give_up_graphs(self) -> bool:
        """True where a graph that does not fit is dropped and its unit recomputed."""
        return self._keeping.may_give_up

    @property
    def inputs_stay(self) -> bool:
        """True where the inputs of units wait for their backward on the device."""
        return self._checkpoints is None

    def has_room(self, tensor: torch.Tensor) -> bool:
        """True where the device's budget has room to hold a tensor."""
        storage = tensor.untyped_storage()
        return storage.data_ptr() in self._held or self._keeping.has_room(storage.nbytes())

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """True where a tensor lies in a slot, or in weights that stay on the device."""
        return self.slots.streams(tensor.data_ptr()) or self.slots.is_weight(tensor)

    def put_away(self, tensor: torch.Tensor, movable: bool) -> torch.Tensor:
        """Return what to save of a unit's input: the tensor, or its copy on the host where activations live there."""
        return self._checkpoints.put(tensor) if self._checkpoints is not None and movable else tensor

    def bring_back(self, tensors: Sequence[torch.Tensor]) -> Returning:
        """Start to bring saved inputs, or a micro-batch of them, back to the device."""
        if self._checkpoints is None:
            return Returning(list(tensors), [], [])
        found = [self._checkpoints.get(tensor) for tensor in tensors]
        return Returning(
            [tensor for tensor, _, _ in found],
            [ticket for _, tickets, _ in found for ticket in tickets],
            [layout for _, _, layout in found],
        )

    def wait(self, returning: Returning) -> list[torch.Tensor]:
        """Let compute come after what returns."""
        self._lanes.compute_after(returning.tickets)
        for number, layout in enumerate(returning.layouts):
            if layout != Layout.of(returning.tensors[number]):
                returning.tensors[number] = layout.copy(returning.tensors[number])
        return returning.tensors

    def opened(self, call: Call) -> None:
        """A call waits for its backward."""
        if self.looks_back:
            self._calls.append(weakref.ref(call))

    def look_back(self, call: Call) -> None:
        """A call's backward is about to compute: start to bring back what the one before it has saved."""
        while self._calls:
            found = self._calls.pop()()
            if found is not None and found is not call:
                found.prepare()
                self._calls.append(weakref.ref(found))
                return

    def hold(self, tensor: torch.Tensor, name: str, claim: Claim) -> None:
        """Enter a tensor that waits for the backward in the device's ledger; one that many units receive counts
        once.
        """
        before, self.where = self.where, Where.ENGINE
        storage = tensor.untyped_storage()
        key, num_bytes = storage.data_ptr(), storage.nbytes()
        if self._checkpoints is None or not self._checkpoints.has(key):
            count, first = self._held.get(key, (0, name))
            if not count:
                self.device.ledger.reserve(name, num_bytes, _FIXES[name])
            self._held[key] = (count + 1, first)
        claim.entries.append((key, num_bytes))
        self._keeping.saw()
        self.where = before

    def let_go(self, claim: Claim, since: int = 0) -> None:
        """What a claim has, or has taken after its first `since` entries, is no longer waited for."""
        while len(claim.entries) > since:
            key, num_bytes = claim.entries.pop()
            if self._checkpoints is not None and self._checkpoints.free(key):
                continue
            count, name = self._held[key]
            if count > 1:
                self._held[key] = (count - 1, name)
            else:
                del self._held[key]
                self.device.ledger.release(name, num_bytes)

    # -- steps -----------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Start a step."""
        self.collect()
        self._num_calls.clear()
        self._calls.clear()
        self._keeping.begin_step()
        self.gradients.begin_step()
        self.slots.settle()

    def end_step(self) -> None:
        """A step is over."""
        self.step_number += 1
        self.claims.weights_change()
        self._keeping.end_step()

    def close(self) -> None:
        """Nothing is held any more."""
        self.claims.reset()
        self._held.clear()

    def reset(self) -> None:
        """Forget every pass so far: they were given up."""
        self.undo.run()
        self.claims.reset()
        self._held.clear()
        for name in _FIXES:
            self.device.ledger.drop(name)
        if self._checkpoints is not None:
            self._checkpoints.reset()
        self._uses.clear()
        self._inside = self.recording = self._batch = None
        self.gradients.begin_step()
        self.where = Where.NOWHERE


def _normally() -> AbstractContextManager[Any]:
    """Out of a caller's torch.inference_mode: tensors that are made in it are good for no later step."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def generator_seed(*numbers: int) -> int:
    """Return a seed of 63 bits for these numbers: the same on every machine and in every version of Python."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def without_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Leave key-value caches out of a training call: a recompute would append to them, and nothing reads them."""
    library = sys.modules.get("transformers.cache_utils")
    if library is None:
        return args, kwargs
    cache = library.Cache
    return (
        tuple(None if isinstance(value, cache) else value for value in args),
        {key: None if isinstance(value, cache) else value for key, value in kwargs.items()},
    )
