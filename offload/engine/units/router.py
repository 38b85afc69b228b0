"""Where the calls of units go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from offload.engine.gradients.flow import Witness
from offload.engine.units.arguments import deliver, received
from offload.engine.units.call import call_unit, call_unit_without_graph
from offload.engine.units.runner import UnitRunner
from offload.engine.units.undo import Where
from offload.engine.units.unit import Unit

Calls = Callable[[Unit, tuple[Any, ...], dict[str, Any]], Any]


class Router:
    """Takes the calls of all units: for the runner, with a backward or without; or for whom they are `diverted` to.

    `give_up` ends what an interrupt has left half done.
    """

    def __init__(self, runner: UnitRunner) -> None:
        self._runner, self._undo = runner, runner.undo
        self._diverted: Calls | None = None
        self.give_up: Callable[[], None] = runner.reset

    def call(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit's forward, as the module would."""
        return (self._diverted or self.stream)(unit, args, kwargs)

    def stream(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit's forward by the runner, as steps do."""
        if self._undo.where in (Where.ENGINE, Where.FAILED):
            self.give_up()
        self._undo.where = Where.ENGINE
        with_grad = torch.is_grad_enabled()
        try:
            self._runner.collect()
            result = self._call(unit, args, kwargs)
        except BaseException as error:
            torch.set_grad_enabled(with_grad)  # an interrupt may have come right before torch's own way out
            if self._undo.where is Where.ENGINE and isinstance(error, Exception):
                self._undo.where = Where.FAILED
            raise
        self._undo.where = Where.NOWHERE
        return result

    def _call(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        runner = self._runner
        is_step = torch.is_grad_enabled() or runner.has_micro_batches
        arguments, containers = received(args, kwargs, opens_caches=is_step)
        runner.count(unit, arguments)
        if torch.is_grad_enabled() and (unit.trainable or any(t.requires_grad for t in arguments.tensors)):
            runner.expect_backward(unit)
            return deliver(*call_unit(unit, runner, arguments), containers)
        return deliver(*call_unit_without_graph(unit, runner, arguments), containers)

    @contextmanager
    def tried(self, calls: Calls, witness: Witness = lambda *_: None) -> Iterator[None]:
        """Within, the units' calls go there, and gradients to `witness` alone: it is no step."""
        gradients = self._runner.gradients
        with self.diverted(calls), self._undo.afterwards(partial(gradients.show, None)):
            gradients.show(witness)
            yield

    @contextmanager
    def diverted(self, calls: Calls) -> Iterator[None]:
        """Within, the units' calls go there."""

        def restore() -> None:
            self._diverted = None

        with self._undo.afterwards(restore):
            self._diverted = calls
            yield
