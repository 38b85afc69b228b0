"""A small model with an engine plan and the work in a step, for forecast tests and benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from offload.distributed.comm import Comm
from offload.engine.prepare import EnginePlan, prepare
from offload.extras.plan.workload import Cost, UnitWork, Workload
from offload.planning.settings import Settings

WORDS, ROWS, LENGTH = 64, 8, 16


class Block(nn.Module):
    """Residual block with a hidden layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.down(functional.gelu(self.up(self.norm(h))))


class Stack(nn.Module):
    """Embedding, blocks, a resident norm and a head."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(WORDS, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def loss_of(outputs: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss for predicting the input tokens."""
    return functional.cross_entropy(outputs.flatten(0, 1).float(), batch["x"].flatten())


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    """Return batches with random tokens [ROWS, LENGTH]."""
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)} for _ in range(count)]


def planned(model: nn.Module, settings: Settings, comm: Comm | None = None) -> EnginePlan:
    """Plan for a model, as an engine does. Collective."""
    return prepare(model, settings, comm or Comm())


def work(name: str | None, forward_s: float, backward_s: float, input_bytes: int = 0, saved_bytes: int = 0) -> UnitWork:
    """Return the work for one use of a unit. One floating-point operation takes one second."""
    forward, backward = Cost(forward_s, 0, 0), Cost(backward_s, 0, 0)
    return UnitWork(name, forward, backward, input_bytes, saved_bytes, 0, 0, keeps_graph=not saved_bytes)


def workload(width: int, depth: int, settings: Settings, seconds: float = 0.001, kept_bytes: int = 1) -> Workload:
    """Return the work in a `Stack` step, computed from shapes, with `seconds` per use. `kept_bytes`: size of a block's
    autograd graph if saved.
    """
    rows = ROWS // settings.passes
    parts = rows // (settings.micro_batch_size or rows)
    inputs = rows // parts * LENGTH * width * (2 if settings.precision == "bf16" else 4)
    blocks = [work(f"blocks.{number}", seconds, 2 * seconds, inputs, kept_bytes) for number in range(depth)]
    first = replace(work("embedding", seconds, seconds, rows // parts * LENGTH * 8), reads_weights=False)
    calls = first, *blocks, work("head", seconds, seconds, inputs)
    return Workload(calls, parts, rows * LENGTH, num_passes=settings.passes)
