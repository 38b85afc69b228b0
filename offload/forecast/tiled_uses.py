"""Which modules of a model on `meta` would run over tiles of the sequence: tried on stand-ins of its blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from offload.engine.units.arguments import Arguments, run_over_copies
from offload.engine.units.find import Candidate
from offload.engine.units.row_trials import RowTrials
from offload.engine.units.tiles import TiledForward, Tiles

ROWS = 2
"""Of a batch whose uses are noted."""


class TiledUses:
    """Finds tiles of blocks by the engine's own trials, and runs uses over tiles of so many tokens."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._noted: dict[Hashable, tuple[nn.Module, Arguments]] = {}
        self._found: dict[Hashable, Tiles] = {}

    def note(self, kind: Hashable, unit: Candidate, arguments: Arguments) -> None:
        """Note a use of a kind, of a few rows and tokens."""
        if unit.is_block and kind not in self._noted:
            self._noted[kind] = _stand_in(unit.module), arguments

    def find(self) -> None:
        """Find out what may run over tiles in uses of the kinds that were noted."""
        for kind, (stand_in, arguments) in self._noted.items():
            try:
                self._found[kind] = _find(stand_in, arguments)
            except Exception:
                self._found[kind] = Tiles(())
        self._noted.clear()

    def forward(self, kind: Hashable, unit: Candidate, own: Callable[..., Any]) -> Callable[..., Any]:
        """Return what runs in uses of a kind."""
        modules, tiles = dict(unit.module.named_modules()), self._found.get(kind, Tiles(()))
        found = [replace(rows, module=modules[rows.name]) for rows in tiles.modules]
        return TiledForward(own, found, self._size, "cpu") if found else own


def _find(stand_in: nn.Module, arguments: Arguments) -> Tiles:
    """Return what may run over tiles in a block, by its stand-in, in a use like this."""

    def run(forward: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return run_over_copies(forward, arguments, tensors, arguments.others).tensors

    with torch.random.fork_rng(()):
        tensors = [_filled(t).requires_grad_(t.requires_grad) for t in arguments.tensors]
        trials = RowTrials(stand_in, run, lambda _: False, lambda: [torch.get_rng_state()])
        return trials.find(stand_in.forward, tensors, ROWS)


def _stand_in(block: nn.Module) -> nn.Module:
    """Return a copy of a module with weights on the CPU, each of which takes the memory of one row: that is enough to
    see which rows of a result hang on which of an input.
    """
    found, random = copy.deepcopy(block), torch.get_rng_state()
    for module in found.modules():
        module.__dict__.pop("forward", None)
        for name, weight in module._parameters.items():
            if weight is not None:
                values = _filled(weight[(0,) * (weight.dim() - 1)] if weight.dim() > 1 else weight) * 0.1
                module._parameters[name] = nn.Parameter(values.expand(weight.shape), weight.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _filled(buffer) if buffer.is_meta else buffer
    torch.set_rng_state(random)
    return found


def _filled(like: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU with numbers: random ones, true, or zeros."""
    if like.is_floating_point():
        return torch.randn(like.shape, dtype=like.dtype, device="cpu")
    return torch.full(like.shape, like.dtype == torch.bool, dtype=like.dtype, device="cpu")
