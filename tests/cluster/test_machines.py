"""Runs over several machines (network.py), started with examples/cluster/torchrun.sh.

Machines have separate disks and slow links. Tests kill a rank or cut a link.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests import forks
from tests.cluster.network import Network, network
from tests.cluster.test_disks import settings
from tests.cluster.test_examples import FOLDER, words_of
from tests.distributed.ranks import Rank
from tests.forks import MINUTES
from tests.run_folder import environment, losses

pytestmark = pytest.mark.slow


@contextmanager
def started(machines: Network, words: Sequence[str], restarts: int = 0, ranks: int = 2) -> Iterator[list[Rank]]:
    """Start the example on each machine with `ranks` ranks, and the folder `run` on the machine's disk."""
    folder = machines.folder
    (folder / "run").mkdir(exist_ok=True)
    common = {"HEAD": "10.77.0.1", "MACHINES": str(machines.size), "GPUS": str(ranks), "RESTARTS": str(restarts)}
    with ExitStack() as opened:
        agents = []
        for number in range(machines.size):
            disk = folder / f"disk-{number}"
            disk.mkdir(exist_ok=True)
            output = folder / f"output-{number}"
            example = words_of(folder, [FOLDER / "torchrun.sh", *words], NODE=str(number), **common)
            run = ["-u", *machines.words(number, disk), "torch.distributed.run", *example]
            env = environment(folder / f"cache-{number}")
            with output.open("wb") as file:
                process = forks.start(run, cwd=folder, env=env, stdout=file, stderr=subprocess.STDOUT)
            opened.callback(process.close)
            agents.append(Rank(process, output))
        yield agents


def alone(folder: Path, words: Sequence[str]) -> None:
    """Train in one process on this host."""
    found = forks.run(["-m", "offload.train", *words], cwd=folder, env=environment(folder / "cache-0"))
    assert found.returncode == 0, found.stdout + found.stderr


def assert_alike(run: Path, other: Path) -> None:
    """Check that two runs are equal up to the summation order."""
    assert losses(run) == pytest.approx(losses(other), rel=1e-5)
    one, two = (load_file(each / "hf/model.safetensors") for each in (run, other))
    assert one.keys() == two.keys()
    for name, weight in one.items():
        assert weight == pytest.approx(two[name], rel=1e-3, abs=1e-5), name


def test_three_machines_train_as_one_process_does_which_goes_on_alone(tmp_path: Path) -> None:
    words = settings(tmp_path)
    with network(tmp_path, 3) as machines:
        machines.throttle("100mbit")
        with started(machines, [*words, "--run.dir", "run", "--train.steps", "4"]) as agents:
            assert [each.end(MINUTES) for each in agents] == [0, 0, 0], [each.output for each in agents]
    disks = [tmp_path / f"disk-{number}" for number in range(3)]
    kept = [sorted(path.name for path in (disk / "checkpoints/step-4").glob("rank-*")) for disk in disks]
    assert {name for names in kept for name in names} == {f"rank-{rank}.bin" for rank in range(6)}
    assert [len(names) for names in kept] == [2, 2, 2]
    wrote = next(disk for disk in disks if (disk / "metrics.jsonl").exists())  # torchrun chooses the first machine
    for disk in disks:
        for path in (disk / "checkpoints/step-4").glob("rank-*"):
            path.replace(wrote / "checkpoints/step-4" / path.name)
    for run, steps in (wrote, "6"), (tmp_path / "one", "4"), (tmp_path / "one", "6"):
        alone(tmp_path, [*words, "--run.dir", str(run), "--train.steps", steps])
    assert_alike(wrote, tmp_path / "one")


def test_a_killed_rank_is_started_again_at_the_newest_checkpoint(tmp_path: Path) -> None:
    words = [*settings(tmp_path), "--train.steps", "8"]
    with network(tmp_path, 2) as machines:
        machines.throttle("5mbit")
        with started(machines, [*words, "--run.dir", "run"], restarts=1) as agents:
            first = _first(agents, "saved run/checkpoints/step-2")
            os.kill(_pids(tmp_path)[3], signal.SIGKILL)
            assert [each.end(MINUTES) for each in agents] == [0, 0], [each.output for each in agents]
    assert "resumed at step" in first.output
    alone(tmp_path, [*words, "--run.dir", "one"])
    assert_alike(next(tmp_path.glob("disk-*/metrics.jsonl")).parent, tmp_path / "one")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """The settings and the result of an uninterrupted run with quantized gradients on the link."""
    folder = tmp_path_factory.mktemp("whole")
    words = [*settings(folder), "--train.steps", "10", "--offload.link_gradients", "int4", "--run.dir", "run"]
    with network(folder, 2) as machines, started(machines, words) as agents:
        assert [each.end(MINUTES) for each in agents] == [0, 0], [each.output for each in agents]
    return words, next(folder.glob("disk-*/metrics.jsonl")).parent


@pytest.mark.parametrize("way", ["killed in mid-save", "cut in mid-save", "cut in mid-step"])
def test_a_lost_machine_ends_all_and_the_run_goes_on_bit_for_bit(
    tmp_path: Path, way: str, whole: tuple[list[str], Path]
) -> None:
    """Both ranks on a machine are killed and torchrun restarts all ranks, or a link is cut.

    After a cut each machine reports the loss once, and a user restarts the run.
    """
    words, other = whole
    is_cut = "cut" in way
    with network(tmp_path, 2) as machines:
        machines.throttle("5mbit")
        with started(machines, words, restarts=int(not is_cut)) as agents:
            _first(agents, "saved run/checkpoints/step-2")
            pids = _pids(tmp_path)[2:] if way == "cut in mid-step" else _stopped_in_mid_save(tmp_path, agents)
            if is_cut:
                machines.cut(1)
            for pid in pids:
                os.kill(pid, signal.SIGCONT if is_cut else signal.SIGKILL)
            for agent in agents if is_cut else []:
                agent.wait_for("lost: ", MINUTES)  # torchrun itself ends more than a minute later
                assert agent.output.count("offload: ") == 1, agent.output
            if not is_cut:
                assert [each.end(MINUTES) for each in agents] == [0, 0], [each.output for each in agents]
        if is_cut:
            machines.plug(1)
            with started(machines, words) as agents:
                assert [each.end(MINUTES) for each in agents] == [0, 0], [each.output for each in agents]
        assert "resumed at step" in "".join(each.output for each in agents)
    run = next(tmp_path.glob("disk-*/metrics.jsonl")).parent
    assert not list(tmp_path.glob("disk-*/checkpoints/*.partial-*"))
    assert losses(run) == losses(other)
    assert (run / "hf/model.safetensors").read_bytes() == (other / "hf/model.safetensors").read_bytes()


def _stopped_in_mid_save(folder: Path, agents: Sequence[Rank]) -> list[int]:
    """Stop both ranks on the second machine during a checkpoint write. Return their process ids."""
    pids, deadline = _pids(folder)[2:], time.monotonic() + MINUTES
    while True:
        while not next(folder.glob("disk-*/checkpoints/*.partial-*"), None):
            assert time.monotonic() < deadline
            assert [each.process.poll() for each in agents] == [None] * len(agents)
            time.sleep(0.001)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        if next(folder.glob("disk-*/checkpoints/*.partial-*"), None):
            return pids
        for pid in pids:  # this save was complete
            os.kill(pid, signal.SIGCONT)


def _first(agents: Sequence[Rank], text: str) -> Rank:
    """Return the machine with rank 0, after `text` appears in the output."""
    deadline = time.monotonic() + MINUTES
    while not (found := [each for each in agents if text in each.output]):
        outputs = [each.output for each in agents]
        assert time.monotonic() < deadline, outputs
        assert [each.process.poll() for each in agents] == [None] * len(agents), outputs
        time.sleep(0.02)
    return found[0]


def _pids(folder: Path) -> list[int]:
    """Return the process id of each rank."""
    found = next(folder.glob("disk-*/env.json"))
    pids: list[int] = json.loads(found.read_text())["pids"]
    return pids
