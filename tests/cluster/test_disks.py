"""Ranks on machines with separate disks: each rank runs in a separate folder with a relative run folder."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from offload.distributed.ranks import NamespaceSocket
from tests import forks
from tests.run_folder import SHAPE, lines_of, write_shape, write_text

RUN = Path("run/checkpoints")


def settings(tmp_path: Path, shape: Mapping[str, int] = SHAPE) -> list[str]:
    """Write a small model configuration and text, readable from any folder. Return the settings."""
    config, text = write_shape(tmp_path / "shape", **shape), write_text(tmp_path)
    data = ["--model.path", str(config), "--data.source", str(text)]
    data += ["--data.sequence_length", "32", "--train.batch_size", "6", "--checkpoint.every", "2"]
    return [*data, "--optimizer.schedule", "constant", "--optimizer.warmup_steps", "0"]  # valid for any number of steps


def train(disks: list[Path], words: Sequence[str]) -> list[tuple[int, str]]:
    """Run one rank in each folder. Return (exit code, stdout with stderr) per rank."""
    for disk in disks:
        disk.mkdir(exist_ok=True)
    done = forks.run_ranks(["-m", "offload.train", *words], len(disks), cwd=disks)
    return [(each.returncode, each.stdout + each.stderr) for each in done]


def files(disk: Path, step: int) -> set[str]:
    return {path.name for path in (disk / RUN / f"step-{step}").glob("rank-*")}


def weights(disk: Path) -> bytes:
    return (disk / "run/hf/model.safetensors").read_bytes()


@pytest.mark.slow
def test_checkpoints_on_disks_of_their_own_are_resumed_by_whoever_has_their_parts(tmp_path: Path):
    words = [*settings(tmp_path), "--run.dir", "run"]
    unexported = [*words, "--checkpoint.export", "false"]
    whole, one, two, three = (tmp_path / name for name in ("whole", "one", "two", "three"))
    for disks, steps in (
        ([whole, whole], [*words, "--train.steps", "6"]),
        ([one, two], [*unexported, "--train.steps", "4"]),
    ):
        assert [code for code, _ in train(disks, steps)] == [0, 0]
    assert (files(one, 4), files(two, 4)) == ({"rank-0.bin"}, {"rank-1.bin"})
    assert not list(tmp_path.glob("*/run/**/*.partial-*"))

    # A save without publication on one machine does not count. The machines have other numbers now.
    shutil.rmtree(one / RUN / "step-4")
    (first, text), (second, other) = train([two, one], [*words, "--checkpoint.export", "true", "--train.steps", "6"])
    assert (first, second, other) == (0, 0, ""), text
    assert "step-4/rank-0.bin is missing on the disks of all machines" in text
    assert "resumed at step 2" in text
    assert weights(two) == weights(whole)
    assert (files(one, 6), files(two, 6)) == ({"rank-1.bin"}, {"rank-0.bin"})

    # A new machine joins as the first.
    (first, text), *others = train([three, one, two], [*unexported, "--train.steps", "8"])
    assert (first, *others) == (0, (0, ""), (0, "")), (text, others)
    assert "resumed at step 6" in text
    # The copied parts form an ordinary checkpoint.
    verify = ["-m", "offload.verify", "run"]
    assert "rank-1.bin is missing" in forks.start(verify, cwd=three).communicate()[0]
    for disk in one, two:
        shutil.copytree(disk / RUN / "step-8", three / RUN / "step-8", dirs_exist_ok=True)
    ((code, text),) = train([three], [*unexported, "--train.steps", "10"])
    assert code == 0
    assert "resumed at step 8" in text
    assert [line["step"] for line in lines_of(three / "run")] == [7, 8, 9, 10]


def test_a_door_is_found_from_its_own_network_alone():
    door = NamespaceSocket(2)
    try:
        assert door.reaches(door.name)
        assert not door.reaches(f"{door.name}0")
        apart = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-S", "-c", "print('there')"]
        if subprocess.run(apart, capture_output=True, check=False).returncode:
            pytest.skip("no network namespaces (unshare --net) here")
        apart[-1] = f"import socket; socket.socket(socket.AF_UNIX).connect({door.name!r})"
        assert "ConnectionRefusedError" in subprocess.run(apart, capture_output=True, text=True, check=False).stderr
    finally:
        door.close()
    with socket.socket(socket.AF_UNIX) as visitor, pytest.raises(ConnectionRefusedError):
        visitor.connect(door.name)
