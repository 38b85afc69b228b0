"""Detection of writes to device weights by code outside the engine, between the first steps."""

from __future__ import annotations

from offload.engine.comparison import same_bits
from offload.engine.state import EngineState
from offload.errors import ConfigError

_NUM_CHECKS = 2
"""A script with writes between steps writes from the first step on. Each check reads all resident weights."""


class ForeignWrites:
    """Compares resident weights with the engine's weights, before the second and the third step.

    An offloaded parameter refuses writes. A resident weight is a plain tensor: it accepts a write from a script (by
    numpy, by `.data`, under no_grad), and the next update overwrites the change.
    """

    def __init__(self, state: EngineState, updates_later: bool) -> None:
        """`updates_later`: updates run in a later step; device weights differ from the engine's weights until then.

        No check either if weights are partitioned over ranks or states are on disk: the reads would displace data in
        the rings.
        """
        self._state = state
        self.was_step = False
        """True if the last pass was a training step. In an evaluation a model may write weights and restore them."""
        is_elsewhere = bool(state.plan.rings) or state.plan.residence.sharding.gathers
        self._num_left = 0 if updates_later or is_elsewhere else _NUM_CHECKS

    def check(self) -> None:
        """Check before a step. Raises ConfigError if weights were written since the previous step."""
        if not self._num_left or not self.was_step:
            return
        self._num_left -= 1
        state = self._state
        # The model itself may write weights it reads outside their unit (RWKV does).
        staying = [unit for unit in state.units if unit.resident and unit.name not in state.read_outside]
        with state.counters.preserve():
            state.updates.flush()
            state.lanes.drain_updates()
            state.slots.compute_after_resident()
            resident = ((index, weight.detach().cpu()) for unit in staying for index, weight in unit.live().items())
            read = state.store.values.read_local
            written = next((index for index, weight in resident if not same_bits(weight, read(index))), None)
        if written is not None:
            state.runner.weights_changed()
            raise ConfigError(
                f"{state.infos[written].name} was changed on the device between steps, and the next update would "
                "overwrite the change with the engine's own weights. Change weights with engine.edit(), which yields "
                "each parameter and stores the result."
            )
