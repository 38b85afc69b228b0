"""Steps that end while lanes are at work: the error comes at once, nothing hangs, and the engine continues or raises
TornError.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import Engine, Placement
from offload.errors import TornError
from tests.cases.models import build, llama, tokens
from tests.engine.compare import assert_same, own_step_of, weights
from tests.engine.handmade import Block, Log, Stack, cross_entropy, words
from tests.engine.inside import lane_threads, parts_of

SOON_S = 120.0
"""Time limit in seconds for abandoning a step, generous for a busy machine."""
FREE: dict[str, Any] = {"max_grad_norm": None}
DEFERRED: dict[str, Any] = {"max_grad_norm": 0.2, "clip": "deferred"}
SPECULATIVE: dict[str, Any] = {"max_grad_norm": 0.2, "clip": "speculative"}
# A step takes an hour at this speed, so a wait for any lane exceeds the limit.
GLACIAL = {lane: {"latency_seconds": 2 * SOON_S} for lane in ("h2d", "d2h", "update")}


class Told(Exception):
    """Raised on purpose."""


class Breaks(Block):
    """Raise in the forward when `left` counts down to 0: in the pass itself, or in the recomputation."""

    _left = Log()

    @property
    def left(self) -> int:
        return self._left[0] if self._left else -1

    @left.setter
    def left(self, value: int) -> None:
        self._left[:] = [value]

    def forward(self, h: Tensor) -> Tensor:
        if self.left == 0:
            self.left = -1
            raise Told
        self.left -= 1
        return super().forward(h)


def breaking(**settings: Any) -> Engine:
    return Engine(build(lambda: Stack(Breaks)), **settings)


def step(engine: Engine, seed: int) -> float:
    return engine.step(words(seed), loss_fn=cross_entropy).loss.item()


@contextmanager
def ends_soon() -> Iterator[None]:
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < SOON_S


def loss_of(seed: int) -> Callable[[nn.Module], Tensor]:
    return lambda model: cross_entropy(model(words(seed)["x"]), words(seed))


@contextmanager
def interrupted(after_s: float) -> Iterator[None]:
    """Send a Ctrl-C after `after_s` seconds. The block must end soon by KeyboardInterrupt."""
    timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with ends_soon(), pytest.raises(KeyboardInterrupt):
        yield
    timer.join()


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_collected")
def test_ctrl_c_while_the_lanes_crawl() -> None:
    engine = breaking(throttle=GLACIAL, **SPECULATIVE)
    with interrupted(after_s=0.5):
        for seed in range(5):
            step(engine, seed)
    threads = lane_threads(engine)
    with ends_soon():
        engine.close()
    assert not any(thread.is_alive() for thread in threads)


def test_an_own_loop_that_fails_on_a_lane_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, undisturbed = breaking(debug=1), breaking()
    original = parts_of(engine).device.copy

    def fail(*arguments: Any) -> None:
        if threading.current_thread().name == "offload h2d":
            monkeypatch.undo()
            raise Told
        original(*arguments)

    for seed in range(3):
        if seed == 1:
            monkeypatch.setattr(parts_of(engine).device, "copy", fail)
            with pytest.raises(Told):
                engine.model(words(9)["x"])
        for one in (engine, undisturbed):
            one.lr = 1e-3 * (seed + 1)  # for this update
        assert own_step_of(engine, loss_of(seed)) == own_step_of(undisturbed, loss_of(seed))
    assert_same(weights(engine), weights(undisturbed))
    engine.close()


def test_weights_that_are_given_back_have_had_their_last_update() -> None:
    slow = {"update": {"latency_seconds": 0.05}}
    undisturbed, engine = breaking(**DEFERRED), breaking(**DEFERRED, throttle=slow)
    for seed in range(2):
        assert step(engine, seed) == step(undisturbed, seed)
    wanted = weights(undisturbed)
    engine.close(restore=True)
    assert_same({name: value.detach() for name, value in engine.model.named_parameters()}, wanted)


ON_DISK = dict.fromkeys(("parameters", "optimizer", "gradients", "activations"), "nvme")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "settings", "recompute"),
    [
        ({}, SPECULATIVE, "always"),
        ({"optimizer": "nvme"}, FREE, "never"),
        (ON_DISK, FREE | {"micro_batch_size": 2}, "always"),
    ],
    ids=["cpu", "optimizer", "nvme"],
)
def test_a_torn_engine_is_sound_again_once_it_has_loaded(
    place: dict[str, str], settings: dict[str, Any], recompute: str, tmp_path: Path
) -> None:
    """Nothing may wait for the abandoned updates, in any of the three lanes."""
    slow = {lane: {"latency_seconds": 0.01} for lane in ("update", "nvme_write")}
    (tmp_path / "disk").mkdir()
    placement = Placement(**place, nvme_dir=str(tmp_path / "disk") if place else None)
    engine = breaking(throttle=slow, placement=placement, recompute=recompute, **settings)
    undisturbed = breaking(recompute=recompute, **settings)
    assert step(engine, 0) == step(undisturbed, 0)
    engine.save_checkpoint(tmp_path / "saved")
    wanted = weights(engine)

    def tear(seed: int) -> None:
        is_armed: list[bool] = []

        def fail(_module: nn.Module, _arguments: Any, result: Tensor) -> None:
            if is_armed:
                raise_in_backward(result, wait_s=0.2)

        hook = engine.model.blocks[0].register_forward_hook(fail)
        step(engine, seed)  # a new hook, and a new kind of batch, are recorded first
        is_armed.append(True)
        with pytest.raises(Told):
            step(engine, seed)
        hook.remove()
        with pytest.raises(TornError):
            weights(engine)

    for seed in (1, 2):  # again, from the loaded states
        tear(8 + seed)
        for _ in range(seed):
            engine.load_checkpoint(tmp_path / "saved")
            assert_same(weights(engine), wanted)
        batch = words(seed)
        undisturbed.load_checkpoint(tmp_path / "saved")
        assert torch.equal(*(one.evaluate(batch, loss_fn=cross_entropy) for one in (engine, undisturbed)))
        assert step(engine, seed) == step(undisturbed, seed)
        engine.save_checkpoint(tmp_path / "later")
    tear(9)
    engine.load_checkpoint(tmp_path / "later")
    for seed in (3, 4):
        assert step(engine, seed) == step(undisturbed, seed)
    assert_same(weights(engine), weights(undisturbed))
    engine.close()
    undisturbed.close()


def raise_in_backward(result: Tensor, wait_s: float = 0.0) -> None:
    """Raise Told in the backward, after `wait_s` for updates of later blocks to begin."""

    def told(_: Tensor) -> None:
        time.sleep(wait_s)
        raise Told

    if result.requires_grad:
        result.register_hook(told)


def test_a_fetch_that_failed_fails_one_call_of_an_own_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failed fetch is of a resident unit, before the call. The loop continues with the next call."""
    undisturbed = Engine(build(llama))
    engine = Engine(build(llama), throttle={"h2d": {"latency_seconds": 0.01}})
    parts = parts_of(engine)
    submit = parts.lanes.h2d.submit

    def fail() -> None:
        raise Told

    def loss_of(seed: int) -> Callable[[nn.Module], Tensor]:
        return lambda model: model(**tokens(seed)).loss

    engine.backward(loss_of(0)(engine.model))
    monkeypatch.setattr(parts.lanes.h2d, "submit", lambda _work, **how: submit(fail, **how))
    parts.slots.refresh(always=True)
    monkeypatch.undo()
    with pytest.raises(Told):
        engine.model(**tokens(1))
    assert own_step_of(engine, loss_of(1)) == own_step_of(undisturbed, loss_of(0), loss_of(1))
    assert_same(weights(engine), weights(undisturbed))
    engine.close()


@pytest.mark.parametrize("clip", ["deferred", "speculative"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, Told])
def test_a_step_that_is_counted_and_not_updated_is_no_step(
    error: type[BaseException], clip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error between the count and the update would lose this step silently if training continued."""
    engine = breaking(clip=clip)
    step(engine, 0)

    def expect(*_: object) -> None:
        monkeypatch.undo()
        raise error

    monkeypatch.setattr(parts_of(engine).executor, "begin_fetches", expect)
    with pytest.raises(error):
        step(engine, 1)
    with pytest.raises(TornError, match="from different steps"):
        step(engine, 2)
    engine.close()


def saved_on_a_slow_disk(folder: Path) -> tuple[Engine, dict[str, Tensor]]:
    """Return (engine with slow disk writes, weights saved in `folder`)."""
    (folder / "disk").mkdir()
    placement = Placement(optimizer="nvme", parameters="nvme", nvme_dir=str(folder / "disk"))
    engine = breaking(placement=placement, throttle={"nvme_write": {"latency_seconds": 0.02}})
    step(engine, 0)
    engine.save_checkpoint(folder / "saved")
    wanted = weights(engine)
    return engine, wanted


@pytest.mark.slow
def test_what_fails_on_its_way_to_the_disk_fails_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load returns only after all bytes are on disk: the load itself raises, not the next step."""
    engine, wanted = saved_on_a_slow_disk(tmp_path)
    lane, left = parts_of(engine).lanes.update_write, [0]
    original = lane.submit

    def submit(work: Callable[[], None], *args: Any, **settings: Any) -> Any:
        def fails() -> None:
            raise OSError(errno.EIO, "told to")

        left[0] -= 1
        return original(fails if left[0] == 0 else work, *args, **settings)

    monkeypatch.setattr(lane, "submit", submit)
    engine.load_checkpoint(tmp_path / "saved")
    left[0] = -left[0]  # fails the last write of the next load
    with pytest.raises(OSError, match="told to"):
        engine.load_checkpoint(tmp_path / "saved")
    with pytest.raises(TornError):
        weights(engine)
    engine.load_checkpoint(tmp_path / "saved")
    assert_same(weights(engine), wanted)
    engine.close()
