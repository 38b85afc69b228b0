"""Training by gradients: a forward, a backward, and the update from what it gave."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from contextlib import closing

import torch

from offload.engine.loss.parts import Losses
from offload.engine.methods.method import Method, Parts
from offload.engine.methods.result import StepResult
from offload.engine.state import EngineState
from offload.engine.units.condition import Moment
from offload.planning.settings import Settings
from offload.telemetry.counters import Counters


class Backward(Method):
    """Goes forward and backward, clips and updates; own loops, which do the first two themselves, `begin` and `end`
    their steps here.
    """

    def __init__(
        self, state: EngineState, counters: Counters, settings: Settings, losses: Losses, moment: Callable[[], Moment]
    ) -> None:
        super().__init__(state, counters, settings, losses, moment)
        self._splits = settings.splits

    def own_loop(self) -> Backward:
        return self

    def step(self, parts: Parts, kind: Hashable, tokens: int) -> StepResult:
        self._state.runner.forget_forwards()  # of own loops, whose graphs somebody may still hold
        self._state.accumulate(self._splits and self._losses.is_plain)
        if self._state.updates.learns_first:
            return self._learn_and_step(parts, tokens, kind)
        self.begin(kind)
        return self.end(self._passes(parts), tokens, kind)

    def trial(self, parts: Parts) -> list[torch.Tensor]:
        return [self._passes(parts)]

    def _passes(self, parts: Parts) -> torch.Tensor:
        """Go forward and backward over a batch; return its loss, on the device."""
        loss = torch.zeros((), dtype=torch.float32, device=self._state.device.torch_device)
        # Closed now, and not when somebody lets go of a traceback that holds it.
        with closing(parts()) as part_losses:
            for part_loss in part_losses:
                if part_loss.requires_grad:
                    self._state.backward(part_loss)
                loss += part_loss.detach().to(torch.float32)
        return loss

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
        state = self._state
        rank = self._order()
        self.expected = kind, state.updates.is_immediate and not state.updates.learns_first
        brought_loss = state.device.bring_down(loss)  # before the norm, for which the host waits
        applied = state.updates.apply(rank, lambda: self._go_on(tokens is not None))
        (total,) = self.sum(float(brought_loss()))
        return self._finish(
            StepResult(
                torch.tensor(total, dtype=torch.float32, device="cpu"),
                applied.norm,
                tokens,
                skipped=applied.skipped,
                corrected=applied.num_corrected,
                coarse=applied.is_coarse,
            )
        )
