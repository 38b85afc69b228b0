"""Ctrl-C at any line in the engine: KeyboardInterrupt comes at the next safe point, and the engine is as before, as
after, or raises TornError. A second Ctrl-C interrupts at once.
"""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

import offload
from offload import Engine
from offload.engine import checkpoint_save
from offload.errors import TornError
from tests.cases.models import build
from tests.engine.compare import own_step_of, same_bits, weights
from tests.engine.handmade import Stack, cross_entropy, words
from tests.fuzz.faults import is_lock

ENGINE = str(Path(offload.__file__).parent)


class Lines:
    """Count the engine lines run by this thread, and interrupt before line number `at`, `times` times."""

    def __init__(self, at: int = sys.maxsize, times: int = 1) -> None:
        self.at, self.times, self.count, self.where = at, times, 0, ""

    @contextmanager
    def watched(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def interrupt(self, run: Callable[[], Any]) -> bool:
        """Return whether the interrupt came. False: the run ended before line `at`, as after a shorter wait."""
        with suppress(KeyboardInterrupt), self.watched():
            run()
            assert self.count < self.at, "no interrupt came"
            return False
        return True

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(ENGINE) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and not is_lock(frame):
            self.count += 1
            if self.count == self.at:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                for _ in range(self.times):
                    signal.raise_signal(signal.SIGINT)
        return self._line


def step(engine: Engine) -> float:
    return engine.step(words(1), loss_fn=cross_entropy).loss.item()


def loss_of(model: nn.Module) -> torch.Tensor:
    return cross_entropy(model(words(1)["x"]), words(1))


@pytest.mark.slow
def test_a_second_interrupt_comes_at_once_and_says_that_the_engine_has_to_be_loaded(tmp_path: Path) -> None:
    engine = Engine(build(lambda: Stack(depth=2)), micro_batch_size=1)
    step(engine)
    engine.save_checkpoint(tmp_path / "saved")
    wanted, lines = step(engine), Lines()
    with lines.watched():
        step(engine)
    for at in random.Random(2).sample(range(100, lines.count // 2), 12):
        engine.load_checkpoint(tmp_path / "saved")
        with pytest.raises(KeyboardInterrupt), Lines(at, times=2).watched():
            step(engine)
        with pytest.raises(TornError, match="second interrupt"):
            weights(engine)
        engine.load_checkpoint(tmp_path / "saved")
        assert step(engine) == wanted
        assert _get_current_dispatch_mode() is None
        assert torch.is_grad_enabled()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    engine.close()


@pytest.mark.slow
def test_an_interrupted_recording_leaves_nothing_otherwise() -> None:
    """Covers the first step, since the recording pass changes most global state."""

    def fresh() -> Engine:
        return Engine(build(lambda: Stack(depth=2)), micro_batch_size=2)

    lines, engine, wanted = Lines(), fresh(), step(fresh())  # the first step in a process runs more lines
    with lines.watched():
        assert step(engine) == wanted
    for at in random.Random(1).sample(range(1, lines.count * 9 // 10), 12):
        engine, lines = fresh(), Lines(at)
        modes = [module.training for module in engine.model.modules()]
        with pytest.raises(KeyboardInterrupt), lines.watched():
            step(engine)
        assert _get_current_dispatch_mode() is None, lines.where
        assert [module.training for module in engine.model.modules()] == modes, lines.where
        if not engine.num_steps:
            assert step(engine) == wanted, lines.where
        engine.close()


@pytest.mark.parametrize("save", [Engine.save_checkpoint, Engine.begin_checkpoint])
def test_an_interrupted_save_leaves_no_folder(
    save: Callable[[Engine, Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt during the write is raised after the write, and the unseen checkpoint is removed."""

    def interrupted(*what: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        write(*what)

    engine, write = Engine(build(lambda: Stack(depth=2))), checkpoint_save._write_states
    step(engine)
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(checkpoint_save, "_write_states", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(engine, tmp_path / "run/saved")
    monkeypatch.undo()
    assert not list((tmp_path / "run").iterdir())
    assert not [name for _, name, _ in engine.allocations if "checkpoint" in name]
    engine.save_checkpoint(tmp_path / "run/saved")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["saved"]
    engine.close()


def test_an_interrupted_forward_gives_up_no_gradients() -> None:
    """Gradients accumulated so far belong to the caller."""
    engine, twin = (Engine(build(lambda: Stack(depth=2))) for _ in range(2))
    wanted = own_step_of(twin, loss_of, loss_of)
    engine.backward(loss_of(engine.model))
    with torch.no_grad():
        expected, lines = engine.model(words(3)["x"]), Lines()
        with lines.watched():
            engine.model(words(3)["x"])
        for at in range(1, lines.count + 1, 97):
            lines = Lines(at)
            lines.interrupt(lambda: engine.model(words(3)["x"]))
            assert same_bits(engine.model(words(3)["x"]), expected), lines.where
    assert own_step_of(engine, loss_of) == wanted
    engine.close()
    twin.close()
