"""Detects writes to weights on the device by other code than the engine's."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from offload.engine.comparison import same_bits, signed_sums
from offload.engine.state import EngineState
from offload.errors import ConfigError


class ForeignWrites:
    """Compares the contents of resident weights before a step, and before an update, with those after the last one.

    An offloaded parameter refuses writes. A resident weight is a plain tensor: it accepts a write from a script (by
    numpy, by `.data`, under no_grad), and the next update overwrites the change.
    """

    def __init__(self, state: EngineState, updates_later: bool) -> None:
        """`updates_later`: updates run in a later step, so device weights change between steps.

        No check then, and none over ranks with parts of the weights: a rank cannot read the others' parts alone.
        """
        self._state = state
        self._is_off = updates_later or state.plan.residence.sharding.gathers
        self._is_counted = state.device.torch_device.type != "cpu"  # on a CPU, numpy writes unseen by torch
        self._noted: dict[int, tuple[nn.Parameter, int, torch.Tensor]] = {}
        self.note()

    def note(self) -> None:
        """Record the contents: the engine's weights, also those that the model has written in an evaluation."""
        if not self._is_off:
            self._state.slots.compute_after_resident()
            self._noted = {index: (weight, weight._version, signed_sums(weight)) for index, weight in self._staying()}

    def check(self) -> None:
        """Raise ConfigError if weights were written since `note`. The engine's weights then replace them."""
        state, current = self._state, dict(self._staying())
        noted = [
            (index, weight, sums)
            for index, (weight, version, sums) in self._noted.items()
            if current.get(index) is weight and self._may_have_changed(weight, version)
        ]
        if not noted:
            return
        indices, weights, before = zip(*noted, strict=True)
        if same_bits(torch.cat(before), torch.cat([*map(signed_sums, weights)])):
            return
        with state.counters.preserve():  # a write by engine.edit or a loaded checkpoint changes both sides
            state.updates.flush()
            state.lanes.drain_updates()
            state.slots.compute_after_resident()
            read, live = state.store.values.read_local, dict(self._staying())
            written = next((index for index in indices if not same_bits(live[index].detach().cpu(), read(index))), None)
        if written is not None:
            state.runner.weights_changed()
        self.note()
        if written is not None:
            name = state.infos[written].name
            raise ConfigError(
                f"{name} was changed on the device between steps, and the next update would overwrite the change with "
                "the engine's own weights, which replace it now. Change weights between steps with engine.edit() "
                f"(optimizer.engine.edit() in a loop over offload.wrap): for _, value in engine.edit([{name!r}]): "
                "value.clamp_(0, 1) stores any change in place."
            )

    def _may_have_changed(self, weight: nn.Parameter, version: int) -> bool:
        """Return False if torch has counted no write, and nobody has the address. To compare contents, the host waits
        for the device.
        """
        return not self._is_counted or weight._version != version or getattr(weight, "has_address", True)

    def _staying(self) -> Iterator[tuple[int, nn.Parameter]]:
        """Yield (index, weight) for the copies on the device. Excluded: weights that are stored there alone, and those
        read outside their unit, because the model itself may write them (RWKV does).
        """
        is_alone = self._state.plan.residence.is_used_in_place
        for unit in self._state.units:
            if unit.resident and unit.name not in self._state.read_outside:
                alone = {index for region in filter(is_alone, unit.regions) for index in region.parameters}
                yield from (each for each in unit.live().items() if each[0] not in alone)
