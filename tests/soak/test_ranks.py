"""Runs over several ranks, saved after a signal."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import psutil
import pytest
import torch

from tests.forks import start
from tests.lanes.patience import eventually
from tests.soak.runs import SMALL, Commands, Run

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks would run on GPUs")


@pytest.mark.slow
def test_a_signal_saves_once_whoever_gets_it(folder: Path) -> None:
    """First the launcher gets the signal, then rank 1."""
    words = [*SMALL, "--train.steps", "1000000"]
    run = Run(Commands(folder, start), "asked", words, num_ranks=2)
    with run.start() as processes:
        for number, rank in enumerate([None, 1]):
            assert eventually(lambda number=number: num_steps(run) >= 20 * (number + 1)), run.said()
            psutil.Process(processes.pids(rank)[0]).send_signal(signal.SIGUSR1)
            assert eventually(lambda number=number: len(run.checkpoints.folders()) > number), run.said()
        before = num_steps(run)
        assert eventually(lambda: num_steps(run) >= before + 20), run.said()
        psutil.Process(processes.started[0].pid).send_signal(signal.SIGTERM)
        assert processes.codes() == {130}, run.said()
    saved = re.findall(r"^step (\d+)  saved ", run.said(), re.MULTILINE)
    assert len(saved) == 3, run.said()
    assert saved[2] == str(len(run.learnt()))
    assert run.said().count("SIGUSR1: saving after this step.") == 1, "rank 0 says what it heard"


def num_steps(run: Run) -> int:
    path = run.path / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0
