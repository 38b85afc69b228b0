"""Detects writes to weights on the device by other code than the engine's."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from offload.engine.comparison import same_bits, signed_sums
from offload.engine.flow import Flow
from offload.errors import ConfigError


class ForeignWrites:
    """Compares the contents of resident weights with those after the last step: before a step, before an update, and
    before a read that leaves the engine (a copy, a state dict, a checkpoint, an export).

    An offloaded parameter refuses writes. A resident weight is a plain tensor: it accepts a write from a script (by
    numpy, by `.data`, under no_grad), and a forward computes with it. But no read finds the change, because the host
    has the engine's own weights, and the next update overwrites it.
    """

    def __init__(self, flow: Flow, updates_later: bool) -> None:
        """`updates_later`: updates run in a later step, so device weights change between steps.

        No check then, and none over ranks with parts of the weights: a rank cannot read the others' parts alone.
        """
        self._flow = flow
        self._is_off = updates_later or flow.plan.residence.sharding.gathers
        self._is_counted = flow.device.torch_device.type != "cpu"  # on a CPU, numpy writes unseen by torch
        self._noted: dict[int, tuple[nn.Parameter, int, torch.Tensor | None]] = {}
        """By parameter: the weight, torch's count of writes, and the sums of its contents (None: not computed)."""
        self.note()

    def note(self) -> None:
        """Record the contents: the engine's weights, also those that the model has written in an evaluation."""
        if not self._is_off:
            self._flow.slots.compute_after_resident()
            self._noted = {index: self._look(weight) for index, weight in self._staying()}

    def forget(self) -> None:
        """Compare nothing until the next `note`."""
        self._noted = {}

    def _look(self, weight: nn.Parameter) -> tuple[nn.Parameter, int, torch.Tensor | None]:
        sums: torch.Tensor | None = None
        if self._may_change_unseen(weight):
            sums = signed_sums(weight)
        return weight, weight._version, sums

    def check(self, only: int | None = None) -> None:
        """Raise ConfigError if weights were written since `note`. The engine's weights then replace them.

        `only`: the index of the parameter to check; None: all.
        """
        noted = {index: entry for index, entry in self._noted.items() if only in (None, index)}
        if not noted:
            return
        flow, current = self._flow, dict(self._staying())
        suspects = {
            index: (weight, sums)
            for index, (weight, version, sums) in noted.items()
            if current.get(index) is weight and (weight._version != version or self._may_change_unseen(weight))
        }
        if not suspects:
            return
        before = [sums for _, sums in suspects.values() if sums is not None]
        if len(before) == len(suspects):  # the host waits for the device, once
            now = torch.cat([signed_sums(weight) for weight, _ in suspects.values()])
            if same_bits(torch.cat(before), now):
                return
        with flow.counters.preserve():  # a write by engine.edit or a loaded checkpoint changes both sides
            flow.updates.flush()
            flow.lanes.drain_updates()
            flow.slots.compute_after_resident()
            read, live = flow.store.values.read_local, dict(self._staying())
            written = next((i for i in suspects if not same_bits(live[i].detach().cpu(), read(i))), None)
        if written is None:
            self._noted |= {index: self._look(live[index]) for index in suspects}
        else:
            flow.runner.weights_changed()
            self.note()
            name = flow.infos[written].name
            raise ConfigError(
                f"{name} was changed on the device between steps, and the change would be lost: state_dict(), "
                "checkpoints and the next update have the engine's own weights, which replace it now. Change weights "
                "between steps with engine.edit() "
                f"(optimizer.engine.edit() in a loop over offload.wrap): for _, value in engine.edit([{name!r}]): "
                "value.clamp_(0, 1) stores any change in place."
            )

    def _may_change_unseen(self, weight: nn.Parameter) -> bool:
        """Return False if torch counts all writes: on a GPU, as long as nobody has the address."""
        return not self._is_counted or getattr(weight, "has_address", True)

    def _staying(self) -> Iterator[tuple[int, nn.Parameter]]:
        """Yield (index, weight) for the copies on the device. Excluded: weights that are stored there alone, and those
        read outside their unit, because the model itself may write them (RWKV does).
        """
        is_alone = self._flow.plan.residence.is_used_in_place
        for unit in self._flow.units:
            if unit.resident and unit.name not in self._flow.read_outside:
                alone = {index for region in filter(is_alone, unit.regions) for index in region.parameters}
                yield from (each for each in unit.live().items() if each[0] not in alone)
