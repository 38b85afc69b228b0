"""Checkpoints over ranks: stored by name and slice, and readable with any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import Muon
from offload.checkpoint import writer as writing
from offload.checkpoint.reader import Reader
from offload.distributed.joining import open_comm
from offload.errors import ConfigError, OffloadError
from offload.optim.rule import UpdateRule
from tests.cases.models import share
from tests.engine.handmade import cross_entropy
from tests.engine.ranks import run
from tests.engine.ranks_child import CASES, SMOOTH, opened

pytestmark = pytest.mark.slow  # the quick run covers ranks by test_ranks.py and test_ranks_faults.py

ON_DISK = {"placement": dict.fromkeys(("parameters", "optimizer", "gradients"), "nvme")}


def read_all(folder: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Return every plane of a checkpoint as bytes."""
    found = {}
    with Reader(folder) as reader:
        for name, entry in reader.contents.items():
            for plane, dtype in entry.planes.items():
                flat = torch.empty(entry.count(plane), dtype=dtype)
                reader.read(name, plane, 0, flat)
                found[name, plane] = flat.view(torch.uint8) if flat.numel() else flat
    return found


def save(case: str, rows: Sequence[int], path: str, resume: str = "", **settings: Any) -> dict[str, Any]:
    """Train two steps, or resume instead, and save. Return the loaded metadata."""
    known, meta = CASES[case], {}
    with open_comm() as comm:
        engine = opened(comm, known, **settings)
        if resume:
            meta = engine.load_checkpoint(resume)
        for seed in () if resume else range(2):
            engine.step(share(known.batch(seed, sum(rows)), rows, comm.rank), loss_fn=known.loss_fn)
        engine.save_checkpoint(path, {"case": case})
        engine.close()
    return meta


def refused(path: str, later: bool) -> tuple[str, str]:
    """Save with a disk error on rank 1, at once or during a step. Return the error. Training goes on."""

    async def full(*_: Any) -> str:
        raise OSError(28, "no space left")

    batch = CASES["plain"].batch
    with open_comm() as comm, opened(comm, CASES["plain"]) as engine:
        engine.step(share(batch(0, 4), (2, 2), comm.rank))
        with pytest.MonkeyPatch.context() as patch, pytest.raises(OffloadError) as caught:  # noqa: PT012
            if comm.rank == 1:
                patch.setattr(writing, "_write", full)
            if not later:
                engine.save_checkpoint(path)
            saving = engine.begin_checkpoint(path)
            engine.step(share(batch(1, 4), (2, 2), comm.rank))
            saving.finish()
        engine.step(share(batch(2, 4), (2, 2), comm.rank))
    return type(caught.value).__name__, str(caught.value)


def parted(path: str) -> tuple[str, str]:
    """Rank 0 finishes a save while the others step. Return the error."""
    with open_comm() as comm:
        engine, batch = opened(comm, CASES["plain"]), share(CASES["plain"].batch(0, 4), (2, 2), comm.rank)
        saving = engine.begin_checkpoint(path)
        with saving, pytest.raises(ConfigError) as caught:
            saving.finish() if comm.rank == 0 else engine.step(batch)
        engine.step(batch)
        engine.close()
    return type(caught.value).__name__, str(caught.value)


def gone_on(case: str, path: str, loops: bool = False, **settings: Any) -> list[dict[str, Any]]:
    """Train two steps, save, and train two more steps, or a step of an own loop. Return all values afterwards, for the
    original and the resumed run.
    """
    known, found = CASES[case], []
    with open_comm() as comm:
        rows = (2,) * comm.size
        batches = [share(known.batch(seed, sum(rows)), rows, comm.rank) for seed in range(4)]
        for is_resumed in (False, True):
            engine = opened(comm, known, **settings)
            if is_resumed:
                engine.load_checkpoint(path)
            else:
                for batch in batches[:2]:
                    engine.step(batch, known.loss_fn)
                engine.save_checkpoint(path)
            for batch in batches[2:]:
                if loops:
                    engine.backward(cross_entropy(engine.model(batch["x"]), batch))
                else:
                    result = engine.step(batch, known.loss_fn)
            if loops:
                result = engine.update()
            buffers = {name: buffer.tolist() for name, buffer in engine.model.named_buffers()}
            weights = {name: value.tolist() for name, value in engine.named_parameters()}
            found.append({"step": (result.loss.item(), result.grad_norm), "buffers": buffers, "weights": weights})
            engine.close()
    return found


REPLICAS: dict[str, Any] = {"replicas": 2}


@pytest.mark.parametrize(
    ("case", "stage", "rule", "how"),
    [
        ("tied", 0, SMOOTH, {}),
        ("two dtypes", 1, SMOOTH, {}),
        ("tied", 3, SMOOTH, {}),
        ("plain", 3, Muon(), {}),
        ("two dtypes", 0, SMOOTH, REPLICAS),
        ("two dtypes", 3, SMOOTH, REPLICAS),
        ("two dtypes", 3, SMOOTH, REPLICAS | {"replica_states": "shared"}),
    ],
)
def test_any_number_of_ranks_and_replicas_reads_what_others_wrote(
    case: str, stage: int, rule: UpdateRule, how: dict[str, Any], tmp_path: Path
) -> None:
    """Ranks save on disk. Other numbers of ranks in memory resume and save again: all states keep their bits, once.

    Break: write replicated states whole, or the rank's range of another plane; leave the weight ranges of other ranks
    unread; with replicas write the shard instead of the piece.
    """
    first = tmp_path / "first"
    common: dict[str, Any] = {"case": case, "zero_stage": stage, "optimizer": rule}
    others = [1] * (3 if how else 1)
    run(len(others) + 1, save, **common, **how, **ON_DISK, folder=str(tmp_path), rows=(2, *others), path=str(first))
    wanted = read_all(first)
    assert any((flat != 0).any() for (_, plane), flat in wanted.items() if plane == "exp_avg_sq")
    readers: list[tuple[int, dict[str, Any]]] = [(3, {}), (1, {})]
    if how:
        readers = [(3, {"replicas": 3}), (1, {}), (4, how), (4, REPLICAS)]
    for number, (size, its) in enumerate(readers):
        path = tmp_path / str(number)
        metas = run(size, save, **common, **its, rows=(1,) * size, path=str(path), resume=str(first))
        assert metas == [{"case": case}] * size
        found = read_all(path)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], flat) for key, flat in wanted.items())


@pytest.mark.parametrize("later", [False, True], ids=["at once", "while training goes on"])
def test_a_rank_that_cannot_write_fails_the_save_on_all_and_training_goes_on(later: bool, tmp_path: Path) -> None:
    errors = run(2, refused, path=str(tmp_path / "step-1"), later=later)
    assert errors[0] == errors[1]
    assert errors[0][0] == "DiskError"
    assert errors[0][1].startswith("[rank 1] the write of ")
    assert not list(tmp_path.iterdir()), "nothing half-written"


def test_a_rank_that_ends_a_save_while_others_take_a_step_is_told_so(tmp_path: Path) -> None:
    errors = run(2, parted, path=str(tmp_path / "saved"))
    assert errors[0] == errors[1]
    assert "rank 0: finish of a checkpoint; rank 1: step" in errors[0][1]
    assert not list(tmp_path.iterdir())


def test_ranks_go_on_with_the_running_values_of_their_own_rows(tmp_path: Path) -> None:
    """Break: give all ranks the buffers of rank 0."""
    by_rank = run(2, gone_on, case="moving buffers", path=str(tmp_path / "saved"))
    for whole, resumed in by_rank:
        assert resumed == whole
    assert by_rank[0][0]["buffers"] != by_rank[1][0]["buffers"]
    with Reader(tmp_path / "saved") as reader:
        assert set(reader.contents["blocks.0.mean"].planes) == {"moved-0", "moved-1"}
        assert set(reader.contents["blocks.2.mean"].planes) == {"buffer", "moved-1"}


def test_a_step_before_it_does_not_decide_how_an_own_loop_adds_up(tmp_path: Path) -> None:
    """A unit with several uses sums gradients on the device in a step. In an own loop ranks sum after each pass."""
    for whole, resumed in run(2, gone_on, case="used twice", loops=True, path=str(tmp_path / "saved")):
        assert resumed == whole
