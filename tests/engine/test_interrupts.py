"""Ctrl-C at any line in the engine: KeyboardInterrupt comes at the next safe point, and the engine is as before, as
after, or raises TornError. A second Ctrl-C interrupts at once.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from offload import Engine
from offload.engine import checkpoint_save
from offload.errors import TornError
from tests.cases.models import build
from tests.engine.compare import own_step_of, same_bits, weights
from tests.engine.handmade import Stack, cross_entropy, words
from tests.fuzz.faults import Faults


def step(engine: Engine) -> float:
    return engine.step(words(1), loss_fn=cross_entropy).loss.item()


def loss_of(model: nn.Module) -> torch.Tensor:
    return cross_entropy(model(words(1)["x"]), words(1))


def watched(**settings: Any) -> tuple[Engine, Faults]:
    model = build(lambda: Stack(depth=2))
    return Engine(model, **settings), Faults(model)


def count(faults: Faults, run: Callable[[], Any]) -> Counter[str]:
    with faults.counting():
        run()
    return faults.counts


@pytest.mark.slow
def test_a_second_interrupt_comes_at_once_and_says_that_the_engine_has_to_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, faults = watched(micro_batch_size=1)
    step(engine)
    engine.save_checkpoint(tmp_path / "saved")
    wanted, places = step(engine), count(faults, lambda: step(engine))
    interrupt = signal.raise_signal
    monkeypatch.setattr(signal, "raise_signal", lambda number: (interrupt(number), interrupt(number)))
    for number in range(1, 13):
        engine.load_checkpoint(tmp_path / "saved")
        faults.counts = places
        with pytest.raises(KeyboardInterrupt), faults.armed("lines", number / 26):
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
    wanted = step(watched(micro_batch_size=2)[0])  # the first step in a process runs more lines
    engine, faults = watched(micro_batch_size=2)
    places = count(faults, lambda: step(engine))
    for number in range(12):
        engine, faults = watched(micro_batch_size=2)
        modes, faults.counts = [module.training for module in engine.model.modules()], places
        with pytest.raises(KeyboardInterrupt), faults.armed("lines", number / 13.3):
            step(engine)
        assert _get_current_dispatch_mode() is None, number
        assert [module.training for module in engine.model.modules()] == modes, number
        if not engine.num_steps:
            assert step(engine) == wanted, number
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
    (engine, faults), (twin, _) = watched(), watched()
    wanted = own_step_of(twin, loss_of, loss_of)
    engine.backward(loss_of(engine.model))
    with torch.no_grad():
        expected, places = engine.model(words(3)["x"]), count(faults, lambda: engine.model(words(3)["x"]))
        for number in range(20):
            faults.counts = places
            with suppress(KeyboardInterrupt), faults.armed("lines", number / 20):
                engine.model(words(3)["x"])
            assert same_bits(engine.model(words(3)["x"]), expected), number
    assert own_step_of(engine, loss_of) == wanted
    engine.close()
    twin.close()
