"""Commands that save on a full disk: the earlier checkpoint stays whole, and the new one leaves no files."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import psutil
import pytest
import torch

from offload.checkpoint.reader import verify
from tests.forks import start
from tests.lanes.patience import eventually
from tests.run_folder import fill
from tests.soak.runs import SMALL, Commands, Forks, Processes, Run

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks would run on GPUs")
FOR_EVER = [*SMALL, "--train.steps", "1000000", "--checkpoint.every", "5"]


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["one rank", "two ranks"])
def run(request: pytest.FixtureRequest, folder: Path, forks: Forks, disk: Path) -> Run:
    """A run on this disk, with --gpus for two ranks."""
    starter = forks if request.param == 1 else Commands(folder, start)
    return Run(starter, f"run-{request.node.name}", FOR_EVER, request.param, place=disk)


def wait_for(words: str, run: Run, processes: Processes, times: int = 1) -> None:
    """Wait for a number of matching output lines."""
    eventually(lambda: num_said(words, run) >= times or not processes.is_running())
    assert num_said(words, run) >= times, run.said()


def num_said(words: str, run: Run) -> int:
    return len(re.findall(words, run.said(), re.MULTILINE))


def check_what_is_there(run: Run, *, while_it_runs: bool = False) -> None:
    """Check that the run has only whole checkpoints and `latest`.

    `latest` names the newest checkpoint, or an earlier one if the disk was full at the update. During a run a partial
    checkpoint is allowed.
    """
    folders = run.checkpoints.folders()
    for path in folders:
        verify(path)
    names = {path.name for path in run.checkpoints.path.iterdir()} - {".latest.new"}
    if while_it_runs:
        names = {name for name in names if ".partial-" not in name}
    assert names == {*(path.name for path in folders), "latest"}
    said = re.fullmatch(r"step-(\d+)\n", (run.checkpoints.path / "latest").read_text())
    assert said is not None
    assert int(said[1]) <= int(folders[0].name.removeprefix("step-"))


def assert_ended_for_want_of_room(processes: Processes, run: Run) -> None:
    assert processes.codes() == {1}, run.said()
    assert len(run.errors()) == 1, run.said()
    assert re.search("ENOSPC.*, with .*B free;.*A checkpoint takes about .*: it goes on from step ", run.errors()[0])
    assert "Traceback" not in run.said()
    check_what_is_there(run)


@pytest.mark.slow
def test_training_goes_on_and_says_so(run: Run, disk: Path) -> None:
    """The disk is full for a while, and again at the stop signal."""
    saved, not_saved = "^step [0-9]+  saved ", "^note: step [0-9]+ could not be saved"
    with run.start() as processes:
        wait_for("^step 5  saved ", run, processes)
        other = fill(disk)
        wait_for(f"{not_saved}, the last one is of step [0-9]+: ", run, processes)
        check_what_is_there(run, while_it_runs=True)
        last = run.checkpoints.folders()[0]
        other.unlink()
        wait_for(saved, run, processes, 1 + num_said(saved, run))
        fill(disk)
        wait_for(not_saved, run, processes, 1 + num_said(not_saved, run))
        assert run.checkpoints.folders()[0] != last
        last = run.checkpoints.folders()[0]
        psutil.Process(processes.started[0].pid).send_signal(signal.SIGTERM)
        assert_ended_for_want_of_room(processes, run)
    assert run.checkpoints.folders()[0] == last

    (disk / "other").unlink()
    step = int(last.name.removeprefix("step-"))
    with run.start() as processes:
        wait_for(f"^resumed at step {step} from ", run, processes)
        wait_for(saved, run, processes)
        psutil.Process(processes.started[0].pid).send_signal(signal.SIGTERM)
        assert processes.codes() == {130}, run.said()
    steps = [line[0] for line in run.learnt()]
    assert steps == list(range(1, len(steps) + 1))
    check_what_is_there(run)
    assert run.checkpoints.folders()[0].name == f"step-{len(steps)}"
