"""Assumptions about other libraries.

A failure means a moved hook in a library. Each test names the dependent code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import trainer

import offload
from tests.integrations.plain import needs

needs("accelerate")

from accelerate import Accelerator  # noqa: E402


def calls(function: Any) -> str:
    return " ".join(inspect.getsource(function).split())


def test_the_trainer_names_its_files_as_before() -> None:
    assert trainer.TRAINING_ARGS_NAME == "training_args.bin"
    assert trainer.OPTIMIZER_NAME == "optimizer.pt"


def test_checkpointing_of_gradients_is_left_off() -> None:
    """Both transformers names turn off checkpointing. Otherwise each unit would run a third forward pass."""
    from offload.engine.prepare import disable_checkpointing
    from tests.integrations.plain import llama

    model = llama()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    embeddings = model.get_input_embeddings()
    assert embeddings._forward_hooks, "embeddings have no hook by which their results ask for a gradient"
    flags = [name for name, module in model.named_modules() if getattr(module, "gradient_checkpointing", False)]
    assert flags, "layers have no flag gradient_checkpointing any more; offload leaves it off"
    disable_checkpointing(model)
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    assert not embeddings._forward_hooks


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class OwnCheckpoints(nn.Module):
    """A block with a flag of its own, which no library turns off."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.gradient_checkpointing = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + checkpoint(self.linear, x, use_reentrant=False)
        return torch.tanh(x)


def own_blocks() -> nn.Module:
    return nn.Sequential(OwnCheckpoints(), OwnCheckpoints())


def diffusion() -> Any:
    needs("diffusers")
    from diffusers import DiTTransformer2DModel

    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "patch_size": 2}
    model: Any = DiTTransformer2DModel(in_channels=4, out_channels=8, num_embeds_ada_norm=10, **sizes)
    model.enable_gradient_checkpointing()
    return model


def language() -> Any:
    from tests.integrations.plain import llama

    model = llama()
    model.gradient_checkpointing_enable()
    return model


@pytest.mark.parametrize(
    ("make", "num_left"),
    [
        (diffusion, 0),
        (lambda: Wrapper(language()), 0),
        (lambda: Wrapper(diffusion()), 0),
        (lambda: nn.ModuleList([language(), diffusion(), own_blocks()]), 2),
        (own_blocks, 2),
    ],
    ids=["diffusers", "wrapped transformers", "wrapped diffusers", "beside each other", "own flags"],
)
def test_the_topmost_modules_that_can_are_asked_to_leave_checkpoints_out(
    make: Callable[[], nn.Module], num_left: int
) -> None:
    from offload.engine.prepare import disable_checkpointing

    model = make()
    flags = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    assert flags
    disable_checkpointing(model)
    assert sum(getattr(module, "gradient_checkpointing", False) for module in flags) == num_left


def test_checkpoints_of_a_script_run_within_units() -> None:
    torch.manual_seed(0)
    plain = own_blocks()
    torch.manual_seed(0)
    model = own_blocks()
    model, optimizer = offload.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(4, 8)
    plain(x).sum().backward()
    model(x).sum().backward()
    for own, given in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own.grad, given.grad)
    optimizer.engine.close()


def test_vllm_gets_the_engines_weights() -> None:
    """TRL calls `_iter_named_params` for names and tensors. vLLM has no companion of the model."""
    needs("trl")
    from trl.generation.vllm_generation import VLLMGeneration
    from trl.trainer import grpo_trainer

    from offload import AdamW, Engine
    from offload.engine.companions import add_companion
    from offload.integrations.transformers import weights_for_vllm
    from tests.integrations.plain import PLACEMENT, llama

    synced = calls(VLLMGeneration.sync_weights)
    assert synced.count("self._iter_named_params()") == 4, "sync_weights reads weights in another way now"
    assert "self.vllm_generation = VLLMGeneration(" in inspect.getsource(grpo_trainer)
    vllm = VLLMGeneration.__new__(VLLMGeneration)
    model = llama()
    wanted = {name: p.detach().clone() for name, p in model.named_parameters()}
    add_companion(model, "teacher", llama())
    engine = Engine(model, AdamW(), PLACEMENT)
    own = type("Trainer", (), {"model": model, "engine": engine, "accelerator": Accelerator(cpu=True)})
    found = dict(weights_for_vllm(own, vllm))
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
