"""What the units of one engine share: the slots, the gradients, the inputs that wait for their backward, and who is computing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from offload.engine.gradients import GradientFlow
from offload.engine.unit import Arguments, Unit, stream_call
from offload.errors import OffloadError
from offload.partition.layout import Region
from offload.tiers.device import Device
from offload.tiers.slots import Slots

if TYPE_CHECKING:
    from offload.engine.record import Recording

_INPUTS_FIX = (
    "These are the inputs that units keep for their recompute. Lower --train.micro_batch_size or --data.sequence_length, "
    "or raise --offload.device_memory."
)


class Stream:
    """Serves the units' calls. A unit's use goes enter -> run -> leave, in forward and again in backward."""

    def __init__(self, device: Device, slots: Slots, gradients: GradientFlow, debug: bool) -> None:
        self.device, self.slots, self.gradients = device, slots, gradients
        self.anchor = torch.zeros((), requires_grad=True)
        self.recording: Recording | None = None
        self._debug = debug
        self._inside: Unit | None = None
        self._uses: dict[str, int] = {}
        self._held: dict[int, int] = {}

    def call(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit's forward, as the module would."""
        if self.recording is not None:
            return self.recording.call(unit, args, kwargs)
        if torch.is_grad_enabled():
            arguments = Arguments((args, kwargs))
            if unit.trainable or any(t.requires_grad for t in arguments.tensors):
                self._uses[unit.name] = self._uses.get(unit.name, 0) + 1
                return stream_call(unit, self, arguments)
        self.enter(unit)
        try:
            with torch.no_grad():
                result = Arguments(unit.run(args, kwargs, unit.live()))
                return result.fill([self.own(t) for t in result.tensors])
        finally:
            self.leave(unit)

    def enter(self, unit: Unit) -> None:
        """Bring the unit's weights into the slot, which is its own until `leave`."""
        if self._inside is not None:
            raise OffloadError(
                f"unit {unit.name} was called from inside unit {self._inside.name}, which did not happen in the recording pass: "
                f"there is one slot for both."
            )
        self._inside = unit
        if self._uses.get(unit.name, 0) > 1 and not self.gradients.accumulates:
            for region in unit.regions:
                self.gradients.make_lasting(region)
        self.slots.fetch(unit.regions)

    def leave(self, unit: Unit) -> None:
        """Give the slot back."""
        self._inside = None
        if self._debug:
            self.slots.poison()

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a result of a unit as something that outlives the slot."""
        slot = self.slots.slot
        begin = tensor.data_ptr() - slot.data_ptr()
        return tensor.clone() if 0 <= begin < slot.nbytes and slot.nbytes else tensor

    def make_live(self, regions: Sequence[Region]) -> dict[int, nn.Parameter]:
        """Return Parameters over the device's copy of `regions`, whose gradients go to the flow as soon as they are there."""
        live = self.slots.parameters(regions)
        for index, parameter in live.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p, index=index: self.gradients.take(index, p))  # type: ignore[misc]
        return live

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        """Enter a unit's inputs in the device's ledger; a tensor that many units receive counts once."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage.data_ptr()
            count = self._held.get(key, 0)
            if not count:
                self.device.ledger.reserve("unit inputs", storage.nbytes(), _INPUTS_FIX)
            self._held[key] = count + 1

    def let_go(self, unit: Unit, tensors: Sequence[torch.Tensor]) -> None:
        """A use of a unit is over: its inputs leave the ledger."""
        self._uses[unit.name] = max(0, self._uses.get(unit.name, 0) - 1)
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage.data_ptr()
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]
                self.device.ledger.release("unit inputs", storage.nbytes())

    def reset(self) -> None:
        """Forget the uses of a pass that was given up."""
        self._uses.clear()
        self._inside = None
