"""Runs units: fetches weights, runs module forwards, releases slots."""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrize

from offload.distributed.comm import Comm
from offload.engine.gradients.flow import GradientFlow
from offload.engine.gradients.loss_scale import LossScale
from offload.engine.units.activation_offload import TensorLayout
from offload.engine.units.arguments import Arguments, run_over_copies
from offload.engine.units.offloaded_tensor import OffloadedTensor
from offload.engine.units.saved_inputs import Claim, Claims, KeptOutputs, SavedInputs
from offload.engine.units.snapshots import Snapshot
from offload.engine.units.torch_state import with_own_cache
from offload.engine.units.traits import PartsDifferError, Rows, Span, UnitTraits, UnrecordedCallError
from offload.engine.units.unit import Unit
from offload.engine.units.use import Forward, Forwards, Use
from offload.engine.units.weight_writes import WeightWrites, refuse_writes
from offload.errors import OffloadError
from offload.interrupts import interrupts
from offload.lanes.lanes import Lanes
from offload.lanes.ticket import Ticket
from offload.layout.regions import Piece, Region
from offload.schedule.execute import Executor
from offload.tiers.device import Device
from offload.tiers.slots import Slots

_Part = TypeVar("_Part")
_SHARE_OF_BUDGET = 1 / 32
_MOST_USES = 2
"""Maximum unfinished uses on the device at a new launch: the running one and the next."""
RunRows = Callable[[Span | None, Sequence[torch.Tensor], Sequence[Any]], Arguments]
"""Runs one micro-batch of a unit use: rows (None: the whole input), input tensors, other inputs."""


class UnitRunner:
    """Shared state of all units in one engine. A use calls enter, run, leave in the forward and again in the backward.

    Inside `micro_batches`, every unit with batch-dependent inputs runs one micro-batch after another with a single
    weight fetch (layered gradient accumulation, arXiv:2106.02679).
    """

    stages: Forwards
    """The forwards of the uses."""

    def __init__(
        self,
        device: Device,
        lanes: Lanes,
        slots: Slots,
        executor: Executor,
        gradients: GradientFlow,
        saved: SavedInputs,
        units: Sequence[Unit],
        *,
        loss_scale: LossScale,
        seed: int,
        comm: Comm,
    ) -> None:
        # Weights before a use, and gradients after it.
        self.device = device
        self.slots = slots
        self.gradients = gradients
        self.loss_scale = loss_scale
        self._lanes = lanes
        self._executor = executor
        self._ahead = RunAhead(device)

        # The units, filled in by the caller: their live Parameters come from `make_live` here.
        self._units = units
        self.writes = WeightWrites()
        self.anchor = torch.zeros((), requires_grad=True)
        """Makes results of a unit differentiable, even without an input that requires a gradient."""

        # Random numbers: equal in a repeated step, different on each rank.
        self._seed = seed
        self._comm = comm
        self.has_peers = gradients.measures.has_peers
        self.step_number = 0

        # The pass.
        self.rows = Rows(rank=comm.rank)
        self.is_engine_call = False
        """True if the engine calls the model, not a script."""
        self._num_calls = Counter[str]()
        """Calls in this step, by unit."""

        # The present use.
        self.exchanges = list[Callable[[], None]]()
        """Exchanges of one micro-batch, repeated by a rank with fewer micro-batches."""
        self._current_unit: Unit | None = None
        self._name = ""
        """Pass and unit of the last use, for the timeline."""
        self._is_in_model = False
        self.has_failed = False
        """A unit use failed halfway and no engine code is running: the next call must reset the engine."""

        # What uses keep until their backward.
        self.saved = saved
        self.outputs = KeptOutputs()
        self.claims = Claims()
        self._uses = Counter[str]()
        """Uses with a backward still to come, by unit."""
        self._last_snapshot: Callable[[], Snapshot | None] = lambda: None
        """Weak reference: the next snapshot shares what has not changed since."""

    @property
    def place(self) -> str:
        """Last begun use and the unit's number, as `forward layers.3, unit 5 of 9`; empty before the first use."""
        _, _, unit_name = self._name.partition(" ")
        numbers = [number for number, unit in enumerate(self._units, 1) if unit.name == unit_name]
        if not numbers:
            return ""
        return f"{self._name}, unit {numbers[0]} of {len(self._units)}"

    # -- a use of a unit -------------------------------------------------------------------------------------

    def count(self, unit: Unit) -> Rows:
        """Count a call; return the rows of this use."""
        self._num_calls[unit.name] += 1
        return self.rows._replace(step=self.step_number, use=self._num_calls[unit.name])

    def has_called(self, unit: Unit) -> bool:
        """True if a call of the unit was counted in this step."""
        return unit.name in self._num_calls

    def receive(self, unit: Unit, arguments: Arguments) -> Rows:
        """Count a call and select the traits; return the rows of this use.

        Raises UnrecordedCallError on all ranks if the batch is cut into rows but one rank cannot cut the arguments.
        """
        rows = self.count(unit)
        unit.recall(arguments.structure)
        departs = rows.is_cut and not unit.traits.can_cut(arguments, rows.batch)
        # All ranks leave the pass together, because ranks left alone would wait forever in an exchange.
        if rows.num_parts > 1 and self._comm.any(departs, f"how unit {unit.name} is called"):
            raise UnrecordedCallError(is_own=departs)
        return rows

    def expect_backward(self, unit: Unit) -> None:
        """Count a use with a backward. `finish` ends the use."""
        self._uses[unit.name] += 1

    def enter(self, unit: Unit, backward: bool = False, reads: bool = True) -> None:
        """Fetch the unit weights (if `reads`) and, for a backward, reserve gradient memory.

        Both belong to the unit until `leave`.
        """
        # The caller's inference mode: tensors created inside are unusable in later steps.
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                self.enter(unit, backward, reads)
            return
        interrupts.check()
        if self._current_unit is not None:
            self.has_failed = True
            raise OffloadError(
                f"unit {unit.name} was called from inside unit {self._current_unit.name}, which did not happen in the "
                "recording pass: one unit computes at a time."
            )
        self._current_unit = unit
        try:
            if self._uses[unit.name] > 1:  # several backwards of the unit in this step: their gradients add up
                for region in unit.regions:
                    if not self.gradients.accumulates(region):
                        self.gradients.make_lasting(region, for_good=False)
            self._ahead.enter()
            self._executor.enter(unit.regions, backward, reads)
            if backward:
                self.gradients.open(unit.regions)
            if reads:
                self.stages.enter(unit)
        except BaseException:
            if backward:
                self.has_failed = True
            else:  # Gradients so far are complete: only this use has failed.
                self._current_unit = None
                self._executor.forget()
            raise
        self._name = f"forward {unit.name}"
        if backward:
            self._name = f"backward {unit.name}"
        self._begin = self._lanes.now()

    def snapshot(self, unit: Unit, may_recompute: bool) -> Snapshot:
        """Take a snapshot of generators and modules before a unit forward, for the recomputation."""
        traits, last = unit.traits, self._last_snapshot()
        snapshot = Snapshot(
            self.device, self.is_weight, unit.modules, traits.buffers, unit.mutable_attributes, may_recompute, last
        )
        self._last_snapshot = weakref.ref(snapshot)
        if traits.keeps:
            snapshot.drop_graphs()
        return snapshot

    def leave(self) -> None:
        """Release the slot and gradient memory of the unit."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                self.leave()
            return
        unit = self._current_unit
        self.stages.leave()
        if unit is not None:
            marks = self._lanes.record_compute(self._name, self._begin)
            self._ahead.leave(marks)
            try:
                self._executor.leave(unit.regions, marks)
            except BaseException:
                self.has_failed = True
                raise
        self._current_unit = None

    def run(self, unit: Unit, use: Use, forward: Forward) -> Arguments:
        """Run the unit module by `forward`; return (result, container changes)."""
        if unit in self.writes.parameters:
            forward = self.writes.checked(unit, forward)
        if parametrize._cache_enabled:
            forward = with_own_cache(forward)
        has_installed = unit.install_live()
        self._is_in_model = True
        try:
            return run_over_copies(forward, use.arguments, use.tensors, use.others)
        finally:
            self._is_in_model = False
            if has_installed:
                unit.install(unit.placeholders)

    def backward(self, tensor: torch.Tensor, gradient: torch.Tensor | None = None, *leaves: torch.Tensor) -> None:
        """Run the backward. In a trial or a norm-only pass, only `leaves` outside the model receive gradients.

        Hooks of other tensors could have any side effects.
        """
        self.check_writes()
        inputs = None
        if self.gradients.discards_gradients:
            live = [parameter for unit in self._units if unit.resident for parameter in unit.live().values()]
            inputs = [t for t in (self.anchor, *leaves, *live) if t.requires_grad]
        torch.autograd.backward(tensor, gradient, inputs=inputs)

    def check_writes(self) -> None:
        """Check after the forwards of a pass, before updates. Raises ConfigError if a forward changed weights."""
        if self.writes.parameters and (unit := self.writes.find()) is not None:
            self.weights_changed()
            refuse_writes(unit)

    def weights_changed(self, regions: Iterable[Region] | None = None) -> None:
        """Discard device copies and saved graphs after weights were written other than by an update.

        `regions`: the written regions; None: all.
        """
        self._executor.forget()
        self.forget_forwards()
        self.slots.refresh(regions, always=True)

    def finish(self, claim: Claim) -> None:
        """End a use after the backward, or without one."""
        if self.claims.has(claim):
            self.saved.release(claim)
            if claim.is_current:
                self._uses[claim.unit] -= 1
            self.claims.close(claim)

    def collect(self) -> None:
        """Release memory held by uses dropped without a backward."""
        while (claim := self.claims.next_dropped()) is not None:
            self.finish(claim)

    def copy_from_slot(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a unit result that outlives the slot: a copy if stored in slot memory."""
        if self.slots.streams(self.device.address(tensor)):
            return TensorLayout.of(tensor).copy(tensor)
        return tensor

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """True for a tensor over device weights, or a placeholder."""
        return isinstance(tensor, OffloadedTensor) or self.slots.holds(tensor)

    def make_live(self, regions: Sequence[Region], slots: Slots | None = None) -> dict[Piece, nn.Parameter]:
        """Return Parameters over the device copy of `regions`. Gradient hooks pass each gradient to the gradient flow.

        `slots`: None: the unit slots.
        """
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            live = (slots or self.slots).parameters(regions)
        flow = weakref.proxy(self.gradients)  # Weak, because torch hides hooks from the garbage collector.
        for piece, parameter in live.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(GradientFlow.take, flow, piece))
        return live

    # -- micro-batches ---------------------------------------------------------------------------------------

    @contextmanager
    def micro_batches(self, batch_rows: int, rows: int, num_parts: int) -> Iterator[None]:
        """Run units with `rows` batch rows at a time during the context.

        `num_parts`: the maximum micro-batch count over all ranks.
        """
        whole, self.rows = self.rows, self.rows._replace(batch=batch_rows, size=rows, num_parts=num_parts)
        self.gradients.sums_in_fp32 = num_parts > 1
        try:
            yield
        finally:
            self.rows = whole
            self.gradients.sums_in_fp32 = False

    @contextmanager
    def whole_batch(self) -> Iterator[None]:
        """Run units on the whole input during the context (the chunks of a head)."""
        before, self.rows = self.rows, Rows(rank=self.rows.rank)
        try:
            yield
        finally:
            self.rows = before

    @property
    def is_at_work(self) -> bool:
        """True between `enter` and `leave`, except inside model code."""
        return self._current_unit is not None and not self._is_in_model

    def run_rows(
        self,
        unit: Unit,
        rows: Rows,
        arguments: Arguments,
        tensors: Sequence[torch.Tensor],
        run: RunRows,
        draws: bool = True,
    ) -> list[Arguments]:
        """Run the micro-batches of a use of `unit` by `run`. Return a result per micro-batch that outlives the slot.

        `draws`: each micro-batch and rank draws other random numbers.
        """
        traits = unit.traits
        spans = rows.of(traits)
        results = []
        # All ranks have the same seed but must draw different random numbers.
        caller_rng_state = None
        if draws and (len(spans) > 1 or self.has_peers):
            caller_rng_state = self.device.random_state()
        try:
            for number, span in enumerate(synchronized(self, traits, rows, spans)):
                if caller_rng_state is not None:
                    place = rows.step, unit.number, rows.use, number, rows.rank
                    self.device.seed(generator_seed(self._seed, *place))
                result = run(span, traits.cut_inputs(tensors, span), traits.cut_others(arguments.others, span))
                for index, tensor in enumerate(result.tensors):
                    result.tensors[index] = self.copy_from_slot(tensor)
                results.append(result)
        finally:
            if caller_rng_state is not None:
                self.device.set_random_state(caller_rng_state)
        return results

    def join(self, unit: Unit, rows: Rows, results: Sequence[Arguments]) -> list[torch.Tensor]:
        """Return the whole-batch results.

        Raises PartsDifferError on all ranks if micro-batches disagree on a result without batch axis: the result
        depends on all rows, and no micro-batch has them.
        """
        if rows.num_parts > 1 and None in unit.traits.outputs:
            index = unit.traits.differing_output(results)
            if self._comm.any(index is not None, f"results without row axis of unit {unit.name}"):
                subject = "a result"  # of another rank
                if index is not None:
                    subject = f"result {index}"
                raise PartsDifferError(f"{subject} of unit {unit.name} has no row axis but depends on the rows")
        return unit.traits.join_outputs(results)

    @contextmanager
    def as_engine_calls(self) -> Iterator[None]:
        """Mark forward calls during the context as made by the engine, not by a user training loop."""
        before, self.is_engine_call = self.is_engine_call, True
        try:
            yield
        finally:
            self.is_engine_call = before

    def interrupt_pass(self) -> Callable[[], None]:
        """Save the pass state before a nested pass; return a function to restore the state."""
        rows, is_engine_call = self.rows, self.is_engine_call
        num_calls = self._num_calls.copy()

        def resume() -> None:
            self.rows, self.is_engine_call = rows, is_engine_call
            self._num_calls = num_calls.copy()

        return resume

    # -- steps -----------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Start a step."""
        self.collect()
        self._num_calls.clear()
        self.saved.begin_step()
        self.gradients.begin_step()
        self.slots.compute_after_resident()
        if self.writes.parameters:
            self.writes.begin()

    def forget_forwards(self) -> None:
        """Mark all open claims as belonging to old weights."""
        self.claims.mark_stale()
        self._uses.clear()
        if self.writes.parameters:
            self.writes.forget()

    def end_step(self) -> int:
        """End a step; return the peak device memory in bytes."""
        self.step_number += 1
        self.forget_forwards()
        return self.saved.end_step()

    def close(self) -> None:
        """Release everything."""
        self.claims.reset()
        self.saved.reset()

    def reset(self) -> None:
        """Reset after an aborted pass."""
        self.claims.reset()
        self.saved.reset()
        self._uses.clear()
        self.writes.forget()
        self._current_unit = None
        self.stages.leave()
        self.rows = Rows(rank=self.rows.rank)
        self.gradients.end_step()
        self._is_in_model = False
        self.has_failed = False


def generator_seed(*numbers: int) -> int:
    """Return a 63-bit seed from numbers, equal on every machine and Python version."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class RunAhead:
    """Lets the launching thread wait if the device is more than two unit uses behind.

    Applies only while more than 1/32 of the budget waits to be free. A copy on another stream keeps source and target
    memory in use until the device has finished the copy. Without a limit, step memory (unit inputs in D2H or
    H2D copies, gradients) would grow with up to about a thousand pending launches and vary between steps.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._ends: deque[Sequence[Ticket]] = deque()

    def enter(self) -> None:
        """Wait, if necessary, before another use is launched."""
        ends, budget = self._ends, self._device.ledger.budget_bytes
        while ends and ends[0][-1].is_over:
            ends.popleft()
        if len(ends) < _MOST_USES or budget is None or self._device.waiting_bytes <= budget * _SHARE_OF_BUDGET:
            return
        while len(ends) >= _MOST_USES:
            last = ends.popleft()
        # `synchronize` instead of a lane wait: compute is not delayed, and no timeline event is recorded.
        for mark in last:
            mark.synchronize()

    def leave(self, marks: Sequence[Ticket]) -> None:
        """Record the compute marks that end a use."""
        if marks:
            self._ends.append(marks)


def synchronized(runner: UnitRunner, traits: UnitTraits, rows: Rows, parts: Sequence[_Part]) -> Iterator[_Part]:
    """Yield the micro-batches of a unit use. `traits`: of the call of this use.

    A rank with fewer micro-batches than others then takes part in the missing exchanges, by repeating the exchanges
    from the last micro-batch without own tokens (`runner.exchanges`).
    """
    for part in parts:
        runner.exchanges = []
        yield part
    exchanges, runner.exchanges = runner.exchanges, []
    if exchanges and traits.grows:  # otherwise every rank ran the whole input once
        for _ in range(len(parts), rows.num_parts):
            for exchange in exchanges:
                exchange()
    runner.exchanges = []
