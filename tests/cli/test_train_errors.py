"""Every error from the training command: the exit code, and one paragraph with the value and the allowed values."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload.app.config.command_line import parse_config
from offload.app.config.config import all_keys
from offload.app.config.other_trainers import EQUIVALENT_SETTINGS
from offload.errors import ConfigError
from tests.matrix import quick

Train = Callable[..., "subprocess.CompletedProcess[str]"]


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def paragraph(result: subprocess.CompletedProcess[str], code: int) -> str:
    """Check that stderr is one line without a traceback. Return the line."""
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("offload: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--train.stpes", "5"], ["train.stpes", "did you mean train.steps?"]),
        (["--trian.steps", "5"], ["trian.steps", "did you mean train.steps?"]),
        (["--steps", "5"], ["steps", "did you mean train.steps?"]),
        (["--train.steps", "many"], ["train.steps", "'many'", "integer"]),
        (["--train.steps", "-3"], ["train.steps", "'-3'", "greater than or equal to 1"]),
        (["--train.steps"], ["--train.steps", "VALUE"]),
        (["--offload.device_memory", "6 gigs"], ["offload.device_memory", "'6 gigs'", "6GiB"]),
        (["--optimizer.betas", "0.9", "1.5"], ["optimizer.betas", "'1.5'", "less than 1"]),
        (["--optimizer.name", "adamw_8bit"], ["'adamw_8bit' (did you mean optimizer.states int8?)"]),
        (
            ["--model_name_or_path", "x", "--dataset_name", "y", "--num_epochs=3"],
            [
                "unknown keys model_name_or_path (did you mean model.path?), dataset_name (did you mean data.source?)",
                "num_epochs (did you mean train.epochs?); the sections are run,",
            ],
        ),
        (
            ["--debgu", "--lr", "1"],
            ["unknown option --debgu (did you mean debug?)", "unknown key lr (did you mean opt"],
        ),
        (["--train.precision", "bf17"], ["train.precision is 'bf17' (did you mean bf16?); it"]),
        (["--optimizer.name", "adam"], ["optimizer.name is 'adam' (did you mean adamw?)"]),
        (["--optimizer.name", "lino"], ["optimizer.name", "'lino'", "'muon' or 'mezo'"]),
        (
            ["--optimizer.name", "sgd", "--optimizer.states", "int8"],
            ["optimizer.states is int8", "sgd", "adamw or lion"],
        ),
        (["--optimizer.master", "bf16"], ["optimizer.master is bf16", "adamw", "--optimizer.name mezo"]),
        (["--optimizer.states", "int4"], ["optimizer.states", "'int4'", "'bf16' or 'int8'"]),
        (["--train.clip", "sometimes"], ["train.clip", "'sometimes'", "'deferred'"]),
        (["--offload.throttle", "fast"], ["offload.throttle", "'fast'", "{h2d: 100MiB}"]),
        (["--offload.throttle", "{h2d: [}"], ["offload.throttle", "not YAML"]),
        (["--offload.prefetch", "-1"], ["offload.prefetch", "'-1'", "0 or more"]),
        (["--offload.prefetch", "some"], ["offload.prefetch", "'some'", "auto"]),
        (["--checkpoint.on_error", "ignore"], ["checkpoint.on_error", "'ignore'", "'continue' or 'stop'"]),
        (["--config", "no-such.yaml"], ["no-such.yaml", "No such file"]),
        (["extra"], ["'extra'", "--help"]),
        (["--data.source", "ok.txt", "a" * 300], ["data.source", "aaa", "255 bytes"]),
        (["--run.dir", "a\0b"], ["run.dir", "zero byte"]),
        (["--train"], ["train is a section", "train.steps"]),
        (["--train.lr", "1"], ["train.lr", "did you mean optimizer.lr?"]),
        (["--train.max_grad_norm", "inf"], ["train.max_grad_norm", "'inf'", "finite"]),
        (["--optimizer.groups", "{bias: {lr_scale: .inf}}"], ["optimizer.groups", "finite"]),
        (["--offload.throttle", "[" * 1500], ["offload.throttle", "nested too deeply"]),
        (["--offload.throttle", "!!timestamp x"], ["offload.throttle", "cannot be read as YAML"]),
    ],
)
def test_a_wrong_command_line_is_explained(arguments: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(arguments, prog="train", description="")
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train: {stpes: 5}", ["train.stpes", "did you mean train.steps?"]),
        ("trian: {steps: 5}", ["trian", "did you mean train?"]),
        ("train: {steps: [5]}", ["train.steps", "[5]", "integer"]),
        ("run: {debug: 7}", ["run.debug", "7", "boolean"]),
        ("optimizer: {lr: true}", ["optimizer.lr", "true"]),
        ("train: 5", ["train is 5", "section"]),
        ("base_model: x\ndatasets: []\nval_set_size: 0\nwd: 0", ["unknown keys base_model (", "datasets (", "wd ("]),
        ("- 5", ["list", "sections"]),
        ("train: {steps: 5", ["YAML"]),
        ("train: [1]", ["train is [1]", "section"]),
        ("bogus:", ["bogus"]),
        ("[" * 1500, ["nested too deeply"]),
        ("train: {steps: &a [*a]}", ["train.steps", "integer"]),
        ("!!int x", ["cannot be read as YAML"]),
        ("train: {steps: 2}\n\ntrain: {batch_size: 4}", ["train is set twice", "line 1", "line 3"]),
        ("train: {steps: 2, steps: 4}", ["steps is set twice"]),
        ("train: {steps: 2}\ntrain.steps: 4", ["train.steps is set twice"]),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse_config(["--config", str(file), "--train.batch_size", "2"], prog="train", description="")
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)
    assert str(caught.value).count("the sections are") <= 1


@pytest.mark.parametrize(
    "key",
    quick(
        ["train.steps", "offload.host_memory", "data.format", "x", "train.x", "optimizer.groups"],
        ("train.steps", "x", "optimizer.groups"),
    ),
)
def test_long_values_and_names_are_shown_in_part(key: str) -> None:
    for words in ([f"--{key}", "b" * 5000], [f"--{key}{'c' * 5000}", "1"], ["d" * 5000]):
        with pytest.raises(ConfigError) as caught:
            parse_config(words, prog="train", description="")
        assert len(str(caught.value)) < 1000


def test_every_familiar_name_leads_to_a_key() -> None:
    known = {*all_keys(), "--gpus"}
    for name, ours in EQUIVALENT_SETTINGS.items():
        assert not [word for word in re.findall(r"--gpus|[a-z]+\.[a-z_]+", ours) if word not in known], name
        assert name not in {key.split(".")[1] for key in known if "." in key}, f"{name} is a key itself"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--model.path", "nowhere"], 2, ["model.path is nowhere", "does not exist"]),
        (["--offload.device_memory", "2KiB"], 3, ["offload.device_memory", "2048 bytes", "embed_tokens", "49152"]),
        (["--offload.prefetch", "9", "--offload.device_memory", "200KiB"], 3, ["--offload.prefetch", "204800 bytes"]),
        (["--offload.host_memory", "100KiB"], 3, ["offload.host_memory", "102400 bytes"]),
    ],
)
def test_a_run_that_cannot_be_is_refused(
    train: Train, folder: Path, tiny: list[str], arguments: list[str], code: int, words: list[str]
) -> None:
    """Tests of each part have its other refusals."""
    message = paragraph(train(*tiny, "--run.dir", "refused", *arguments), code)
    assert not [word for word in words if word not in message], message
    assert not (folder / "refused").exists()  # a refused run writes no files


def test_debug_adds_the_traceback(train: Train) -> None:
    result = train("--train.steps", "many", "--debug")
    assert result.returncode == 2
    assert "Traceback" in result.stderr
    assert "train.steps" in result.stderr.splitlines()[-1]
