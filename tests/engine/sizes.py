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


class Elements:
    """Region sizes of a Llama in elements, from the shapes. Each is padded to a multiple for `size` ranks."""

    def __init__(self, model: nn.Module, size: int = 1) -> None:
        self._size = size
        base = model.model
        units = [base.embed_tokens, *base.layers, model.lm_head]
        self.trained, self.frozen = ([self._of(unit, kind) for unit in units] for kind in (True, False))
        self.norm = self._of(base.norm, True)
        self.all_trained, self.all_frozen = sum(self.trained) + self.norm, sum(self.frozen)

    def _of(self, unit: nn.Module, is_trained: bool) -> int:
        sizes = [up(p.numel(), ALIGNMENT) for p in unit.parameters() if p.requires_grad == is_trained]
        return up(sum(sizes), SHARD * self._size)

    @property
    def fetched(self) -> int:
        """Elements fetched in a step without prefetch, if all parameters train.

        Every unit is fetched before forward and before backward. Exceptions: the head stays in the slot, the embedding
        backward reads no weights, and resident units are copied once.
        """
        return 2 * sum(self.trained) - self.trained[0] - self.trained[-1] + self.norm


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
