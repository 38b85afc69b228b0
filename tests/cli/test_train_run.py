"""The training command from start to end: run folder, output and stop signals."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from offload.app.checkpoint_folder import Checkpoints
from offload.app.config.config import Config
from offload.lanes.timeline import LANES
from tests.cli.conftest import EITHER, training
from tests.telemetry.reader import read_trace

Train = Callable[..., "subprocess.CompletedProcess[str]"]
Begin = Callable[..., Any]
FIELDS = [
    *("step", "tokens", "tokens_seen", "targets", "loss", "lr", "grad_norm", "tokens_per_second", "step_seconds"),
    *("h2d_bytes", "d2h_bytes", "nvme_read_bytes", "nvme_write_bytes", "lanes"),
    *("peak_device_bytes", "peak_host_bytes", "peak_pinned_bytes"),
]


@EITHER
def test_a_whole_run(train: Train, folder: Path, tiny: list[str]) -> None:
    run = folder / "whole"
    (folder / "whole.yaml").write_text(
        "run: {dir: whole, name: proof}\ntrain: {steps: 99, eval_every: 2}\noptimizer: {schedule: linear}\n"
    )
    result = train("--config", "whole.yaml", *tiny, "--data.eval-fraction", "0.1")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert not [
        c for c in result.stdout if ord(c) < 32 and c != "\n"
    ]  # no terminal: no colours and no carriage returns
    assert "logits bit-equal" in result.stdout
    begun = re.findall(r"(?m)^(reading|recording|comparing|running) .* \.\.\. \(after 0:\d\d\)$", result.stdout)
    assert begun == ["reading", "recording", "comparing", "running"], "what comes before the first step"
    assert "sample:" in result.stdout

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert list(lines[0]) == FIELDS
    assert [line["step"] for line in lines if "eval_loss" in line] == [2, 4]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert (lines[0]["tokens"], lines[0]["targets"]) == (2 * 32, 2 * 31)
    assert all(line["h2d_bytes"] > 0 and line["d2h_bytes"] > 0 for line in lines)  # the weights were streamed
    assert max(line["peak_device_bytes"] for line in lines) <= 256 * 1024

    assert all(list(line["lanes"]) == ["compute", *LANES] for line in lines)
    assert all(line["lanes"]["h2d"]["busy_seconds"] > 0 for line in lines)
    assert [work.name for work in read_trace(run / "trace.json.gz")["steps"]] == [
        *("step 1", "step 2", "evaluation", "step 3", "step 4")
    ]

    plan = json.loads((run / "plan.json").read_text())
    assert plan["fits"]
    assert plan["tiers"]["device"]["budget_bytes"] == 256 * 1024
    for tier in plan["tiers"].values():
        assert tier["bytes"] == sum(each["bytes"] for each in tier["allocations"])
    assert json.loads((run / "env.json").read_text())["versions"]["torch"] == torch.__version__

    text = (run / "config.yaml").read_text()
    assert "steps: 4  # command line" in text  # the command line overrides the file
    assert "schedule: linear  # file" in text
    assert "precision: fp32  # resolved" in text or torch.cuda.is_available()
    assert "seed: 0  # default" in text
    assert "clip: deferred  # resolved" in text
    assert "prefetch: 0  # resolved" in text or torch.cuda.is_available()
    again = Config.load(run / "config.yaml")
    assert again.train.steps == 4
    assert again.offload.device_memory == 256 * 1024
    assert set(yaml.safe_load(text)) == set(Config.SECTIONS)

    model = AutoModelForCausalLM.from_pretrained(run / "hf")
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert len(AutoTokenizer.from_pretrained(run / "hf")) <= 384


@pytest.mark.slow
def test_a_second_run_without_a_folder_gets_its_own(train: Train, folder: Path, tiny: list[str]) -> None:
    (folder / "runs/twice").mkdir(parents=True)
    result = train(*tiny, "--train.steps", "1", "--run.name", "twice", "--checkpoint.export", "false")
    assert result.returncode == 0, result.stderr
    assert (folder / "runs/twice-2/metrics.jsonl").exists()
    assert not (folder / "runs/twice-2/hf").exists()
    assert not list((folder / "runs/twice").iterdir())


@pytest.mark.slow
@EITHER
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_all_states_and_the_same_command_goes_on(
    train: Train, folder: Path, environment: dict[str, str], begin: Begin, tiny: list[str], number: signal.Signals
) -> None:
    run = folder / f"stopped-{number.name}"
    words = [*tiny, "--train.steps", "1000000", "--run.dir", str(run)]
    with training(folder, environment, begin, words) as process:
        process.send_signal(number)
        _, error = process.communicate()
    assert process.returncode == 130, error
    assert error.count("\n") == 1
    assert number.name in error
    assert f"saved in {run}/checkpoints" in error
    steps = len((run / "metrics.jsonl").read_text().splitlines())
    assert f"after step {steps} of 1000000" in error
    assert steps >= 10
    shown = [work.name for work in read_trace(run / "trace.json.gz")["steps"]]
    assert (shown[0], shown[-1]) == ("step 1", f"step {steps}")
    assert [path.name for path in Checkpoints(run / "checkpoints").folders()] == [f"step-{steps}"]
    assert not (run / "hf").exists()

    ended = train("--run.dir", str(run), "--train.steps", str(steps + 3))
    assert ended.returncode == 0, ended.stderr
    assert f"resumed at step {steps} from {run}/checkpoints/step-{steps}" in ended.stdout
    assert f"changed for this resume: train.steps is {steps + 3} and was 1000000\n" in ended.stdout
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, steps + 4))
    model = AutoModelForCausalLM.from_pretrained(run / "hf")
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert sorted(path.name for path in run.iterdir()) == sorted(
        ["checkpoints", "config.yaml", "env.json", "hf", "metrics.jsonl", "plan.json", "report.html", "trace.json.gz"]
    )


@pytest.mark.slow
def test_a_run_without_a_reader_trains_to_the_end(
    folder: Path, environment: dict[str, str], begin: Begin, tiny: list[str]
) -> None:
    run = folder / "unread"
    words = [*tiny, "--run.dir", str(run), "--checkpoint.every", "4", "--checkpoint.export", "false"]
    with training(folder, environment, begin, words, "data: ") as process:
        process.stdout.close()
        process.stderr.close()
        assert process.wait() == 0
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 4
    assert [path.name for path in Checkpoints(run / "checkpoints").folders()] == ["step-4"]


@pytest.mark.slow
def test_a_run_in_a_terminal_that_closes_saves(folder: Path, environment: dict[str, str], tiny: list[str]) -> None:
    """The kernel sends SIGHUP to the leader of the session, and each later write fails."""
    run = folder / "closed"
    words = [*tiny, "--train.steps", "1000000", "--run.dir", str(run)]
    pid, controller = pty.fork()
    if not pid:
        os.chdir(folder)
        os.execve(sys.executable, [sys.executable, "-m", "offload.train", *words], {**environment, "TERM": "xterm"})
    shown = b""
    while b"step 10/" not in shown:
        shown += os.read(controller, 1 << 16)
    os.close(controller)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    steps = len((run / "metrics.jsonl").read_text().splitlines())
    assert [path.name for path in Checkpoints(run / "checkpoints").folders()] == [f"step-{steps}"]


@pytest.mark.slow
def test_another_signal_saves_and_training_goes_on(
    folder: Path, environment: dict[str, str], begin: Begin, tiny: list[str]
) -> None:
    run = folder / "asked"
    words = [*tiny, "--train.steps", "1000000", "--train.log_every", "1000000", "--run.dir", str(run)]
    with training(folder, environment, begin, words, "tiers: ") as process:
        process.send_signal(signal.SIGUSR1)
        said = [process.stdout.readline()]
        while "  saved " not in said[-1] and len(said) < 1000:  # steps and evaluations go on until the signal arrives
            said.append(process.stdout.readline())
        assert "SIGUSR1: saving after this step.\n" in said, said
        saved = said[-1]
        step = int(saved.split()[1])
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate()
    assert process.returncode == 130, error
    assert [path.name for path in Checkpoints(run / "checkpoints").folders()][-1] == f"step-{step}"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) > step
    # The D2H copy for the save delays the next step. The end of the save may delay a later step.
    assert next(line["step"] for line in lines if "checkpoint_seconds" in line) == step + 1


@pytest.mark.slow
def test_two_processes_cannot_train_in_one_folder(
    train: Train, folder: Path, environment: dict[str, str], begin: Begin, tiny: list[str]
) -> None:
    words = [*tiny, "--train.steps", "1000000", "--run.dir", str(folder / "busy"), "--checkpoint.every", "100000"]
    with training(folder, environment, begin, words):
        second = train(*words)
    assert second.returncode == 2
    assert "another process is training" in second.stderr
