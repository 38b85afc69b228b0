"""Forward passes side by side: unit by unit, so that a unit's weights come up once for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from offload.engine.methods.perturbed import Perturbed
from offload.engine.methods.slot_updates import SlotUpdates
from offload.engine.state import EngineState
from offload.engine.units.arguments import deliver, received
from offload.engine.units.condition import Dicts
from offload.engine.units.drawn import Drawn
from offload.engine.units.runner import together
from offload.engine.units.surroundings import Surroundings
from offload.engine.units.unit import Unit
from offload.lanes.lockstep import Lockstep


class InterleavedForwards:
    """Runs a function that calls the model several times at once: each pass goes on to the end of its next unit, then
    the other passes do (ZO2, arXiv:2503.12668, on modules as they are). All of them draw the same random
    numbers, and none sees what another's code has noted in modules above the units.
    """

    def __init__(self, state: EngineState, pending: SlotUpdates, perturbed: Perturbed) -> None:
        self._state, self._pending, self._perturbed = state, pending, perturbed
        self._lockstep: Lockstep[torch.Tensor] = Lockstep(self._switched)
        self._residents: list[Unit] = []
        self._above: list[nn.Module] = []
        self._kept: dict[int, _PassState] = {}
        self._begin: _PassState | None = None
        self._last: _PassState | None = None  # what was last put back
        self._open: Unit | None = None  # whose weights are up
        self._have_run: set[int] = set()
        self._num_passes = 0

    def run(self, function: Callable[[], torch.Tensor], num_passes: int) -> list[torch.Tensor]:
        """Return what each pass has returned, in order."""
        state = self._state
        self._residents = [unit for unit in state.units if unit.resident]
        inside = {module for unit in state.units if not unit.resident for module in unit.modules}
        self._above = [module for module in state.model.modules() if module not in inside]
        self._num_passes, self._open, self._kept = num_passes, None, {}
        self._begin = self._last = _PassState(state, self._above)
        passes = [self._pass(function) for _ in range(num_passes)]
        with state.router.diverted(self._call):
            self._move_residents(0)
            try:
                results = self._lockstep.run(passes)
                self._leave()
            finally:
                self._kept, self._begin, self._last = {}, None, None
                for unit in self._residents:
                    unit.install(unit.live())
        return results

    def free(self) -> None:
        """The engine closes: no thread stays."""
        self._lockstep.close()

    def _pass(self, function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Return the function as it runs in a thread of its own: with what torch keeps for each as it is in this."""
        state = self._state
        surroundings, enter = Surroundings(state.device.torch_device.type), state.device.entered()

        def run() -> torch.Tensor:
            with enter(), torch.no_grad():
                return surroundings.run(function)

        return run

    def _move_residents(self, number: int) -> None:
        """Units that stay on the device have the weights of the pass whose turn it is."""
        for unit in self._residents:
            self._perturbed.enter(unit, number)

    # -- a unit's call ---------------------------------------------------------------------------------------

    def _call(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit's forward for the pass whose turn it is, as the module would."""
        runner, device = self._state.runner, self._state.device
        arguments, containers = received(args, kwargs)
        runner.count(unit, arguments)
        rows, results = runner.rows_of(unit), []
        # Ranks start from the same seed, and must not draw the same.
        ambient = device.random_state() if len(rows) > 1 or runner.has_peers else None
        self._enter(unit)
        self._perturbed.enter(unit, self._lockstep.current)
        try:
            for number, span in enumerate(together(runner, unit, rows)):
                if ambient is not None:
                    runner.seed(unit, number)
                inputs = unit.traits.cut_inputs(arguments.tensors, span)
                others = unit.traits.cut_others(arguments.others, span)
                forward = runner.forwards.of(unit, runner, arguments, inputs, others)
                result = runner.run(unit, arguments, inputs, others, forward)
                result.tensors[:] = [runner.own(t) for t in result.tensors]
                results.append(result)
        finally:
            unit.install(unit.resting)
            if ambient is not None:
                device.set_random_state(ambient)
        delivered = deliver(results[0], runner.join(unit, results), containers)
        del result, results  # other passes have their turn now, and need the memory
        if len(self._have_run) == self._num_passes:
            self._leave()
        if self._state.way.interleaves:
            self._lockstep.turn()
        return delivered

    def _enter(self, unit: Unit) -> None:
        """Bring a unit's weights up, unless another pass has and this one has not yet run over them."""
        number = self._lockstep.current
        if self._open is not unit or number in self._have_run:  # a pass may go another way than the others
            self._leave()
            self._state.runner.enter(unit)
            self._pending.make(unit.regions)
            self._open, self._have_run = unit, set()
        self._have_run.add(number)

    def _leave(self) -> None:
        if self._open is not None:
            self._state.runner.leave()
            self._open = None

    def _switched(self, leaves: int, comes: int) -> None:
        """Another pass has its turn: all is as it was when it had it last."""
        assert self._begin is not None
        self._kept[leaves] = _PassState(self._state, self._above, self._last)
        self._last = self._kept.get(comes, self._begin)
        self._last.put_back(self._kept[leaves])
        self._move_residents(comes)


class _PassState:
    """What a pass has of its own between two of its turns: generators, micro-batches, and attributes of modules, in
    which its code makes notes. (Hooks that it has registered are everybody's, and so are flags that say so.)
    """

    def __init__(self, state: EngineState, modules: list[nn.Module], last: _PassState | None = None) -> None:
        """`last`: what was put back last, of which most is unchanged."""
        self._state = state
        self._random = state.device.random_state()
        self._drawn: Drawn = Drawn.so_far(None if last is None else last._drawn)
        self._go_on = state.runner.interrupt_pass()
        is_same = last is not None and last._attributes.are_as_then
        self._attributes: Dicts = last._attributes if last is not None and is_same else Dicts(map(vars, modules))

    def put_back(self, now: _PassState) -> None:
        """All is as it was. `now`: how it is."""
        state = self._state
        state.device.set_random_state(self._random)
        if self._drawn is not now._drawn:
            self._drawn.put_back()
        self._go_on()
        if self._attributes is now._attributes or not state.way.interleaves:
            return
        for live, then in self._attributes.pairs():
            for key in [key for key in live.keys() | then.keys() if live.get(key) is not then.get(key)]:
                if not (key[:1] == "_" and isinstance(live.get(key), bool | None)):  # of everybody's hooks
                    if key in then:  # a chunked head puts another `forward` there for a while
                        live[key] = then[key]
                    else:
                        del live[key]
