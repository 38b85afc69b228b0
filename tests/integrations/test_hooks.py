"""Assumptions about other libraries.

A failure means a moved hook in a library. Each test names the dependent code.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from transformers import Trainer, trainer
from transformers.trainer_callback import CallbackHandler

from tests.integrations.plain import needs

needs("accelerate")

from accelerate import Accelerator  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402

HOOKS: list[tuple[type, str, str, str]] = [
    (Trainer, "create_accelerator_and_postprocess", "self", "refuses arguments, makes the accelerator ours"),
    (Trainer, "_move_model_to_device", "self model device", "leaves the model on the host"),
    (Trainer, "create_optimizer", "self model", "opens the engine"),
    (Trainer, "call_model_init", "self trial", "takes torch.compile off"),
    (Trainer, "_wrap_model", "self model training dataloader", "wraps in nothing; opens the engine for an evaluation"),
    (Trainer, "get_decay_parameter_names", "self model", "the weight decay's groups"),
    (Trainer, "save_model", "self output_dir _internal_call", "all ranks export"),
    (Trainer, "_save", "self output_dir state_dict", "exports"),
    (Trainer, "_save_optimizer_and_scheduler", "self output_dir", "the engine's states into a checkpoint"),
    (Trainer, "_load_from_checkpoint", "self resume_from_checkpoint model", "leaves weights to the engine"),
    (Trainer, "_load_optimizer_and_scheduler", "self checkpoint", "the engine's states out of a checkpoint"),
    (Trainer, "_load_best_model", "self", "the best checkpoint's states"),
    (Accelerator, "prepare", "self args device_placement", "opens the engine of a script"),
    (Accelerator, "prepare_model", "self model device_placement evaluation_mode", "wraps in nothing"),
    (Accelerator, "backward", "self loss kwargs", "the loss goes to the engine"),
    (Accelerator, "clip_grad_norm_", "self parameters max_norm norm_type", "the norm of a Trainer's logs"),
    (Accelerator, "save_state", "self output_dir safe_serialization save_model_func_kwargs", "the engine's states"),
    (Accelerator, "load_state", "self input_dir load_kwargs load_model_func_kwargs", "the engine's states"),
    (Accelerator, "register_load_state_pre_hook", "self hook", "the engine's states before a script's hooks"),
    (Accelerator, "register_save_state_pre_hook", "self hook", "and no weights of the engine's model"),
    (Accelerator, "get_state_dict", "self model unwrap", "the engine's weights"),
]


@pytest.mark.parametrize(
    ("owner", "name", "takes", "purpose"), HOOKS, ids=[f"{o.__name__}.{n}" for o, n, _, _ in HOOKS]
)
def test_a_hook_is_there(owner: type, name: str, takes: str, purpose: str) -> None:
    hook = getattr(owner, name, None)
    assert hook is not None, f"{owner.__name__}.{name} is gone; offload used it for: {purpose}"
    found = list(inspect.signature(hook).parameters)
    assert found == takes.split(), f"{owner.__name__}.{name} takes {found} now; offload used it for: {purpose}"


def calls(function: Any) -> str:
    return " ".join(inspect.getsource(function).split())


@pytest.mark.parametrize(
    ("owner", "name", "said", "purpose"),
    [
        (Trainer, "train", "self._load_from_checkpoint(resume_from_checkpoint)", "weights before the engine is there"),
        (Trainer, "_prepare_for_training", "self.create_optimizer()", "the engine opens before anything is wrapped"),
        (Trainer, "_prepare_for_training", "self.accelerator.prepare(self.model, self.optimizer)", "DDP is left out"),
        (Trainer, "_prepare_for_training", "self._load_optimizer_and_scheduler(resume_from", "a run goes on"),
        (Trainer, "_run_epoch", "grad_norm = self._clip_grad_norm(model)", "the norm comes from the engine"),
        (Trainer, "_clip_grad_norm", "self.accelerator.clip_grad_norm_(model.parameters(), ", "the clip of a step"),
        (
            Trainer,
            "_get_grad_norm",
            'self.accelerator.clip_grad_norm_(model.parameters(), float("inf"))',
            "the norm of a step without a clip",
        ),
        (Trainer, "_has_mixed_mesh_grads", "if self._mixed_mesh_grads is None", "a Trainer looks at no gradients"),
        (Optimizer, "register_step_pre_hook", "self._optimizer_step_pre_hooks[", "hooks of an optimizer taken over"),
        (Optimizer, "register_step_post_hook", "self._optimizer_step_post_hooks[", "hooks of an optimizer taken over"),
        (Trainer, "training_step", "self.accelerator.backward(loss, **kwargs)", "the loss goes to the engine"),
        (Trainer, "evaluation_loop", "self._wrap_model(self.model, training=False)", "the engine opens"),
        (
            Trainer,
            "_save_checkpoint",
            "self._save_optimizer_and_scheduler(output_dir)",
            "the engine's states, on all ranks",
        ),
        (Trainer, "log", "self.state.log_history.append(output)", "OffloadCallback adds to both"),
        (Trainer, "_maybe_log_save_evaluate", "callback_handler.on_save(self.args, ", "states of a factory's engine"),
        (CallbackHandler, "call_event", "optimizer=self.optimizer", "OffloadCallback finds the engine"),
        (Trainer, "create_accelerator_and_postprocess", "self.accelerator = Accelerator(**args)", "it becomes ours"),
        (Trainer, "create_optimizer", "optimizer_cls()(opt_model, **optimizer_kwargs)", "offload_optimizer_factory"),
        (Accelerator, "_prepare_one", "return self.prepare_model(obj", "the engine's model is left as it is"),
        (Accelerator, "__init__", "self._load_model_state_pre_hook = OrderedDict()", "ours goes before all others"),
        (Accelerator, "save_state", "weights.append(self.get_state_dict(model, unwrap=False))", "not the engine's"),
        (Accelerator, "save_state", "hook(self._models, weights, output_dir)", "a hook gets the model of the engine"),
        (Accelerator, "load_state", "hook(models, input_dir)", "the engine's model is loaded by nobody else"),
        (AcceleratedOptimizer, "step", "self.optimizer.step(closure)", "the update"),
    ],
)
def test_a_hook_is_called(owner: type, name: str, said: str, purpose: str) -> None:
    assert said in calls(getattr(owner, name)), (
        f"{owner.__name__}.{name} has no {said!r} now; offload used it for: {purpose}"
    )


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
    """TRL calls `_iter_named_params` for names and tensors."""
    needs("trl")
    from trl.generation.vllm_generation import VLLMGeneration
    from trl.trainer import grpo_trainer

    from offload import AdamW, Engine
    from offload.integrations.transformers import weights_for_vllm
    from tests.integrations.plain import PLACEMENT, llama

    synced = calls(VLLMGeneration.sync_weights)
    assert synced.count("self._iter_named_params()") == 4, "sync_weights reads weights in another way now"
    assert "self.vllm_generation = VLLMGeneration(" in inspect.getsource(grpo_trainer)
    vllm = VLLMGeneration.__new__(VLLMGeneration)
    model = llama()
    wanted = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = Engine(model, AdamW(), PLACEMENT)
    own = type("Trainer", (), {"model": model, "engine": engine, "accelerator": Accelerator(cpu=True)})
    found = dict(weights_for_vllm(own, vllm))
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
