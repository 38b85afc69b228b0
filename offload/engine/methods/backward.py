"""Training with gradients: forward, backward, and an update from the gradients."""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch

from offload.engine.loss.parts import summed
from offload.engine.methods.method import Method, Parts
from offload.engine.methods.result import StepResult


class Backward(Method):
    """Runs forward and backward, clips and updates. Own loops run both themselves, and call `begin` and `end` here."""

    def own_loop(self) -> Backward:
        return self

    def step(self, parts: Parts, kind: Hashable, tokens: int) -> StepResult:
        self._state.runner.forget_forwards()  # from own loops: the script may still hold their autograd graphs
        # Experts are fetched once per micro-batch, and their gradients are copied to the host as often.
        comes_often = self._losses.is_plain or bool(self._state.experts)
        self._state.accumulate(self._state.plan.adds_up or (self._settings.splits and comes_often))
        if self._state.updates.learns_first:
            return self._learn_and_step(parts, tokens, kind)
        self.begin(kind)
        return self.end(self._passes(parts), tokens, kind)

    def trial(self, parts: Parts) -> list[torch.Tensor]:
        return [self._passes(parts)]

    def _passes(self, parts: Parts) -> torch.Tensor:
        """Run forward and backward over a batch; return the loss on the device."""

        def backward(part: torch.Tensor) -> None:
            if part.requires_grad:
                self._state.backward(part)

        return summed(parts(), self._state.device.torch_device, backward)

    def _learn_and_step(self, parts: Parts, tokens: int, kind: Hashable) -> StepResult:
        """Make a step with two backwards: the first for the norm only, the second for the updates.

        Both start with equal generator and buffer states.
        """
        state, before = self._state, self._moment()
        self.begin(kind, learns=True)
        loss = self._passes(parts)
        norm = state.updates.learn()
        if math.isfinite(norm):
            before.put_back()
            state.executor.end()
            self._begin_pass(kind, norm=norm)
            self._counters.begin_pass()
            loss = self._passes(parts)
        return self.end(loss, tokens, kind)

    def begin(self, kind: Hashable, waits: bool = False, learns: bool = False) -> None:
        """Begin a step with schedule key `kind`; gradients may arrive from now on.

        `waits`: gradients come from several backwards. `learns`: the next backward is for the norm only.
        """
        self._state.lanes.timeline.begin_step()
        self._counters.begin_step()
        self._begin_pass(kind, waits, learns)

    def _begin_pass(self, kind: Hashable, waits: bool = False, learns: bool = False, norm: float | None = None) -> None:
        state = self._state
        state.runner.begin_step()
        state.updates.begin_step(
            self.lr, waits or state.gradients.accumulates, state.runner.step_number, learns=learns, norm=norm
        )
        state.executor.begin(kind, wraps=state.updates.is_immediate)

    def end(self, loss: torch.Tensor, tokens: int | None, kind: Hashable) -> StepResult:
        """Finish the gradients, clip, update, and start to fetch the next step's weights."""
        state, rank = self._state, self._order()
        self.expected = kind, state.updates.is_immediate and not state.updates.learns_first
        brought_loss = state.device.bring_down(loss)  # before the host waits for the norm
        applied = state.updates.apply(rank, lambda: self._go_on(tokens is not None))
        (total,) = self.sum(float(brought_loss()))
        is_skipped, num_corrected, is_coarse = applied.skipped, applied.num_corrected, applied.is_coarse
        return self._finish(total, applied.norm, tokens, skipped=is_skipped, corrected=num_corrected, coarse=is_coarse)
