"""Checks on model.path before the torch import."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from offload.app.config.config import Config
from offload.app.config.sections import ModelSection
from offload.app.hf import models
from offload.app.hf.model_path import find_model
from offload.app.training.task import check_names
from offload.errors import ConfigError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with one entry per path type."""
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "adapter", "packed", "model"):
        (tmp_path / name).mkdir()
    for name in ("run/hf", "run/checkpoints"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "run/hf/config.json").write_text("{}")
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    (tmp_path / "packed/m.gguf").write_bytes(b"GGUF")
    (tmp_path / "renamed").write_bytes(b"GGUF\3")
    (tmp_path / "model/config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "model/model.safetensors").touch()
    (tmp_path / "text.txt").write_text("a text")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/nowhere", ["/nowhere, which does not exist"]),
        ("nowhere.gguf", ["does not exist"]),
        ("a/b/c", ["does not exist"]),
        ("text.txt", ["text.txt is not a JSON file"]),
        ("empty", ["a folder without config.json; set --model.path to a Hugging Face"]),
        ("run", ["its model is --model.path run/hf."]),
        ("run/checkpoints", ["its model is --model.path run/hf."]),
        ("adapter", ["--lora.adapter"]),
        ("packed", ["m.gguf in it is a GGUF file", "from_pretrained('packed', gguf_file='m.gguf', ", "package gguf"]),
        ("packed/m.gguf", ["a GGUF file", "from_pretrained('packed', gguf_file='m.gguf')"]),
        ("renamed", ["a GGUF file"]),
        ("model/model.safetensors", ["a file of weights", "to its folder, model,"]),
    ],
)
def test_what_holds_no_model_is_refused_with_the_way_out(here: Path, name: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_names(Config.load(None, {"model.path": name}))
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


def test_what_may_be_a_model_is_looked_for_later(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_model("model") == Path("model")
    assert find_model("model/config.json").exists()
    assert not find_model("gpt2").exists()
    assert not find_model("org/name").exists()
    with pytest.raises(ConfigError, match=r"data\.eval_source='no\.txt' does not exist"):
        check_names(Config.load(None, {"data.eval_source": "no.txt"}))
    with pytest.raises(ConfigError, match=r"data\.source='no\.txt' does not exist"):
        check_names(Config.load(None, {"data.source": "no.txt"}))
    os.mkfifo("pipe.txt")
    with pytest.raises(ConfigError, match=r"data\.source='pipe\.txt' is no regular file"):
        check_names(Config.load(None, {"data.source": "pipe.txt"}))
    check_names(Config.load(None, {"data.source": ["text.txt", "*.none", "builtin:stdlib", "https://a/b"]}))
    assert (here / "run/checkpoints").is_dir()
    check_names(Config.load(None, {"model.path": "/nowhere", "run.dir": "run"}))  # the run folder holds the model
    monkeypatch.setattr(models, "_is_hub_reachable", lambda: False)
    with pytest.raises(ConfigError, match=r"gpt2, which does not exist.*hub cannot be reached"):
        models.locate(ModelSection(path="gpt2"))


def test_an_adapter_beside_the_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would apply it."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert find_model(str(tmp_path)) == tmp_path
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds a model and a PEFT adapter .*--lora\.adapter FOLDER"):
        find_model(str(tmp_path))
    monkeypatch.setattr(models, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(ConfigError, match=r"model\.path is team/model, which holds a model and a PEFT adapter"):
        models.locate(ModelSection(path="team/model"))
