"""Writes to weights by the model's own forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from offload.engine.units.unit import Unit
from offload.errors import ConfigError, warn

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def refuse_writes(unit: Unit) -> NoReturn:
    """Raise the ConfigError for a forward with a lost change of weights."""
    raise ConfigError(
        f"the model's forward writes to weights of unit {unit.name}. The engine stores weights elsewhere and would "
        "lose the change. Compute with a changed copy (functional.normalize(self.weight)), or change weights "
        "between steps with engine.edit(). nn.Embedding with max_norm writes to its own weights in forward: build "
        "it without max_norm."
    )


class WeightWrites:
    """Checks weights that a forward writes, although no value changed in the trial runs (a clamp within bounds).

    Sums of the bits before and after a forward show a later change. They stay on the device until `find`, so that the
    host waits once in a pass.
    """

    def __init__(self) -> None:
        self.parameters: dict[Unit, set[int]] = {}
        """Written parameters, by model index."""
        self._resident_sums: dict[Unit, torch.Tensor] = {}  # from the begin of the pass
        self._has_changed: dict[Unit, torch.Tensor] = {}  # bool on the device, for uses so far

    def add(self, unit: Unit, parameters: Iterable[int]) -> None:
        """Check these parameters of `unit` from the next pass on."""
        self.parameters.setdefault(unit, set()).update(parameters)
        warn(
            f"the model's forward writes to weights of unit {unit.name}, although no value changed in a trial run. A "
            "step with a changed value will be refused: the engine stores weights elsewhere and would lose the "
            "change. Clamp weights between steps with engine.edit()."
        )

    @contextmanager
    def watched(self, units: Iterable[Unit]) -> Iterator[None]:
        """Within the context, all weights of streamed units are checked."""
        before = self.parameters
        self.parameters = {unit: {*unit.placeholders} for unit in units if not unit.resident}
        try:
            yield
        finally:
            self.parameters = before
            self.forget()

    def begin(self) -> None:
        """Begin a pass: record the weights that stay on the device."""
        self.forget()
        self._resident_sums = {unit: self._sum(unit) for unit in self.parameters if unit.resident}

    def checked(self, unit: Unit, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward of `unit` with a comparison of the weights before and after."""

        def run(*args: Any, **kwargs: Any) -> Any:
            sum_before = self._sum(unit)
            result = forward(*args, **kwargs)
            self._compare(unit, sum_before)
            return result

        return run

    def _sum(self, unit: Unit) -> torch.Tensor:
        """Return the sum of the bits of written parameters, on the device. The unit's weights are there."""
        # As integers: these sums are exact in any order, and no NaN hides a change.
        weights = [unit.live()[index].detach() for index in sorted(self.parameters[unit])]
        sums = [weight.view(_INTEGERS[weight.itemsize]).sum(dtype=torch.int64) for weight in weights]
        return torch.stack(sums)

    def _compare(self, unit: Unit, sum_before: torch.Tensor) -> None:
        """Compare the weights with an earlier sum."""
        has_changed = (self._sum(unit) != sum_before).any()
        if unit in self._has_changed:
            has_changed |= self._has_changed[unit]
        self._has_changed[unit] = has_changed

    def find(self) -> Unit | None:
        """Return a unit with weights changed by a forward since `begin`, or None.

        Checks resident weights only in the first call after `begin`: updates may change them later in a pass.
        """
        for unit, sum_before in self._resident_sums.items():
            self._compare(unit, sum_before)
        changed = [unit for unit, has_changed in self._has_changed.items() if has_changed]
        self.forget()
        return next(iter(changed), None)

    def forget(self) -> None:
        """Forget sums and comparisons so far."""
        self._resident_sums.clear()
        self._has_changed.clear()
