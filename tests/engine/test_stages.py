"""Stages of another package: `examples/noise_stage.py` against plain PyTorch."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from offload import SGD, Engine
from offload.engine.units.stages import STAGES
from tests.engine.device import own_device
from tests.engine.handmade import Stack, cross_entropy, words

EXAMPLE = Path(__file__).parents[2] / "examples" / "noise_stage.py"


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("noise_stage", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(STAGES, "_objects", dict(STAGES._objects))
    STAGES.register("input noise", module.InputNoise)
    return module


class NoisyForward(torch.autograd.Function):
    """A block with noise on the input in the forward, and the backward of the clean block."""

    @staticmethod
    def forward(ctx: Any, block: torch.nn.Module, scale: float, hidden: torch.Tensor) -> torch.Tensor:
        ctx.block = block
        ctx.save_for_backward(hidden)
        return block(hidden + scale * torch.randn_like(hidden))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, torch.Tensor | None]:
        (hidden,) = ctx.saved_tensors
        leaf = hidden.detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.block(leaf), gradient)
        return None, None, leaf.grad


def test_a_stage_changes_the_forward_and_leaves_the_recomputation_alone(noise: ModuleType) -> None:
    torch.manual_seed(0)
    model, batch = Stack(), words()
    plain = copy.deepcopy(model).to(own_device())
    with Engine(model, SGD(lr=0.1), precision="fp32", recompute="always", max_grad_norm=None) as engine:
        torch.manual_seed(1)
        loss = engine.step(batch, loss_fn=cross_entropy).loss
        clean = engine.evaluate(batch, loss_fn=cross_entropy)
        trained = {name: value.clone() for name, value in engine.named_parameters()}
    batch = {name: value.to(own_device()) for name, value in batch.items()}
    torch.manual_seed(1)
    hidden = plain.embedding(batch["x"])
    for block in plain.blocks:
        hidden = NoisyForward.apply(block, noise.SCALE, hidden)
    expected = cross_entropy(plain.head(hidden), batch)
    assert loss == expected.item()
    expected.backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert clean == cross_entropy(plain(batch["x"]), batch).item()
    for name, parameter in plain.named_parameters():
        assert torch.equal(trained[name].cpu(), parameter.cpu()), name
