"""A batch makes one rank call units in an unrecorded order. All ranks then record again together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from offload import Engine
from offload.distributed.comm import Comm
from offload.distributed.joining import open_comm
from tests.cases.models import build, llama
from tests.engine.handmade import Stack, cross_entropy
from tests.engine.ranks import run
from tests.engine.ranks_child import JOB
from tests.engine.reference import Batch, LossFunction, count_labels, count_shifted
from tests.engine.test_departures import Gate, Sometimes, mistral, rare

pytestmark = pytest.mark.slow  # the quick run covers ranks by test_ranks.py and test_ranks_faults.py


def text(seed: int, rank: int, length: int, padded: int = 0, rows: int = 2) -> dict[str, Tensor]:
    """Return token rows. `padded`: number of padding tokens at the end of the last row."""
    ids = torch.randint(3, 60, (rows, length), generator=torch.Generator().manual_seed(10 * seed + rank))
    mask, labels = torch.ones_like(ids), ids.clone()
    if padded:
        mask[-1, -padded:], labels[-1, -padded:] = 0, -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


@dataclass(frozen=True)
class Departing:
    """A model, and a function (step, rank) for the batch."""

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
    """Loss, norm and tokens per step, and the evaluation loss on the batch before the step."""

    steps: list[tuple[float, float, int | None]] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)


def departing(names: Sequence[str], stages: Sequence[int], evaluates: bool = False) -> list[Found]:
    """Train in one-row micro-batches, case by case."""
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
    """One rank alone has a new loss function, module mode or model argument."""

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


def plain(name: str) -> tuple[float, float, int]:
    """Return loss, norm and targets of torch's first step: each micro-batch's mean, weighted by its targets."""
    case = CASES[name]
    model = build(case.make)
    batches = [{key: value.cpu() for key, value in case.batch(0, rank).items()} for rank in range(2)]
    parts = [
        {key: value[row : row + 1] for key, value in batch.items()}
        for batch in batches
        for row in range(len(batch["labels"]))
    ]
    counts, total = [(count_labels if case.loss_fn else count_shifted)(part) for part in parts], 0.0
    for part, count in zip(parts, counts, strict=True):
        loss = case.loss_fn(model(part["x"]), part) if case.loss_fn else model(**part).loss
        (loss * count / sum(counts)).backward()
        total += loss.item() * count / sum(counts)
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()
    return total, norm, sum(counts)


def test_one_rank_departs_and_all_record_again() -> None:
    """Break: let the departing rank decide alone; record on another rank's rows; never give up micro-batches."""
    names = list(CASES)
    by_rank = run(2, departing, names=names, stages=(3,))
    assert by_rank[0] == by_rank[1]
    for name, found in zip(names, by_rank[0], strict=True):
        assert found.steps[0] == pytest.approx(plain(name), rel=2e-6), name


def test_departures_of_evaluations_and_of_every_stage() -> None:
    names = ["padding, then a window, each on another rank", "what its own first rows do not show"]
    found = run(2, departing, names=names, stages=(0, 2), evaluates=True)[0]
    for name, first, other in zip(names, found[::2], found[1::2], strict=True):
        assert first == other, name
        assert first.evaluated == pytest.approx([loss for loss, _, _ in first.steps], rel=1e-5), name


def test_what_is_new_to_one_rank_alone_is_recorded_on_all() -> None:
    assert run(2, other_ways)[0] == run(2, other_ways)[1]
