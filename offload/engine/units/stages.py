"""Stages: objects around the module forward in each use of a unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

from torch import nn

from offload.distributed.comm import Comm
from offload.doors import Door
from offload.engine.gradients.flow import GradientFlow
from offload.engine.units.arguments import Arguments
from offload.engine.units.call import Router
from offload.engine.units.find import UnitCandidate
from offload.engine.units.runner import UnitRunner
from offload.engine.units.unit import Unit
from offload.engine.units.use import Forward, ForwardRunner, Use
from offload.lanes.lanes import Lanes
from offload.layout.regions import Region
from offload.planning.plan import Plan
from offload.planning.settings import Settings
from offload.schedule.execute import Executor
from offload.tiers.counters import Counters
from offload.tiers.device import Device
from offload.tiers.slots import Slots
from offload.tiers.store import Store
from offload.tiers.tile import DeferredUpdates


class Host(Protocol):
    """What a stage, an attention or an exchange may ask of an engine."""

    model: nn.Module
    plan: Plan
    comm: Comm
    device: Device
    lanes: Lanes
    counters: Counters
    regions: Sequence[Region]
    store: Store
    slots: Slots
    deferred_updates: DeferredUpdates
    executor: Executor
    gradients: GradientFlow
    units: list[Unit]
    runner: UnitRunner
    router: Router
    stages: Stage

    def settle(self) -> None:
        """Restore the forwards of units kept on the device, after a snapshot from before has put back others."""


class Stage:
    """A stage around `inner`. Each method here passes on to `inner`; a subclass overrides some of them.

        class Timed(Stage):
            @classmethod
            def over(cls, inner: Stage, host: Host, settings: Settings) -> Stage:
                return cls(inner)

            def forward_of(self, unit: Unit, use: Use) -> Forward:
                forward = self.inner.forward_of(unit, use)
                return forward if self.is_paused else partial(print_time, unit.name, forward)

        STAGES.register("timed", Timed)

    Later engines then time each unit, the recomputation included.
    """

    is_paused = False
    """True in trials: units run the original forwards."""

    def __init__(self, inner: Stage) -> None:
        self.inner = inner

    @classmethod
    def over(cls, inner: Stage, host: Host, settings: Settings) -> Stage:  # noqa: ARG003
        """Return a stage around `inner` for this engine, or `inner` if the settings leave this stage out."""
        return inner

    @classmethod
    def in_memory(cls, model: nn.Module, settings: Settings) -> AbstractContextManager[None]:  # noqa: ARG003
        """Within the context, a model in memory computes as units with this stage do. Default: as it is."""
        return nullcontext()

    @classmethod
    def beside(cls, model: nn.Module, settings: Settings) -> Callable[[UnitCandidate], int]:  # noqa: ARG003
        """Return a function that says how many device bytes the stage needs beside a unit in use.

        The plan has room for the largest unit, under the name `BESIDE`.
        """
        return lambda _: 0

    def enter(self, unit: Unit) -> None:
        """Begin a use, forward or backward, with all micro-batches: the weights are on the device until `leave`."""
        self.inner.enter(unit)

    def leave(self) -> None:
        """End the use, if there is one."""
        self.inner.leave()

    def forward_of(self, unit: Unit, use: Use) -> Forward:
        """Return the forward for a use, with the signature of the module forward. The recomputation has the same."""
        return self.inner.forward_of(unit, use)

    def for_recomputation(self, forward: Forward) -> Forward:
        """Return the recomputation function for a use run with `forward`."""
        return self.inner.for_recomputation(forward)

    def record(self, unit: Unit, runner: ForwardRunner, arguments: Arguments, rows: int | None) -> Forward:
        """Learn about a unit during a recorded use and return the forward to run.

        The unit weights are on the device. `rows`: batch rows in the first of several passes (0: unknown), None: learn
        nothing.
        """
        return self.inner.record(unit, runner, arguments, rows)

    def term_of(self, term: Callable[..., Any]) -> Callable[..., Any]:
        """Return the `Term` of a loss over chunks of logits, to run in place of `term`."""
        return self.inner.term_of(term)

    def check(self) -> None:
        """Check the result after all units were recorded. Raises ConfigError if no unit can run as configured."""
        self.inner.check()

    def divert(self) -> None:
        """Redirect calls inside units to the stages. `undo` ends this."""
        self.inner.divert()

    def undo(self) -> None:
        """Undo `divert`."""
        self.inner.undo()

    @property
    def description(self) -> str:
        """Report text about changed forwards, except compilation. Empty if all are original."""
        return self.inner.description

    @property
    def compiled(self) -> frozenset[type]:
        """Module classes running compiled, without refused classes."""
        return self.inner.compiled

    @property
    def num_graphs(self) -> int:
        """Number of compiled graphs so far."""
        return self.inner.num_graphs

    @property
    def needs_short_recording(self) -> bool:
        """True if recording with a few tokens can find properties missed with many tokens."""
        return self.inner.needs_short_recording

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run the original forwards in trials during the context."""
        before, self.is_paused = self.is_paused, True
        try:
            with self.inner.paused():
                yield
        finally:
            self.is_paused = before


class OriginalForward(Stage):
    """The last stage: the forward of the module."""

    num_graphs = 0
    needs_short_recording = False
    description, compiled = "", frozenset[type]()

    def __init__(self) -> None:
        super().__init__(self)

    def enter(self, unit: Unit) -> None:
        """Prepare nothing."""

    def leave(self) -> None:
        """Release nothing."""

    def forward_of(self, unit: Unit, use: Use) -> Forward:  # noqa: ARG002
        return unit.compute

    def for_recomputation(self, forward: Forward) -> Forward:
        return forward

    def record(self, unit: Unit, runner: ForwardRunner, arguments: Arguments, rows: int | None) -> Forward:  # noqa: ARG002
        return unit.compute

    def term_of(self, term: Callable[..., Any]) -> Callable[..., Any]:
        return term

    def check(self) -> None:
        """Accept all."""

    def divert(self) -> None:
        """Redirect nothing."""

    def undo(self) -> None:
        """Restore nothing."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        yield


STAGES: Door[type[Stage]] = Door("stage", {})


def open_stages(host: Host, settings: Settings) -> Stage:
    """Return the stages of an engine around the module forwards, the outermost first."""
    stage: Stage = OriginalForward()
    for each in STAGES.used_with(settings):
        stage = each.over(stage, host, settings)
    return stage


@contextmanager
def stages_in_memory(model: nn.Module, settings: Settings) -> Iterator[None]:
    """Within the context, a model in memory computes as units do, up to the last bits of other kernels."""
    with ExitStack() as stack:
        for each in STAGES.used_with(settings):
            stack.enter_context(each.in_memory(model, settings))
        yield
