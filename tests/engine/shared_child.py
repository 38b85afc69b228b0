"""What ranks do that share sequences: the jobs of tests/engine/test_shared_sequences.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from offload import Engine, Placement
from offload.distributed.joining import open_comm
from offload.errors import OffloadError
from tests.engine.families import build
from tests.engine.ranks_child import JOB, SMOOTH, small_tiles

Batch = dict[str, torch.Tensor]


@dataclass
class Shared:
    """What a run gave on one rank: loss, norm and tokens of each step; the loss of an evaluation after the last; the
    weights; the elements that were exchanged in attention in the last step, and the message of an error.
    """

    steps: list[tuple[float, float, int | None]] = field(default_factory=list)
    evaluated: float = 0.0
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    exchanged: int = 0
    error: str = ""


def train(comm: Any, make: Callable[[], nn.Module], batches: Sequence[Batch], **settings: Any) -> Shared:
    """Train on one batch after another, of which all ranks of a group are given the same rows; the batch that follows
    the last is evaluated.
    """
    placement, size = settings.pop("placement", {}), settings["sequence_parallel"]
    if placement.get("optimizer") == "nvme":
        placement = {**placement, "nvme_dir": settings.pop("folder")}
    (group, _), num_groups = comm.group_of(size), comm.size // size
    found = Shared()

    def own(batch: Batch) -> Batch:
        rows = len(batch["labels"])
        return {
            key: value[rows * group // num_groups : rows * (group + 1) // num_groups] for key, value in batch.items()
        }

    try:
        with Engine(build(make), SMOOTH, Placement(**placement), comm=comm, **settings) as engine:
            *trained, last = batches
            for step, batch in enumerate(trained):
                torch.manual_seed(step)
                result = engine.step(own(batch))
                found.steps.append((result.loss.item(), result.grad_norm, result.tokens))
                found.exchanged = engine.counters.all_to_all_elements
            found.evaluated = engine.evaluate(own(last)).item()
            found.weights = dict(engine.named_parameters())
    except OffloadError as error:
        found.error = f"{type(error).__name__}: {error}"
    return found


def trained(runs: Sequence[Mapping[str, Any]]) -> list[Shared]:
    """Train one after another, over one comm."""
    with open_comm(times=JOB) as comm, small_tiles():
        return [train(comm, **run) for run in runs]
