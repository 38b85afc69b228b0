"""ZeRO over ranks equals one process on the whole batch, with equal bits for all stages, tiers and timings.

"Break:" in a docstring names the code mutations the test must detect.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch

from offload.engine.gradients.updates import UNCLIPPED_STEPS
from tests.cases.models import build
from tests.cases.run import Step
from tests.engine.compare import assert_same
from tests.engine.ranks import JobError, run
from tests.engine.ranks_child import (
    CASES,
    SMOOTH,
    Found,
    dropped_out,
    own_loss,
    own_seed,
    trained,
    without_targets,
)
from tests.engine.reference import Reference
from tests.engine.test_overlap import MODES, SLOW

STAGES = (0, 1, 2, 3)
ROWS: dict[str, tuple[int, ...]] = {"even": (2, 2, 2, 2), "uneven": (1, 4, 2, 3), "micro-batches": (3, 1, 2, 1)}
"""Rows per rank. In the last entry, with micro-batches of one row, rank 0 has three rows and rank 1 one row."""


# -- harness -----------------------------------------------------------------------------------------------------------


def settings_of(rows: str, mode: str) -> dict[str, Any]:
    return MODES[mode] | ({"micro_batch_size": 1} if rows == "micro-batches" else {})


def train(size: int, *runs: Mapping[str, Any]) -> list[Found]:
    """Train the runs on `size` ranks, and check for equal results on all ranks. Return rank 0's results."""
    by_rank = run(size, trained, runs=runs)
    for one in by_rank[1:]:
        for other, first in zip(one, by_rank[0], strict=True):
            assert_equal(other, first, "another rank")
    return by_rank[0]


def assert_equal(found: Found, wanted: Found, when: str = "") -> None:
    """Check for equal bits in all losses, norms, counts and weights."""
    assert found.results == wanted.results, when
    assert_same(found.weights, wanted.weights, when=when)


@cache
def plain(case: str, num_rows: int, num_steps: int, mode: str, unlabelled: tuple[Any, ...] = ()) -> Found:
    """Train plain PyTorch on the whole batch, with an evaluation after the second step."""
    known, found = CASES[case], Found()
    model = build(known.make)
    exceptions = known.reference(known.precision)
    reference = Reference(model, SMOOTH, known.precision, MODES[mode]["max_grad_norm"], **exceptions)
    for step in range(num_steps):
        batch = known.batch(step, num_rows)
        if unlabelled:
            batch = without_targets(batch, *unlabelled)
        torch.manual_seed(step)
        loss, norm = reference.step(batch, known.loss_fn, known.count)
        found.steps.append(Step(loss.item(), norm, known.count(batch), False))
        if step == 1:
            found.evaluated.append(evaluated(reference, case, num_rows))
    found.weights = {name: value.clone() for name, value in reference.masters.items()}
    return found


def evaluated(reference: Reference, case: str, num_rows: int) -> float:
    known, model = CASES[case], reference.model
    batch = known.batch(99, num_rows)
    model.eval()
    with torch.no_grad():
        loss = model(**batch).loss if known.loss_fn is None else known.loss_fn(model(batch["x"]), batch)
    model.train()
    return float(loss)


def assert_near(found: Found, wanted: Found, within: float) -> None:
    """Compare the numbers per step, and the weights on the layer's scale."""
    assert [one[2:4] for one in found.steps] == [one[2:4] for one in wanted.steps]
    for step, (one, other) in enumerate(zip(found.steps, wanted.steps, strict=True)):
        assert one[0] == pytest.approx(other[0], rel=within), f"loss of step {step}"
        assert one[1] == pytest.approx(other[1], rel=within), f"norm of step {step}"
    assert found.evaluated == pytest.approx(wanted.evaluated, rel=within), "evaluation"
    assert_same(found.weights, wanted.weights, within)


# -- as one process ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_the_weights_at_the_start_are_those_of_rank_0(stage: int) -> None:
    """Break: let every rank take weights from the local model."""
    common = {"case": "plain", "rows": (2, 2, 2), "num_steps": 2, "zero_stage": stage}
    same, other = train(3, common, {**common, "by_rank": {1: {"model_seed": 5}, 2: {"model_seed": 6}}})
    assert_equal(other, same)


# -- the same bits, for any setting without effect on numbers ---------------------------------------------------------

PLACEMENTS: dict[str, dict[str, str]] = {
    "device": {"parameters": "device", "optimizer": "device"},
    "activations on the cpu": {"activations": "cpu"},
    "states on nvme": {"parameters": "nvme", "optimizer": "nvme", "activations": "cpu"},
    "all on nvme": dict.fromkeys(("parameters", "optimizer", "gradients", "activations"), "nvme"),
    "weights on the device": {"parameters": "device", "optimizer": "cpu", "device_memory": "8MiB"},
}
TIMINGS: dict[str, dict[str, Any]] = {
    "at once": {"prefetch": 0},
    "throttled": {"prefetch": 2, "throttle": SLOW},
    "delayed": {"prefetch": 0, "delays": 1},
    "delayed, ahead": {"prefetch": 2, "delays": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize(("spiked", "clip"), [(3, "deferred"), (UNCLIPPED_STEPS, "speculative")])
def test_ranks_decide_alike_how_a_run_clips(spiked: int, clip: str) -> None:
    """Ranks agree on the clipping mode, with a large gradient on one rank.

    Break: decide by this rank's gradient norm.
    """
    common = {"case": "spiking", "rows": (1, 2), "num_steps": UNCLIPPED_STEPS + 2, "spike": (spiked, 1, 1e6)}
    common |= {"max_grad_norm": 100.0, "throttle": {"update": "4MiB"}}
    auto, *fixed = train(2, common, *({**common, "clip": each} for each in ("deferred", "speculative")))
    same, other = fixed if clip == "deferred" else reversed(fixed)
    assert_equal(auto, same)
    assert any((auto.weights[name] != value).any() for name, value in other.weights.items()), "it says something"


# -- differences between ranks ----------------------------------------------------------------------------------------


UNLABELLED = {"whole": ("plain", None), "in chunks": ("plain", 3000), "loss_fn": ("spiking", None)}


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", UNLABELLED.values(), ids=UNLABELLED)
def test_a_rank_without_any_target_takes_part(how: tuple[str, int | None], rank: int) -> None:
    """The mean loss would be 0/0, and chunks without targets do not run.

    Break: multiply the NaN by weight 0; skip the head, and the head collectives, on the rank without targets.
    """
    (case, chunk), rows = how, (2, 2)
    common = {"case": case, "rows": rows, "num_steps": 3, "evaluate": 1, "unlabelled": rank, "head_chunk_bytes": chunk}
    first, *others = train(2, *({**common, **MODES["deferred"], "zero_stage": stage} for stage in (0, 3)))
    for other in others:
        assert_equal(other, first)
    assert_near(first, plain(case, sum(rows), 3, "deferred", unlabelled=(rows, rank)), 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "stage"), [((4, 1), 0), ((1, 3), 3)])
def test_a_head_in_chunks_whose_number_differs_by_rank(rows: tuple[int, ...], stage: int) -> None:
    """On the rank with one row, a chunk holds all logits, or more columns than on the other rank.

    Break: reduce the head gradients after every chunk.
    """
    common = {"case": "plain", "rows": rows, "num_steps": 3, "evaluate": 1, "zero_stage": stage, **MODES["deferred"]}
    for chunk in (10 * 67 * 4, 3000):  # the first holds all logits of one row: ten tokens, 67 words
        (found,) = train(2, {**common, "head_chunk_bytes": chunk, "delays": 4})
        assert_near(found, plain("plain", sum(rows), 3, "deferred"), 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_that_mixes_rows_is_called_as_often_as_each_rank_has_micro_batches(stage: int) -> None:
    """Rank 0 calls the model three times and rank 1 once. Rank 1 must still gather weights for rank 0.

    Break: leave rank 1 out.
    """
    common = {"case": "mixes rows", "rows": (3, 1), "num_steps": 3, "micro_batch_size": 1}
    found = train(2, {**common, "zero_stage": 0}, {**common, "zero_stage": stage, "delays": 5})
    assert_equal(*found)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_dropout_differs_by_rank_and_comes_again(stage: int) -> None:
    """All ranks have the same rows and the same generator state, so only dropout masks differ.

    Break: seed the masks without the rank; use a generator that timing advances.
    """
    one = run(3, dropped_out, stages=(stage,), num_steps=2)
    two = run(3, dropped_out, stages=(0, stage), num_steps=2)
    local = [found[0].local for found in one]
    assert all(len({losses[step] for losses in local}) == 3 for step in range(2)), "masks differ"
    assert len({found[0].evaluated[0] for found in one}) == 1, "without masks nothing does"
    for first, (serial, again) in zip(one, two, strict=True):
        assert first[0].local == again.local == serial.local
        assert_equal(again, first[0])
        assert_equal(serial, first[0])


# -- gradients that are not finite -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "factor"), [(0, float("inf")), (3, float("nan"))])
def test_a_step_that_one_rank_cannot_use_is_skipped_by_all(stage: int, factor: float) -> None:
    """The weights equal a run without the skipped batch.

    Break: decide by this rank's gradients; count the skipped step.
    """
    common = {"case": "spiking", "rows": (1, 2, 1), "zero_stage": stage, "on_nonfinite": "skip"}
    skipped, left_out = train(
        3,
        {**common, "num_steps": 4, "seeds": (0, 1, 2, 3), "spike": (2, 1, factor)},
        {**common, "num_steps": 3, "seeds": (0, 1, 3)},
    )
    assert [one[3] for one in skipped.steps] == [False, False, True, False]
    assert skipped.steps[:2] + skipped.steps[3:] == left_out.steps
    assert_same(skipped.weights, left_out.weights)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_that_one_rank_cannot_use_stops_all_with_one_message(stage: int) -> None:
    """Break: raise on this rank only."""
    common = {"case": "spiking", "rows": (1, 2), "num_steps": 3, "zero_stage": stage, "clip": "deferred"}
    stopped, wanted = train(2, {**common, "spike": (1, 1, float("inf"))}, {**common, "seeds": (0, 2)})
    assert stopped.error is not None
    assert stopped.error[0] == "NonFiniteError"
    assert "embedding" in stopped.error[1]
    assert stopped.steps == wanted.steps
    assert_same(stopped.weights, wanted.weights)


# -- own loops -------------------------------------------------------------------------------------------------------


def plain_own_loop(case: str, size: int, num_steps: int) -> Found:
    """Sum the gradients of all ranks in rank order, and average the losses."""
    known, found = CASES[case], Found()
    reference = Reference(build(known.make), SMOOTH, known.precision, **known.reference(known.precision))
    for step in range(num_steps):
        losses = []
        for rank in range(size):
            for part in range(2):
                loss = own_loss(reference.model, known, own_seed(step, part, rank))
                loss.backward()
                reference.collect()
                losses.append(loss.detach().float())
        found.steps.append(Step(torch.stack(losses).mean().item(), reference.update(), None, False))
    found.weights = dict(reference.masters)
    return found


# -- the harness itself ----------------------------------------------------------------------------------------------


def raises(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        raise ValueError("told to")


def test_a_job_that_fails_tells_which_rank_and_the_next_one_runs() -> None:
    with pytest.raises(JobError, match=r"rank 1 of 2(.|\n)*ValueError: told to"):
        run(2, raises, rank=1)
    assert run(2, raises, rank=7) == [None, None]
