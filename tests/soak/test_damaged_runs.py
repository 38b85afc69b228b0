"""A damaged checkpoint saved by two ranks, resumed by the command. tests/checkpoint/test_damage.py has all damage."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from offload.checkpoint.manifest import MANIFEST
from tests.run_folder import contents, flip
from tests.soak.runs import SMALL, Forks, Run

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_ranks"), [pytest.param("rank-1.bin", 2, marks=pytest.mark.slow), ("tokenizer.json", 1)]
)
def test_by_the_command(run: Run, name: str, num_ranks: int) -> None:
    """By path: refused with one paragraph. Without a path, one rank or two resume from the previous checkpoint."""
    path = run.checkpoints.path / "step-4" / name
    flip(path)
    before = contents(run.path)
    words = run.words
    run.num_ranks, run.words = num_ranks, [*words, "--checkpoint.resume", str(path.parent)]
    assert run.start().codes() == {1}
    assert len(run.errors()) == 1, run.said()
    assert f"{path} is damaged" in run.errors()[0]
    assert run.errors()[0].endswith(f"The last good one is {run.checkpoints.path}/step-2.")
    assert contents(run.path) == before

    run.words = words
    assert run.start().codes() == {0}, run.said()
    assert len(re.findall(f"^note: a checkpoint is skipped: .*{path} is damaged", run.said(), re.MULTILINE)) == 1
    assert run.said().count("resumed at step 2 ") == 1
    assert "Traceback" not in run.said()
    assert [line[0] for line in run.learnt()] == [1, 2, 3, 4, 5, 6]
    assert len(list(run.checkpoints.path.glob("step-4.aside-*"))) == 1
