"""What the states of a model must cost, computed from shapes alone, and what an engine says that it holds."""

from __future__ import annotations

from torch import Tensor, nn

from offload import Engine
from tests.engine.reference import Batch, LossFunction

ALIGNMENT, SHARD = 128, 2048
"""Elements: where a parameter may begin, and of what a region is a multiple."""


def elements(*modules: nn.Module) -> int:
    """Return the elements of one region that holds all the modules' parameters."""
    parameters = {id(p): p for module in modules for p in module.parameters()}
    return up(sum(up(p.numel(), ALIGNMENT) for p in parameters.values()), SHARD)


def up(size: int, multiple: int) -> int:
    return (size + multiple - 1) // multiple * multiple


def tier_bytes(engine: Engine, tier: str) -> dict[str, int]:
    """Return what a tier holds, by name."""
    return {name: size for where, name, size in engine.allocations if where == tier}


def held_in_step(engine: Engine, batch: Batch, loss_of: LossFunction) -> dict[str, int]:
    """Take a step; return what the device holds between its forward and its backward."""
    held: dict[str, int] = {}

    def loss_fn(outputs: Tensor, rows: Batch) -> Tensor:
        if outputs.requires_grad:
            held.clear()
            held.update(tier_bytes(engine, "device"))
        return loss_of(outputs, rows)

    engine.step(batch, loss_fn=loss_fn)
    return held
