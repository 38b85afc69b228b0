"""Forwards that unit uses run: the module forward, unless a subclass has another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from offload.engine.units.arguments import Arguments
from offload.engine.units.unit import Unit
from offload.tiers.device import Device

Forward = Callable[..., Any]


class ForwardRunner(Protocol):
    """Runs modules over weights in device memory."""

    @property
    def device(self) -> Device:
        """The compute device."""
        ...

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """True for a tensor over weights on the device."""
        ...

    def run(
        self, unit: Unit, arguments: Arguments, tensors: Sequence[torch.Tensor], others: Sequence[Any], forward: Forward
    ) -> Arguments:
        """Run `forward` as the unit forward, with `tensors` and `others` in place of the argument leaves."""
        ...

    def restoring(self, unit: Unit) -> AbstractContextManager[None]:
        """Restore random generators and mutable module attributes after the context."""
        ...


class OriginalForwards:
    """Uses run the original module forwards."""

    num_graphs = 0
    """Number of compiled graphs so far."""
    _is_paused = False
    needs_short_recording = False
    """True if recording with a few tokens can find properties missed with many tokens."""

    def of(
        self,
        unit: Unit,
        _runner: ForwardRunner,
        _arguments: Arguments,
        _tensors: Sequence[torch.Tensor],
        _others: Sequence[Any],
        _needs: Sequence[bool] | None = None,
    ) -> Forward:
        """Return the forward for a micro-batch, with the signature of the module forward.

        The forward also serves the recomputation. Called before the use runs, with the unit weights on the device.
        `needs`: requires_grad per tensor; None: no backward.
        """
        return unit.forward

    def for_recomputation(self, forward: Forward) -> Forward:
        """Return the recomputation function for a use run with `forward`."""
        return forward

    def record(self, unit: Unit, _runner: ForwardRunner, _arguments: Arguments, _rows: int | None) -> Forward:
        """Learn about a unit during a recorded use and return the forward to run.

        The unit weights are on the device. `rows`: batch rows in the first of several passes (0: unknown), None: learn
        nothing.
        """
        return unit.forward

    def check(self) -> None:
        """Check the result after all units were recorded. Raises ConfigError if no unit can run as configured."""

    @property
    def description(self) -> str:
        """Report text about changed forwards, except compilation. Empty if all are original."""
        return ""

    @property
    def compiled(self) -> frozenset[type]:
        """Module classes running compiled, without refused classes."""
        return frozenset()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run the original forwards in trials during the context."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before
