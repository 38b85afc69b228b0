"""Writes to weights on the device that no engine has made: between the first steps they are looked for."""

from __future__ import annotations

from offload.engine.state import EngineState
from offload.engine.units.belongings import same_bits
from offload.errors import ConfigError
from offload.telemetry.counters import Counters

_NUM_LOOKS = 2
"""A script that writes between steps does so from the first step on; each look reads all weights that stay."""


class ForeignWrites:
    """Compares weights that stay on the device with the weights of the engine, before the second and the third step.

    A parameter at rest refuses to be written to. A weight that stays is a plain tensor, and takes what a script writes
    (by numpy, by `.data`, under no_grad) until the next update brings it up again.
    """

    def __init__(self, state: EngineState, counters: Counters, is_late: bool) -> None:
        """`is_late`: updates are made in a later step, until when weights on the device are others than those of the
        engine. Nor is anything compared where weights are cut over ranks, or states rest on disk: reads would displace
        what lies in the rings.
        """
        self._state, self._counters, self._was_step = state, counters, False
        is_elsewhere = bool(state.plan.rings) or state.plan.layout.sharding.gathers
        self._num_left = 0 if is_late or is_elsewhere else _NUM_LOOKS

    def note(self, is_step: bool) -> None:
        """A pass is over: a step, or another, in which a model may write to weights and put them back later."""
        self._was_step = is_step

    def look(self) -> None:
        """A step is about to begin. Raises ConfigError where weights were written to since the one before."""
        if not self._num_left or not self._was_step:
            return
        self._num_left -= 1
        with self._counters.unchanged():
            written = self._find()
        if written is not None:
            self._state.weights_changed()
            raise ConfigError(
                f"{written} was written to between steps, on the device, where its weights stay: the next update would "
                "bring up those of the engine, and the change would be lost. Write by engine.edit(), which yields each "
                "parameter and takes it back."
            )

    def _find(self) -> str | None:
        """Return the name of a parameter that was written to; None for none."""
        state = self._state
        state.updates.flush()
        state.lanes.drain_updates()
        state.slots.settle()
        # Weights that the model's code reads from outside of their unit it may write, too (RWKV does).
        staying = [unit for unit in state.units if unit.resident and unit.name not in state.read_outside]
        for index, weight in ((index, weight) for unit in staying for index, weight in unit.live().items()):
            if not same_bits(weight.detach().cpu(), state.store.values.read_here(index)):
                return state.infos[index].name
        return None
