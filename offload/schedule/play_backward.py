"""A step of forward and backward, played."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offload.lanes.ticket import Fence, Ticket
from offload.layout.regions import Region
from offload.schedule.play import Call, Engine, Play
from offload.schedule.virtual_inputs import VirtualInputs
from offload.schedule.virtual_states import Seconds, taken


class PlayBackward(Play):
    """As of `offload.engine.methods.backward`, `GradientFlow` and `Updates`."""

    def __init__(self, calls: Sequence[Call], engine: Engine, seconds: Mapping[str, Seconds]) -> None:
        super().__init__(calls, engine, seconds)
        self._inputs = VirtualInputs(calls, engine, seconds, self._states, self._lanes, self._compute)
        self._order: list[Region] = []  # of updates, in the last step
        self._landed: list[tuple[Region, Fence]] = []
        self._tickets: list[Ticket] = []
        self._updates_at_once = False

    def step(self) -> None:
        if self._engine.learns:
            self._begin(learns=True)
            self._pass(learns=True)
            self._land_rest(learns=True)
            self._lanes.wait(self._tickets)
            self._executor.end()
        self._begin(learns=False)
        self._pass(learns=False)
        self._end()

    # -- passes ----------------------------------------------------------------------------------------------

    @property
    def _is_immediate(self) -> bool:
        return self._updates_at_once and self._engine.clip != "speculative"

    def _begin(self, learns: bool) -> None:
        clip = self._engine.clip
        self._landed, self._tickets = [], []
        self._updates_at_once = not learns and (self._engine.learns or clip != "deferred") and not self._engine.delays
        self._slots.settle()
        self._executor.begin("step", wraps=self._is_immediate)

    def _pass(self, learns: bool) -> None:
        for number, call in enumerate(self._calls):
            self._inputs.put_away(number, call)
            self._forward(call)
        self._read_early()
        for number in reversed(range(len(self._calls))):
            self._backward(number, self._calls[number], learns)

    def _forward(self, call: Call) -> None:
        if not call.regions:
            self._compute.run(call.forward_s, call.forward_host_s)
            return
        self._executor.enter(call.regions, False)
        self._compute.run(call.forward_s, call.forward_host_s)
        self._executor.leave(call.regions, self._compute.mark())

    def _backward(self, number: int, call: Call, learns: bool) -> None:
        if not call.regions:
            self._compute.run(call.backward_s, call.backward_host_s)
            return
        self._executor.enter(call.regions, True)
        passing = [r for r in call.regions if r.trainable and r.index not in self._engine.lasting]
        sizes = [r.numel * (2 if r.is_bf16 and not self._engine.wide else 4) for r in passing]
        stretch = taken(self._states.buffer, sum(sizes)) if passing and sum(sizes) else None
        if stretch is not None:
            self._compute.compute_after(stretch.fills)
        for part in range(call.num_parts):
            self._inputs.bring_back(number, call, part)
            self._compute.run(call.backward_s / call.num_parts, call.backward_host_s / call.num_parts)
        if stretch is not None:
            for region in passing:
                self._land(region, stretch.fence, learns)
            stretch.is_open = False
        self._executor.leave(call.regions, self._compute.mark())

    # -- gradients and updates -------------------------------------------------------------------------------

    def _read_early(self) -> None:
        """The backward begins: read what is updated first, if it waits for the norm."""
        engine = self._engine
        on_disk = any("gradients" in engine.layout.of(region) for region in engine.regions)
        if engine.clip == "deferred" and not engine.delays and not engine.learns and not on_disk:
            for region in self._order:
                if not self._states.lend_early(region):
                    break

    def _land(self, region: Region, source: Fence, learns: bool) -> None:
        if learns:
            return
        fence, tickets = self._states.land(region, source)
        self._tickets += tickets
        self._landed.append((region, fence))
        if self._updates_at_once:
            self._update(region, fence, publishes=self._is_immediate)

    def _land_rest(self, learns: bool) -> None:
        """The backward is over: land what waited on the device."""
        for region in self._engine.regions:
            if region.trainable and region.index in self._engine.lasting:
                self._land(region, Fence("lasting gradients"), learns)

    def _end(self) -> None:
        """As of `Updates.apply` and `Steps.end`."""
        engine, first = self._engine, self._executor.first_uses()
        self._land_rest(learns=False)
        if self._is_immediate:
            self._go_on(wraps=not engine.learns)
        self._lanes.wait([*self._tickets, *self._compute.mark()])
        ranked = sorted(self._landed, key=lambda landed: self._rank(landed[0], first))
        if self._updates_at_once and engine.clip == "speculative":
            # All but the last one were updated with the norm so far.
            for region, fence in ranked if engine.corrects else ():
                if region is not self._landed[-1][0]:
                    self._update(region, fence, publishes=False)
            for region, _ in ranked if engine.layout.sharding.publishes else ():
                for number in range(len(self._states.of[region.index].tiles)):
                    self._states.publish(region, number)
        elif not self._updates_at_once:
            due = list(reversed(ranked)) if engine.delays else ranked
            self._due, self._order = dict(due), [region for region, _ in due]
            self._slots.invalidate(self._due)
            self._show()
        if not self._is_immediate:
            self._go_on(wraps=False)
            self._submit_due()
        self._compute.run(0.0, engine.step_host_s)
        self._slots.settle()

    def _show(self) -> None:
        """Where updates are late, the next pass computes with the weights from before those that are due."""
        if self._engine.delays:
            for region in self._due:
                for tile in self._states.of[region.index].held:
                    tile.show(True)
