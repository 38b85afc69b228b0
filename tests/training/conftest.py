"""Whole runs inside the test process, on models and texts with a few kilobytes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from offload.app.config.config import Config
from offload.app.training import planner, records
from offload.app.training.trainer import Trainer, TrainResult
from offload.engine.engine import Engine
from offload.extras.plan import alternatives
from offload.machine.hardware import Hardware, Rates
from tests.run_folder import SHAPE, lines_of, write_shape, write_text
from tests.threads import torch_threads

SHAPES: dict[str, dict[str, Any]] = {
    "llama": SHAPE | {"num_hidden_layers": 3},
    "bert": SHAPE | {"architectures": ["BertForMaskedLM"]},
    "t5": {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2},
    "codegen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_ctx": 64, "n_positions": 64},
    "mixtral": SHAPE | {"num_key_value_heads": 2, "num_local_experts": 4},
    "gpt_oss": SHAPE
    | {
        "hidden_size": 72,
        "intermediate_size": 40,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "pad_token_id": 0,
        "eos_token_id": 0,
        "dtype": "float32",
    },
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "gemma2": SHAPE | {"num_key_value_heads": 2, "head_dim": 16, "eos_token_id": 0, "bos_token_id": 0},
}


HOST = {"offload__parameters": "cpu", "offload__optimizer": "cpu"}


@pytest.fixture(autouse=True)
def _little_to_collect() -> None:
    """Shorten the garbage collection after each run: objects from earlier tests and imports cost 0.2 s or more."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Set one torch thread: steps with a few microseconds gain nothing from threads and lose much on a busy machine."""
    with torch_threads(1):
        yield


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine in place of measurements, which take a second in each new cache and differ under load."""
    rates = Rates(1e10, 1e10, 2e10, {"fp32": 1e11, "bf16": 1e11}, 1e10, 1e10, 1e-5, 1e9, 1e9)
    made_up = Hardware("made up", "cpu", 1, None, 1 << 34, None, None, False, rates)
    monkeypatch.setattr(alternatives, "probe", lambda *_, **__: made_up)


@pytest.fixture(autouse=True)
def _without_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the page of a run, which takes as long as a few steps. Tests of it are in tests/reporting."""
    monkeypatch.setattr(records, "REPORTS", {})


@pytest.fixture
def with_plan() -> None:
    """For tests of a run's plan."""


@pytest.fixture(autouse=True)
def _without_plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the forecast of a run, unless the test takes `with_plan`."""

    def open_as_given(config: Config, *_: Any) -> planner.RunForecast:
        return planner.RunForecast(config, "none", "", 1, {})

    if "with_plan" not in request.fixturenames:
        monkeypatch.setattr(planner, "PLANNERS", {"forecast": open_as_given})


@pytest.fixture
def num_lines() -> int:
    """Lines of the text."""
    return 400


@pytest.fixture
def before_step(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a context manager: before step `number` of a run (from 1), raise an error or call a function."""
    step = Engine.step

    @contextmanager
    def watch(number: int, act: BaseException | Callable[[], Any]) -> Iterator[None]:
        def acting(self: Engine, *args: Any, **more: Any) -> Any:
            if self.num_steps == number - 1:
                if isinstance(act, BaseException):
                    raise act
                act()
            return step(self, *args, **more)

        with monkeypatch.context() as patch:
            patch.setattr(Engine, "step", acting)
            yield

    return watch


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], num_lines: int) -> Any:
    """Return a function that trains over a few kilobytes of text and returns (result, metrics.jsonl lines, stdout)."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = write_text(tmp_path, num_lines)

    def train(
        name: str, family: str = "llama", without: Sequence[str] = (), **settings: Any
    ) -> tuple[TrainResult, list[dict[str, Any]], str]:
        values = {
            "run__dir": str(tmp_path / name),
            "model__path": str(write_shape(tmp_path / f"{family}-shape", family, **SHAPES[family])),
            "data__source": str(text),
            "data__sequence_length": 32,
            "data__eval_share": 0.1,
            "train__steps": 3,
            "train__batch_size": 4,
            "train__precision": "fp32",
        }
        kept = {key: value for key, value in values.items() if key not in without}
        config = Config.load(None, {key.replace("__", "."): value for key, value in {**kept, **settings}.items()})
        result = Trainer(config).run()
        return result, lines_of(result.dir), capsys.readouterr().out

    return train


@contextmanager
def interrupted_measurement(monkeypatch: pytest.MonkeyPatch, num_batches: int) -> Iterator[None]:
    """Context in which the measurement of another model stops after some batches, as by Ctrl-C."""
    evaluate, left = Engine.evaluate, [num_batches]

    def failing(self: Engine, *args: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return evaluate(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "evaluate", failing)
        with pytest.raises(KeyboardInterrupt):
            yield
