"""Contracts with blocks of at least 200 MiB, streamed through slots that are filled again and again.

Small blocks share pages and allocations with others, fit one tile of a ring, and leave a slot as they found it. The
model that stays on the device, in the same process, is the reference, bit for bit.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn

from offload import SGD, Engine, Placement
from tests.engine.device import cpu_only, set_seed
from tests.engine.inside import parts_of

pytestmark = [pytest.mark.slow, cpu_only("blocks of 200 MiB; a GPU has `make gpu-check`")]

BLOCK_BYTES = 200 << 20
SHAPE: dict[str, Any] = {
    "hidden_size": 3072, "intermediate_size": 9216, "num_hidden_layers": 3, "num_attention_heads": 24,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 256, "max_position_embeddings": 128,
}  # fmt: skip
NUM_STEPS = 2


class KeepsWeight(torch.autograd.Function):
    """A product whose backward reads the weight from an attribute: autograd does not know that it is kept."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(h)
        return h @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (h,), gradient = ctx.saved_tensors, gradients[0]
        return gradient @ ctx.weight, gradient.flatten(0, -2).T @ h.flatten(0, -2)


class KeepingLinear(nn.Linear):
    def forward(self, h: Tensor) -> Tensor:
        return KeepsWeight.apply(h, self.weight)


def llama(**more: Any) -> nn.Module:
    return t.LlamaForCausalLM(t.LlamaConfig(**SHAPE | more))


def keeping() -> nn.Module:
    model = llama()
    for layer in model.model.layers:
        layer.mlp.down_proj.__class__ = KeepingLinear
    return model


def mixture() -> nn.Module:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1536, "num_hidden_layers": 2}
    config = t.Qwen3MoeConfig(**SHAPE | experts)
    return t.AutoModelForCausalLM.from_config(config, experts_implementation="eager")


@dataclass(frozen=True)
class Large:
    """A feature over large blocks.

    make: returns the model.
    settings: keywords for both engines.
    streamed: keywords for `Engine`, of the streamed run alone.
    placement: keywords for `Placement`, of the streamed run.
    """

    make: Callable[[], nn.Module] = llama
    settings: Mapping[str, Any] = field(default_factory=dict)
    streamed: Mapping[str, Any] = field(default_factory=dict)
    placement: Mapping[str, Any] = field(default_factory=dict)


CASES: dict[str, Large] = {
    "recomputed": Large(streamed={"recompute": "always"}),
    "kept graphs": Large(streamed={"recompute": "never"}),
    "kept graphs on the host": Large(streamed={"recompute": "never"}, placement={"graphs": "cpu"}),
    "kept products": Large(streamed={"recompute": "products"}),
    "a weight kept by a function, recomputed": Large(keeping, streamed={"recompute": "always"}),
    "a weight kept by a function, in a kept graph": Large(keeping, streamed={"recompute": "never"}),
    "tiles": Large(settings={"sequence_tile": 20}, streamed={"recompute": "always"}),
    "row blocks": Large(
        lambda: llama(vocab_size=1 << 17, num_hidden_layers=1, tie_word_embeddings=True),
        settings={"head_chunk_bytes": 64 << 20},
        placement={"device_memory": "2GiB"},
    ),
    "streamed experts": Large(mixture, placement={"experts": "streamed"}),
}


def train(case: Large, placement: Placement, settings: Mapping[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses and norms of each step, and the weights after the last step."""
    set_seed(0)
    model = case.make().bfloat16()
    told = {"precision": "bf16", "optimizer": SGD(lr=0.1), "max_grad_norm": 0.5, **case.settings, **settings}
    numbers: list[float] = []
    with Engine(model, placement=placement, **told) as engine:
        largest = max(sum(region.weight_bytes for region in unit.regions) for unit in parts_of(engine).units)
        assert largest >= BLOCK_BYTES or "experts" in case.placement
        for seed in range(NUM_STEPS):
            ids = torch.randint(0, 256, (2, 48), generator=torch.Generator().manual_seed(seed))
            result = engine.step({"input_ids": ids, "labels": ids})
            numbers += [float(result.loss), float(result.grad_norm or 0)]
        return numbers, {name: weight.detach().clone() for name, weight in engine.named_parameters()}


@pytest.mark.parametrize("name", CASES)
def test_large_blocks_have_the_bits_of_the_resident_model(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    tiers = {"parameters": "nvme", "optimizer": "nvme", "gradients": "nvme", "nvme_dir": str(tmp_path)}
    streamed, weights = train(case, Placement(**tiers | dict(case.placement)), {"prefetch": 1, **case.streamed})
    gc.collect()
    resident, wanted = train(case, Placement(parameters="device", optimizer="device"), {})
    if name == "row blocks":  # another order of sums
        assert streamed == pytest.approx(resident, rel=1e-2)
        return
    assert streamed == pytest.approx(resident, rel=1e-12 if name == "streamed experts" else 0)  # another sum of squares
    assert weights.keys() == wanted.keys()
    different = [name for name, weight in weights.items() if not torch.equal(weight, wanted.pop(name))]
    assert not different
