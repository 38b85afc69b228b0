"""Detection of writes to device weights by code outside the engine, between the first steps."""

from __future__ import annotations

from offload.engine.comparison import same_bits
from offload.engine.state import EngineState
from offload.errors import ConfigError
from offload.tiers.counters import Counters

_NUM_CHECKS = 2
"""A script with writes between steps writes from the first step on. Each check reads all resident weights."""


class ForeignWrites:
    """Compares resident weights with the engine's weights, before the second and the third step.

    An offloaded parameter refuses writes. A resident weight is a plain tensor: it accepts a write from a script (by
    numpy, by `.data`, under no_grad), and the next update overwrites the change.
    """

    def __init__(self, state: EngineState, counters: Counters, updates_later: bool) -> None:
        """`updates_later`: updates run in a later step; device weights differ from the engine's weights until then.

        No check either if weights are partitioned over ranks or states are on disk: the reads would displace data in
        the rings.
        """
        self._state, self._counters, self._was_step = state, counters, False
        is_elsewhere = bool(state.plan.rings) or state.plan.residence.sharding.gathers
        self._num_left = 0 if updates_later or is_elsewhere else _NUM_CHECKS

    def record_pass(self, is_step: bool) -> None:
        """Record a pass: a training step, or an evaluation. The check compares weights only after a training step: in
        an evaluation a model may write weights and restore them later.
        """
        self._was_step = is_step

    def check(self) -> None:
        """Check before a step. Raises ConfigError if weights were written since the previous step."""
        if not self._num_left or not self._was_step:
            return
        self._num_left -= 1
        with self._counters.preserve():
            written = self._find()
        if written is not None:
            self._state.runner.weights_changed()
            raise ConfigError(
                f"{written} was changed on the device between steps, and the next update would overwrite the change "
                "with the engine's own weights. Change weights with engine.edit(), which yields each parameter and "
                "stores the result."
            )

    def _find(self) -> str | None:
        """Return the name of a changed parameter; None: no changes."""
        state = self._state
        state.updates.flush()
        state.lanes.drain_updates()
        state.slots.compute_after_resident()
        # The model itself may write weights it reads outside their unit (RWKV does).
        staying = [unit for unit in state.units if unit.resident and unit.name not in state.read_outside]
        for index, weight in ((index, weight) for unit in staying for index, weight in unit.live().items()):
            if not same_bits(weight.detach().cpu(), state.store.values.read_local(index)):
                return state.infos[index].name
        return None
