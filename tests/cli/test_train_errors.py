"""Every error of the training command: its exit code, and one paragraph with what was given and what is allowed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from offload.cli import parse_config
from offload.errors import ConfigError

Train = Callable[..., "subprocess.CompletedProcess[str]"]


def paragraph(result: subprocess.CompletedProcess[str], code: int) -> str:
    """Return the error after checking that it is one line on stderr, without a traceback."""
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
        (["--train.clip", "sometimes"], ["train.clip", "'sometimes'", "'deferred'"]),
        (["--offload.throttle", "fast"], ["offload.throttle", "'fast'", "{h2d: 100MiB}"]),
        (["--offload.throttle", "{h2d: [}"], ["offload.throttle", "not YAML"]),
        (["--offload.prefetch", "-1"], ["offload.prefetch", "'-1'", "0 or more"]),
        (["--offload.prefetch", "some"], ["offload.prefetch", "'some'", "auto"]),
        (["--checkpoint.on_error", "ignore"], ["checkpoint.on_error", "'ignore'", "'continue' or 'stop'"]),
        (["--train.batch_size", "2", "--train.micro_batch_size", "4"], ["micro_batch_size is 4", "batch_size, 2"]),
        (["--train.steps", "5", "--optimizer.warmup_steps", "6"], ["warmup_steps is 6", "train.steps, 5"]),
        (["--config", "no-such.yaml"], ["no-such.yaml", "No such file"]),
        (["extra"], ["'extra'", "--help"]),
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
        ("- 5", ["list", "sections"]),
        ("train: {steps: 5", ["YAML"]),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse_config(["--config", str(file)], prog="train", description="")
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


def test_the_command_reports_wrong_settings_and_leaves_with_2(train: Train, folder: Path) -> None:
    (folder / "wrong.yaml").write_text("train: {stpes: 5}")
    assert "did you mean train.steps?" in paragraph(train("--config", "wrong.yaml"), 2)
    assert "did you mean train.steps?" in paragraph(train("--train.stpes", "5"), 2)
    assert "'many'" in paragraph(train("--train.steps", "many"), 2)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--model.path", "nowhere"], 2, ["model.path is nowhere", "does not exist"]),
        (["--model.path", "text.txt"], 2, ["model.path", "text.txt", "JSON"]),
        (["--data.sequence_length", "128"], 2, ["data.sequence_length is 128", "64"]),
        (["--data.source", "empty.txt"], 2, ["empty.txt"]),
        (["--data.source", "nowhere/*.txt"], 2, ["nowhere/*.txt"]),
        (["--model.path", "mixtral.json", "--offload.device_memory", "1MiB"], 2, ["output_router_logits"]),
        (["--offload.device_memory", "20KiB"], 3, ["offload.device_memory", "20480 bytes", "embed_tokens", "49152"]),
        (
            ["--offload.throttle", "{h2: 1MiB}"],
            2,
            ["offload.throttle.h2", "mean h2d", "h2d, d2h, collective, nvme_read, nvme_write, update"],
        ),
        (["--offload.throttle", "{d2h: 6 gigs}"], 2, ["offload.throttle.d2h", "'6 gigs'"]),
        (["--offload.prefetch", "9", "--offload.device_memory", "100KiB"], 3, ["--offload.prefetch", "102400 bytes"]),
        (["--offload.host_memory", "100KiB"], 3, ["offload.host_memory", "102400 bytes"]),
    ],
)
def test_a_run_that_cannot_be_is_refused(
    train: Train, folder: Path, tiny: list[str], arguments: list[str], code: int, words: list[str]
) -> None:
    message = paragraph(train(*tiny, "--run.dir", "refused", *arguments), code)
    assert not [word for word in words if word not in message], message
    assert not (folder / "refused").exists()  # a refused run leaves nothing behind


def test_an_earlier_run_is_never_touched(train: Train, folder: Path, tiny: list[str]) -> None:
    (folder / "earlier").mkdir(exist_ok=True)
    (folder / "earlier/metrics.jsonl").write_text("{}\n")
    message = paragraph(train(*tiny, "--run.dir", "earlier"), 2)
    assert "earlier" in message
    assert "metrics.jsonl" in message
    assert [file.name for file in (folder / "earlier").iterdir()] == ["metrics.jsonl"]
    assert (folder / "earlier/metrics.jsonl").read_text() == "{}\n"


def test_debug_adds_the_traceback(train: Train) -> None:
    result = train("--train.steps", "many", "--debug")
    assert result.returncode == 2
    assert "Traceback" in result.stderr
    assert "train.steps" in result.stderr.splitlines()[-1]
