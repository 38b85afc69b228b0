"""Stages of one's own, for cases of the table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from offload.engine.units.stages import Host, Stage
from offload.engine.units.unit import Unit
from offload.engine.units.use import Forward, Use
from offload.modules import forwards_replaced
from offload.planning.settings import Settings


def twice(forward: Forward) -> Forward:
    """Return a forward that runs `forward` on its own result."""

    def run(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(forward(hidden, *args, **kwargs), *args, **kwargs)

    return run


def _blocks_twice(model: nn.Module) -> dict[nn.Module, Forward]:
    blocks = [block for row in model.modules() if isinstance(row, nn.ModuleList) for block in row]
    return {block: twice(block.forward) for block in blocks}


def run_twice(model: nn.Module) -> None:
    """Make a model in plain PyTorch compute as with `Twice`."""
    for block, forward in _blocks_twice(model).items():
        block.forward = forward


class Twice(Stage):
    """Runs each block twice, one after the other: a model of twice the depth with the same weights."""

    @classmethod
    def over(cls, inner: Stage, host: Host, settings: Settings) -> Stage:
        return cls(inner)

    @classmethod
    @contextmanager
    def in_memory(cls, model: nn.Module, settings: Settings) -> Iterator[None]:
        with forwards_replaced(_blocks_twice(model)):
            yield

    def forward_of(self, unit: Unit, use: Use) -> Forward:
        forward = self.inner.forward_of(unit, use)
        return twice(forward) if unit.is_block and not self.is_paused else forward
