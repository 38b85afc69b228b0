"""Components of an engine: three owners, each built from those before it, and released together by `close`."""

from __future__ import annotations

from torch import nn

from offload.distributed.comm import Comm
from offload.engine.flow import Flow
from offload.engine.memory import Memory
from offload.engine.prepare import EnginePlan
from offload.engine.weights import Weights
from offload.tiers.counters import Counters


class EngineState:
    """A model with streamed parameters."""

    def __init__(self, model: nn.Module, prepared: EnginePlan, counters: Counters, comm: Comm) -> None:
        self.memory = Memory(prepared, counters, comm)
        self.weights = Weights(prepared, self.memory)
        self.flow = Flow(model, prepared, self.memory, self.weights)

    def close(self, restore: bool) -> None:
        """Undo the rerouting, restore real parameters with `restore`, and free the tiers."""
        self.flow.leave_model(restore)
        self.memory.end_lanes()  # before any memory is freed: a copy may still use it
        self.flow.runner.close()
        self.weights.free()
        self.memory.free()
        self.flow.recovery.is_closed = True
