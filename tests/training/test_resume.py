"""Interrupted and resumed runs have the same bits as an uninterrupted run, for any damage to the run folder."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from offload.app.checkpoint_folder import Checkpoints
from offload.app.config.config import Config
from offload.app.training import checkpoints, finish, trainable
from offload.app.training.checkpoints import Saves
from offload.app.training.run_folder import RunFolder
from offload.checkpoint.reader import Reader, verify
from offload.checkpoint.writer import Save, Writer
from offload.engine.engine import Engine
from offload.errors import CheckpointError, ConfigError, DiskError, DoesNotFitError, InterruptedRun
from offload.export import main as export_command
from offload.extras.data.tokenizer import train_bpe
from tests.disks import held_back
from tests.run_folder import assert_said_as_saved, assert_same_tensors, contents, fill, flip, learnt, numbers
from tests.training.conftest import SHAPES

DISK = {"offload.parameters": "nvme", "offload.optimizer": "nvme", "offload.gradients": "nvme"}
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"train.precision": "bf16", "train.micro_batch_size": 2},
    "boxed": {"offload.device_memory": "512KiB"},
    "speculative": {"train.clip": "speculative", "train.max_grad_norm": 0.3},
    "deferred": {"train.clip": "deferred", "train.max_grad_norm": 0.3, "train.precision": "bf16"},
    "late": {"train.clip": "deferred", "offload.throttle": {"update": {"latency_seconds": 0.01}}},
    "fp16": {"train.precision": "fp16", "train.micro_batch_size": 2},
    "skip": {"train.on_nonfinite": "skip", "optimizer.schedule": "wsd"},
    "disk": {"train.precision": "bf16", **DISK},
}
QUICK = ("skip",)
"""Settings for the quick run. tests/contracts covers the others in the quick run."""


class Ended(BaseException):
    """Simulates the end of the process."""


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finish each checkpoint before the next step, independent of the disk speed."""

    def is_due(saves: Saves) -> bool:
        if saves._pending is not None:
            saves._pending.saving._writer.wait()
        return saves._pending is not None

    monkeypatch.setattr(Saves, "is_due", property(is_due))


@pytest.fixture
def ended(run: Any, before_step: Any, at_once: None) -> Any:
    """Return a function: train like `run`, and end the process before step `number`."""

    def train(number: int, *names: str, **settings: Any) -> None:
        with before_step(number, Ended()), pytest.raises(Ended):
            run(*names, **settings)

    return train


def steps_of(folder: Path) -> list[str]:
    return [path.name for path in Checkpoints(folder / "checkpoints").folders()]


def make_folder(family: str, folder: Path, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **shape: Any) -> None:
    """Write a pretrained model with a tokenizer. For gemma2 the configuration ties the head, the files do not."""
    config = AutoConfig.for_model(family, vocab_size=384, **SHAPES[family] | shape)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    if family == "gemma2":
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    train_bpe(numbers(), 384).save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("every", "number"), [(2, 2), (0, 3)], ids=["between", "at the end"])
def test_an_evaluation_that_is_due_as_a_run_is_stopped_is_made(
    run: Any, before_step: Any, every: int, number: int
) -> None:
    settings = {"train.eval_every": every, "checkpoint.export": False}
    _, wanted, _ = run("whole", **settings)
    with before_step(number, lambda: os.kill(os.getpid(), signal.SIGTERM)), pytest.raises(InterruptedRun):
        run("parts", **settings)
    _, found, _ = run("parts", **settings)
    assert [line.get("eval_loss") for line in found] == [line.get("eval_loss") for line in wanted]
    assert found[number - 1]["eval_loss"] is not None


@pytest.mark.parametrize(
    "settings",
    [pytest.param(name, marks=pytest.mark.slow if name not in QUICK else []) for name in SETTINGS],
)
def test_a_resumed_run_is_one_that_never_stopped(run: Any, ended: Any, tmp_path: Path, settings: str) -> None:
    """The run ends in step 6, one step after the last checkpoint, and again directly after the next checkpoint.

    Break: leave a random generator, the step number, the update counts or a pending update out of a checkpoint.
    """
    common = {"train.steps": 9, **SETTINGS[settings]}
    if settings == "disk":
        common["offload.nvme_dir"] = str(tmp_path)
    whole, wanted, _ = run("whole", "gpt2", **common)
    common |= {"checkpoint.every": 2, "checkpoint.keep": 2}
    for number in (6, 7):
        ended(number, "parts", "gpt2", **common)
    result, found, output = run("parts", "gpt2", **common)
    assert "resumed at step 6 from " in output
    assert steps_of(result.dir) == ["step-9", "step-8"]
    assert learnt(found) == learnt(wanted)
    assert (result.steps, result.eval_loss) == (9, whole.eval_loss)
    assert_same_tensors(result.dir / "hf", whole.dir / "hf")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["codegen", "mixtral", "gemma2"])
def test_a_run_from_a_folder_goes_on_without_it(run: Any, ended: Any, tmp_path: Path, family: str) -> None:
    """The weights and the tokenizer are in the checkpoints.

    The export keeps the tensor names and the layout of the folder.

    Break: build the resumed model in another dtype, with uninitialized buffers, or without the weight conversions.
    """
    folder = tmp_path / "folder"
    make_folder(family, folder)
    common = {"model.path": str(folder), "train.precision": "bf16", "train.steps": 4, "checkpoint.every": 2}
    whole, wanted, _ = run("whole", **common)
    ended(4, "parts", **common)
    shutil.rmtree(folder)
    result, found, output = run("parts", **common)
    assert "the weights of a checkpoint" in output
    assert learnt(found) == learnt(wanted)
    assert_same_tensors(result.dir / "hf", whole.dir / "hf")
    assert contents(result.dir / "hf")["config.json"] == contents(whole.dir / "hf")["config.json"]


@pytest.mark.slow
def test_a_damaged_checkpoint_is_skipped_and_moved_aside(run: Any, ended: Any) -> None:
    whole, wanted, _ = run("whole", **{"train.steps": 6})
    common = {"train.steps": 6, "checkpoint.every": 2}
    ended(6, "parts", **common)
    folder = whole.dir.with_name("parts") / "checkpoints"
    flip(folder / "step-4/rank-0.bin")
    result, found, output = run("parts", **common)
    assert f"skipped: {folder}/step-4/rank-0.bin is damaged" in output
    assert "resumed at step 2" in output
    (aside,) = folder.glob("step-4.aside-*")
    assert f"a checkpoint above step 2 was renamed to {aside}" in output
    assert steps_of(result.dir) == ["step-6", "step-4", "step-2"]
    assert learnt(found) == learnt(wanted)
    assert_same_tensors(result.dir / "hf", whole.dir / "hf")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rank-0.bin", "manifest.json", "config.json", "tokenizer.json"])
def test_no_run_begins_at_damage_alone(run: Any, ended: Any, tmp_path: Path, name: str) -> None:
    common = {"train.steps": 6, "checkpoint.every": 2}
    ended(6, "parts", **common)
    folder = tmp_path / "parts/checkpoints"
    for step in (2, 4):
        flip(folder / f"step-{step}" / name)
    before = contents(folder.parent)
    with pytest.raises(CheckpointError, match=rf"none of the 2 .*step-4/{name} is damaged.*step-2/{name} is damaged"):
        run("parts", **common)
    assert contents(folder.parent) == before
    flip(folder / "step-2" / name)
    with pytest.raises(CheckpointError, match=rf"step-4/{name} is damaged.*The last good one is .*step-2"):
        run("parts", **common, **{"checkpoint.resume": str(folder / "step-4")})
    assert contents(folder.parent) == {**before, f"checkpoints/step-2/{name}": (folder / "step-2" / name).read_bytes()}


@pytest.mark.parametrize(
    ("every", "exports", "files", "is_free"),
    [
        (5, False, ["metrics.jsonl"], True),
        ("auto", True, ["metrics.jsonl"], True),
        ("auto", True, ["metrics.jsonl", "hf"], False),
        (None, True, ["metrics.jsonl"], True),
        ("auto", False, ["metrics.jsonl"], False),  # a finished run leaves no more
        (None, False, ["metrics.jsonl"], False),
    ],
)
def test_a_folder_without_a_checkpoint_is_free_if_the_run_ended_early(
    tmp_path: Path, every: Any, exports: bool, files: list[str], is_free: bool
) -> None:
    before = Config.load(None, {"checkpoint.every": every, "checkpoint.export": exports})
    (tmp_path / "config.yaml").write_text(before.to_yaml())
    for name in files:
        (tmp_path / name).touch()
    folder = RunFolder.open(Config.load(None, {"run.dir": str(tmp_path)}))
    with contextlib.nullcontext() if is_free else pytest.raises(ConfigError, match="holds an earlier run"):
        folder.check(before, resumes=False)


@pytest.mark.slow
def test_a_run_goes_back_to_one_of_its_checkpoints_and_then_on_from_there(run: Any) -> None:
    common = {"checkpoint.every": 2, "optimizer.schedule": "constant"}
    first, wanted, _ = run("run", **common, **{"train.steps": 6})
    back = {"checkpoint.resume": str(first.dir / "checkpoints/step-2"), "optimizer.lr": 1e-2}
    result, found, output = run("run", **common, **back, **{"train.steps": 4})
    assert "resumed at step 2" in output
    assert output.count("a checkpoint above step 2 was renamed to ") == 2
    assert steps_of(result.dir) == ["step-4", "step-2"]
    assert learnt(found[:2]) == learnt(wanted[:2])
    assert [line["lr"] for line in found[2:]] == [1e-2, 1e-2]
    result, found, output = run("run", **common, **{"train.steps": 5})
    assert "resumed at step 4" in output
    assert [line["lr"] for line in found] == [*(line["lr"] for line in wanted[:2]), 1e-2, 1e-2, 1e-2]


@pytest.mark.slow
def test_a_new_run_begins_at_anothers_checkpoint(run: Any, tmp_path: Path) -> None:
    whole, wanted, _ = run("whole", **{"train.steps": 6, "checkpoint.every": 4})
    resume = {"checkpoint.resume": str(tmp_path / "whole/checkpoints/step-4")}
    result, found, _ = run("by step", **resume, **{"train.steps": 6})
    assert learnt(found) == learnt(wanted[4:])
    assert_same_tensors(result.dir / "hf", whole.dir / "hf")
    _, found, output = run("by run", **{"train.steps": 7, "checkpoint.resume": str(whole.dir)})
    assert "resumed at step 6" in output
    assert [line["step"] for line in found] == [7]
    assert steps_of(whole.dir) == ["step-6", "step-4"]
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        run("again", **{"checkpoint.resume": str(tmp_path)})
    _, _, output = run("by step", **resume, **{"train.steps": 8})
    assert f"resumed at step 6 from {result.dir}" in output, "the same command again goes on with what it has begun"
    fresh = tmp_path / "other"
    fresh.mkdir()
    (fresh / "metrics.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds an earlier run .*checkpoint\.resume is "):
        run("other", **resume)


@pytest.mark.slow
def test_a_finished_run_is_left_as_it_is_and_a_longer_one_goes_on(run: Any) -> None:
    """A resumed run removes a truncated last line from the metrics file."""
    common = {"checkpoint.every": 3}
    first, _, _ = run("run", **common, **{"train.steps": 3})
    before = contents(first.dir)
    again, _, output = run("run", **common, **{"train.steps": 3})
    assert contents(first.dir) == before
    assert (again.steps, again.export) == (3, None)
    assert "done: 3 steps" in output
    with (first.dir / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 4, "lo')
    result, lines, _ = run("run", **common, **{"train.steps": 5})
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert (result.dir / "hf/config.json").exists()
    assert contents(first.dir)["hf/model.safetensors"] != before["hf/model.safetensors"]


@pytest.mark.slow
def test_other_data_make_another_run(run: Any, tmp_path: Path) -> None:
    run("run", **{"checkpoint.every": 3})
    text = tmp_path / "text.txt"
    text.write_text(text.read_text().replace("number", "numeral"))
    before = contents(tmp_path / "run")
    with pytest.raises(ConfigError, match="training data has changed since the run began"):
        run("run", **{"train.steps": 6})
    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("section", "export_bytes", "said"),
    [
        ({"every": None, "export": False}, 0, ""),
        ({"every": None}, 10, ""),
        ({"every": 1, "keep": 1, "export": False}, 0, "and up to 2 checkpoints of"),
        ({"every": 1, "keep": 1}, 10, "and the export with up to 2 checkpoints of"),
        ({"every": "auto", "export": False}, 0, "and up to 2 checkpoints"),
    ],
)
def test_a_note_about_room_is_about_what_the_run_needs(
    section: dict[str, Any], export_bytes: int, said: str, tmp_path: Path
) -> None:
    config = Config(checkpoint=section)
    notes = list(trainable.DiskNeeds(export_bytes, 1 << 60).check(tmp_path, config, 0))
    assert len(notes) == bool(said)
    assert said in "".join(notes)


@pytest.mark.slow
def test_a_disk_without_room_for_the_export_is_refused_before_the_first_step(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, _, said = run("run", **{"train.steps": 1, "checkpoint.every": 1})
    assert "is on a disk with" not in said
    export, states = (
        max(file.stat().st_size for file in (result.dir / name).iterdir()) for name in ("hf", "checkpoints/step-1")
    )
    room = [0.8 * export, 1.01 * export + 1.5 * states]
    monkeypatch.setattr(trainable, "free_bytes", lambda _path: int(room[0]))
    with pytest.raises(DoesNotFitError, match=r"the export at the end takes .*--checkpoint\.export false"):
        run("refused")
    assert not (tmp_path / "refused").exists()
    room.pop(0)
    assert "wants" not in run("one", **{"checkpoint.every": None})[2]
    assert "the export with up to 2 checkpoints" in run("some", **{"checkpoint.every": 1, "checkpoint.keep": 1})[2]


@pytest.mark.slow
@pytest.mark.parametrize("is_saved", [True, False], ids=["states saved", "no room at all"])
def test_an_export_to_a_full_disk_loses_no_states(
    run: Any, disk: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_saved: bool
) -> None:
    """The run saves the states, or waits for free space."""
    export, tries = Engine.export, list[int]()

    def filling(self: Engine, *args: Any, **more: Any) -> Any:
        tries.append(1)
        if len(tries) == 1:
            fill(disk)
        else:
            (disk / "other").unlink()
        return export(self, *args, **more)

    monkeypatch.setattr(Engine, "export", filling)
    monkeypatch.setattr(finish, "_RETRY_S", 0.0)
    settings = {"run.dir": str(disk / "run"), "checkpoint.every": 3 if is_saved else "auto"}
    if not is_saved:
        result, _, said = run("run", **settings)
        assert "The states could not be saved either" in said
        assert result.export is not None
        assert len(tries) == 2
        return
    with pytest.raises(DiskError, match=r"`python -m offload\.export .* OUT`") as failure:
        run("run", **settings)
    command = re.search(r"python -m offload\.export (\S+) OUT", str(failure.value))
    assert export_command([command[1], str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/model.safetensors").exists()


@pytest.mark.slow
def test_a_checkpoint_is_saved_every_hour(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not steps_of(run("short")[0].dir)
    monkeypatch.setattr(checkpoints, "_AUTO_S", 0.0)
    result, _, said = run("long")
    assert steps_of(result.dir) == ["step-3"], "each takes the place of the last"
    assert said.count(" saved ") == 3
    monkeypatch.setattr(checkpoints, "free_bytes", lambda _path: 1000)
    assert not steps_of(run("tight")[0].dir), "there is no room"


@pytest.mark.slow
def test_training_goes_on_while_a_checkpoint_is_written(
    run: Any, before_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint is announced after completion. The next save (step 6) waits for the first."""
    whole, wanted, _ = run("whole", **{"train.steps": 7})
    gate, seen = threading.Event(), list[list[str]]()

    def look() -> None:
        seen.append(steps_of(whole.dir.parent / "run"))
        gate.set()

    with monkeypatch.context() as during, before_step(6, look):
        held_back(during, gate)
        result, found, output = run("run", **{"train.steps": 7, "checkpoint.every": 3})
    assert seen == [[]]
    assert steps_of(result.dir) == ["step-7", "step-6", "step-3"]
    assert [int(each) for each in re.findall(r"step (\d+)  saved ", output)] == [3, 6, 7]
    assert "training stopped for" in output
    assert learnt(found) == learnt(wanted)
    for each in (7, 6, 3):
        verify(result.dir / f"checkpoints/step-{each}")
    for name in ("checkpoints/step-7", "checkpoints/step-6", "hf"):
        shutil.rmtree(result.dir / name)
    result, found, output = run("run", **{"train.steps": 7})
    assert "resumed at step 3" in output
    assert learnt(found) == learnt(wanted)
    assert_same_tensors(result.dir / "hf", whole.dir / "hf")


@pytest.mark.slow
@pytest.mark.parametrize("on_error", ["continue", "stop"])
def test_a_checkpoint_that_fails_on_its_way_is_told_of(
    run: Any, before_step: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_error: str
) -> None:
    gate = threading.Event()
    settings = {"train.steps": 4, "checkpoint.every": 3, "checkpoint.on_error": on_error}
    held_back(monkeypatch, gate, OSError(errno.EIO, os.strerror(errno.EIO)))
    with before_step(4, gate.set), pytest.raises(DiskError, match="EIO"):
        run("run", **settings)
    assert gate.is_set()
    assert steps_of(tmp_path / "run") == []
    assert not list((tmp_path / "run/checkpoints").glob("*.partial-*"))
    assert not [each for each in threading.enumerate() if each.name.startswith("offload-checkpoint")]


@pytest.mark.slow
@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()], ids=repr)
def test_a_checkpoint_that_is_on_its_way_when_a_step_fails(
    run: Any, before_step: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """The run completes the checkpoint. A second interrupt ends the wait."""
    gate, is_ours = threading.Event(), isinstance(error, RuntimeError)

    def fail() -> None:
        threading.Timer(0.05, gate.set).start()
        raise error

    held_back(monkeypatch, gate)
    with before_step(5, fail), pytest.raises(type(error)):
        run("run", **{"train.steps": 7, "checkpoint.every": 3})
    assert steps_of(tmp_path / "run") == (["step-3"] if is_ours else [])
    assert not list((tmp_path / "run/checkpoints").glob("*.partial-*"))
    if is_ours:
        verify(tmp_path / "run/checkpoints/step-3")


def test_a_last_save_that_fails_is_an_error_after_the_export(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Engine, "begin_checkpoint", Mock(side_effect=DiskError("no room", 28, Path("there"))))
    with pytest.raises(
        DiskError, match=r"the last step, 3, could not be saved, .*: No space left .*make room, and train on from .*hf"
    ) as caught:
        run("run", **{"checkpoint.every": 1})
    assert "no room" not in str(caught.value), "the note says it, once for each step"
    said = re.findall(r"note: step (\d) could not be saved, and there is none yet: no room", capsys.readouterr().out)
    assert said == ["1", "2", "3"]


@pytest.mark.slow
def test_a_checkpoint_of_an_engine_alone_is_no_position_in_a_run(run: Any, tmp_path: Path) -> None:
    run("run", **{"checkpoint.every": 3})
    path = tmp_path / "run/checkpoints/step-3"
    with Reader(path) as reader, Save(tmp_path / "alone") as save, Writer(save.path, 0, {}) as writer:
        save.commit({}, [writer.finish()], {"engine": reader.meta["engine"], "meta": {}})
    with pytest.raises(ConfigError, match=r"was written by engine\.save_checkpoint outside of a run"):
        run("new", **{"checkpoint.resume": str(tmp_path / "alone")})


def test_the_size_said_before_a_save_is_the_saved_size(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break: say all bytes that the engine holds."""
    monkeypatch.setattr(checkpoints, "LONG_BYTES", 0)
    found, _, said = run("said", train__steps=1, checkpoint__every=1)
    assert_said_as_saved(found.dir / "checkpoints" / "step-1", said)
