"""Loggers receive the metrics.jsonl numbers, resume with a run, and never end a run with an error."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from offload.app.telemetry.loggers import Loggers, check_loggers
from offload.errors import ConfigError

LINES = [
    {"step": 1, "loss": 2.5, "lr": 0.1, "lanes": {"h2d": {}}, "peak_device_bytes": 7, "grad_norm": float("nan")},
    {"step": 2, "loss": 1.5, "lr": 0.2, "eval_loss": 1.25, "eval_sources": {"books": {"loss": 1.25}}},
]
WANTED = {
    "train/loss": {1: 2.5, 2: 1.5},
    "train/lr": {1: 0.1, 2: 0.2},
    "train/peak_device_bytes": {1: 7.0},
    "eval/loss": {2: 1.25},
    "eval/books/loss": {2: 1.25},
}


def report(name: str, folder: Path, lines: list[dict[str, Any]], last_step: int = 0) -> list[str]:
    said: list[str] = []
    loggers = Loggers([name], folder, last_step, {"train.steps": 2, "data.source": ("a", "b")}, said.append)
    for line in lines:
        loggers.log(line)
    loggers.close()
    return said


def from_tensorboard(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {
        name: {each.step: pytest.approx(each.value) for each in found.Scalars(name)} for name in found.Tags()["scalars"]
    }


def test_tensorboard_has_what_was_logged_and_forgets_what_is_made_again(tmp_path: Path) -> None:
    assert not report("tensorboard", tmp_path, LINES)
    assert from_tensorboard(tmp_path) == WANTED
    again = {**LINES[1], "loss": 1.75}
    assert not report("tensorboard", tmp_path, [again], last_step=1)
    assert from_tensorboard(tmp_path)["train/loss"] == {1: 2.5, 2: 1.75}


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_other_loggers_go_on_with_the_run_of_a_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed, which nothing here needs")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    assert not report(name, tmp_path, LINES[:1])
    assert not report(name, tmp_path, LINES[1:], last_step=1)
    if name == "mlflow":
        import mlflow

        (run,) = mlflow.search_runs(experiment_names=["offload"], output_format="list")
        history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "train/loss")
        assert {each.step: each.value for each in history} == WANTED["train/loss"]


def test_a_logger_that_fails_is_told_of_once_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.tensorboard import SummaryWriter

    monkeypatch.setattr(SummaryWriter, "add_scalar", Mock(side_effect=OSError("no space left")))
    assert report("tensorboard", tmp_path, LINES) == [
        "note: tensorboard (run.report_to) failed, and the run continues without it: OSError: no space left"
    ]


def test_what_is_not_there_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="did you mean wandb"):
        check_loggers(["wanbd"])
    monkeypatch.setattr("offload.app.telemetry.loggers.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install mlflow"):
        check_loggers(["mlflow"])
