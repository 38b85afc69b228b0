"""Assumptions about other libraries.

A failure means a moved hook in a library. Each test names the dependent code.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import trainer

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
