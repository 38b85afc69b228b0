"""A checkpoint saved by two ranks, with every damage type.

A resume by path reports the damaged file and the good checkpoint. A resume without a path starts at the good checkpoint
with the same bits.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload.app.config.command_line import parse_config
from offload.app.config.config import Config
from offload.app.training import build as runs
from offload.app.training.resume import ResumePoint, find_start
from offload.app.training.trainer import Trainer
from offload.checkpoint.manifest import MANIFEST, checksum
from offload.engine.engine import Engine
from offload.errors import CheckpointError
from tests.soak.runs import SMALL, WORDS, Forks, Run

FILES = [
    *(MANIFEST, "rank-0.bin", "rank-1.bin", "config.json", "generation_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
]


@pytest.fixture(scope="module")
def saved(forks: Forks) -> Run:
    """A run over two ranks with step-2 and step-4, for a total of 6 steps."""
    run = Run(forks, "saved", [*SMALL, "--train.steps", "4", "--checkpoint.every", "2"], num_ranks=2)
    assert run.start().codes() == {0}, run.said()
    for name in ("step-2", "step-4"):
        assert sorted(path.name for path in (run.checkpoints.path / name).iterdir()) == sorted(FILES)
    return run


@pytest.fixture
def run(saved: Run, tmp_path: Path) -> Run:
    """A copy of this run, for damage."""
    words = [*SMALL, "--train.steps", "6", "--checkpoint.every", "2"]
    copy = Run(saved.starter, tmp_path.name, words, place=tmp_path)
    shutil.copytree(saved.path, copy.path)
    return copy


class Ended(BaseException):
    """Ends the run after the checks."""


class Loader:
    """A run in the test process without states; states are loaded from any checkpoint, repeatedly."""

    def __init__(self, run: Run, engine: Engine, load_start: Callable[..., Any], folder: Path) -> None:
        self.run, self._engine, self._begin_at, self._states = run, engine, load_start, folder / "states"
        self._configs = {}
        for how in ("auto", str(run.checkpoints.path / "step-4")):
            self._configs[how] = config_of(run, "--checkpoint.resume", how)
        self.said: list[str] = []
        self.load(str(run.checkpoints.path / "step-4"))
        (self.run.checkpoints.path / "step-4").rename(folder / "step-4")
        self.load("auto")
        self._of_step_2 = self.states()
        (folder / "step-4").rename(self.run.checkpoints.path / "step-4")

    def load(self, how: str) -> None:
        """Load like a run with `--checkpoint.resume`."""
        self.said.clear()
        self._begin_at(find_start(self._configs[how]), self._engine, self.said.append)

    def states(self) -> dict[str, bytes]:
        """Return all files in a checkpoint of the current states."""
        self._engine.save_checkpoint(self._states)
        return {each.name: each.read_bytes() for each in self._states.iterdir()}

    def check(self, name: str) -> None:
        """Check that step-4 is refused because of one file."""
        bad, good = (self.run.checkpoints.path / step for step in ("step-4", "step-2"))
        with pytest.raises(CheckpointError) as caught:
            self.load(str(bad))
        assert f"{bad / name} " in str(caught.value)
        assert f"The last good one is {good}." in str(caught.value)
        assert caught.value.exit_code == 1
        self.load("auto")
        assert [text for text in self.said if f"{bad / name} " in text], self.said
        assert self.said[-1] == f"resumed at step 2 from {good}"
        assert self.states() == self._of_step_2


def config_of(run: Run, *words: str) -> Config:
    return parse_config([*WORDS, *run.words, "--run.dir", str(run.path), *words], prog="", description="")


@pytest.fixture
def inside(run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that calls `work` with a `Loader`."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    load_start = runs.load_start

    def call(work: Callable[[Loader], None]) -> None:
        def instead(_start: ResumePoint, engine: Engine, _say: Any) -> None:
            work(Loader(run, engine, load_start, tmp_path))
            raise Ended

        monkeypatch.setattr(runs, "load_start", instead)
        with pytest.raises(Ended):
            Trainer(config_of(run)).run()

    return call


@pytest.mark.slow  # quick version: tests/checkpoint/test_damage.py
@pytest.mark.parametrize("num_bits", [200])
def test_flipped_bits(inside: Any, num_bits: int) -> None:
    """Break: skip the checksum comparison for one file type."""
    inside(lambda loader: flip_bits(loader, num_bits))


def flip_bits(loader: Loader, num_bits: int) -> None:
    rng, folder = random.Random(11), loader.run.checkpoints.path / "step-4"
    for number in range(num_bits):
        path = folder / FILES[number % len(FILES)]  # equal probability per file: by size, small files would be rare
        whole = path.read_bytes()
        data, at = bytearray(whole), rng.randrange(len(whole))
        data[at] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        loader.check(path.name)
        path.write_bytes(whole)


@pytest.mark.slow  # quick version: tests/checkpoint/test_damage.py
def test_other_damage(inside: Any) -> None:
    inside(damage)


def damage(loader: Loader) -> None:
    rng, folder = random.Random(12), loader.run.checkpoints.path / "step-4"
    for name in FILES:
        path, other = folder / name, folder.with_name("step-2") / name
        whole = path.read_bytes()
        truncated = [whole[: rng.randrange(len(whole))] for _ in range(3)]
        for data in (*truncated, b"", whole + b"\n", other.read_bytes()):
            if data != whole:  # both steps have the same model configuration
                path.write_bytes(data)
                loader.check("rank-0.bin" if name == MANIFEST and data == other.read_bytes() else name)
        path.unlink()
        loader.check(name)
        path.write_bytes(whole)
    for name in ("rank-2.bin", "notes.txt"):
        (folder / name).touch()
        loader.check(name)
        (folder / name).unlink()


@pytest.mark.slow
def test_a_version_to_come(inside: Any) -> None:
    inside(make_newer)


def make_newer(loader: Loader) -> None:
    path = loader.run.checkpoints.path / "step-4" / MANIFEST
    whole = path.read_bytes()
    newer = json.loads(whole)
    del newer["checksum"]
    rest = f'",\n{json.dumps({**newer, "version": 2})[1:]}'.encode()
    path.write_bytes(b'{"checksum": "' + checksum(rest).encode() + rest)
    loader.check(MANIFEST)
    assert "newer program" in loader.said[0]
    path.write_bytes(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_ranks"), [pytest.param("rank-1.bin", 2, marks=pytest.mark.slow), ("tokenizer.json", 1)]
)
def test_by_the_command(run: Run, name: str, num_ranks: int) -> None:
    """By path: refused with one paragraph. Without a path, one rank or two resume from the previous checkpoint."""
    path = run.checkpoints.path / "step-4" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    before = {each: each.read_bytes() for each in run.path.rglob("*") if each.is_file()}
    words = run.words
    run.num_ranks, run.words = num_ranks, [*words, "--checkpoint.resume", str(path.parent)]
    assert run.start().codes() == {1}
    assert len(run.errors()) == 1, run.said()
    assert f"{path} is damaged" in run.errors()[0]
    assert run.errors()[0].endswith(f"The last good one is {run.checkpoints.path}/step-2.")
    assert {each: each.read_bytes() for each in run.path.rglob("*") if each.is_file()} == before

    run.words = words
    assert run.start().codes() == {0}, run.said()
    assert len(re.findall(f"^note: a checkpoint is skipped: .*{path} is damaged", run.said(), re.MULTILINE)) == 1
    assert run.said().count("resumed at step 2 ") == 1
    assert "Traceback" not in run.said()
    assert [line[0] for line in run.learnt()] == [1, 2, 3, 4, 5, 6]
    assert len(list(run.checkpoints.path.glob("step-4.aside-*"))) == 1
