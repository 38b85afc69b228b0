"""Rank jobs for tests/engine/test_shared_sequences.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from offload import AdamW, Engine, Placement
from offload.distributed.comm import Comm
from offload.distributed.joining import open_comm
from offload.errors import ConfigError, OffloadError
from tests.cases.models import build, gpt2, mamba, mixtral
from tests.cases.run import small
from tests.engine.ranks_child import JOB

Batch = Mapping[str, torch.Tensor]
SMOOTH = AdamW(lr=0.05, betas=(0.9, 0.99), eps=1.0, weight_decay=0.1)
"""An update as precise as the gradients. See tests/engine/ranks_child.py."""


def still_gpt2() -> nn.Module:
    return gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def with_router_loss() -> nn.Module:
    return mixtral(output_router_logits=True)


class Blurred(nn.Module):
    """Adds the previous token, halved, to each token before the block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.block(hidden + 0.5 * nn.functional.pad(hidden[:, :-1], (0, 0, 1, 0)), *args, **kwargs)


def blurred_gpt2() -> nn.Module:
    model: Any = still_gpt2()
    model.transformer.h[1] = Blurred(model.transformer.h[1])
    return model


MIXING = {"a router's loss": with_router_loss, "linear attention": mamba, "a shift of tokens": blurred_gpt2}
"""Models with operations across tokens that ranks cannot share."""


@dataclass
class Shared:
    """Results from one run on one rank.

    steps: (loss, norm, targets) per step; evaluated: loss after the last step; exchanged: elements exchanged by
    attention in the last step; error: the error message, empty without one.
    """

    steps: list[tuple[float, float, int | None]] = field(default_factory=list)
    evaluated: float = 0.0
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    exchanged: int = 0
    error: str = ""


def train(comm: Comm, make: Callable[[], nn.Module], batches: Sequence[Batch], **settings: Any) -> Shared:
    """Train on all batches but the last, and evaluate the last.

    All ranks in a group get the same rows. `alike=False`: ranks in one group get different batches.
    """
    placement, size, alike = settings.pop("placement", {}), settings["sequence_parallel"], settings.pop("alike", True)
    found = Shared()

    def own(batch: Batch) -> Batch:
        (group, place), num_groups = comm.group_of(size), comm.size // size
        rows = len(batch["labels"])
        mine = {key: its[rows * group // num_groups : rows * (group + 1) // num_groups] for key, its in batch.items()}
        return mine if alike or not place else {**mine, "input_ids": mine["input_ids"].flip(1)}

    try:
        with Engine(build(make), SMOOTH, Placement(**placement), comm=comm, **settings) as engine:
            *trained, last = batches
            for batch in trained:
                result = engine.step(own(batch))
                found.steps.append((result.loss.item(), result.grad_norm, result.tokens))
                found.exchanged = engine.counters.all_to_all_elements
            found.evaluated = engine.evaluate(own(last)).item()
            few = {"input_ids": last["input_ids"][:1, :5].to(engine.device)}
            with torch.no_grad():
                assert engine.model(**few).logits.shape[:2] == (1, 5), "a caller's own rows are whole"
            found.weights = dict(engine.named_parameters())
            with pytest.raises(ConfigError, match="your own training loop, where the engine cannot split rows"):
                engine.model(**few)
    except OffloadError as error:
        found.error = f"{type(error).__name__}: {error}"
    return found


def trained(runs: Sequence[Mapping[str, Any]]) -> list[Shared]:
    """Train the runs one after another over one comm."""
    with open_comm(times=JOB) as comm, small():
        return [train(comm, **run) for run in runs]
