"""An engine over the flow of hooks, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from offload.accelerators import own_accelerator
from offload.distributed.comm import Comm
from offload.engine.hooked.flow import Flow
from offload.engine.loss.batch import Batch, map_tensors
from offload.engine.memory import Memory
from offload.engine.methods.method import Backward
from offload.engine.methods.result import StepResult
from offload.engine.prepare import prepare
from offload.engine.weights import Weights
from offload.planning.machines import ThisMachine
from offload.planning.settings import Settings
from offload.tiers.counters import Counters


class HookedEngine:
    """Trainer for `model`, whose parameters stay its own."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.model = model
        self.counters = Counters()
        comm = Comm()
        prepared = prepare(model, settings, comm, ThisMachine(own_accelerator(settings.device)), {})
        self._memory = Memory(prepared, self.counters, comm)
        self._weights = Weights(prepared, self._memory)
        self._flow = Flow(model, prepared, self._memory, self._weights)
        flow: Any = self._flow  # without what whole engines ask for beside
        self._method = Backward(flow, settings, flow, lambda: flow)

    def step(self, batch: Batch, loss_of: Callable[[nn.Module, Batch], torch.Tensor]) -> StepResult:
        """Train on a batch: forward, backward, update."""
        flow = self._flow
        batch = map_tensors(flow.device.copy_to_device, batch)
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        schedule_key = "step", *(tuple(tensor.shape) for tensor in tensors)
        flow.make_room(flow.plan.summed)
        flow.spare_memory.begin_step(sum(tensor.numel() for tensor in tensors))
        self._method.begin(schedule_key)
        loss = loss_of(self.model, batch)
        loss.backward()
        flow.uses.leave()
        return self._method.end(loss.detach(), 1, schedule_key)

    def values(self) -> dict[str, torch.Tensor]:
        """Return the master weights by name, fp32."""
        self._flow.updates.flush()
        return {info.name: self._flow.store.values.read(info.index) for info in self._flow.infos}

    def close(self) -> None:
        """Free all memory. The model has no weights afterwards."""
        self._memory.end_lanes()
        self._weights.free()
        self._memory.free()
