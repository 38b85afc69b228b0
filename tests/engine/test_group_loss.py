"""Losses over row groups and log-probabilities match plain PyTorch over whole logits: in micro-batches, with a chunked
head, and over ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, softplus

from offload import SGD, Engine, Placement
from offload.engine.loss.batch import Batch
from offload.engine.loss.group_loss import TokenLoss
from offload.errors import ConfigError
from tests.cases.models import VOCABULARY, build, gemma2, llama, share
from tests.engine import ranks
from tests.engine.compare import weights
from tests.engine.device import own_device, twin

PROMPT, LENGTH = 17, 28
"""The prompt has no targets and is longer than the recorded token sample."""
CHUNK_BYTES = 8 * VOCABULARY * 4
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "micro-batches": {"micro_batch_size": 2},
    "chunks": {"head_chunk_bytes": CHUNK_BYTES},
    "micro-batches, chunks": {"micro_batch_size": 4, "head_chunk_bytes": CHUNK_BYTES},
    "streamed": {
        "head_chunk_bytes": CHUNK_BYTES,
        "placement": Placement(parameters="cpu", optimizer="cpu", gradients="cpu"),
    },
}


class Pairs(TokenLoss):
    """The first row of each pair should be more probable than the second."""

    group = 2

    def of(self, log_probs: torch.Tensor, batch: Batch) -> torch.Tensor:
        sums = log_probs.sum(1)
        return self._mean(softplus(sums[1::2] - sums[::2]), batch, first=sums[::2])


def answers(rows: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (rows, LENGTH), generator=generator)
    lengths = torch.randint(PROMPT + 2, LENGTH + 1, (rows,), generator=generator)
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :PROMPT] = -100
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {key: value.to(own_device()) for key, value in batch.items()}


def plainly(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss from whole logits, sums of log-probabilities [rows])."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    sums = -cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], reduction="none").sum(1)
    return softplus(sums[1::2] - sums[::2]).mean(), sums


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_training_is_that_of_whole_logits(way: str) -> None:
    """Gemma 2 caps the logits in the head. A chunk has 8 tokens.

    Break: use a neighbouring row's slope, the token positions from the previous chunk, or a mean over tokens.
    """
    model = build(gemma2)
    plain, batch, loss = twin(model), answers(), Pairs()
    engine = Engine(model, SGD(lr=0.1), max_grad_norm=None, **WAYS[way])
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        result = engine.step(batch, loss)
        wanted, sums = plainly(plain, batch)
        optimizer.zero_grad()
        wanted.backward()
        optimizer.step()
        assert float(result.loss) == pytest.approx(float(wanted.detach()), abs=1e-6)
        torch.testing.assert_close(loss.metrics["first"], sums[::2].detach().cpu(), atol=1e-5, rtol=1e-6)
    with torch.no_grad():
        wanted, sums = plainly(plain.eval(), batch)
    assert float(engine.evaluate(batch, loss)) == pytest.approx(float(wanted), abs=1e-6)
    torch.testing.assert_close(loss.metrics["first"], sums[::2].cpu(), atol=1e-5, rtol=1e-6)
    assert (engine.head_chunks > 1) == ("head_chunk_bytes" in WAYS[way])
    wanted = {name: value.detach().cpu() for name, value in plain.named_parameters()}
    torch.testing.assert_close(weights(engine), wanted, atol=1e-6, rtol=1e-5)
    engine.close()


def ranked() -> tuple[float, torch.Tensor, dict[str, torch.Tensor]]:
    """Train on six rows: four on rank 0, two on rank 1. Evaluate all six; rank 1 has no targets there."""
    loss = Pairs()
    engine = Engine(build(llama), SGD(lr=0.1), max_grad_norm=None, micro_batch_size=2, head_chunk_bytes=CHUNK_BYTES)
    result = engine.step(share(answers(), (4, 2), engine.rank), loss)
    measured = loss.metrics["first"]
    whole = answers()
    if engine.rank:
        whole = {**whole, "labels": torch.full_like(whole["labels"], -100)}
    alone = engine.evaluate(whole, loss)
    found = weights(engine)
    engine.close()
    return float(result.loss), torch.cat([measured, alone[None]]), found


@pytest.mark.slow
def test_ranks_weigh_by_their_groups() -> None:
    """A rank without targets is covered too."""
    found, loss = ranks.run(2, ranked), Pairs()
    engine = Engine(build(llama), SGD(lr=0.1), max_grad_norm=None)
    wanted = engine.step(answers(), loss)
    first = loss.metrics["first"]
    alone = engine.evaluate(answers(), loss)
    for each, _, its in found:
        assert each == pytest.approx(float(wanted.loss), abs=1e-6)
        torch.testing.assert_close(its, weights(engine), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(torch.cat([found[0][1][:-1], found[1][1][:-1]]), first, atol=1e-5, rtol=1e-6)
    assert [float(measured[-1]) for _, measured, _ in found] == pytest.approx([float(alone)] * 2, abs=1e-5)
    engine.close()


@pytest.mark.parametrize(("rows", "micro", "said"), [(5, None, "the batch has 5 rows"), (6, 3, "a micro-batch has 3")])
def test_half_a_group_is_refused(rows: int, micro: int | None, said: str) -> None:
    with Engine(build(llama), micro_batch_size=micro) as engine, pytest.raises(ConfigError, match=said):
        engine.step({key: value[:rows] for key, value in answers().items()}, Pairs())
