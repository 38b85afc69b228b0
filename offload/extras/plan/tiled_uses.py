"""Find `meta` modules able to run over sequence tiles, by trial runs with small CPU copies of the blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from offload.engine.units.arguments import Arguments, run_over_copies
from offload.engine.units.find import UnitCandidate
from offload.engine.units.trial import Trial
from offload.extras.large.row_trials import RowTrials
from offload.extras.large.tiles import TiledForward, Tiles
from offload.tiers.device import CpuDevice
from offload.tiers.ledger import Ledger

ROWS = 2
"""Batch rows in recorded uses."""


class TiledUses:
    """Finds tileable modules in blocks with the engine's trial runs, and runs uses over tiles of `size` tokens."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._samples: dict[Hashable, tuple[nn.Module, Arguments]] = {}
        self._tiles: dict[Hashable, Tiles] = {}

    def record(self, signature: Hashable, unit: UnitCandidate, arguments: Arguments) -> None:
        """Record the first use for each kind. Inputs have only a few rows and tokens."""
        if unit.is_block and signature not in self._samples:
            self._samples[signature] = _build_stand_in(unit.module), arguments

    def find(self) -> None:
        """Run the tile search for every recorded kind. A failed trial run means no tiles."""
        for signature, (stand_in, arguments) in self._samples.items():
            try:
                self._tiles[signature] = _find_tiles(stand_in, arguments)
            except Exception:
                self._tiles[signature] = Tiles(())
        self._samples.clear()

    def forward(self, signature: Hashable, unit: UnitCandidate, own: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward function for a use: tiled if the search was successful, else `own`."""
        modules, tiles = dict(unit.module.named_modules()), self._tiles.get(signature, Tiles(()))
        tiled_modules = [replace(rows, module=modules[rows.name]) for rows in tiles.modules]
        return TiledForward(own, tiled_modules, self._size, "cpu") if tiled_modules else own


class _StandIn:
    """A CPU copy of a block, in the roles of a unit and of the runner of a trial."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.modules = module, list(module.modules())
        self.device = CpuDevice(Ledger("device", None), copies_aside=False)

    def live(self) -> dict[int, nn.Parameter]:
        """Return all parameters."""
        return dict(enumerate(self.module.parameters()))

    def is_weight(self, _tensor: torch.Tensor) -> bool:
        """No tensor is over weights in a slot."""
        return False

    def run(
        self, _unit: object, arguments: Arguments, tensors: Sequence[torch.Tensor], others: Sequence[Any], forward: Any
    ) -> Arguments:
        """Run `forward` on other tensors."""
        return run_over_copies(forward, arguments, tensors, others)

    def restoring(self, _unit: object) -> AbstractContextManager[None]:
        """Restore nothing: the copy is thrown away."""
        return nullcontext()


def _find_tiles(block: nn.Module, arguments: Arguments) -> Tiles:
    """Return the tileable modules in a block, from trial runs on the CPU copy."""
    stand_in: Any = _StandIn(block)
    with torch.random.fork_rng(()):
        tensors = [_random_like(t).requires_grad_(t.requires_grad) for t in arguments.tensors]
        return RowTrials(Trial(stand_in, stand_in, arguments)).find(block.forward, tensors, ROWS)


def _build_stand_in(block: nn.Module) -> nn.Module:
    """Copy a block to the CPU with random weights. Each weight is one row, expanded to the full shape.

    Expanded weights are enough for the row trials: only the dependency between input rows and result rows matters.
    """
    stand_in, rng_state = copy.deepcopy(block), torch.get_rng_state()
    for module in stand_in.modules():
        module.__dict__.pop("forward", None)
        for name, weight in module._parameters.items():
            if weight is not None:
                values = _random_like(weight[(0,) * (weight.dim() - 1)] if weight.dim() > 1 else weight) * 0.1
                module._parameters[name] = nn.Parameter(values.expand(weight.shape), weight.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _random_like(buffer) if buffer.is_meta else buffer
    torch.set_rng_state(rng_state)
    return stand_in


def _random_like(like: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor with the same shape and dtype: random floats, True, or integer zeros."""
    if like.is_floating_point():
        return torch.randn(like.shape, dtype=like.dtype, device="cpu")
    return torch.full(like.shape, like.dtype == torch.bool, dtype=like.dtype, device="cpu")
