"""A plan takes each way to name a model for every model of a run: nothing is read or downloaded but the shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from offload.app.config.config import Config
from offload.app.config.presets import PRESETS
from offload.app.hf import models
from offload.extras.plan import alternatives
from offload.extras.plan.forecast import Forecaster
from offload.extras.plan.machine_files import read_machine

DISTILL: dict[str, Any] = {"train.method": "distill"}
DPO: dict[str, Any] = {"train.method": "dpo", "data.format": "preference"}


def download_into(folder: Path, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the hub have one model of this shape, which comes into the folder; return what is asked for."""
    asked: list[str] = []

    def download(_name: str, *, allow_patterns: list[str], **_options: Any) -> str:
        asked.extend(allow_patterns)
        return str(folder)

    (folder / "config.json").write_text(json.dumps(shape))
    monkeypatch.setattr(models, "snapshot_download", download)
    return asked


@pytest.mark.parametrize("way", ["preset", "config", "folder", "hub"])
@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("model.path", {}),
        ("distill.teacher", {**DISTILL, "distill.way": "beside"}),
        ("distill.teacher", {**DISTILL, "distill.way": "stored", "distill.top_k": 8}),
        ("prefs.reference", {**DPO, "prefs.way": "beside"}),
        ("prefs.reference", {**DPO, "prefs.way": "stored"}),
    ],
)
def test_each_model_of_a_run_is_planned_from_its_shape(
    key: str, settings: dict[str, Any], way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Break: let `locate` ask for the weights of the hub's model."""
    asked = download_into(tmp_path, PRESETS["tiny"], monkeypatch)
    names = {"preset": "tiny", "config": str(tmp_path / "config.json"), "folder": str(tmp_path), "hub": "some/model"}
    name = names[way]
    if (key, way) == ("model.path", "preset"):
        key = "model.preset"
    own = {"data.source": ["rows.jsonl"], "train.batch_size": 2, "data.sequence_length": 32}
    config = Config.load(None, {**own, **settings, key: name})
    found = Forecaster(config, 1, plans_downloads=True).predict(config, read_machine("h100"), times=False)
    assert found.fits
    assert found.to_dict()["precision"] == "bf16"
    assert bool(asked) == (way == "hub")
    assert "*.safetensors" not in asked


@pytest.mark.parametrize(
    "settings",
    [
        {"train.method": "contrastive", "contrastive.pooling": "auto"},
        {"model.init": "pretrained"},
        {"offload.parameters": "files", "lora.rank": 4},
        {"lora.rank": 4},
    ],
)
def test_no_setting_makes_a_plan_download_weights(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On this machine, too. Break: `locate(config.model)` in any of them."""
    asked = download_into(tmp_path, PRESETS["tiny"], monkeypatch)
    config = Config.load(None, {"model.path": "some/model", "data.sequence_length": 32, **settings})
    monkeypatch.setattr(alternatives, "probe", lambda *_others, **_options: read_machine("h100"))
    hardware = alternatives.this_hardware(config)
    assert Forecaster(config, 1).predict(config, hardware, times=False).fits
    assert asked
    assert "*.safetensors" not in asked


def test_a_teacher_that_a_preset_names_is_planned_in_the_codes_of_its_files() -> None:
    """As a model that a preset names is. Break: plan its weights in bf16, 60 times 2 bytes."""
    key = "distill.teacher"
    config = Config.load(None, {**DISTILL, "model.preset": "gpt-oss-20b", key: "gpt-oss-20b", "distill.way": "beside"})
    forecaster = Forecaster(config, 1, plans_downloads=True)
    built = forecaster._built
    teacher = {id(each) for each in forecaster._companions["teacher"].model.parameters()}
    coded = [each for each in built.quantized if id(each) in teacher]
    assert len(coded) == 2 * 24
    assert {type(built.quantized[each]).__name__ for each in coded} == {"Mxfp4Codec"}
