"""Whole runs on conversations with pictures."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import transformers

from offload import parity
from offload.app.config.config import Config
from offload.app.training.trainer import Trainer, TrainResult
from offload.errors import ConfigError
from tests import forks
from tests.run_folder import assert_same_tensors, lines_of, losses
from tests.training.conftest import HOST
from tests.vision import COLOURS, about, model_folder, rows_file

HOST_WORDS = ("--offload.parameters", "cpu", "--offload.optimizer", "cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: model_folder(tmp_path_factory.mktemp(family), family) for family in ("llava", "gemma3")}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cache folder for one hardware measurement per module."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def rows(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write one conversation about a square per colour."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return rows_file(tmp_path / "rows.jsonl", [{"messages": about([colour])} for colour in COLOURS])


def settings_of(folder: Path, rows: Path, run: Path | str) -> dict[str, Any]:
    """Return the settings common to all runs in this file."""
    return {
        "run.dir": str(run),
        "model.path": str(folder),
        "model.init": "random",
        "data.source": str(rows),
        "data.sequence_length": 96,
        "data.eval_share": 0.0,
        "train.steps": 3,
        "train.batch_size": 4,
        "train.precision": "fp32",
    }


def words(settings: dict[str, Any]) -> list[str]:
    """Return the settings as command-line flags."""
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


@pytest.fixture
def train(folders: dict[str, Path], rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that trains a model on these rows and returns (result, stdout)."""

    def run(name: str, family: str = "llava", **more: Any) -> tuple[TrainResult, str]:
        own = {key.replace("__", "."): value for key, value in more.items()}
        config = Config.load(None, settings_of(folders[family], rows, tmp_path / name) | own)
        return Trainer(config).run(), capsys.readouterr().out

    return run


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llava", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_run_is_that_of_plain_pytorch(
    family: str, rows: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """`offload.parity` trains the transformers model beside a streamed model."""
    settings = settings_of(folders[family], rows, "") | {"train.batch_size": 3}
    del settings["run.dir"], settings["train.steps"]
    assert parity.main([*words(settings), "--steps", "3", "--json", *HOST_WORDS]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bit_equal"]
    assert len(found["steps"]) == 3
    assert found["weights"]["differing_elements"] == 0 < found["weights"]["elements"]


@pytest.mark.slow
def test_a_run_goes_on_to_the_same_bits(train: Any) -> None:
    """The final weights equal a run without tiers."""
    calm = {"optimizer__schedule": "constant", "train__batch_size": 3, "checkpoint__every": 2}
    whole, _ = train("whole", train__steps=4, **calm)
    train("cut", train__steps=2, checkpoint__export=False, **calm, **HOST)
    cut, said = train("cut", train__steps=4, checkpoint__export=True, **calm, **HOST)
    assert "resumed at step 2" in said
    assert "logits bit-equal" in said
    assert losses(cut.dir) == losses(whole.dir)
    assert_same_tensors(cut.export, whole.export)


def test_what_does_not_go_is_refused(train: Any, rows: Path) -> None:
    with pytest.raises(ConfigError, match=r"rows.jsonl has pictures, and data.packing is true.*Leave data.packing out"):
        train("packed", data__packing=True)
    with pytest.raises(ConfigError, match=r"rows.jsonl has pictures, and data.packing_isolated is true"):
        train("isolated", data__packing_isolated=True)
    rows_file(rows, [{"messages": about(["red", "blue"])}] * 4)
    with pytest.raises(ConfigError, match=r"train.micro_batch_size is 2, but some rows have no picture or several"):
        train("parts", train__micro_batch_size=2)


@pytest.mark.slow
def test_a_model_learns_what_it_sees(rows: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    """The run uses the command line. Generation uses the exported model with the exported processor."""
    (rows.parent / "again.jsonl").write_text(rows.read_text())
    settings = settings_of(folders["llava"], rows, tmp_path / "run") | {"train.steps": 60, "optimizer.lr": 1e-2}
    settings["data.eval_source"] = f"[{rows.parent / 'again.jsonl'}]"
    ran = forks.run(["-m", "offload.train", *words(settings)], env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ran.returncode == 0, ran.stderr
    last = lines_of(tmp_path / "run")[-1]
    assert 0 < last["loss"] < 0.1
    assert 0 < last["eval_loss"] < 0.1
    own: Any = transformers.AutoProcessor.from_pretrained(tmp_path / "run" / "hf")
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "run" / "hf")
    for colour in COLOURS:
        question = about([colour])[:1]
        question[0]["content"][0]["path"] = str(rows.parent / f"squares/{colour}.png")
        asked = own.apply_chat_template(
            question, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        written = model.generate(**asked, max_new_tokens=8, do_sample=False)[0, asked["input_ids"].shape[1] :]
        assert own.decode(written, skip_special_tokens=True) == f"It is {colour}."
