"""What a method of training is to the rest: a step from the parts of a loss to the update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable
from contextlib import suppress
from typing import Any, Protocol

import torch

from offload.engine.loss.parts import Losses
from offload.engine.methods.result import StepResult, ZerothOrderRecord
from offload.engine.state import EngineState
from offload.engine.units.condition import Moment
from offload.engine.units.unit import Unit
from offload.errors import ConfigError
from offload.layout.regions import Region
from offload.planning.settings import Settings
from offload.telemetry.counters import Counters
from offload.telemetry.timeline import Span

Parts = Callable[[], Generator[torch.Tensor, None, None]]
"""Runs the model over a batch once, and yields its loss in parts, those of all ranks adding up."""


class OwnSteps(Protocol):
    """Begins and ends the steps of own loops, which go forward and backward themselves."""

    def begin(self, kind: Hashable, waits: bool = ..., learns: bool = ...) -> None:
        """Begin a step of that kind, whose gradients may come from now on, with `waits` from several backwards."""

    def end(self, loss: torch.Tensor, tokens: int | None, kind: Hashable) -> StepResult:
        """Finish the gradients, clip, update, and start on the next step's weights."""


class Method(ABC):
    """Makes steps of one engine, over its units, passes and updates. `lr`: of the next update. `expected`: the kind of
    the next step, and whether its weights may come up while this one goes on. `spans`: what every lane did in the last
    step.
    """

    def __init__(
        self, state: EngineState, counters: Counters, settings: Settings, losses: Losses, moment: Callable[[], Moment]
    ) -> None:
        """`moment`: notes generators and modules as they are."""
        self._state, self._counters, self._settings, self._rule = state, counters, settings, settings.optimizer
        self.lr = settings.optimizer.lr
        self._losses, self._moment = losses, moment
        self.expected: tuple[Hashable, bool] = (None, False)
        self.spans: list[Span] = []

    @abstractmethod
    def step(self, parts: Parts, kind: Hashable, tokens: int) -> StepResult:
        """Train on a batch: make passes over `parts`, and update. Passes of one `kind` have one schedule. `tokens`: the
        targets of the batch.
        """

    @abstractmethod
    def trial(self, parts: Parts) -> list[torch.Tensor]:
        """Make the passes of a step over `parts`, and no step; return the loss of each."""

    def begin_trial(self) -> None:  # noqa: B027 (most need nothing)
        """A trial is about to be made: have ready what `hang` needs."""

    def own_loop(self) -> OwnSteps:
        """Return what begins and ends the steps of own loops. Raises ConfigError where none can make a step."""
        raise ConfigError(
            f"{self._rule.title} trains by forward passes alone, and keeps no gradients: call engine.step(batch, "
            "loss_fn), whose loss_fn may return any number that is to become small, instead of a forward, "
            "engine.backward and engine.update. For outputs call the model under torch.no_grad(), for a loss "
            "engine.evaluate."
        )

    def replay(self, measured: ZerothOrderRecord) -> None:  # noqa: ARG002
        """Make a step again, from what it measured. Collective. Raises ConfigError."""
        raise ConfigError(
            f"engine.replay makes steps again that were made by forward passes alone, and {self._rule.title} needs "
            "their gradients: give the engine MeZO(...), as that run had it."
        )

    num_passes = 1
    """Over the rows of a batch, in a step, each of which sees weights of its own."""

    def hang(self, unit: Unit, number: int) -> None:  # noqa: ARG002
        """Hang the weights of a unit, which are on the device, as pass `number` is to see them, in its module."""
        unit.install(unit.live())

    def forget(self) -> None:  # noqa: B027 (most have nothing)
        """All states are about to be written anew."""

    def free(self) -> None:  # noqa: B027 (most have none)
        """The engine closes: let go of the device's memory."""

    def sum(self, *losses: float) -> list[float]:
        """Return the sums of what each rank has of losses, on all of them."""
        comm = self._state.comm
        return comm.sum_in_order(list(losses), "loss") if comm.size > 1 else list(losses)

    def _order(self) -> Callable[[Region], float]:
        """Return when the next step will need each region, by the pass that is ending."""
        state = self._state
        return state.executor.order(lambda region: [unit.regions for unit in state.users[region.index]])

    def _go_on(self, is_batch: bool) -> None:
        """It is known how all is updated: begin to bring up the weights of the next step. `is_batch`: of which the
        engine knows all.
        """
        state = self._state
        peak_bytes = state.runner.end_step()
        state.executor.end()
        if is_batch:  # own loops hold as many graphs at once as they like: nothing is ever left over
            state.spare_memory.end_step(peak_bytes)
        state.executor.expect(*self.expected)

    def _finish(self, loss: float, grad_norm: float, tokens: int | None, **more: Any) -> StepResult:
        """The step is made: return its result, with what the lanes did."""
        state = self._state
        with suppress(Exception):  # what fails there fails the next pass: this step is made
            state.slots.settle()  # a script may read what stays before that, which would wait for it as well
        seconds, lanes, self.spans = state.lanes.end_step()
        told = torch.tensor(loss, dtype=torch.float32, device="cpu")
        return StepResult(told, grad_norm, tokens, seconds=seconds, lanes=lanes, **more)
