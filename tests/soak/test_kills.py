"""Runs killed again and again, mostly during a save, and restarted with the same command.

The result has the same bits as an uninterrupted run, and no files remain.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from offload.checkpoint.reader import verify
from tests.forks import PATIENCE_S
from tests.lanes.patience import eventually
from tests.soak.runs import LARGE, TIERS, Commands, Forks, Processes, Run

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks would run on GPUs")
EVERY = 2
FILES = ["checkpoints", "config.yaml", "env.json", "hf", "metrics.jsonl", "plan.json", "report.html", "trace.json.gz"]


@dataclass(frozen=True)
class Kill:
    """Time and target of a kill.

    at: the state of a save, as in `at_work`, or `starting` or `training` outside a save. rank: the rank to kill; None:
    all processes, including the launcher.
    """

    at: str
    rank: int | None = None


FEW = [Kill("writing"), Kill("starting"), Kill("writing"), Kill("announcing"), Kill("removing")]
MANY = [Kill(at) for at in ("training", "starting", *["announcing"] * 2, *["removing"] * 2, *["writing"] * 9)]
FEW_RANKS = [Kill("writing", rank=1), Kill("writing")]
MANY_RANKS = [
    *(Kill("writing"), Kill("writing", rank=0), Kill("writing", rank=1), Kill("announcing"), Kill("training", rank=1)),
    *(Kill("removing", rank=0), Kill("starting")),
]


def at_work(folder: Path, before: set[str]) -> str:
    """Return the save state, from the new names in the checkpoint folder. Empty between two saves."""
    new = " ".join(names(folder) - before)
    if ".partial-" in new:
        return "writing"
    if ".removed-" in new:
        return "removing"
    return "announcing" if unannounced(folder) - before else ""


def unannounced(folder: Path) -> set[str]:
    """Return the checkpoints above the one named in `latest`."""
    steps = {int(name[5:]): name for name in names(folder) if re.fullmatch(r"step-\d+", name)}
    latest = -1
    with suppress(FileNotFoundError):
        latest = int((folder / "latest").read_text()[5:])
    return {name for step, name in steps.items() if step > latest}


def names(folder: Path) -> set[str]:
    with suppress(FileNotFoundError):
        return {path.name for path in folder.iterdir()}
    return set()


def stop_at(at: str, run: Run, processes: Processes, before: set[str], rng: random.Random) -> bool:
    """Wait for the state `at` in one of the first saves, and stop all processes at a random time in this state.

    Returns False if the run ended first, because some states last a few milliseconds.
    """
    folder, until = run.checkpoints.path, time.monotonic() + PATIENCE_S
    num_before, longest, last = rng.randrange(3), 0.03, ""
    word = {"starting": "data: ", "training": "tiers: "}.get(at)
    while True:
        assert time.monotonic() < until
        if not processes.is_running():
            return False
        if word and word in run.said():
            time.sleep(rng.uniform(0, 0.3))
            return processes.stop()
        now = at_work(folder, before)
        if now == at != last:
            num_before -= 1
            if num_before < 0:
                time.sleep(rng.uniform(0, longest) if at == "writing" else 0)
                if processes.stop() and at_work(folder, before) == at:
                    return True
                processes.go_on()
                longest /= 2  # the length of a save is unknown
        last = now
        time.sleep(0.01 if word else 0.0002)


def start_and_kill(run: Run, kill: Kill, rng: random.Random) -> str | None:
    """Start the command and kill it. Return the save state; None: the run ended first."""
    folder = run.checkpoints.path
    before = names(folder)
    with run.start() as processes:
        for pid in processes.pids():  # on a busy machine, low priority slows the save and not the test
            os.setpriority(os.PRIO_PROCESS, pid, 10)
        if not stop_at(kill.at, run, processes, before, rng):
            assert processes.codes() == {0}, run.said()
            return None
        found, doomed = at_work(folder, before), processes.pids(kill.rank)
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)
        processes.go_on()
        codes = processes.codes()
    if kill.rank is None:
        assert codes == {-signal.SIGKILL}
        assert eventually(lambda: not any(map(psutil.pid_exists, doomed)))
    else:
        assert codes <= {1, -signal.SIGKILL}, "and the other ranks ended"
    return found


def check_after_kill(run: Run) -> int | None:
    """Check that all checkpoint folders are valid, including all announced ones. Return the newest step."""
    told = [int(step) for log in run.logs for step in re.findall(r"^step (\d+)  saved ", log.read_text(), re.MULTILINE)]
    for path in run.checkpoints.folders():
        verify(path)
    found = [int(path.name[5:]) for path in run.checkpoints.folders()]
    assert len(found) <= 3, "two stay, and a new one is made before an old one goes"
    assert max(found, default=0) >= max(told, default=0)
    return max(found, default=None)


def kill_and_go_on(run: Run, whole: Run, kills: Sequence[Kill], num_steps: int, seed: int) -> Counter[str]:
    """Kill a run at each given time, finish it, and compare with a whole run.

    Returns the number of kills by save state.
    """
    rng, hits, step, left = random.Random(seed), Counter[str](), None, set[str]()
    for number, kill in enumerate(kills, 1):
        found = start_and_kill(run, kill, rng)
        assert_went_on(run, step)
        step = check_after_kill(run)
        left = {name for name in names(run.checkpoints.path) if ".partial-" in name or ".removed-" in name}
        if found is None:
            break
        hits[found] += 1
        whom = "all" if kill.rank is None else f"rank {kill.rank}"
        print(f"{run.name} {number}/{len(kills)}: {whom} killed, {found or 'no save'}; step {step} is whole")
    assert run.start().codes() == {0}, run.said()
    assert_went_on(run, step)
    for name in left:
        assert f"note: {name}, left by a killed process, is removed." in run.said()

    assert [line[0] for line in run.learnt()] == list(range(1, num_steps + 1))
    assert run.learnt() == whole.learnt()
    weights, wanted = run.weights(), whole.weights()
    assert weights.keys() == wanted.keys()
    assert not [name for name in wanted if not weights[name].equal(wanted[name])]
    assert sorted(names(run.path)) == FILES
    assert names(run.checkpoints.path) == {"latest", f"step-{num_steps}", f"step-{num_steps - EVERY}"}
    assert (run.checkpoints.path / "latest").read_text() == f"step-{num_steps}\n"
    return hits


def assert_went_on(run: Run, step: int | None) -> None:
    """Check the resume step of the last process, if the process came that far."""
    said = run.said()
    assert re.findall(r"^resumed at step (\d+) ", said, re.MULTILINE) in ([], [] if step is None else [str(step)])
    assert "Traceback" not in said


@pytest.fixture(autouse=True)
def disk(folder: Path) -> Iterator[Path]:
    """The NVMe tier folder, empty after killed runs."""
    path = folder / "disk"
    yield path
    assert not names(path)


def whole_run(starter: Commands | Forks, name: str, words: Sequence[str], num_ranks: int = 1) -> Run:
    run = Run(starter, f"{name}-whole", words, num_ranks)
    assert run.start().codes() == {0}, run.said()
    return run


@pytest.fixture(scope="module")
def whole(forks: Forks) -> Run:
    return whole_run(forks, "forked", [*LARGE, "--train.steps", "30"])


@pytest.mark.slow  # quick version: tests/checkpoint/test_atomic.py, and two ranks with a signal
@pytest.mark.parametrize("tier", ["nvme"])
def test_a_run_that_is_killed_while_it_saves(forks: Forks, whole: Run, tier: str) -> None:
    run = Run(forks, tier, [*LARGE, *TIERS[tier], "--train.steps", "30", "--checkpoint.every", str(EVERY)])
    hits = kill_and_go_on(run, whole, FEW, 30, seed=1)
    assert hits["writing"]


@pytest.mark.slow  # quick version: one killed process, and ranks with a failed save
def test_ranks_that_are_killed_while_they_save(forks: Forks) -> None:
    words = [*LARGE, "--train.steps", "20"]
    whole = whole_run(forks, "ranks", words, 2)
    hits = kill_and_go_on(Run(forks, "ranks", [*words, "--checkpoint.every", str(EVERY)], 2), whole, FEW_RANKS, 20, 2)
    assert hits["writing"]


@pytest.mark.soak
@pytest.mark.parametrize("tier", TIERS)
def test_thirty_kills(folder: Path, tier: str) -> None:
    kills = random.Random(tier).sample(MANY, len(MANY))
    words, starter = [*LARGE, *TIERS[tier], "--train.steps", "100"], Commands(folder)
    whole = whole_run(starter, f"thirty-{tier}", words)
    run = Run(starter, f"thirty-{tier}", [*words, "--checkpoint.every", str(EVERY)])
    hits = kill_and_go_on(run, whole, kills, 100, seed=3)
    print(f"{run.name}: {dict(hits)}")
    assert len(kills) - hits[""] >= len(kills) / 2
    assert hits["announcing"]
    assert hits["removing"]


@pytest.mark.soak
def test_kills_of_ranks(folder: Path) -> None:
    words, starter = [*LARGE, *TIERS["nvme"], "--train.steps", "80"], Commands(folder)
    whole = whole_run(starter, "more-ranks", words, 2)
    run = Run(starter, "more-ranks", [*words, "--checkpoint.every", str(EVERY)], 2)
    hits = kill_and_go_on(run, whole, MANY_RANKS, 80, seed=4)
    print(f"{run.name}: {dict(hits)}")
    assert len(MANY_RANKS) - hits[""] >= len(MANY_RANKS) / 2
