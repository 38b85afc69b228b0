"""Whole runs in the test process with the real engine: exactness, families, time limits, training from an export."""

from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers

from offload.app import environment
from offload.app.config.config import Config
from offload.app.training import planner, records
from offload.app.training.records import describe_streaming
from offload.app.training.run_folder import RunFolder
from offload.app.training.trainable import WholeModel
from offload.app.training.trainer import Trainer
from offload.engine.engine import Engine
from offload.engine.gradients import loss_scale, policies, updates
from offload.errors import ConfigError, DoesNotFitError, NonFiniteError
from offload.export import main as export_command
from offload.lanes.timeline import Span, Timeline
from tests.telemetry.reader import read_trace
from tests.training.conftest import HOST


def test_a_run_whose_updates_are_late_ends_with_the_newest_weights(run: Any) -> None:
    result, lines, said = run("late", train__delay=1, **HOST)
    assert "updates are one step late, from step 1 on" in said
    assert "logits bit-equal" in said
    assert lines[-1]["eval_loss"] == result.eval_loss


@pytest.mark.slow
def test_it_says_what_it_trains_on_and_how_much_it_evaluates(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "TESTED", {"torch": ("1.9", "1.10")})
    result, lines, said = run("said", train__batch_size=2, data__eval_share=0.3)
    text = tmp_path / "text.txt"
    data, rows = (next(line for line in said.splitlines() if line.startswith(start)) for start in ("data: te", "rows:"))
    assert data.startswith(f"data: text of {text}: 1 document, ")
    assert data.endswith(" tokens, 96.9% of them trained on")  # the first token in each row of 32 has no context
    assert "a row may begin and end within a document" in rows
    num_rows = int(rows.partition(" to evaluate")[0].split()[-1])
    assert num_rows > 16
    assert f"{16 * 31} tokens in 16 of {num_rows} rows" in said
    assert [line.get("eval_loss") for line in lines] == [None, None, result.eval_loss]
    assert f"note: offload is tested with torch 1.9 to 1.10; this machine has torch {torch.__version__}.\n" in said


@pytest.mark.parametrize(
    ("is_tested", "versions"),
    [(True, ["2.11.0", "2.11.0+cu130", "2.13.9"]), (False, ["2.10.1", "2.14.0a0+git1", "3.0"])],
)
def test_which_versions_are_tested(versions: list[str], is_tested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "TESTED", {"torch": ("2.11", "2.13")})
    for version in versions:
        monkeypatch.setattr(environment, "version_of", {"torch": version}.get)
        assert (environment.describe_untested() is None) == is_tested, version


def test_the_packages_are_those_that_are_tested() -> None:
    root = Path(__file__).parents[2]
    wanted = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    pins = (root / "constraints.txt").read_text().splitlines()
    for name, (oldest, newest) in environment.TESTED.items():
        assert f"{name}>={oldest}" in wanted
        assert [pin for pin in pins if pin.startswith(f"{name}=={newest}.")]


def test_a_model_is_not_trained_on_data_that_nobody_named(run: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.source is not set.*--data\.source .*builtin:stdlib \(text\)"):
        Trainer(Config(model={"path": "m.json"}, run={"dir": str(tmp_path / "never")})).run()
    assert not (tmp_path / "never" / "config.yaml").exists()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "bert"])
def test_other_objectives_train_export_and_reload(run: Any, family: str) -> None:
    result, lines, said = run("run", family, train__micro_batch_size=2)
    assert "reloaded" in said
    assert result.export.is_dir()
    assert all(line["loss"] > 0 for line in lines)


@pytest.mark.slow
def test_embeddings_grow_for_tokens_that_were_added_to_the_tokenizer(run: Any, tmp_path: Path) -> None:
    """Break: keep the old vocabulary size in the configuration; read the model without new rows."""
    first, _, _ = run("first", train__steps=2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(first.export)
    known, added = 384, ["offload", "stream"]
    tokenizer.add_tokens([f"<filler {number}>" for number in range(known - len(tokenizer))] + added)
    tokenizer.save_pretrained(tmp_path / "more")
    text = tmp_path / "added.txt"
    text.write_text("\n".join(f"{number} offload stream {number}" for number in range(300)))
    settings = {"model__path": str(first.export), "data__tokenizer": str(tmp_path / "more"), "data__source": str(text)}
    second, _, said = run("second", **settings, train__steps=1, optimizer__lr=0.0)
    assert "model.embed_tokens.weight grows from 384 to 386 rows" in said
    old, new = (transformers.AutoModelForCausalLM.from_pretrained(each.export) for each in (first, second))
    assert new.config.vocab_size == 386
    for before, after in zip(old.parameters(), new.parameters(), strict=True):
        assert torch.equal(before, after[: len(before)])
    table = old.get_input_embeddings().weight
    assert torch.equal(new.get_input_embeddings().weight[384:], table.double().mean(0).float().expand(2, -1))
    assert len(transformers.AutoTokenizer.from_pretrained(second.export)) == 386
    with pytest.raises(ConfigError, match="has 386 tokens, the model's vocabulary has 384"):
        run("random", **settings, model__init="random")


def test_the_learning_rate_follows_the_schedule(run: Any) -> None:
    warmup = {"optimizer__schedule": "linear", "optimizer__warmup_steps": 2}
    _, lines, said = run("lr", train__steps=4, train__epochs=9, optimizer__lr=0.1, **warmup)
    assert "note: train.steps is 4, and overrides train.epochs, 9" in said
    assert [line["lr"] for line in lines] == pytest.approx([0.05, 0.1, 0.1, 0.05])


def test_a_skipped_step_of_fp16_moves_no_schedule_and_the_scale_is_told(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**40)  # one that the first steps have to halve
    warmup = {"optimizer__schedule": "linear", "optimizer__warmup_steps": 20}
    precision = {"train__precision": "fp16", "train__log_every": 1}
    _, lines, said = run("fp16", train__steps=30, optimizer__lr=0.1, **warmup, **precision)
    skipped = [int(number) - 1 for number in re.findall(r"step (\d+) skipped: a gradient was not finite", said)]
    num_before = [sum(number < step for number in skipped) for step in range(30)]
    assert 0 < len(skipped) < 30
    assert [line["loss_scale"] for line in lines] == [2.0 ** (40 - number) for number in num_before]
    rates = [0.1 * (step - number + 1) / 20 for step, number in enumerate(num_before)]
    assert [line["lr"] for line in lines[:20]] == pytest.approx(rates[:20])
    assert f"scale {lines[-1]['loss_scale']:g}" in said


@pytest.mark.slow
def test_a_diverging_run_stops_with_an_error_and_keeps_its_record(run: Any, tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="finite"):
        run("wild", train__steps=50, optimizer__lr=1e30, optimizer__warmup_steps=0)
    steps = len((tmp_path / "wild/metrics.jsonl").read_text().splitlines())
    assert steps > 0
    assert read_trace(tmp_path / "wild/trace.json.gz")["steps"][-1].name == f"step {steps}"
    assert not (tmp_path / "wild/hf").exists()


STREAMED = {**HOST, "checkpoint__export": False}
THROTTLE = {"h2d": 20_000_000, "d2h": 20_000_000}


@pytest.mark.slow
@pytest.mark.parametrize("throttle", [None, THROTTLE], ids=["serial", "overlapped"])
def test_metrics_and_trace_tell_the_same(run: Any, throttle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real, spans = Timeline.end_step, list[list[Span]]()

    def end_step(self: Timeline) -> Any:
        found = real(self)
        spans.append(found[2])
        return found

    monkeypatch.setattr(Timeline, "end_step", end_step)
    result, lines, _ = run("told", offload__throttle=throttle, train__steps=5, train__eval_every=0, **STREAMED)
    shown = read_trace(result.dir / "trace.json.gz")
    marks = {work.name: work for work in shown.pop("steps")}
    assert list(marks) == [f"step {number}" for number in range(1, 6)]
    for line in lines:
        mark = marks[f"step {line['step']}"]
        assert (mark.end - mark.begin) / 1e9 == pytest.approx(line["step_seconds"], abs=1e-6)
        assert list(line["lanes"]) == list(shown)
    for lane in ("h2d", "d2h", "update"):
        busy = sum(line["lanes"][lane]["busy_seconds"] for line in lines[1:])
        later = shown[lane][sum(span.lane == lane for span in spans[0]) :]  # the first step also records the model
        assert sum(work.end - work.begin for work in later) / 1e9 == pytest.approx(busy, abs=1e-6 * len(later))
        assert busy > 0
    works = sorted((work for works in shown.values() for work in works), key=lambda work: work.begin)
    beside = [one.name for one, other in itertools.pairwise(works) if one.end > other.begin]
    assert bool(beside) == bool(throttle)  # without lanes all work is sequential


@pytest.mark.slow
def test_step_seconds_hold_all_that_a_step_takes(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Engine.step
    inner: list[float] = []

    def step(self: Engine, *args: Any) -> Any:
        result = real(self, *args)
        inner.append(result.seconds)
        return result

    monkeypatch.setattr(Engine, "step", step)
    _, lines, _ = run("timed", **STREAMED)
    assert all(line["step_seconds"] > seconds for line, seconds in zip(lines, inner, strict=True))
    assert lines[0]["step_seconds"] > 1.5 * inner[0]  # including the recording passes
    assert [line["tokens"] / line["step_seconds"] for line in lines] == pytest.approx(
        [line["tokens_per_second"] for line in lines]
    )


@pytest.mark.slow
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_trace_is_written_when_a_step_fails(
    run: Any, tmp_path: Path, before_step: Any, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "REPORTS", {"page": lambda folder, _say: (folder / "report.html").touch()})
    with before_step(4, error("on purpose")), pytest.raises(error, match="on purpose"):
        run("failed", train__steps=5)
    files = {file.name for file in (tmp_path / "failed").iterdir()}
    report = {"report.html"} if error is RuntimeError else set()  # a second interrupt skips the report
    assert files == {"config.yaml", "plan.json", "env.json", "metrics.jsonl", "trace.json.gz"} | report
    steps = read_trace(tmp_path / "failed/trace.json.gz")["steps"]
    assert [work.name for work in steps] == ["step 1", "step 2", "step 3"]


def test_a_run_that_fails_in_its_first_step_leaves_nothing(run: Any, tmp_path: Path, before_step: Any) -> None:
    with before_step(1, RuntimeError("on purpose")), pytest.raises(RuntimeError, match="on purpose"):
        run("failed")
    assert not (tmp_path / "failed").exists()


def test_a_step_without_room_is_told_with_the_change_of_the_plan(
    run: Any, before_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan has counted all that a step needs, the error only the first memory without room."""

    def short(config: Config, *_: Any) -> planner.RunForecast:
        return planner.RunForecast(config, "1 MiB", "--train.batch_size 1 fits.", 1, {})

    monkeypatch.setattr(planner, "PLANNERS", {"forecast": short})
    error = DoesNotFitError("64 KiB too little.", "Lower something that was not tried.")
    with before_step(1, error), pytest.raises(DoesNotFitError) as raised:
        run("short")
    assert str(raised.value).endswith("64 KiB too little. --train.batch_size 1 fits.")


def test_folders_made_for_a_run_without_files_are_removed(tmp_path: Path, monkeypatch: Any) -> None:
    """Folders of others stay, also if empty."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    for config in (Config(), Config(run={"dir": "a/b"}), Config(run={"dir": "own/b"})):
        RunFolder.open(config).close()
        assert [path.name for path in tmp_path.rglob("*")] == ["own"]
    (tmp_path / "runs" / "train").mkdir(parents=True)
    RunFolder.open(Config()).close()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["train"]


@pytest.mark.slow
def test_a_trace_that_cannot_be_written_is_no_reason_to_fail(run: Any, tmp_path: Path) -> None:
    (tmp_path / "told/trace.json.gz.partial").mkdir(parents=True)
    result, lines, said = run("told", checkpoint__export=False)
    assert result.steps == len(lines) == 3
    assert "the trace could not be written" in said
    assert not (result.dir / "trace.json.gz").exists()


@pytest.mark.slow
def test_coarse_steps_are_counted_and_said_once(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "COARSE_RATIO", 1.0)  # every correction counts as coarse
    speculative = {"train__clip": "speculative", "train__max_grad_norm": 0.01, "offload__throttle": THROTTLE}
    _, lines, said = run("coarse", **speculative, **STREAMED)
    assert [line["coarse"] for line in lines] == [True] * 3
    assert said.count("coarse: in 3 of 3 steps") == 1
    monkeypatch.undo()
    _, lines, said = run("fine", **speculative | {"train__max_grad_norm": 1e6}, **STREAMED)
    assert [(line["corrected"], line["coarse"]) for line in lines] == [(0, False)] * 3
    assert "coarse:" not in said


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "clip"), [(1e6, "speculative"), (1e-3, "deferred")])
def test_how_a_run_clips_is_left_to_its_steps_and_written(
    run: Any, monkeypatch: pytest.MonkeyPatch, norm: float, clip: str
) -> None:
    """The written configuration gives the same losses in a second run, with any clip setting there."""
    monkeypatch.setattr(updates, "UNCLIPPED_STEPS", 2)
    settings = {"train__max_grad_norm": norm, "offload__throttle": {"update": 50_000_000}, **STREAMED}
    result, lines, _ = run("open", **settings)
    assert f"clip: {clip}  # resolved" in (result.dir / "config.yaml").read_text()
    _, again, _ = run("again", train__clip=clip, **settings)
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in again] == [line[key] for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "prefetch"),
    [
        ({}, 0),  # no lane works beside compute
        ({"offload__prefetch": 3}, 3),
        ({"offload__throttle": THROTTLE}, 2),
        ({"offload__throttle": THROTTLE, "offload__prefetch": 1, "offload__device_memory": "10MiB"}, 1),
        ({"offload__throttle": THROTTLE, "offload__device_memory": "10MiB"}, "auto"),  # a fixed number would be smaller
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's free memory is a budget")
def test_the_written_configuration_says_how_far_it_fetches_ahead(
    run: Any, with_plan: None, settings: dict[str, Any], prefetch: int | str
) -> None:
    result, _, _ = run("ahead", **settings, **STREAMED)
    assert Config.load(result.dir / "config.yaml").offload.prefetch == prefetch


def test_settings_that_cannot_be_are_refused_before_any_work(run: Any, tmp_path: Path) -> None:
    for groups, words in (({"(": {"lr_scale": 1.0}}, "regular expression"), ({"a": {"lr": 1.0}}, "unknown key 'lr'")):
        with pytest.raises(ConfigError, match=words):
            run("never", model__path="nowhere", optimizer__groups=groups)
    assert not (tmp_path / "never").exists()


@pytest.mark.slow
def test_an_export_that_fails_in_any_way_leaves_the_states(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run saves no checkpoint. The export fails at an existing folder, or with an internal error."""

    def taking(engine: Engine, folder: Path, *_: Any) -> None:
        folder.mkdir()
        (folder / "notes.txt").write_text("mine")
        engine.export(folder, replace=True)

    for name, write, told in (
        ("taken", taking, "is not an earlier export"),
        ("broken", Mock(side_effect=RuntimeError("on purpose")), "on purpose"),
    ):
        monkeypatch.setattr(WholeModel, "write", lambda _self, *given, write=write: write(*given))
        with pytest.raises((ConfigError, RuntimeError), match=told):
            run(name, checkpoint__every=None)
        assert "the export failed. The last step is done, and its states are saved" in capsys.readouterr().out
        assert export_command([str(tmp_path / name), str(tmp_path / f"{name}-export")]) == 0


def test_the_states_on_the_host_are_told_without_copies_for_checkpoints() -> None:
    last = {"d2h_bytes": 1, "h2d_bytes": 1, "peak_host_bytes": 9 << 20, "peak_device_bytes": 1 << 20}
    engine: Any = SimpleNamespace(allocations=[("cpu", "weights", 1 << 20), ("cpu", "exp avg", 2 << 20)])
    first, _ = describe_streaming(last, engine)
    assert "3 MiB of states on the host" in first
    assert describe_streaming(last, SimpleNamespace(allocations=[("device", "weights", 1)])) == []  # type: ignore[arg-type]
