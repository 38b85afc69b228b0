"""Tensor-parallel models: the bits of the same model in memory, or a refusal by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine import tensor_parallel as jobs
from tests.engine.device import cpu_only
from tests.engine.ranks import run
from tests.test_docs import ROOT, blocks

pytestmark = cpu_only("DTensor collectives over gloo")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "num_ranks", "how"),
    [
        ("tied", 2, {"tier": "device", "limit": 0.3}),
        ("mesh", 4, {}),
        ("sequences", 2, {"micro_rows": 2}),
        ("layers", 2, {"precision": "bf16", "limit": 0.3}),
        ("layers", 4, {"micro_rows": 2}),
        ("sequences", 4, {}),
        ("mesh", 4, {"tier": "device", "micro_rows": 2}),
    ],
)
def test_training_has_the_bits_of_the_model_in_memory(way: str, num_ranks: int, how: dict[str, Any]) -> None:
    norms = run(num_ranks, jobs.train, way=way, num_ranks=num_ranks, **how)
    assert all(each == norms[0] for each in norms)


@pytest.mark.slow
def test_rows_cut_between_units_are_whole_batches() -> None:
    assert len(set(run(2, jobs.train_with_rows_cut))) == 1


@pytest.mark.slow
def test_states_on_disk_and_clipping_over_all_parts(tmp_path: Path) -> None:
    norms = run(2, jobs.train, way="sequences", num_ranks=2, tier="nvme", folder=str(tmp_path), limit=0.3)
    assert norms[0] == norms[1]
    assert max(norms[0]) > 0.3


def test_a_checkpoint_has_a_folder_for_each_part(tmp_path: Path) -> None:
    run(2, jobs.save, folder=str(tmp_path))


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_on_one_rank_concerns_all() -> None:
    run(2, jobs.overflow)


@pytest.mark.slow
def test_replicas_of_a_cut_model_train_together() -> None:
    norms = run(4, jobs.train_replicas)
    assert all(each == norms[0] for each in norms)


@pytest.mark.slow
def test_a_plain_loop_goes_on_from_states_of_torch_and_back() -> None:
    run(2, jobs.wrap_loop)


REFUSALS = {
    "recompute": "train.recompute is auto, but the model is tensor-parallel",
    "compile": "train.compile is always",
    "clip": "copies of a parameter would drift apart",
    "sequence_tile": "train.sequence_tile is 4",
    "sequence_parallel": "shares rows over the same ranks",
    "link_weights": "quantizes weights in blocks",
    "head_chunk_bytes": "set --train.head_chunk_bytes none",
    "dispatch": "offload.dispatch is always, but the model is tensor-parallel",
    "fill": "load the weights into the model before Engine()",
    "rule": "the optimizer is Muon",
    "uneven": "dimension 0 of norm.weight [33] is cut over 2 ranks, into parts of different sizes",
    "partial": "norm.weight is a DTensor with the placement",
    "differing": "the parameters that each rank of a tensor-parallel model has whole",
    "buffer": "buffer table of the model is a DTensor",
    "fully_shard": "leave fully_shard out",
    "own_forward": "head has a forward of its own",
    "room": "offload.device_memory is 1 KiB",
}


def test_inexact_models_and_settings_are_refused_by_name() -> None:
    errors: list[Any] = run(2, jobs.refuse)
    for each in errors:
        assert each.keys() == REFUSALS.keys()
        for name, text in REFUSALS.items():
            assert text in each[name], each[name]


@pytest.mark.slow
def test_the_lines_of_the_page_run() -> None:
    (code,) = blocks(ROOT / "docs" / "how-to" / "several-gpus.md", "py")
    losses = run(2, jobs.run_page, code=code)
    assert losses[0] == losses[1]
    assert losses[0][2] < losses[0][0]
