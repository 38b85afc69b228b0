"""Whole runs on conversations with pictures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from offload.config.config import Config
from offload.training.trainer import Trainer, TrainResult
from tests.vision import COLOURS, about, model_folder, rows_file

Train = Callable[..., tuple[TrainResult, list[dict[str, Any]], str]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: model_folder(tmp_path_factory.mktemp(family), family) for family in ("llava", "gemma3")}


@pytest.fixture
def train(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Train:
    """Train a model on squares of which each has a colour; return the result, the lines of metrics.jsonl, and what was
    said.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = rows_file(tmp_path / "rows.jsonl", [{"messages": about([colour])} for colour in COLOURS])

    def run(name: str, family: str = "llava", **settings: Any) -> tuple[TrainResult, list[dict[str, Any]], str]:
        values = {
            "run.dir": str(tmp_path / name),
            "model.path": str(folders[family]),
            "model.init": "random",
            "data.source": str(rows),
            "data.sequence_length": 96,
            "data.eval_share": 0.0,
            "train.steps": 3,
            "train.batch_size": 4,
            "train.precision": "fp32",
        }
        result = Trainer(
            Config.load(None, values | {key.replace("__", "."): each for key, each in settings.items()})
        ).run()
        lines = [json.loads(line) for line in (result.dir / "metrics.jsonl").read_text().splitlines()]
        return result, lines, capsys.readouterr().out

    return run


@pytest.mark.parametrize("family", ["llava", "gemma3"])
def test_a_streamed_run_equals_a_resident_one_bit_for_bit(train: Train, family: str) -> None:
    resident, there, _ = train("resident", family)
    streamed, here, said = train("streamed", family, offload__parameters="cpu", offload__optimizer="cpu")
    print(said)
    assert [(line["loss"], line["grad_norm"]) for line in here] == [(line["loss"], line["grad_norm"]) for line in there]
    assert here[-1]["h2d_bytes"] > 0 == there[-1]["h2d_bytes"]
    assert "logits bit-equal" in said
    first, second = (
        transformers.AutoModelForImageTextToText.from_pretrained(result.export) for result in (resident, streamed)
    )
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name
