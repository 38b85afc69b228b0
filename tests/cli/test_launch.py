"""`train --gpus N`: refused settings, the exit code for several ranks, and whole runs with two ranks."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from offload.app.checkpoint_folder import Checkpoints
from offload.app.config.command_line import parse_config, take_gpus
from offload.app.launch import exit_code, launch
from offload.app.training.trainer import Trainer
from offload.errors import ConfigError, RankLostError
from tests.cli.conftest import EITHER, training
from tests.lanes.patience import eventually
from tests.run_folder import lines_of

Train = Callable[..., "subprocess.CompletedProcess[str]"]
Begin = Callable[..., Any]
NOTE = "note: no GPU is found here; the 2 ranks share the CPU."
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks would run on GPUs")


@pytest.fixture(autouse=True)
def _not_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([], (1, [])),
        (["--gpus", "2", "--train.steps", "3"], (2, ["--train.steps", "3"])),
        (["--train.steps", "3", "--gpus=8"], (8, ["--train.steps", "3"])),
        (["--gpus", "2", "--gpus", "1"], (1, [])),
    ],
)
def test_the_number_of_ranks_is_taken_from_the_words(words: list[str], found: tuple[int, list[str]]) -> None:
    assert take_gpus(words) == found


@pytest.mark.parametrize("words", [["--gpus", "0"], ["--gpus", "two"], ["--gpus"], ["--gpus=-1"], ["--gpus", "1.5"]])
def test_a_number_of_ranks_is_whole_and_at_least_1(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="--gpus is .*whole number of ranks, at least 1"):
        take_gpus(words)


def test_ranks_within_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="RANK is 1 of WORLD_SIZE 4.*leave out --gpus, or torchrun"):
        take_gpus(["--gpus", "2"])
    assert take_gpus(["--train.steps", "3"]) == (1, ["--train.steps", "3"])


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.accelerators.accelerators", lambda: [object()] * 2)
    with pytest.raises(ConfigError, match="--gpus is 3, but this process can use 2"):
        launch("offload.train", [], 3)


@pytest.mark.parametrize(
    ("codes", "is_interrupted", "expected"),
    [
        ({}, False, 0),
        ({}, True, 0),
        ({0: 2, 1: 2}, False, 2),
        ({0: 1, 1: 3}, False, 3),  # rank 0 ended because of rank 1
        ({0: 2, 1: -15}, True, 2),
        ({0: 1, 1: -9}, False, 1),
        ({0: 130, 1: 130}, False, 130),  # one rank got a stop signal, and all ranks stopped
        ({0: 130, 1: -9}, False, 1),
        ({0: 130, 1: 1}, True, 130),
        ({0: -2, 1: -9}, True, 130),
        ({0: 1, 1: 1}, True, 1),  # the export failed
    ],
)
def test_the_exit_code_that_says_most_is_taken(codes: dict[int, int], is_interrupted: bool, expected: int) -> None:
    assert exit_code(codes, is_interrupted=is_interrupted) == expected


def test_where_no_rank_is_left_to_say_why_the_launcher_does() -> None:
    with pytest.raises(RankLostError, match="rank 0 by SIGKILL, rank 1 by SIGSEGV"):
        exit_code({1: -11, 0: -9}, is_interrupted=False)


@EITHER
@no_gpu
def test_two_ranks_train_one_model(
    train: Train,
    folder: Path,
    environment: dict[str, str],
    begin: Begin,
    tiny: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = folder / "two"
    more = ["--train.batch_size", "3", "--data.eval_share", "0.1", "--train.eval_every", "2"]
    result = train("--gpus", "2", *tiny, *more, "--run.dir", str(run))
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0].endswith("starting 2 ranks ...")
    assert lines[1] == NOTE
    assert lines[2].startswith("data: "), "not what a single process says of its imports"
    assert len(lines) == len(set(lines)), "every line once"
    assert "logits bit-equal" in result.stdout
    metrics = lines_of(run)
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    assert [(line["tokens"], line["targets"]) for line in metrics] == [(3 * 32, 3 * 31)] * 4
    assert json.loads((run / "env.json").read_text())["world_size"] == 2

    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", environment["XDG_CACHE_HOME"])
    Trainer(parse_config([*tiny, *more, "--run.dir", "one"], prog="", description="")).run()
    single = lines_of(folder / "one")
    for key in ("loss", "grad_norm", "eval_loss"):
        found, expected = ([line[key] for line in each if key in line] for each in (metrics, single))
        assert found == pytest.approx(expected, rel=1e-4), key
    assert {file.name for file in run.iterdir()} == {file.name for file in (folder / "one").iterdir()}


@no_gpu
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--train.stpes", "5"], 2, ["train.stpes", "did you mean train.steps?"]),
        (["--train.batch_size", "1"], 2, ["train.batch_size is 1", "2 ranks", "--train.batch_size to 2"]),
        pytest.param(["--model.path", "nowhere"], 2, ["model.path is nowhere"], marks=pytest.mark.slow),
        pytest.param(
            ["--offload.device_memory", "20KiB"],
            3,
            ["offload.device_memory", "20480 bytes"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ranks_that_cannot_train_say_so_once(
    train: Train, folder: Path, tiny: list[str], arguments: list[str], code: int, words: list[str]
) -> None:
    """A wrong configuration is refused before any rank starts."""
    result = train("--gpus", "2", *tiny, "--run.dir", "refused-ranks", *arguments)
    assert result.returncode == code, result.stderr
    assert result.stderr.startswith("offload: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert not [word for word in words if word not in result.stderr], result.stderr
    assert (result.stdout == "") == ("--train" in arguments[0])
    assert not (folder / "refused-ranks").exists()


@contextmanager
def ranks_training(
    folder: Path, environment: dict[str, str], begin: Begin, tiny: list[str], name: str
) -> Iterator[Any]:
    """Yield (launcher, ranks) during training with two ranks. Kill all processes at the end."""
    ranks: list[psutil.Process] = []
    words = [*tiny, "--train.steps", "1000000", "--run.dir", name, "--gpus", "2"]
    with training(folder, environment, begin, words) as process:
        try:
            ranks = sorted(psutil.Process(process.pid).children(), key=lambda rank: int(rank.environ()["RANK"]))
            assert len(ranks) == 2
            yield process, ranks
        finally:
            for each in ranks:
                with suppress(psutil.NoSuchProcess):
                    each.kill()


@pytest.mark.slow
@no_gpu
@pytest.mark.parametrize(
    ("number", "to"),
    [
        (signal.SIGINT, "launcher"),
        (signal.SIGTERM, "launcher"),
        (signal.SIGHUP, "launcher"),
        (signal.SIGTERM, "rank 1"),
    ],
)
def test_a_signal_ends_all_ranks_after_the_step(
    folder: Path, environment: dict[str, str], begin: Begin, tiny: list[str], number: signal.Signals, to: str
) -> None:
    name = f"ranks-{number.name}-{to.replace(' ', '-')}"
    with ranks_training(folder, environment, begin, tiny, name) as (process, ranks):
        (process if to == "launcher" else ranks[1]).send_signal(number)
        output, error = process.communicate()
        assert process.returncode == 130, error
        assert not [rank for rank in ranks if rank.is_running()]
    assert output.count("once more to leave at once") == 1, output  # only one rank prints the message
    assert error.count("\n") == 1, error
    steps = len((folder / name / "metrics.jsonl").read_text().splitlines())
    assert f"interrupted by {number.name} after step {steps} of 1000000" in error
    assert [path.name for path in Checkpoints(folder / name / "checkpoints").folders()] == [f"step-{steps}"]
    assert not (folder / name / "hf").exists()


@EITHER
@pytest.mark.slow
@no_gpu
def test_ranks_whose_launcher_is_killed_save_and_end(
    folder: Path, environment: dict[str, str], begin: Begin, tiny: list[str]
) -> None:
    """Otherwise the ranks would hold the run folder and continue unseen."""
    with ranks_training(folder, environment, begin, tiny, "orphans") as (process, ranks):
        process.kill()
        _, alive = psutil.wait_procs(ranks, timeout=120)
        assert not alive
    assert Checkpoints(folder / "orphans/checkpoints").newest_intact()[0] is not None


def waits(rank: psutil.Process, number: int) -> bool:
    """Return whether a signal waits for a suspended process, by the mask of /proc (proc_pid_status(5))."""
    status = Path(f"/proc/{rank.pid}/status").read_text(encoding="utf-8")
    mask = re.search(r"ShdPnd:\s+(\w+)", status)
    return mask is not None and bool(int(mask[1], 16) >> (number - 1) & 1)


@pytest.mark.slow
@no_gpu
def test_a_second_signal_leaves_at_once(
    folder: Path, environment: dict[str, str], begin: Begin, tiny: list[str]
) -> None:
    with ranks_training(folder, environment, begin, tiny, "ranks-twice") as (process, ranks):
        for rank in ranks:
            rank.suspend()  # both signals arrive within one step
        for number in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
            assert eventually(lambda number=number: all(waits(rank, number) for rank in ranks))
        for rank in ranks:
            rank.resume()
        _, error = process.communicate()
        assert process.returncode == 130, error
    assert error == "offload: interrupted; nothing was saved.\n"
    assert not (folder / "ranks-twice/hf").exists()


@pytest.mark.slow
@no_gpu
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_others_with_one_message(
    folder: Path, environment: dict[str, str], begin: Begin, tiny: list[str], victim: int
) -> None:
    with ranks_training(folder, environment, begin, tiny, f"killed-{victim}") as (process, ranks):
        ranks[victim].kill()
        output, error = process.communicate()
        assert process.returncode == 1, error
        assert not [rank for rank in ranks if rank.is_running()]
    assert error.count("\n") == 1, error
    assert re.search(rf"Rank {victim} is lost: .* it was killed", error)
    assert "SIGTERM" not in output, "what torchrun tells the others is not the user's wish"
