"""Training over two real ranks, started without `torchrun`: agreement and joint end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import forks
from tests.run_folder import SHAPE, lines_of, losses, write_shape, write_text

Run = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of the ranks: a model configuration and a few kilobytes of text."""
    path = tmp_path_factory.mktemp("ranks")
    write_shape(path / "shape", **SHAPE)
    write_text(path)
    return path


@pytest.fixture
def run(folder: Path, request: pytest.FixtureRequest) -> Run:
    """Return a function that runs `python -m tests.training.ranks_child WAY WORDS` in two ranks.

    `more`: additional words per rank. The function checks the exit code of both ranks, and returns both results.
    """

    def start(way: str, name: str, *words: str, more: Sequence[Sequence[str]] = ((), ()), code: int = 0) -> list[Any]:
        settings = [
            *("--run.dir", name, "--model.path", "shape/config.json", "--data.source", "text.txt"),
            *("--data.sequence_length", "32", "--train.steps", "5", "--train.batch_size", "3", *words),
        ]
        child = ["-m", "tests.training.ranks_child", way, *settings]
        ended = forks.run_ranks(child, cwd=folder, own=lambda rank: more[rank], XDG_CACHE_HOME=str(folder / "cache"))
        assert [each.returncode for each in ended] == [code, code], ended
        assert code or [each.stderr for each in ended] == ["", ""]
        return ended

    return start


@pytest.mark.slow
def test_ranks_that_share_sequences_train_and_go_on_as_those_that_do_not(run: Run, folder: Path) -> None:
    """Each step has the rows of two full ranks, and a resumed run without sequence parallelism has the same rows."""
    words = ("--optimizer.schedule", "constant", "--data.eval_share", "0.1", "--train.eval_every", "5")
    shared, more = ("--train.sequence_parallel", "2"), ("--checkpoint.every", "3", "--checkpoint.export", "false")
    run("plain", "whole", *words, "--checkpoint.export", "false")
    run("plain", "shared", *words, *more, *shared, "--train.steps", "3")
    run("plain", "shared", *words, *more, "--train.sequence_parallel", "1")
    assert losses(folder / "shared") == pytest.approx(losses(folder / "whole"), rel=1e-5)
    lines = lines_of(folder / "shared")
    whole = lines_of(folder / "whole")
    assert [line["targets"] for line in lines] == [line["targets"] for line in whole]
    assert lines[-1]["eval_loss"] == pytest.approx(whole[-1]["eval_loss"], rel=1e-5)
    assert lines[0]["all_to_all_elements"] == 3 * 2 * 4 * (3 * 16 * 32), "passes, layers, tensors"


@pytest.mark.slow
def test_ranks_with_different_settings_are_refused_in_one_message(run: Run, folder: Path) -> None:
    first, second = run("plain", "differ", more=((), ("--train.steps", "6", "--optimizer.lr", "0.1")), code=2)
    assert first.stdout.count("\n") == 1, "it loads torch, and says so"
    assert second.stdout == second.stderr == ""
    assert first.stderr.count("\n") == 1
    words = ["must be the same on all ranks", "train.steps 6 instead of 5", "optimizer.lr 0.1 instead of None"]
    assert [word for word in words if word not in first.stderr] == []
    assert not (folder / "differ").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "code", "rank", "said", "num_steps"),
    [
        ("no data", 2, 0, "offload: the data are gone\n", None),
        ("breaks", 1, 0, "[rank 1] failed: OSError: the disk is gone", 2),
        ("fails", 1, 1, "offload: [rank 1] failed: RuntimeError: on purpose", None),
        ("all fail", 1, 0, "offload: failed: RuntimeError: on purpose", None),
    ],
)
def test_what_ends_all_ranks_is_said_by_one(
    run: Run, folder: Path, way: str, code: int, rank: int, said: str, num_steps: int | None
) -> None:
    """Data errors on rank 0 or 1, a failure on one rank, and the same failure on both ranks."""
    ended = run(way, way.replace(" ", "-"), code=code)
    assert said in ended[rank].stderr
    assert ended[rank].stderr.count("\n") == 1
    assert ended[1 - rank].stderr == ""
    if way == "no data":
        assert not (folder / "no-data").exists()
    if num_steps is not None:
        assert len(losses(folder / way)) == num_steps


@pytest.mark.slow
def test_a_rank_without_more_data_ends_the_run_cleanly_on_all(run: Run, folder: Path) -> None:
    first, _ = run("ends", "ended")
    assert "the data end after 2 steps" in first.stdout
    assert "done: 2 steps" in first.stdout
    assert len(losses(folder / "ended")) == 2
    assert (folder / "ended/hf/config.json").exists()


@pytest.mark.slow
def test_what_a_callback_of_one_rank_asks_for_all_do(run: Run, folder: Path) -> None:
    """Rank 1 sets the control flags after step 2. The callbacks on both ranks receive the resulting events."""
    first, second = run("asks", "asked", "--train.eval_every", "0", "--data.eval_share", "0.1")
    assert "a callback asks for it, so the run ends after step 2" in first.stdout
    for rank, each in enumerate((first, second)):
        told = [line for line in each.stdout.splitlines() if line.startswith(f"rank {rank}: ")]
        assert told == [f"rank {rank}: on_evaluate 2", f"rank {rank}: on_save 2", f"rank {rank}: on_train_end 2"]
    assert (folder / "asked/checkpoints/step-2").is_dir()
