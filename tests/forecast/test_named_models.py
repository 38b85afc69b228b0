"""A plan takes each way to name a model for every model of a run: nothing is read from it but the shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from offload.app.config.config import Config
from offload.app.config.presets import PRESETS
from offload.extras.plan.forecast import Forecaster
from offload.extras.plan.machine_files import read_machine

DISTILL: dict[str, Any] = {"train.method": "distill"}
DPO: dict[str, Any] = {"train.method": "dpo", "data.format": "preference"}


@pytest.mark.parametrize("way", ["preset", "config", "folder"])
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
    key: str, settings: dict[str, Any], way: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["tiny"]))
    name = {"preset": "tiny", "config": str(tmp_path / "config.json"), "folder": str(tmp_path)}[way]
    if (key, way) == ("model.path", "preset"):
        key = "model.preset"
    own = {"data.source": ["rows.jsonl"], "train.batch_size": 2, "data.sequence_length": 32}
    config = Config.load(None, {**own, **settings, key: name})
    found = Forecaster(config, 1, plans_downloads=True).predict(config, read_machine("h100"), times=False)
    assert found.fits
    assert found.to_dict()["precision"] == "bf16"
