"""Run the training command like a user, on models and texts with a few kilobytes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import forks, run_folder

LLAMA = run_folder.LLAMA | {"num_key_value_heads": 2, "tie_word_embeddings": True}
SENTENCE = "the weights of a block are fetched, used and given back; then the next block is fetched. "


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The working directory of the commands, with llama.json and text.txt."""
    path = tmp_path / "here"
    path.mkdir()
    (path / "llama.json").write_text(json.dumps(LLAMA))
    (path / "text.txt").write_text("\n".join(f"{number} {SENTENCE * 3}" for number in range(60)))
    (path / "empty.txt").write_text("")
    return path


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_folder.environment(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def tiny() -> list[str]:
    """Return arguments for a run that takes a second after the torch import."""
    return [
        *("--model.path", "llama.json", "--data.source", "text.txt", "--data.sequence_length", "32"),
        *("--train.steps", "4", "--train.batch_size", "2", "--offload.device_memory", "256KiB"),
    ]


@pytest.fixture
def begin() -> Callable[..., Any]:
    """Return the function to start a process. `EITHER` runs a test with both process types."""
    return forks.start


EITHER = pytest.mark.parametrize(
    "begin",
    [pytest.param(forks.start, id="forked"), pytest.param(forks.start_anew, id="anew", marks=pytest.mark.slow)],
)


@contextmanager
def training(
    folder: Path, environment: dict[str, str], begin: Callable[..., Any], words: list[str], until: str = "step 10/"
) -> Iterator[Any]:
    """Yield a command that has printed a line with the prefix `until`. Kill the process at the end."""
    process = begin(["-m", "offload.train", *words], cwd=folder, env=environment)
    try:
        for line in process.stdout:  # lines must be flushed at once, or this loop never ends
            if line.startswith(until):
                break
        yield process
    finally:
        process.close()


@pytest.fixture
def train(
    folder: Path, environment: dict[str, str], begin: Callable[..., Any]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function: run `python -m offload.train ARGUMENTS` and return the finished process."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return forks.run(["-m", "offload.train", *arguments], begin=begin, cwd=folder, env=environment)

    return run
