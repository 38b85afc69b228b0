"""Runs over machines (network.py), as examples/cluster/torchrun.sh starts them: with disks of their own, over slow
links, and what becomes of them where a rank dies and where a cable is pulled.
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
from tests.forks import MINUTES, ROOT

pytestmark = pytest.mark.slow


@contextmanager
def started(machines: Network, words: Sequence[str], restarts: int = 0) -> Iterator[list[Rank]]:
    """Start the example on each of the machines, over two ranks, with the folder `run` on its disk."""
    folder = machines.folder
    (folder / "run").mkdir(exist_ok=True)
    common = {"HEAD": "10.77.0.1", "MACHINES": str(machines.size), "GPUS": "2", "RESTARTS": str(restarts)}
    with ExitStack() as opened:
        agents = []
        for number in range(machines.size):
            disk = folder / f"disk-{number}"
            disk.mkdir(exist_ok=True)
            output = folder / f"output-{number}"
            example = words_of(folder, [FOLDER / "torchrun.sh", *words], NODE=str(number), **common)
            run = ["-u", *machines.words(number, disk), "torch.distributed.run", *example]
            env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            env["XDG_CACHE_HOME"] = str(folder / f"cache-{number}")
            with output.open("wb") as file:
                process = forks.start(run, cwd=folder, env=env, stdout=file, stderr=subprocess.STDOUT)
            opened.callback(process.close)
            agents.append(Rank(process, output))
        yield agents


def alone(folder: Path, words: Sequence[str]) -> None:
    """Train in one process on this machine."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache-0")}
    found = forks.run(["-m", "offload.train", *words], cwd=folder, env=env)
    assert found.returncode == 0, found.stdout + found.stderr


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_alike(run: Path, other: Path) -> None:
    """The same up to the order of sums."""
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
    wrote = next(disk for disk in disks if (disk / "metrics.jsonl").exists())  # torchrun says which is the first
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


def test_a_pulled_cable_ends_all_with_one_message_a_machine(tmp_path: Path) -> None:
    words = [*settings(tmp_path), "--train.steps", "1000"]
    with network(tmp_path, 2) as machines:
        machines.throttle("5mbit")
        with started(machines, [*words, "--run.dir", "run"]) as agents:
            _first(agents, "saved run/checkpoints/step-2")
            machines.cut(1)
            for agent in agents:  # torchrun's own, which asks its store for a minute and more, need not be waited for
                agent.wait_for("lost: ", MINUTES)
                assert agent.output.count("offload: ") == 1, agent.output


def test_a_machine_killed_in_mid_save_goes_on_bit_for_bit_with_its_errors(tmp_path: Path) -> None:
    """Both ranks of a machine, by SIGKILL, while the second checkpoint is written; gradients travel in codes."""
    words = [*settings(tmp_path), "--train.steps", "8", "--offload.link_gradients", "int4", "--run.dir", "run"]
    runs = {}
    for name in ("whole", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        with network(folder, 2) as machines:
            machines.throttle("5mbit")
            with started(machines, words, restarts=1) as agents:
                if name == "killed":
                    _first(agents, "saved run/checkpoints/step-2")
                    _wait_for(folder, "disk-*/checkpoints/step-4.partial-*", agents)
                    for pid in _pids(folder)[2:]:
                        os.kill(pid, signal.SIGKILL)
                assert [each.end(MINUTES) for each in agents] == [0, 0], [each.output for each in agents]
                assert ("resumed at step" in "".join(each.output for each in agents)) is (name == "killed")
        runs[name] = next(folder.glob("disk-*/metrics.jsonl")).parent
        assert not list(folder.glob("disk-*/checkpoints/*.partial-*"))
    assert losses(runs["killed"]) == losses(runs["whole"])
    assert (runs["killed"] / "hf/model.safetensors").read_bytes() == (
        runs["whole"] / "hf/model.safetensors"
    ).read_bytes()


def _wait_for(folder: Path, pattern: str, agents: Sequence[Rank]) -> None:
    """Wait until there is such a file, while all of the machines run."""
    deadline = time.monotonic() + MINUTES
    while not next(folder.glob(pattern), None):
        assert time.monotonic() < deadline
        assert [each.process.poll() for each in agents] == [None] * len(agents)
        time.sleep(0.001)


def _first(agents: Sequence[Rank], text: str) -> Rank:
    """Return the machine that rank 0 is on, when it has printed `text`."""
    deadline = time.monotonic() + MINUTES
    while not (found := [each for each in agents if text in each.output]):
        outputs = [each.output for each in agents]
        assert time.monotonic() < deadline, outputs
        assert [each.process.poll() for each in agents] == [None] * len(agents), outputs
        time.sleep(0.02)
    return found[0]


def _pids(folder: Path) -> list[int]:
    """Return the process of each rank."""
    found = next(folder.glob("disk-*/env.json"))
    pids: list[int] = json.loads(found.read_text())["pids"]
    return pids
