"""`python -m offload.init`: the written file is a configuration of `train`."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offload import plan
from offload.app.config.config import Config
from offload.errors import ConfigError
from offload.extras.plan import alternatives
from offload.init import main
from tests import forks
from tests.matrix import quick

GIVEN = {
    "model.preset": "tiny",
    "data.source": "builtin:stdlib",
    "data.sequence_length": "64",
    "train.batch_size": "12",
    "optimizer.lr": "3e-4",
}
WORDS = [word for key, value in GIVEN.items() for word in (f"--{key}", value)]
MACHINE = ("--hardware", "rtx-4090")


@pytest.mark.parametrize(("most", "rows"), quick([(5, 4), (1, 1)], [(5, 4)]))
def test_the_file_has_the_given_settings_and_the_most_rows_that_fit(
    most: int, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def place(_forecaster: Any, found: Any, **_: Any) -> Any:
        assert (found.hardware.name, found.hardware.host_bytes) == ("RTX 4090", 1 << 30)
        return replace(found, refusal="" if found.config.train.micro_batch_size <= most else "too many rows")

    monkeypatch.setattr(alternatives, "place", place)
    path = tmp_path / "run.yaml"
    assert main([*WORDS, *MACHINE, "--host-memory", "5GiB", "--out", str(path)]) == 0
    written, expected = Config.load(path), Config.load(None, {**GIVEN, "train.micro_batch_size": rows})
    assert dict(written.items()) == dict(expected.items())
    assert {key for key, _ in written.items() if not written.is_default(key)} == {*GIVEN, "train.micro_batch_size"}
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{path}: {path.read_text().splitlines()[0].removeprefix('# ')}"
    assert second == f"offload train --config {path}"


def test_no_file_is_written_if_nothing_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    misfit = {"refusal": "too many rows"}
    monkeypatch.setattr(alternatives, "place", lambda _forecaster, found, **_: replace(found, **misfit))
    fixed = {"refusal": "too many rows.", "fix": "--train.passes 3"}  # the search has told the refusal
    monkeypatch.setattr(alternatives, "place_or_fix", lambda _forecaster, found, _say: replace(found, **fixed))
    path = tmp_path / "run.yaml"
    assert main([*WORDS, *MACHINE, "--out", str(path)]) == 3
    assert capsys.readouterr().err.endswith("The smallest change that fits: --train.passes 3\n")
    assert not path.exists()


@pytest.mark.slow
def test_train_takes_the_file_and_a_file_is_kept(
    folder: Path, environment: dict[str, str], tiny: list[str], train: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    words = ["-m", "offload.init", *tiny, "--offload.device_memory", "64MiB", *MACHINE]
    done = forks.run(words, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    done = train("--config", "offload.yaml", "--run.dir", "run")
    assert done.returncode == 0, done.stderr
    assert Config.load(folder / "run" / "config.yaml").train.micro_batch_size == 2
    before = (folder / "offload.yaml").read_text()
    again = forks.run(words, cwd=folder, env=environment)
    assert again.returncode == 2
    assert "offload.yaml exists, and is kept" in again.stderr
    assert (folder / "offload.yaml").read_text() == before


@pytest.mark.parametrize("command", [main, plan.main])
def test_the_memory_of_this_machine_is_not_described(
    command: Callable[[list[str]], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"set --offload\.host_memory for a limit"):
        command([*WORDS, "--host-memory", "1GiB"])
