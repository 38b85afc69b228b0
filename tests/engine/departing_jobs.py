"""What ranks do in test_ranks_departures.py: steps in which some of them call their units as no rank was recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import transformers as t
from torch import Tensor, nn

from offload import Engine
from offload.distributed.comm import Comm
from offload.distributed.joining import open_comm
from tests.engine.device import own_device
from tests.engine.families import GROUPED, SPECIAL, build, llama
from tests.engine.handmade import WORDS, Block, Stack, cross_entropy
from tests.engine.ranks_child import JOB
from tests.engine.reference import Batch, LossFunction

RARE = 5
"""A word that decides how the blocks of `Sometimes` are called."""


def mistral() -> nn.Module:
    return t.MistralForCausalLM(t.MistralConfig(**GROUPED | SPECIAL, sliding_window=16))


class Gate(Block):
    def forward(self, h: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(h if gate is None else h * gate[:, None, None])


class Sometimes(Stack):
    """Its blocks get another argument where the last row of the batch begins with a rare word: what no sample of its
    first rows shows."""

    def __init__(self) -> None:
        super().__init__(Gate, depth=2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        extra = (torch.linspace(0.5, 1.5, len(x), device=x.device),) if x[-1, 0] == RARE else ()
        for block in self.blocks:
            h = block(h, *extra)
        return self.head(h)


def text(seed: int, rank: int, length: int, padded: int = 0, rows: int = 2) -> dict[str, Tensor]:
    """Return rows of tokens; with `padded` so many of the last one are padding."""
    ids = torch.randint(3, 60, (rows, length), generator=torch.Generator().manual_seed(10 * seed + rank))
    mask, labels = torch.ones_like(ids), ids.clone()
    if padded:
        mask[-1, -padded:], labels[-1, -padded:] = 0, -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def rare(seed: int, rank: int) -> dict[str, Tensor]:
    x = torch.randint(RARE + 1, WORDS, (4, 6), generator=torch.Generator().manual_seed(10 * seed + rank))
    x[-1, 0] = RARE if rank == 0 and seed else RARE + 1
    return {key: value.to(own_device()) for key, value in {"x": x, "labels": x.flip(1)}.items()}


@dataclass(frozen=True)
class Departing:
    """A model, and the batch of (step, rank)."""

    make: Callable[[], nn.Module]
    batch: Callable[[int, int], dict[str, Tensor]]
    loss_fn: LossFunction | None = None


CASES = {
    "short rows, padding on one rank": Departing(llama, lambda step, rank: text(step, rank, 3, padded=1 - rank)),
    "a window that one rank fills": Departing(mistral, lambda step, rank: text(step, rank, 8 if rank else 40)),
    "padding, then a window, each on another rank": Departing(
        mistral, lambda step, rank: text(step, rank, 24 if rank and step > 1 else 3, padded=step and 1 - rank)
    ),
    "one rank has a single micro-batch": Departing(
        mistral, lambda step, rank: text(step, rank, 8 if rank else 40, rows=1 + (rank + step) % 2)
    ),
    "what its own first rows do not show": Departing(Sometimes, rare, cross_entropy),
}
NUM_STEPS = 3


@dataclass
class Found:
    """Loss, norm and tokens of every step, and the loss of an evaluation on its batch before it."""

    steps: list[tuple[float, float, int | None]] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)


def departing(names: Sequence[str], stages: Sequence[int], evaluates: bool = False) -> list[Found]:
    """Train in micro-batches of one row, one case after another."""
    with open_comm(times=JOB) as comm:
        return [_train(comm, CASES[name], stage, evaluates) for name in names for stage in stages]


def _train(comm: Comm, case: Departing, stage: int, evaluates: bool) -> Found:
    engine, found = Engine(build(case.make), micro_batch_size=1, zero_stage=stage, comm=comm), Found()
    for step in range(NUM_STEPS):
        batch = case.batch(step, comm.rank)
        if evaluates:
            found.evaluated.append(engine.evaluate(batch, case.loss_fn).item())
        result = engine.step(batch, case.loss_fn)
        found.steps.append((result.loss.item(), result.grad_norm, result.tokens))
    engine.close()
    return found


def other_ways() -> list[float]:
    """One rank is alone in what is new to it: a loss of its own code, a mode of its modules, an own loop's argument."""

    def first(outputs: Tensor, batch: Batch) -> Tensor:
        return cross_entropy(outputs, batch)

    def second(outputs: Tensor, batch: Batch) -> Tensor:
        return cross_entropy(outputs, batch)

    with open_comm(times=JOB) as comm:
        engine = Engine(build(lambda: Stack(Gate)), comm=comm)
        losses = [first, second if comm.rank else first]
        found = [engine.step(rare(0, comm.rank), loss_fn).loss.item() for loss_fn in losses]
        if comm.rank:
            engine.model.blocks[0].norm.eval()
        found.append(engine.step(rare(0, comm.rank), first).loss.item())
        for step in range(2):
            batch = rare(0, comm.rank)
            loss = cross_entropy(engine.model(batch["x"]) if step and comm.rank else engine.model(x=batch["x"]), batch)
            engine.backward(loss)
        found.append(engine.update().loss.item())
        engine.close()
    return found
