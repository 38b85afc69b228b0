"""Scripts that read weights from a model while an engine has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from offload.engine.own_loop import OwnLoop
from offload.engine.state import EngineState
from offload.errors import ConfigError
from offload.layout.planes import DTYPES
from offload.layout.regions import ParameterInfo
from offload.telemetry.counters import Counters


class Reading:
    """Answers what hangs in a model: a parameter at a time, as it is after every update so far."""

    def __init__(self, state: EngineState, counters: Counters, own_loop: OwnLoop) -> None:
        self._state, self._recovery, self._counters, self._own_loop = state, state.recovery, counters, own_loop
        self._given: Mapping[str, torch.Tensor] = {}
        state.hold.ask(self)

    @contextmanager
    def given(self, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Within, whoever reads one of these parameters is given a copy of these values."""
        self._given = values
        try:
            yield
        finally:
            self._given = {}

    def has_gradients(self) -> bool:
        """Return whether an own loop's step has gradients."""
        return self._own_loop.has_gradients()

    def read(self, info: ParameterInfo) -> torch.Tensor:
        """Return a fresh copy of a parameter as the device uses it, on the CPU.

        Not collective, since a script may well read on one rank alone: it asks no other.

        Raises:
            ConfigError: the engine is at work, or other ranks have parts of the weights.
            TornError: the states belong to no step.
        """
        state, recovery = self._state, self._recovery
        if info.name in self._given:
            return self._given[info.name].to(DTYPES[info.compute], copy=True)
        recovery.check_open()
        recovery.recover()
        if not recovery.is_idle:
            raise ConfigError(
                f"{info.name} was read while the engine is at work, where the recording pass had seen nobody read it: "
                "by a loss_fn that had not read it in its first call, or in the backward of a term that was made of it "
                "outside of the model's forward, where its gradient would be lost. Make such a term in the loss_fn "
                "of engine.step, from the first call on, or of parameter.detach(). (After an interrupt, make the "
                "engine's next call first, which gives up what was left half done.)"
            )
        recovery.check_sound()
        if state.plan.layout.sharding.gathers:
            raise ConfigError(
                f"{info.name} was read from the model on rank {state.comm.rank}, and its weights are cut over "
                f"{state.comm.size} ranks. Call engine.named_parameters() or engine.export(folder) on all of them, or "
                "set offload.zero_stage to 2 at most, where each rank has all weights."
            )
        with torch.inference_mode(False), recovery.working(), self._counters.unchanged():
            state.updates.flush()
            state.lanes.drain_updates()  # its own is waited for by its fence; where another's fails, there is no step
            return state.store.values.read_here(info.index)
