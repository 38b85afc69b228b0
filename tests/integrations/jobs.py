"""Functions executed by one rank in the multi-rank trainer tests."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import set_seed

from offload.engine.gradients import loss_scale
from offload.errors import OffloadError
from offload.integrations.optimizer import FOLDER, find_own
from offload.integrations.transformers import OffloadTrainer
from tests.integrations.plain import (
    LR,
    SameBits,
    decays,
    letters,
    llama,
    logged,
    offload_trainer,
    plain_trainer,
    reset_accelerate,
    rows,
)


def as_rank(job: Callable[..., Any]) -> Callable[..., Any]:
    """Make a job run as an accelerate rank, and reset the accelerate state afterwards."""

    @wraps(job)
    def run(**arguments: Any) -> Any:
        reset_accelerate()
        try:
            result = job(**arguments)
            gc.collect()  # a DDP model that outlives the process group can hang
            dist.barrier()
            return result
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            reset_accelerate()

    return run


@as_rank
def trained(folder: str, offloads: bool, **how: Any) -> dict[str, Any]:
    """Train with evaluations and checkpoints. Return losses, norms and weights."""
    arguments: dict[str, Any] = {
        "max_grad_norm": 0.0,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps" if offloads else "no",
        "save_steps": 2,
        "kwargs": {"eval_dataset": rows(6, seed=2)},
        **how,
    }
    make: Any = offload_trainer if offloads else plain_trainer
    more = (OffloadTrainer,) if offloads else ()
    trainer = make(Path(folder), llama(), *more, **arguments)
    if not offloads:
        eps = how.get("adam_epsilon", 1e-8)
        trainer.optimizer = SameBits(trainer.model, clip=0.0, decayed=decays(trainer.model), eps=eps)
    trainer.train()
    found = results(trainer)
    if offloads:
        assert trainer.model_wrapped is trainer.model
        trainer.save_model()
        trainer.engine.close()
        resumed = make(Path(folder), llama(), OffloadTrainer, **arguments)
        resumed.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-2"))
        again = results(resumed)
        resumed.engine.close()
        assert again["loss"] == found["loss"]
        assert all(torch.equal(again["weights"][name], value) for name, value in found["weights"].items())
    return found


def results(trainer: Any) -> dict[str, Any]:
    engine = getattr(trainer, "engine", None)
    own = engine.named_parameters() if engine else trainer.model.named_parameters()
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return {
        "loss": logged(trainer),
        "eval_loss": logged(trainer, "eval_loss"),
        "norms": logged(trainer, "grad_norm") if engine else optimizer.norms,
        "weights": {name: value.detach().clone() for name, value in own},
    }


@as_rank
def trl_trained(name: str, folder: str, offloads: bool) -> dict[str, Any]:
    """Train with a TRL trainer. Return losses, norms and weights."""
    from tests.integrations.test_trl import made

    trainer = made(name, Path(folder), offloads, max_steps=2, max_grad_norm=0.0, learning_rate=LR)
    if not offloads:
        trainer.optimizer = SameBits(trainer.model, clip=0.0, decayed=decays(trainer.model))
    set_seed(1 + dist.get_rank())
    trainer.train()
    found = results(trainer)
    if offloads:
        trainer._save_checkpoint(trainer.model, None)
        find_own(trainer.optimizer).load(Path(folder) / "checkpoint-2" / FOLDER)
        again = results(trainer)["weights"]
        assert all(torch.equal(again[name], value) for name, value in found["weights"].items())
        trainer.engine.close()
    return found


@as_rank
def script(folder: str, offloads: bool) -> dict[str, Any]:
    """Run an accelerate script and resume from the saved state. Return the outcome."""
    from tests.integrations.test_accelerate import Script

    runs = Script(Path(folder), offloads, 1, 1e9)
    runs.run(1)
    if offloads:
        runs.accelerator.save_state(f"{folder}/saved")
        runs.run(1)
        runs.accelerator.load_state(f"{folder}/saved")
    runs.run(1)
    found = {"loss": [runs.losses[0], runs.losses[-1]], "norms": runs.norms[:1], "weights": runs.weights()}
    if offloads:
        runs.accelerator.engine.close()
    return found


@as_rank
def trained_in_fp16(way: str, folder: str) -> dict[str, Any]:
    """Train four steps with a scale that begins too large and grows after two finite ones. Return batches, results."""
    from tests.integrations.test_accelerate import Script

    batches: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_scale, "FIRST", 2.0**19)
        patch.setattr(loss_scale, "INTERVAL", 2)
        if way == "Trainer":
            trainer = offload_trainer(Path(folder), llama(), OffloadTrainer, fp16=True, max_steps=4, max_grad_norm=0.0)
            collate = trainer.data_collator
            trainer.data_collator = lambda each: batches.append(collate(each)) or batches[-1]
            trainer.train()
            engine = trainer.engine
        else:
            runs = Script(Path(folder), True, 1, 1e9, mixed_precision="fp16")
            runs.data = batches = list(runs.data)
            runs.run(4)
            engine = runs.accelerator.engine
        weights = {name: value.detach().clone() for name, value in engine.named_parameters()}
        scale = engine.loss_scale.value
        engine.close()
    return {"batches": batches[:4], "scale": scale, "weights": weights}


@as_rank
def factory_refused(folder: str) -> str:
    """A plain Trainer would wrap the model in DDP."""
    from transformers import Trainer, TrainingArguments

    from offload.integrations.transformers import offload_optimizer_factory
    from tests.integrations.plain import common

    factory: Any = (offload_optimizer_factory, {"lr": LR})
    trainer = Trainer(
        llama(), TrainingArguments(**common(Path(folder))), train_dataset=rows(), optimizer_cls_and_kwargs=factory
    )
    try:
        trainer.train()
    except ValueError as error:
        return str(error)
    return ""


@as_rank
def saved_where_it_cannot(folder: str) -> list[str]:
    """Save repeatedly, each time with another obstacle on rank 0. Return the error messages."""
    trainer = offload_trainer(
        Path(folder), llama(), OffloadTrainer, max_steps=1, kwargs={"processing_class": letters()}
    )
    trainer.train()
    said: list[str] = []
    for name in ("config.json", "tokenizer.json", "training_args.bin", "checkpoint-1/optimizer.pt"):
        save = partial(trainer._save_checkpoint, trainer.model, None) if "/" in name else trainer.save_model
        said.append(_outcome(save, Path(folder) / name))
    accelerator = trainer.accelerator
    accelerator.register_save_state_pre_hook(lambda *_: os.close(-1) if dist.get_rank() == 0 else None)
    said.append(_outcome(partial(accelerator.save_state, f"{folder}/state"), Path(folder) / "nowhere"))
    trainer.args.output_dir = f"{folder}/file"
    Path(trainer.args.output_dir).touch()
    said.append(_outcome(trainer.save_model, Path(folder) / "nowhere"))
    trainer.args.output_dir = f"{folder}/free"
    trainer.save_model()
    trainer._save_checkpoint(trainer.model, None)
    trainer.engine.close()
    return said


def _outcome(save: Callable[[], Any], in_the_way: Path) -> str:
    """Return the error of a save when rank 0 finds a folder at the path of the file."""
    if dist.get_rank() == 0:
        in_the_way.mkdir(parents=True)
        (in_the_way / "somebody's").touch()
    dist.barrier()
    try:
        save()
    except OffloadError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(in_the_way)
    return ""
