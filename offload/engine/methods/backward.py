"""Training with gradients: forward, backward, and an update from the gradients."""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch

from offload.engine.loss.batch_agreement import PassInputs
from offload.engine.methods.method import Method
from offload.engine.methods.result import StepResult


class Backward(Method):
    """Runs forward and backward, clips and updates. Own loops run both themselves, and call `begin` and `end` here."""

    def prepare(self) -> None:
        self._splits, self._streams_experts = self._settings.splits, bool(self._state.experts)

    def own_loop(self) -> Backward:
        return self

    def step(self, inputs: PassInputs) -> StepResult:
        self._state.runner.forget_forwards()  # from own loops: the script may still hold their autograd graphs
        # Experts are fetched once per micro-batch, and their gradients are copied to the host as often.
        copies_per_micro_batch = self._losses.is_plain or self._streams_experts
        self._state.accumulate(self._state.plan.sums_gradients_on_host or (self._splits and copies_per_micro_batch))
        if self._state.updates.learns_first:
            return self._learn_and_step(inputs)
        self.begin(inputs.plan.schedule_key)
        loss = self._losses.total(inputs, runs_backward=True)
        return self.end(loss, inputs.num_targets, inputs.plan.schedule_key)

    def trial(self, inputs: PassInputs, chunk_tokens: int) -> list[torch.Tensor]:
        return [self._losses.total(inputs, chunk_tokens, runs_backward=True)]

    def _learn_and_step(self, inputs: PassInputs) -> StepResult:
        """Make a step with two backwards: the first for the norm only, the second for the updates.

        Both start with equal generator and buffer states.
        """
        state, before, schedule_key = self._state, self._take_snapshot(), inputs.plan.schedule_key
        self.begin(schedule_key, learns=True)
        loss = self._losses.total(inputs, runs_backward=True)
        norm = state.updates.learn()
        if math.isfinite(norm):
            before.put_back()
            state.executor.end()
            self._begin_pass(schedule_key, norm=norm)
            self._counters.begin_pass()
            loss = self._losses.total(inputs, runs_backward=True)
        return self.end(loss, inputs.num_targets, schedule_key)

    def begin(self, schedule_key: Hashable, waits: bool = False, learns: bool = False) -> None:
        """Begin a step; gradients may arrive from now on.

        `waits`: gradients come from several backwards. `learns`: the next backward is for the norm only.
        """
        self._state.lanes.timeline.begin_step()
        self._counters.begin_step()
        self._begin_pass(schedule_key, waits, learns)

    def _begin_pass(
        self, schedule_key: Hashable, waits: bool = False, learns: bool = False, norm: float | None = None
    ) -> None:
        state = self._state
        state.runner.begin_step()
        state.updates.begin_step(
            self.lr, waits or state.gradients.accumulates, state.runner.step_number, learns=learns, norm=norm
        )
        state.executor.begin(schedule_key, wraps=state.updates.is_immediate)

    def end(self, loss: torch.Tensor, tokens: int | None, schedule_key: Hashable) -> StepResult:
        """Finish the gradients, clip, update, and start to fetch the next step's weights."""
        state, rank = self._state, self._order()
        self.expected = schedule_key, state.updates.is_immediate and not state.updates.learns_first
        read_loss = state.device.copy_to_host(loss)  # before the host waits for the norm
        result = state.updates.apply(rank, lambda: self._start_fetches(tokens is not None))
        (total,) = self.sum(float(read_loss()))
        skipped, corrected, coarse = result.skipped, result.corrected, result.coarse
        return self._finish(total, result.norm, tokens, skipped=skipped, corrected=corrected, coarse=coarse)
