"""A batch that makes one rank call its units in a way that was recorded on none: all of them record again, together."""

from __future__ import annotations

import pytest
import torch

from tests.engine.departing_jobs import CASES, NUM_STEPS, Found, departing, other_ways
from tests.engine.families import build
from tests.engine.ranks import run
from tests.engine.reference import count_labels, count_shifted

pytestmark = pytest.mark.slow  # of ranks, the quick run has test_ranks.py and test_ranks_faults.py of the engine


def plain(name: str) -> Found:
    """What torch gives: each rank's mean, weighted by its targets, one micro-batch after another."""
    case, found = CASES[name], Found()
    model = build(case.make)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0)
    for step in range(NUM_STEPS):
        parts = [
            {key: value[row : row + 1].cpu() for key, value in case.batch(step, rank).items()}
            for rank in range(2)
            for row in range(len(case.batch(step, rank)["labels"]))
        ]
        counts = [(count_labels if case.loss_fn else count_shifted)(part) for part in parts]
        optimizer.zero_grad()
        total = 0.0
        for part, count in zip(parts, counts, strict=True):
            loss = case.loss_fn(model(part["x"]), part) if case.loss_fn else model(**part).loss
            (loss * count / sum(counts)).backward()
            total += loss.item() * count / sum(counts)
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()
        found.steps.append((total, norm, sum(counts)))
        break  # further steps depend on the update, which other tests compare
    return found


def test_one_rank_departs_and_all_record_again() -> None:
    """Break: let the rank that departs decide by itself; record on the rows of a rank that does not depart; never give
    up cutting."""
    names = list(CASES)
    by_rank = run(2, departing, names=names, stages=(3,))
    assert by_rank[0] == by_rank[1]
    for name, found in zip(names, by_rank[0], strict=True):
        (wanted,) = plain(name).steps
        assert found.steps[0] == pytest.approx(wanted, rel=2e-6), name


def test_departures_of_evaluations_and_of_every_stage() -> None:
    names = ["padding, then a window, each on another rank", "what its own first rows do not show"]
    found = run(2, departing, names=names, stages=(0, 2), evaluates=True)[0]
    for name, first, other in zip(names, found[::2], found[1::2], strict=True):
        assert first == other, name
        assert first.evaluated == pytest.approx([loss for loss, _, _ in first.steps], rel=1e-5), name


def test_what_is_new_to_one_rank_alone_is_recorded_on_all() -> None:
    assert run(2, other_ways)[0] == run(2, other_ways)[1]
