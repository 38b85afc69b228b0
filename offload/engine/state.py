"""Components of an engine: three owners, each built from those before it, and released together by `close`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from offload.distributed.comm import Comm
from offload.engine.flow import Flow
from offload.engine.memory import Memory
from offload.engine.units.find import Splitting, UnitCandidate
from offload.engine.weights import Weights
from offload.layout.regions import ParameterInfo, Region
from offload.planning.plan import Plan
from offload.planning.settings import Settings
from offload.tiers.counters import Counters


class EngineState:
    """A model with streamed parameters."""

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        infos: list[ParameterInfo],
        candidates: Sequence[UnitCandidate],
        regions: Sequence[Region],
        splitting: Splitting,
        plan: Plan,
        counters: Counters,
        comm: Comm,
    ) -> None:
        dtypes = [parameter.dtype for _, parameter in model.named_parameters()]
        self.memory = Memory(regions, infos, settings, plan, counters, comm)
        self.weights = Weights(self.memory, regions, infos, dtypes, settings)
        self.flow = Flow(model, candidates, splitting, self.memory, self.weights, settings)

    def close(self, restore: bool) -> None:
        """Undo the rerouting, restore real parameters with `restore`, and free the tiers."""
        self.flow.leave_model(restore)
        self.memory.end_lanes()  # before any memory is freed: a copy may still use it
        self.flow.runner.close()
        self.weights.free()
        self.memory.free()
        self.flow.recovery.is_closed = True
