"""Required state sizes, computed from shapes alone, and sizes reported by an engine."""

from __future__ import annotations

from torch import Tensor, nn

from offload import Engine
from tests.engine.reference import Batch, LossFunction

ALIGNMENT, SHARD = 128, 2048
"""In elements: parameter alignment in a region, and divisor for the region size."""


def elements(*modules: nn.Module) -> int:
    """Return the size of one region for all the modules' parameters, in elements."""
    parameters = {id(p): p for module in modules for p in module.parameters()}
    return up(sum(up(p.numel(), ALIGNMENT) for p in parameters.values()), SHARD)


def up(size: int, multiple: int) -> int:
    return (size + multiple - 1) // multiple * multiple


def tier_bytes(engine: Engine, tier: str) -> dict[str, int]:
    """Return the allocated bytes in a tier, by allocation name."""
    return {name: size for where, name, size in engine.allocations if where == tier}


def held_in_step(engine: Engine, batch: Batch, loss_of: LossFunction) -> dict[str, int]:
    """Take a step. Return the device allocations in bytes, by name, between forward and backward."""
    held: dict[str, int] = {}

    def loss_fn(outputs: Tensor, rows: Batch) -> Tensor:
        if outputs.requires_grad:
            held.clear()
            held.update(tier_bytes(engine, "device"))
        return loss_of(outputs, rows)

    engine.step(batch, loss_fn=loss_fn)
    return held
