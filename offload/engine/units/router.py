"""Routes the module calls to units."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from offload.engine.gradients.flow import GradientObserver
from offload.engine.units.arguments import deliver_result, receive_call
from offload.engine.units.call import call_unit, call_unit_without_graph
from offload.engine.units.runner import UnitRunner
from offload.engine.units.unit import Unit
from offload.interrupts import interrupts

CallTarget = Callable[[Unit, tuple[Any, ...], dict[str, Any]], Any]


class Router:
    """Receives all unit calls: runs them with or without a backward, or passes them to a `diverted` target."""

    def __init__(self, runner: UnitRunner, recover: Callable[[], None]) -> None:
        """`recover`: resets the engine after a pass failed halfway."""
        self._runner, self._recover = runner, recover
        self._diverted: CallTarget | None = None

    def call(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit forward for a module call."""
        return (self._diverted or self.stream)(unit, args, kwargs)

    def stream(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit forward by the runner, as in training steps."""
        runner = self._runner
        if runner.has_failed:
            self._recover()
        with interrupts:
            runner.collect()
            is_step = torch.is_grad_enabled() or runner.has_micro_batches
            arguments, containers = receive_call(args, kwargs, opens_caches=is_step)
            runner.count(unit, arguments)
            if torch.is_grad_enabled() and (unit.trainable or any(t.requires_grad for t in arguments.tensors)):
                runner.expect_backward(unit)
                return deliver_result(*call_unit(unit, runner, arguments), containers)
            return deliver_result(*call_unit_without_graph(unit, runner, arguments), containers)

    @contextmanager
    def trial_mode(self, calls: CallTarget, observer: GradientObserver = lambda *_: None) -> Iterator[None]:
        """Send unit calls to `calls`, and gradients only to `observer`, during the context. For trial runs."""
        gradients = self._runner.gradients
        with self.diverted(calls):
            gradients.observe(observer)
            try:
                yield
            finally:
                gradients.observe(None)

    @contextmanager
    def diverted(self, calls: CallTarget) -> Iterator[None]:
        """Send unit calls to `calls` during the context."""
        self._diverted = calls
        try:
            yield
        finally:
            self._diverted = None
