"""Runs from Python with model, rows and callbacks as arguments, against the same run from files."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, TrainerCallback

from offload import Config, Trainer
from offload.engine.engine import Engine
from offload.errors import ConfigError, InterruptedRun
from offload.extras.data.task import write_rows
from offload.extras.data.tokenizer import train_bpe
from tests.run_folder import assert_same_tensors, lines_of, losses, numbers
from tests.training.conftest import SHAPES

ROWS = numbers(80)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return {
        "run": {"dir": str(tmp_path / "run")},
        "data": {"sequence_length": 32, "eval_share": 0.1},
        "train": {"steps": 4, "batch_size": 4, "precision": "fp32"},
    }


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """Write a model folder with a tokenizer."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", vocab_size=384, **SHAPES["llama"])
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    train_bpe(ROWS, 384).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.slow
def test_a_model_and_rows_that_are_given_train_as_those_of_files(
    settings: dict[str, Any], pretrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A generator supplies the rows and is read once. The tokenizer comes from the model folder."""
    given = AutoModelForCausalLM.from_pretrained(pretrained)
    own = Trainer({**settings, "offload": {"parameters": "cpu"}}, model=given, data=iter(ROWS)).run()
    said = capsys.readouterr().out
    assert "model: LlamaForCausalLM" in said
    assert "given, fp32" in said
    assert "logits bit-equal" in said
    source = write_rows(ROWS, "data")
    files = {**settings, "run": {"dir": str(tmp_path / "files")}, "model": {"path": str(pretrained)}}
    (tmp_path / "run.yaml").write_text(json.dumps({**files, "data": {**settings["data"], "source": source}}))
    wanted = Trainer(tmp_path / "run.yaml").run()
    assert losses(own.dir) == losses(wanted.dir)
    assert_same_tensors(own.export, wanted.export)
    written = Config.load(own.dir / "config.yaml")
    assert (written.model.path, written.data.source) == ("python:LlamaForCausalLM", (source,))
    with pytest.raises(ConfigError, match=r"python:LlamaForCausalLM, so the run trained a model built in Python"):
        Trainer(
            {**settings, "run": {"dir": str(tmp_path / "none")}, "model": {"path": written.model.path}}, data=ROWS
        ).run()


def test_a_model_in_another_dtype_than_the_training_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    """Gemma rounds the embedding scale to the dtype of construction: the export would be a different model.

    The run refuses this before the first step.
    """
    config = AutoConfig.for_model("gemma2", vocab_size=384, **{**SHAPES["gemma2"], "hidden_size": 40})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    words = r"embed_scale \(6\.3125\) than .* export \(6\.32456; float32\).*dtype=torch\.float32"
    with pytest.raises(ConfigError, match=words):
        Trainer(settings | {"model": {"init": "random"}}, model=model, data=ROWS).run()
    assert not (tmp_path / "run/metrics.jsonl").exists()


class Small(nn.Module):
    """A model outside any library: an embedding table, a mean over the earlier positions, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 64)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.table(input_ids)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        logits = self.head(hidden)[:, :-1]
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)}


class Numbered:
    """A torch data set with a length and indexed rows."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = np.random.default_rng(index)
        return {"input_ids": generator.integers(0, 64, 8)}


@pytest.mark.slow
def test_a_module_of_ones_own_trains_is_resumed_and_exported(
    settings: dict[str, Any], before_step: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run stops after the third step. The same call resumes with the module weights in the checkpoint."""
    settings |= {"data": {"packing": False, "sequence_length": 8, "eval_share": 0.1}, "checkpoint": {"every": 1}}
    settings["train"] |= {"steps": 5}
    settings["optimizer"] = {"lr": 1e-2, "freeze": ["table"]}

    def begun() -> Small:
        torch.manual_seed(1)
        return Small()

    aside = {"run": {"dir": settings["run"]["dir"] + "-whole"}}
    whole = Trainer(settings | aside, model=begun(), data=Numbered()).run()
    said = capsys.readouterr().out
    assert "frozen: 1,024 parameters" in said
    assert "not loaded again for a check, since the export is the state_dict of a custom module" in said

    with before_step(4, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        Trainer(settings, model=begun(), data=Numbered()).run()
    again = Trainer(settings, model=Small(), data=Numbered()).run()
    assert losses(again.dir) == losses(whole.dir)
    exported = load_file(again.dir / "hf/model.safetensors")
    assert torch.equal(exported["table.weight"], begun().table.weight)
    assert exported.keys() == Small().state_dict().keys()
    assert_same_tensors(again.export, whole.export)


class Watches(TrainerCallback):
    """A transformers callback that records all events and stores them in checkpoints."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.logged: list[dict[str, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        assert args.train.steps == state.max_steps == 6
        assert isinstance(more["engine"], Engine)
        self.told.append(f"begin {state.global_step}")

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> Any:
        self.told.append(f"step {state.global_step}")
        control.should_save = state.global_step == 2
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        self.logged.append(logs)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **more: Any) -> None:
        self.told.append(f"evaluate {state.global_step} {metrics['eval_loss'] == state.best_metric}")

    def on_save(self, args: Any, state: Any, control: Any, checkpoint: Any = None, **more: Any) -> None:
        self.told.append(f"save {checkpoint.name}")

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.told.append(f"epoch {state.epoch:g}")

    def on_train_end(self, args: Any, state: Any, control: Any, export: Any = None, **more: Any) -> None:
        self.told.append(f"end {state.global_step} {export is not None}")

    def state_dict(self) -> dict[str, Any]:
        return {"told": self.told}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.told = state["told"]


@pytest.mark.slow
def test_callbacks_are_told_of_a_run_and_go_on_with_it(
    settings: dict[str, Any], pretrained: Path, before_step: Any
) -> None:
    """A run killed in the fourth step resumes from the checkpoint requested by a callback."""
    settings["train"] |= {"steps": 6, "eval_every": 3, "epochs": None}
    settings |= {
        "model": {"path": str(pretrained)},
        "data": {"packing": False, "sequence_length": 32, "eval_share": 0.8},
    }
    watch = Watches()
    with before_step(4, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        Trainer(settings, data=ROWS, callbacks=[watch]).run()
    told = ["begin 0", "step 1", "step 2", "step 3", "evaluate 3 True"]
    assert [each for each in watch.told if not each.startswith(("epoch", "save"))] == told
    assert "save step-2" in watch.told, "once it is on the disk"
    again = Watches()
    result = Trainer(settings, data=ROWS, callbacks=[again]).run()
    assert again.told[:3] == ["begin 0", "step 1", "step 2"]
    rest = [each for each in again.told[3:] if not each.startswith("epoch")]
    assert rest == [
        *("begin 2", "step 3", "evaluate 3 True", "step 4", "step 5", "step 6", "evaluate 6 True", "save step-6"),
        "end 6 True",
    ]
    lines = lines_of(result.dir)
    assert [line["loss"] for line in again.logged] == [line["loss"] for line in lines[2:]]
    assert lines[-1]["tokens_seen"] == sum(line["tokens"] for line in lines)
    assert [each for each in again.told if each.startswith("epoch")], "the data have fewer rows than the run"


@pytest.mark.slow
def test_a_signal_within_a_step_says_the_unit(
    settings: dict[str, Any], pretrained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stops:
        def on_train_begin(self, _config: Any, _state: Any, _control: Any, model: Any, **_more: Any) -> None:
            signals = [signal.SIGTERM]  # a second one would leave at once

            def stop(*_call: Any) -> None:
                if signals:
                    signal.raise_signal(signals.pop())

            model.model.layers[1].register_forward_hook(stop)

    settings |= {"model": {"path": str(pretrained)}}
    with pytest.raises(InterruptedRun, match="interrupted by SIGTERM after step 1 of 4"):
        Trainer(settings, data=ROWS, callbacks=[Stops]).run()
    assert re.search(r"SIGTERM: finishing this step \(\w+ \S+, unit \d+ of \d+\), then", capsys.readouterr().out)


@pytest.mark.slow
def test_a_save_asked_for_after_the_last_step_is_made_and_of_what_json_has(
    settings: dict[str, Any], pretrained: Path
) -> None:
    class Saves:
        kept: Any = None

        def on_step_end(self, _config: Any, state: Any, control: Any, **_more: Any) -> None:
            control.should_save = state.global_step == 4

        def state_dict(self) -> Any:
            return self.kept

    class Keeps(Saves):
        def load_state_dict(self, state: Any) -> None:
            self.kept = state

    settings |= {"model": {"path": str(pretrained)}, "checkpoint": {"export": False}}
    result = Trainer(settings, data=ROWS, callbacks=[Saves]).run()
    assert [each.name for each in (result.dir / "checkpoints").glob("step-*")] == ["step-4"]
    keeps = Keeps()
    keeps.kept = {"seen": torch.zeros(2)}
    settings["run"]["dir"] += "-keeps"
    with pytest.raises(ConfigError, match=r"callback Keeps cannot be stored .*Tensor"):
        Trainer(settings, data=ROWS, callbacks=[keeps]).run()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"config": 3}, "config is a int; it should be a path"),
        ({"model": "llama"}, "the model is a str; it should be a torch.nn.Module"),
        ({"model": nn.Linear(2, 2)}, "Linear.forward does not take input_ids and labels"),
        ({"data": {"train": ROWS}}, "data is a mapping of train: give the rows of one"),
        ({"data": []}, "data has no rows"),
        ({"data": ["a", 3]}, "row 1 of data is a int; it should be a text"),
        ({"data": [{"text": object()}]}, "row 0 of data cannot be written as JSON: it holds a object"),
        ({"data": 3}, "data is a int; it should be a path, a list of rows"),
        ({"data": ROWS, "config": {"data": {"source": ["b.txt"]}}}, r"data\.source is .*b\.txt.*leave one of them out"),
        ({"model": Small(), "config": {"lora": {"rank": 2}}}, r"an adapter is configured .*set model\.path"),
        ({"callbacks": TrainerCallback()}, "callbacks is a TrainerCallback; it should be a list"),
        (
            {"callbacks": [type("C", (), {"on_stepend": print})]},
            r"on_stepend, which is never called \(did you mean on_step_",
        ),
        ({"callbacks": [type("C", (TrainerCallback,), {"on_substep_end": print})]}, "on_substep_end, which is never"),
    ],
)
def test_what_cannot_be_given_is_refused(settings: dict[str, Any], given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Trainer(given.pop("config", None), **given)


def test_a_control_has_what_is_honoured_alone() -> None:
    """A callback gets an error for an unsupported control flag. Break: accept any attribute."""
    from offload.app.training.callbacks import TrainControl

    with pytest.raises(AttributeError):
        TrainControl().should_log = True  # type: ignore[attr-defined]


def test_rows_are_written_piece_by_piece_and_known_by_their_content(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def rows() -> Iterator[Any]:
        yield "ä text"
        yield {"input_ids": torch.tensor([1, 2]), "labels": np.array([-100, 2])}

    path = Path(write_rows(rows(), "data"))
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert found == [{"text": "ä text"}, {"input_ids": [1, 2], "labels": [-100, 2]}]
    assert write_rows(list(rows()), "data") == str(path)
    assert write_rows(["another"], "data") != str(path)
    assert write_rows(path, "data") == str(path)
    assert [each.name for each in path.parent.parent.rglob("*") if each.is_file()] == ["data.jsonl"] * 2
