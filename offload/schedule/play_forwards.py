"""A step of forwards alone, played."""

from __future__ import annotations

from offload.lanes.ticket import Fence
from offload.layout.regions import Region
from offload.schedule.play import Call, Play


class PlayForwards(Play):
    """As of `offload.engine.methods.forwards`: what its passes do side by side is in the forward of each call."""

    def step(self) -> None:
        engine = self._engine
        self._slots.settle()
        self._executor.begin("step")
        for call in self._calls:
            self._forward(call)
        self._lanes.wait(self._compute.mark())  # for the losses
        first = self._executor.first_uses()
        trained = sorted((r for r in engine.regions if r.trainable), key=lambda region: self._rank(region, first))
        in_slots = [r for r in trained if self._updates_in_slot(r)]
        self._slots.need_masters(in_slots)
        self._due = {region: Fence("no gradients") for region in trained if region not in in_slots}
        self._slots.invalidate(self._due)
        self._go_on(wraps=False)
        self._submit_due()
        self._compute.run(0.0, engine.step_host_s)
        self._slots.settle()

    def _updates_in_slot(self, region: Region) -> bool:
        """True where the update is put off until the weights come up."""
        engine = self._engine
        return not engine.on_device and engine.layout.updates_in_slot(region) and not self._slots.is_resident(region)

    def _forward(self, call: Call) -> None:
        if call.regions:
            self._executor.enter(call.regions, False)
            self._update_in_slot(call)
        self._compute.run(call.forward_s, call.forward_host_s)
        if call.regions:
            self._executor.leave(call.regions, self._compute.mark())

    def _update_in_slot(self, call: Call) -> None:
        for region in call.regions:
            if region in self._slots.pending:
                self._slots.pending.remove(region)
                down = self._states.update_in_slot(region)
                self._slots.used(self._slots.cargo_of(call.regions), (), (down,))
