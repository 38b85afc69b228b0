"""Interleaved forwards: several passes advance unit by unit, so one weight fetch serves all passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from offload.engine.methods.method import StepHost
from offload.engine.units.arguments import deliver_result, receive_call
from offload.engine.units.call import run_without_backward
from offload.engine.units.snapshots import RngState, ThreadState
from offload.engine.units.state_snapshot import DictSnapshots
from offload.engine.units.unit import Unit
from offload.extras.zeroth.lockstep import Lockstep
from offload.extras.zeroth.perturbed import PerturbedWeights
from offload.extras.zeroth.slot_updates import SlotUpdates


class InterleavedForwards:
    """Runs a function with model calls several times at once (ZO2, arXiv:2503.12668, on unmodified modules).

    Each pass runs to the end of its next unit, then the other passes do. All passes draw equal random numbers.
    Attributes set by one pass in modules above the units are invisible to the others.
    """

    def __init__(self, host: StepHost, pending: SlotUpdates, perturbed: PerturbedWeights) -> None:
        self._host = host
        self._pending = pending
        self._perturbed = perturbed
        self._lockstep: Lockstep[torch.Tensor] = Lockstep(self._switch)
        self._residents: list[Unit] = []
        self._above: list[nn.Module] = []
        self._states: dict[int, _PausedPass] = {}
        self._last: _PausedPass | None = None  # the state restored last
        self._open: Unit | None = None  # the unit with fetched weights
        self._finished: set[int] = set()

    def run(self, function: Callable[[], torch.Tensor], num_passes: int) -> list[torch.Tensor]:
        """Return each pass's result, in order."""
        host = self._host
        self._residents = [unit for unit in host.units if unit.resident]
        # Modules inside of a streamed unit finish within a turn, so no pass sees the state of another there.
        inside = {module for unit in host.units if not unit.resident for module in unit.modules}
        self._above = [module for module in host.model.modules() if module not in inside]
        self._open = None
        self._last = _PausedPass(host, self._above)  # all passes begin with the same generators
        self._states = dict.fromkeys(range(num_passes), self._last)
        passes = [self._pass(function) for _ in range(num_passes)]
        with host.router.diverted(self._call):
            self._move_residents(0)
            try:
                results = self._lockstep.run(passes)
                self._leave()
            finally:
                self._states = {}
                self._last = None
                for unit in self._residents:
                    unit.install(unit.live())
        return results

    def free(self) -> None:
        """Stop all threads when the engine closes."""
        self._lockstep.close()

    def _pass(self, function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Wrap the function for a separate thread with the current thread's thread-local torch state."""
        host = self._host
        surroundings, enter = ThreadState(host.device.autocast_type), host.device.stream_entry()

        def run() -> torch.Tensor:
            # Stream and gradient mode belong to a thread.
            with enter(), torch.no_grad():
                return surroundings.run(function)

        return run

    def _move_residents(self, number: int) -> None:
        """Install pass `number`'s weights in the resident units."""
        for unit in self._residents:
            self._perturbed.enter(unit, number)

    # -- a unit's call ---------------------------------------------------------------------------------------

    def _call(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit's forward for the current pass, with the module's own result."""
        runner = self._host.runner
        arguments, containers = receive_call(args, kwargs)
        rows = runner.receive(unit, arguments)
        self._enter(unit)
        self._perturbed.enter(unit, self._lockstep.current)
        try:
            results = run_without_backward(unit, runner, rows, arguments)
        finally:
            unit.install(unit.placeholders)
        delivered = deliver_result(results[0], runner.join(unit, rows, results), containers)
        del results  # the other passes run next and need the memory
        # All passes have used the weights: the slot is free before the next unit comes.
        if len(self._finished) == len(self._states):
            self._leave()
        if self._host.execution_mode.interleaves:
            self._lockstep.turn()
        return delivered

    def _enter(self, unit: Unit) -> None:
        """Fetch a unit's weights, unless another pass has fetched them and this pass has not used them yet."""
        number = self._lockstep.current
        if self._open is not unit or number in self._finished:  # passes may take different paths
            self._leave()
            self._host.runner.enter(unit)
            self._pending.run(unit.regions)
            self._open = unit
            self._finished = set()
        self._finished.add(number)

    def _leave(self) -> None:
        if self._open is not None:
            self._host.runner.leave()
            self._open = None

    def _switch(self, leaving: int, entering: int) -> None:
        """Switch passes: save the state of pass `leaving`, restore the state of pass `entering`."""
        self._states[leaving] = _PausedPass(self._host, self._above, self._last)
        self._last = self._states[entering]
        self._last.put_back(self._states[leaving])
        self._move_residents(entering)


class _PausedPass:
    """State kept for a pass between two turns: generators, micro-batch position, and module attributes set by model
    code.

    Hooks registered by a pass, and the flags for hooks, are shared by all passes.
    """

    def __init__(self, host: StepHost, modules: list[nn.Module], last: _PausedPass | None = None) -> None:
        """`last`: the state restored last; unchanged parts are reused."""
        self._host = host
        self._random = host.device.random_state()
        random = None
        if last is not None:
            random = last._python_random
        self._python_random: RngState = RngState.capture(random)
        self._resume_pass = host.runner.interrupt_pass()
        self._attributes: DictSnapshots
        if last is not None and last._attributes.are_unchanged:
            self._attributes = last._attributes
        else:
            self._attributes = DictSnapshots(map(vars, modules))

    def put_back(self, current: _PausedPass) -> None:
        """Restore this state in place of the `current` one."""
        host = self._host
        host.device.set_random_state(self._random)
        if self._python_random is not current._python_random:
            self._python_random.put_back()
        self._resume_pass()
        if self._attributes is current._attributes or not host.execution_mode.interleaves:
            return
        for live, then in self._attributes.pairs():
            for key in [key for key in live.keys() | then.keys() if live.get(key) is not then.get(key)]:
                if not (key[:1] == "_" and isinstance(live.get(key), bool | None)):  # skips the shared hook flags
                    if key in then:  # a chunked head temporarily replaces `forward`
                        live[key] = then[key]
                    else:
                        del live[key]
