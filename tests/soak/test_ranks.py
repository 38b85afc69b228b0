"""Runs over several ranks: resumed with another rank count, and saved after a signal."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import psutil
import pytest
import torch

from tests.forks import start
from tests.lanes.patience import eventually
from tests.soak.runs import SMALL, TIERS, Commands, Forks, Run

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks would run on GPUs")


@pytest.fixture(scope="module")
def whole(forks: Forks) -> Run:
    """Two ranks with all states on disk, and step-6 of 12. No dropout, because each rank samples separately."""
    words = [*SMALL, *TIERS["nvme"], "--train.steps", "12", "--checkpoint.every", "6", "--train.max_grad_norm", "0.3"]
    run = Run(forks, "two", words, num_ranks=2)
    assert run.start().codes() == {0}, run.said()
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "tier"),
    [(2, "memory"), (1, "nvme"), (2, "nvme"), (1, "memory"), (3, "memory"), (3, "nvme")],
)
def test_any_number_of_ranks_goes_on_with_a_run(whole: Run, num_ranks: int, tier: str) -> None:
    """Equal bits for the same number of ranks with any placement. Otherwise equal up to the summation order."""
    words = [*SMALL, *TIERS[tier], "--train.steps", "12", "--checkpoint.resume", str(whole.path / "checkpoints/step-6")]
    run = Run(whole.starter, f"{num_ranks}-{tier}", words, num_ranks)
    assert run.start().codes() == {0}, run.said()
    assert run.said().count("resumed at step 6 from ") == 1
    found, wanted = run.learnt(), whole.learnt()[6:]
    weights, expected = run.weights(), whole.weights()
    if num_ranks == 2:
        assert found == wanted
        assert not [name for name in expected if not weights[name].equal(expected[name])]
    else:
        assert found == [pytest.approx(line, rel=1e-5) for line in wanted]
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=1e-5)


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
