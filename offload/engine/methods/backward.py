"""Training by gradients: a forward, a backward, and the update from what it gave."""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch

from offload.engine.loss.parts import summed
from offload.engine.methods.method import Method, Parts
from offload.engine.methods.result import StepResult


class Backward(Method):
    """Goes forward and backward, clips and updates; own loops, which do the first two themselves, `begin` and `end`
    their steps here.
    """

    def own_loop(self) -> Backward:
        return self

    def step(self, parts: Parts, kind: Hashable, tokens: int) -> StepResult:
        self._state.runner.forget_forwards()  # of own loops, whose graphs somebody may still hold
        # Experts come up once for each micro-batch, and their gradients down.
        comes_often = self._losses.is_plain or bool(self._state.experts)
        self._state.accumulate(self._state.plan.adds_up or (self._settings.splits and comes_often))
        if self._state.updates.learns_first:
            return self._learn_and_step(parts, tokens, kind)
        self.begin(kind)
        return self.end(self._passes(parts), tokens, kind)

    def trial(self, parts: Parts) -> list[torch.Tensor]:
        return [self._passes(parts)]

    def _passes(self, parts: Parts) -> torch.Tensor:
        """Go forward and backward over a batch; return its loss, on the device."""

        def backward(part: torch.Tensor) -> None:
            if part.requires_grad:
                self._state.backward(part)

        return summed(parts(), self._state.device.torch_device, backward)

    def _learn_and_step(self, parts: Parts, tokens: int, kind: Hashable) -> StepResult:
        """Make a step whose first backward is for the norm alone; the second one, from the same generators and
        buffers, updates.
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
        """Begin a step of that kind, whose gradients may come from now on. `waits`: and from several backwards.
        `learns`: from one of which nothing but the norm is wanted.
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
        """Finish the gradients, clip, update, and start on the next step's weights."""
        state, rank = self._state, self._order()
        self.expected = kind, state.updates.is_immediate and not state.updates.learns_first
        brought_loss = state.device.bring_down(loss)  # before the norm, for which the host waits
        applied = state.updates.apply(rank, lambda: self._go_on(tokens is not None))
        (total,) = self.sum(float(brought_loss()))
        is_skipped, num_corrected, is_coarse = applied.skipped, applied.num_corrected, applied.is_coarse
        return self._finish(total, applied.norm, tokens, skipped=is_skipped, corrected=num_corrected, coarse=is_coarse)
