"""A stage of one's own, in this file alone: trained with the bits of plain PyTorch, and planned as it runs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from offload import SGD, Engine
from offload.app.config.config import Config
from offload.engine.units.stages import STAGES, Host, Stage
from offload.engine.units.unit import Unit
from offload.engine.units.use import Forward, Use
from offload.extras.plan.forecast import Forecaster
from offload.extras.plan.machine_files import read_machine
from offload.modules import forwards_replaced
from offload.planning.settings import Settings
from tests.engine.device import cpu_only, own_device
from tests.engine.handmade import Stack, cross_entropy, words
from tests.forecast.dry_engine import BASE, BYTES, compare, model_config

MACHINE = "rtx-4090"


def twice(forward: Forward) -> Forward:
    """Return a forward that runs `forward` on its own result."""

    def run(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(forward(hidden, *args, **kwargs), *args, **kwargs)

    return run


class Twice(Stage):
    """Runs each block twice, one after the other: a model of twice the depth with the same weights."""

    @classmethod
    def over(cls, inner: Stage, host: Host, settings: Settings) -> Stage:
        return cls(inner)

    @classmethod
    @contextmanager
    def in_memory(cls, model: nn.Module, settings: Settings) -> Iterator[None]:
        blocks = [block for row in model.modules() if isinstance(row, nn.ModuleList) for block in row]
        with forwards_replaced({block: twice(block.forward) for block in blocks}):
            yield

    def forward_of(self, unit: Unit, use: Use) -> Forward:
        forward = self.inner.forward_of(unit, use)
        return twice(forward) if unit.is_block and not self.is_paused else forward


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(STAGES, "_objects", dict(STAGES._objects))
    STAGES.register("twice", Twice)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("recompute", ["always", "never"])
def test_it_trains_with_the_bits_of_plain_pytorch(recompute: Any) -> None:
    """Break: run a block once in the recomputation."""
    torch.manual_seed(0)
    model, batch = Stack(), words()
    plain = copy.deepcopy(model).to(own_device())
    with Engine(model, SGD(lr=0.1), precision="fp32", recompute=recompute, max_grad_norm=None) as engine:
        losses = [engine.step(batch, loss_fn=cross_entropy).loss for _ in range(2)]
        trained = {name: value.clone() for name, value in engine.named_parameters()}
    batch = {name: value.to(own_device()) for name, value in batch.items()}
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for loss in losses:
        hidden = plain.embedding(batch["x"])
        for block in plain.blocks:
            hidden = block(block(hidden))
        expected = cross_entropy(plain.head(hidden), batch)
        assert loss == expected.item()
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
    for name, parameter in plain.named_parameters():
        assert torch.equal(trained[name].cpu(), parameter.cpu()), name


@cpu_only("the plan and the engine on shapes need no device")
def test_its_plan_is_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line of the plan knows the stage. Break: leave out `in_memory`."""
    config = Config.load(None, BASE)
    before = Forecaster(config, 1, architecture=model_config()).predict(config, read_machine(MACHINE)).timing
    assert before is not None
    monkeypatch.setattr(STAGES, "_objects", dict(STAGES._objects))
    STAGES.register("twice", Twice)
    found = compare("always", MACHINE)
    assert found.planned.busy_s["compute"] == pytest.approx(2 * before.lane_seconds["compute"], rel=0.05)
    assert found.dry.seconds == pytest.approx(found.planned.seconds, rel=0.0125, abs=2e-3)
    assert {lane: found.dry.moved_bytes[lane] for lane in BYTES} == {
        lane: found.planned.moved_bytes[lane] for lane in BYTES
    }
    assert found.dry_bytes == pytest.approx(found.planned_bytes, rel=0.01)
