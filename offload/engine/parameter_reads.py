"""Reads by scripts: the engine answers when a script reads a model parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from offload.engine.flow import Flow
from offload.engine.foreign_writes import ForeignWrites
from offload.engine.own_loop import OwnLoop
from offload.errors import ConfigError
from offload.layout.planes import DTYPES
from offload.layout.regions import ParameterInfo


class ParameterReads:
    """Answers reads of the stand-in parameters in a model, one parameter at a time, with all updates applied."""

    def __init__(self, flow: Flow, own_loop: OwnLoop, foreign_writes: ForeignWrites) -> None:
        self._flow = flow
        self._recovery = flow.recovery
        self._own_loop = own_loop
        self._foreign_writes = foreign_writes
        self._answers: Mapping[str, torch.Tensor] = {}
        flow.ownership.connect(self)

    @contextmanager
    def answering(self, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Context: reading one of these parameters returns a copy from `values`."""
        self._answers = values
        try:
            yield
        finally:
            self._answers = {}

    def gradient(self, info: ParameterInfo) -> torch.Tensor | None:
        """Return a parameter's gradient in an own loop's step, in place; None: no gradient. See `OwnLoop.gradient`."""
        return self._own_loop.gradient(info)

    def drop_gradient(self, info: ParameterInfo) -> None:
        """Drop a parameter's used gradient. See `OwnLoop.drop_gradient`."""
        self._own_loop.drop_gradient(info)

    def is_busy(self) -> bool:
        """Return whether the engine is at work. A pass that failed halfway is given up, as by any other call."""
        self._recovery.recover()
        return not self._recovery.is_idle

    def read(self, info: ParameterInfo, dtype: torch.dtype) -> torch.Tensor:
        """Return a parameter as a new CPU copy, in the dtype used on the device, or in fp32 (master weights).

        Not collective, because a script may read on one rank only.

        Raises:
            ConfigError: the engine is busy, the weights are partitioned over ranks, or a script has written to this
                one on the device.
            TornError: the states belong to no step.
        """
        flow, recovery = self._flow, self._recovery
        if info.name in self._answers:
            return self._answers[info.name].to(dtype, copy=True)
        recovery.check_open()
        recovery.recover()
        if not recovery.is_idle:
            raise ConfigError(
                f"{info.name} was read during a pass, at a point where the recording pass did not read it: by a "
                "loss_fn that did not read it in its first call, or in the backward of a term computed outside the "
                "model's forward, where its gradient would be lost. Compute such a term in the loss_fn of "
                "engine.step, from the first call on, or from parameter.detach(). (After an interrupt, first make "
                "another engine call, which discards the unfinished pass.)"
            )
        recovery.check_sound()
        if flow.store.sharding.gathers:
            raise ConfigError(
                f"{info.name} was read from the model on rank {flow.comm.rank}, but its weights are partitioned over "
                f"{flow.store.sharding.size} ranks. Call engine.named_parameters() or engine.export(folder) on all "
                "ranks, or set --offload.zero_stage to 2 or less, where each rank has all weights."
            )
        with torch.inference_mode(False), recovery.working(), flow.counters.preserve():
            self._foreign_writes.check(info.index)
            flow.updates.flush()
            flow.lanes.drain_updates()  # also raises a failure in another parameter's update
            values = flow.store.values
            if dtype == DTYPES[info.compute]:
                return values.read_local(info.index)
            return values.read(info.index)
