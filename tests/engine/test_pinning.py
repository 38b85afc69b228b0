"""Engines on a device with pinned-memory copies: nothing stays registered, however an engine ends."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import Engine, Placement
from offload.accelerators import Accelerator, own_accelerator
from offload.tiers.host import Pinning
from tests.cases.models import build, llama, tokens
from tests.engine.device import own_device
from tests.lanes.patience import eventually
from tests.tiers.driver import OUT_OF_MEMORY, PlayedDevice, PlayedDriver


class OwnDriver:
    """Records registrations with the real driver, and refuses more than `limit_bytes`.

    CUDA's driver refuses like this without the right to lock memory.
    """

    def __init__(self, kind: type[Accelerator], patch: pytest.MonkeyPatch) -> None:
        self.ranges: dict[int, int] = {}
        self.limit_bytes: int | None = None
        register, unregister = kind.register, kind.unregister

        def note(accelerator: Accelerator, address: int, num_bytes: int) -> int:
            if self.limit_bytes is not None and sum(self.ranges.values()) + num_bytes > self.limit_bytes:
                return OUT_OF_MEMORY
            error = register(accelerator, address, num_bytes)
            if not error:
                self.ranges[address] = num_bytes
            return error

        def forget(accelerator: Accelerator, address: int) -> int:
            error = unregister(accelerator, address)
            if not error:
                self.ranges.pop(address, None)  # other ranges belong to an earlier engine
            return error

        patch.setattr(kind, "register", note)
        patch.setattr(kind, "unregister", forget)

    def launch(self) -> None:
        """Raise a pending driver error, which the next launch would get."""
        torch.ones(1, device=own_device())


Driver = PlayedDriver | OwnDriver


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Driver for engines built from now on: the accelerator's driver, or a simulated one on the CPU."""
    accelerator = own_accelerator()
    if accelerator is not None:
        return OwnDriver(type(accelerator), monkeypatch)
    driver = PlayedDriver()
    pinning = Pinning(driver, 1 << 18)
    monkeypatch.setattr("offload.engine.memory.open_device", lambda *_, **__: PlayedDevice(pinning, driver))
    return driver


def own_loop(engine: Engine) -> None:
    """Run two backward passes. Their gradients are summed in a plane of another dtype."""
    for seed in range(2):
        engine.backward(engine.model(**tokens(seed)).loss)
    engine.update()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ends"), [("states", "closed"), ("activations", "dropped"), ("own loop", "closed"), ("nvme", "dropped")]
)
def test_an_engine_leaves_nothing_registered(driver: Driver, kind: str, ends: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"precision": "bf16"}
    if kind == "activations":
        settings["placement"] = Placement(activations="cpu")
    if kind == "nvme":
        settings["placement"] = Placement(optimizer="nvme", activations="nvme", nvme_dir=str(tmp_path))
    engine = Engine(build(llama), **settings)
    own_loop(engine) if kind == "own loop" else engine.step(tokens())
    held = engine.counters.peak_pinned_bytes
    assert 0 < held <= sum(driver.ranges.values())
    if ends == "closed":
        engine.close()
        assert not driver.ranges, "although the engine is still there"
    del engine
    assert eventually(lambda: gc.collect() >= 0 and not driver.ranges), "lanes that nobody closed end by themselves"
    driver.launch()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the driver refused to pin")
def test_an_engine_that_may_not_pin_trains_all_the_same(driver: Driver) -> None:
    losses = []
    for limit_bytes in (None, 1 << 16, 0):
        driver.limit_bytes = limit_bytes
        engine = Engine(build(llama), precision="bf16")
        losses.append([engine.step(tokens(seed)).loss for seed in range(2)])
        assert engine.pins == bool(driver.ranges) == (limit_bytes != 0)
        assert engine.counters.peak_pinned_bytes <= (1 << 30 if limit_bytes is None else limit_bytes)
        engine.close()
    for others in losses[1:]:
        assert torch.equal(torch.stack(losses[0]), torch.stack(others))
