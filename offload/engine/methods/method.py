"""Training methods: the interface for a step from the batch to the update, and the step with gradients."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, Protocol

import torch

from offload.engine.gradients.updates import Updates
from offload.engine.loss.batch_agreement import PassInputs
from offload.engine.loss.parts import Losses
from offload.engine.methods.result import StepResult
from offload.engine.spare_memory import SpareMemory
from offload.engine.units.execution_mode import ExecutionMode
from offload.engine.units.model_structure import ModelStructure
from offload.engine.units.snapshots import Snapshot
from offload.engine.units.stages import Host
from offload.engine.units.unit import Unit
from offload.errors import ConfigError
from offload.interrupts import interrupts
from offload.lanes.timeline import Span
from offload.layout.regions import ParameterInfo, Region
from offload.planning.settings import Settings


class StepHost(Host, Protocol):
    """What a training method may ask of an engine."""

    infos: list[ParameterInfo]
    updates: Updates
    spare_memory: SpareMemory
    execution_mode: ExecutionMode
    snapshot: ModelStructure

    def make_room(self, indices: frozenset[int] | None = None) -> None:
        """Make room for gradient sums of the regions with these indices, and of no others, between two steps.

        None: of all trainable regions, for several backward passes.
        """


class Method(ABC):
    """Makes an engine's steps.

    `lr`: learning rate for the next update. `expected`: (schedule key for the next step, whether weights may be fetched
    before this step ends). `spans`: work on every lane in the last step.

    Example, for update rules with `method = "printed"`:

        class PrintedSteps(Backward):
            def step(self, inputs):
                result = super().step(inputs)
                print(result.grad_norm)
                return result

        METHODS.register("printed", PrintedSteps)
    """

    def __init__(
        self, host: StepHost, settings: Settings, losses: Losses, take_snapshot: Callable[[], Snapshot]
    ) -> None:
        """`take_snapshot`: takes a snapshot of generators and modules."""
        self._host = host
        self._settings = settings
        self._rule = settings.optimizer
        self.lr = settings.optimizer.lr
        self._losses = losses
        self._take_snapshot = take_snapshot
        self.expected: tuple[Hashable, bool] = (None, False)
        self.spans: list[Span] = []
        self._users = defaultdict[Region, list[tuple[Region, ...]]](list)
        """For each region, the regions of every unit with it."""
        for unit in host.units:
            for region in unit.regions:
                self._users[region].append(unit.regions)
        self.prepare()

    def prepare(self) -> None:  # noqa: B027 (most need nothing)
        """Create the objects of this method, at the end of the constructor."""

    @abstractmethod
    def step(self, inputs: PassInputs) -> StepResult:
        """Train on a batch: run passes over the batch, then update."""

    @abstractmethod
    def trial(self, inputs: PassInputs, chunk_tokens: int) -> list[torch.Tensor]:
        """Run a step's passes without an update, with `chunk_tokens` per head chunk; return the loss from each pass."""

    def begin_trial(self) -> None:  # noqa: B027 (most need nothing)
        """Prepare `install_weights` for a trial."""

    @abstractmethod
    def own_loop(self) -> Backward:
        """Return the method that begins and ends own loops' steps; the loops run forward and backward themselves.

        Raises ConfigError if the method allows no own loops.
        """

    def replay(self, record: Any) -> None:  # noqa: ARG002
        """Repeat a step from a record. Collective. Raises ConfigError."""
        raise ConfigError(
            f"engine.replay repeats MeZO steps, which use forward passes only, but {self._rule.title} needs gradients: "
            "create the engine with the MeZO(...) of the recorded run."
        )

    num_passes = 1
    """Passes over a batch in a step; each pass uses separate weights."""

    def install_weights(self, unit: Unit, number: int) -> None:  # noqa: ARG002
        """Install a unit's device weights for pass `number` in the module."""
        unit.install(unit.live())

    def forget(self) -> None:  # noqa: B027 (most have nothing)
        """Forget pending updates before all states are written again."""

    def free(self) -> None:  # noqa: B027 (most have none)
        """Release device memory when the engine closes."""

    def sum(self, *losses: float) -> list[float]:
        """Return the losses summed over all ranks."""
        return self._host.comm.sum_in_order(list(losses), "loss")

    def _first_use(self) -> Callable[[Region], float]:
        """Return a sort key for regions: the first use in the next step, if that step repeats the current pass."""
        return self._host.executor.first_use(self._users.__getitem__)

    def _start_updates(self, is_batch: bool) -> None:
        """Start the pending updates in the order of the next step, and fetch the first weights for that step.

        `is_batch`: as in `_start_fetches`.
        """
        updates = self._host.updates
        with interrupts.uninterrupted():
            updates.update_resident()
            self._start_fetches(is_batch)
            updates.start_rest()

    def _start_fetches(self, is_batch: bool) -> None:
        """Begin to fetch the next step's weights, once the updates are determined.

        `is_batch`: the engine ran the whole step, not an own loop.
        """
        host = self._host
        peak_bytes = host.runner.end_step()
        host.executor.end()
        if is_batch:  # own loops may hold any number of graphs, so no memory is ever spare
            host.spare_memory.end_step(peak_bytes)
        host.executor.begin_fetches(*self.expected)

    def _finish(self, loss: float, grad_norm: float, tokens: int | None, **more: Any) -> StepResult:
        """Complete the step and return the result, with lane times."""
        host = self._host
        with suppress(Exception):  # an error here fails the next pass: this step is complete
            host.slots.compute_after_resident()  # here, so that a script reading these weights does not wait
        seconds, lanes, spans = host.lanes.end_step()
        self.spans = spans
        loss_tensor = torch.tensor(loss, dtype=torch.float32, device="cpu")
        return StepResult(loss_tensor, grad_norm, tokens, seconds=seconds, lanes=lanes, **more)


class Backward(Method):
    """Runs forward and backward, clips and updates. Own loops run both themselves, and call `begin` and `end` here."""

    def prepare(self) -> None:
        self._splits = self._settings.splits

    def own_loop(self) -> Backward:
        return self

    def step(self, inputs: PassInputs) -> StepResult:
        self._host.runner.forget_forwards()  # from own loops: the script may still hold their autograd graphs
        several_copies = self._splits and self._losses.is_called_per_micro_batch
        self._host.make_room(None if several_copies else self._host.plan.summed)
        if self._host.updates.measures_first:
            return self._step_in_two_passes(inputs)
        self.begin(inputs.plan.schedule_key)
        loss = self._losses.total(inputs, runs_backward=True)
        return self.end(loss, inputs.num_targets, inputs.plan.schedule_key)

    def trial(self, inputs: PassInputs, chunk_tokens: int) -> list[torch.Tensor]:
        return [self._losses.total(inputs, chunk_tokens, runs_backward=True)]

    def _step_in_two_passes(self, inputs: PassInputs) -> StepResult:
        """Make a step with two backwards: the first for the norm only, the second for the updates.

        Both start with equal generator and buffer states.
        """
        host = self._host
        before = self._take_snapshot()
        schedule_key = inputs.plan.schedule_key
        self.begin(schedule_key, for_norm=True)
        loss = self._losses.total(inputs, runs_backward=True)
        norm = host.updates.measure_norm()
        if math.isfinite(norm):
            before.put_back()
            host.executor.end()
            self._begin_pass(schedule_key, norm=norm)
            host.counters.begin_pass()
            loss = self._losses.total(inputs, runs_backward=True)
        return self.end(loss, inputs.num_targets, schedule_key)

    def begin(self, schedule_key: Hashable, sums_backwards: bool = False, for_norm: bool = False) -> None:
        """Begin a step; gradients may arrive from now on.

        `sums_backwards`: gradients come from several backwards. `for_norm`: the next backward is for the norm only.
        """
        self._host.lanes.timeline.begin_step()
        self._host.counters.begin_step()
        self._begin_pass(schedule_key, sums_backwards, for_norm)

    def _begin_pass(
        self, schedule_key: Hashable, sums_backwards: bool = False, for_norm: bool = False, norm: float | None = None
    ) -> None:
        host = self._host
        after_norm = sums_backwards or host.gradients.has_sums
        host.runner.begin_step()
        host.updates.begin_step(self.lr, after_norm, host.runner.step_number, for_norm=for_norm, norm=norm)
        host.executor.begin(schedule_key, fetches_next=host.updates.is_immediate)

    def end(self, loss: torch.Tensor, tokens: int | None, schedule_key: Hashable) -> StepResult:
        """Finish the gradients, clip, update, and start to fetch the next step's weights."""
        host, updates = self._host, self._host.updates
        first_use = self._first_use()
        is_batch = tokens is not None
        self.expected = schedule_key, updates.is_immediate and not updates.measures_first
        loss_scale = updates.loss_scale.value
        read_loss = host.device.copy_to_host(loss)  # before the host waits for the norm
        host.gradients.send_rest()
        if updates.is_immediate:  # all updates are submitted: the fetches need not wait for the norm
            updates.update_resident()
            self._start_fetches(is_batch)
            result = updates.clip_gradients(first_use)
            updates.start_rest()
        else:
            result = updates.clip_gradients(first_use)
            self._start_updates(is_batch)
        (total,) = self.sum(float(read_loss()))
        more = {"skipped": result.skipped, "corrected": result.corrected, "coarse": result.coarse}
        return self._finish(total, result.norm, tokens, loss_scale=loss_scale, **more)
