"""Training with gradients: forward, backward, and an update from the gradients."""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch

from offload.engine.loss.parts import sum_parts
from offload.engine.methods.method import LossParts, Method
from offload.engine.methods.result import StepResult


class Backward(Method):
    """Runs forward and backward, clips and updates. Own loops run both themselves, and call `begin` and `end` here."""

    def prepare(self) -> None:
        self._splits, self._streams_experts = self._settings.splits, self._state.runner.stages.fetches_per_micro_batch

    def own_loop(self) -> Backward:
        return self

    def step(self, parts: LossParts, schedule_key: Hashable, tokens: int) -> StepResult:
        self._state.runner.forget_forwards()  # from own loops: the script may still hold their autograd graphs
        # Experts are fetched once per micro-batch, and their gradients are copied to the host as often.
        copies_per_micro_batch = self._losses.is_plain or self._streams_experts
        self.make_room(self._state.plan.sums_gradients_on_host or (self._splits and copies_per_micro_batch))
        if self._state.updates.learns_first:
            return self._learn_and_step(parts, tokens, schedule_key)
        self.begin(schedule_key)
        return self.end(self._passes(parts), tokens, schedule_key)

    def make_room(self, accumulates: bool = True) -> None:
        if self._state.has_room_for_sums is not accumulates:
            self._state.accumulate(accumulates)

    def trial(self, parts: LossParts) -> list[torch.Tensor]:
        return [self._passes(parts)]

    def _passes(self, parts: LossParts) -> torch.Tensor:
        """Run forward and backward over a batch; return the loss on the device."""

        def backward(part: torch.Tensor) -> None:
            if part.requires_grad:
                self._state.runner.backward(part)

        return sum_parts(parts(), self._state.device.torch_device, backward)

    def _learn_and_step(self, parts: LossParts, tokens: int, schedule_key: Hashable) -> StepResult:
        """Make a step with two backwards: the first for the norm only, the second for the updates.

        Both start with equal generator and buffer states.
        """
        state, before = self._state, self._take_snapshot()
        self.begin(schedule_key, learns=True)
        loss = self._passes(parts)
        norm = state.updates.learn()
        if math.isfinite(norm):
            before.put_back()
            state.executor.end()
            self._begin_pass(schedule_key, norm=norm)
            self._counters.begin_pass()
            loss = self._passes(parts)
        return self.end(loss, tokens, schedule_key)

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
        is_skipped, num_corrected, is_coarse = result.skipped, result.num_corrected, result.is_coarse
        return self._finish(total, result.norm, tokens, skipped=is_skipped, corrected=num_corrected, coarse=is_coarse)
