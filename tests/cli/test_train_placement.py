"""The training command resolves open placement settings to the fastest plan from `offload.plan`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from offload.app.config.at_resume import resumed
from offload.app.config.config import Config
from offload.app.training import planner
from offload.distributed.joining import open_comm
from offload.errors import ConfigError

Train = Callable[..., "subprocess.CompletedProcess[str]"]
SLOW_LINK = ("--offload.device_memory", "512KiB", "--offload.throttle", "{h2d: 1000000}")
"""A slow link: weights should stay on the device, with just enough memory for them."""


@pytest.fixture
def environment(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """The environment with an empty hardware cache."""
    return {**environment, "XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.mark.slow
def test_it_is_measured_once_and_the_fastest_placement_is_taken(train: Train, folder: Path, tiny: list[str]) -> None:
    found = train(*tiny, *SLOW_LINK, "--run.dir", "found")
    assert found.returncode == 0, found.stderr
    assert "measuring this machine once" in found.stdout
    assert "placement, chosen by a search: --offload.parameters device --offload.optimizer cpu" in found.stdout
    text = (folder / "found/config.yaml").read_text()
    assert "parameters: device  # resolved" in text
    told = json.loads((folder / "found/plan.json").read_text())

    where = ("--offload.parameters", "cpu", "--offload.optimizer", "cpu", "--train.recompute", "never")
    given = train(*tiny, *SLOW_LINK, "--run.dir", "given", *where)
    assert given.returncode == 0, given.stderr
    assert "measuring" not in given.stdout
    instead = json.loads((folder / "given/plan.json").read_text())
    assert told["step_seconds"] < 0.7 * instead["step_seconds"]
    moved = [json.loads((folder / f"{name}/metrics.jsonl").read_text().splitlines()[-1]) for name in ("found", "given")]
    assert moved[0]["h2d_bytes"] < 0.7 * moved[1]["h2d_bytes"]
    weights = [load_file(folder / name / "hf/model.safetensors") for name in ("found", "given")]
    assert all(torch.equal(weights[0][name], weight) for name, weight in weights[1].items())


@pytest.mark.slow
def test_what_fits_the_device_stays_there_and_nothing_is_measured(train: Train, folder: Path, tiny: list[str]) -> None:
    result = train(*tiny, "--offload.device_memory", "1GiB", "--run.dir", "run")
    assert result.returncode == 0, result.stderr
    assert "measuring" not in result.stdout
    assert "placement" not in result.stdout
    assert not list((folder.parent / "cache").rglob("*rates*"))


def test_a_placement_that_was_found_is_found_anew() -> None:
    was = Config(train={"steps": 4}).with_resolved(
        offload__parameters="cpu", offload__zero_stage=1, train__recompute="always", train__clip="deferred"
    )
    later = resumed(Config(), was.to_dict(), "there")
    assert (later.offload.parameters, later.offload.zero_stage, later.train.recompute) == ("auto", "auto", "auto")
    assert later.train.clip == "deferred"
    given = Config(offload={"parameters": "cpu", "zero_stage": 1})
    later = resumed(Config(), given.to_dict(), "there")
    assert (later.offload.parameters, later.offload.zero_stage) == ("cpu", 1)


def test_a_defect_of_the_forecast_is_told_as_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(error: Exception, *, debug: bool = False) -> str:
        monkeypatch.setattr(planner, "PLANNERS", {"forecast": Mock(side_effect=error)})
        notes: list[str] = []
        config = Config.load(None, {"offload.device": "cpu", "run.debug": debug})
        data: Any = None
        planned = planner.decide_placement(config, LlamaConfig(), data, comm, notes.append, notes.append)
        assert planned[:3] == (config, None, "")
        later.extend(planned.late_notes)
        return " ".join(notes)

    later: list[str] = []
    comm = open_comm("cpu")
    try:
        note = told(AssertionError("twice\n the same"))
        assert "because of a defect in the forecast (AssertionError: twice the same): training continues" in note
        assert "--debug" in note
        assert not capsys.readouterr().err
        assert "--debug" not in told(AssertionError("twice"), debug=True)
        assert "Traceback" in capsys.readouterr().err
        assert not later
        assert not told(ConfigError("a reason.")), "the engine says it as its own error"
        assert later == ["there is no memory forecast: a reason."]
    finally:
        comm.close()
