"""Mutations in integrations with other trainers and in the command-line trainer."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offload.app.training import trainer
from offload.app.training.objectives import Objective
from offload.engine.engine import Engine
from offload.engine.gradients.updates import Updates
from offload.engine.loss.chunked_head import ChunkedHead, Part
from offload.extras.distill.losses import Distillation
from offload.extras.frozen import frozen_model
from offload.integrations.optimizer import OffloadOptimizer
from tests.mutations import enter_as, mutation, replaced

enter_as(
    "rates-of-schedulers-not-followed",
    replaced(OffloadOptimizer, "_prepare", lambda self: None),
    "tests/integrations/test_trainer.py",
    fuzzed=True,
)

enter_as(
    "rounding-errors-of-a-minimum-compared",
    replaced(Distillation, "trial", lambda self: self),
    "tests/training/test_distill.py::test_logits_of_all_tokens_never_exist",
)


@mutation("tests/training/test_parity.py::test_a_method_is_compared_with_its_own_loss")
def loss_of_one_side_has_another_temperature(patch: pytest.MonkeyPatch) -> None:
    step = Engine.step

    def colder(self: Engine, batch: Any, loss_fn: Any = None) -> Any:
        loss_fn._temperature = 0.9
        return step(self, batch, loss_fn)

    patch.setattr(Engine, "step", colder)


@mutation("tests/training/test_distill.py::test_logits_of_all_tokens_never_exist")
def head_of_the_teacher_over_all_tokens(patch: pytest.MonkeyPatch) -> None:
    class Whole(ChunkedHead):
        def parts(self, inputs: Any, slopes: Any = None) -> Iterator[Part]:
            self._run(inputs.output, input_ids=inputs.batch["input_ids"])
            return super().parts(inputs, slopes)

    patch.setattr(frozen_model, "ChunkedHead", Whole)


@mutation("tests/training/test_trainer.py::test_the_learning_rate_follows_the_schedule")
def schedule_one_step_late(patch: pytest.MonkeyPatch) -> None:
    rate_at = trainer.rate_at
    patch.setattr(trainer, "rate_at", lambda step, *rest: rate_at(max(0, step - 1), *rest))


@mutation("tests/integrations/test_trainer.py::test_a_run_is_that_of_the_plain_trainer")
def gradients_of_the_last_accumulated_batch_alone(patch: pytest.MonkeyPatch) -> None:
    mixin: Any = importlib.import_module("offload.integrations.transformers").OffloadMixin
    training_step = mixin.training_step

    def alone(self: Any, *how: Any, **more: Any) -> Any:
        self.engine.zero_grad()
        return training_step(self, *how, **more)

    patch.setattr(mixin, "training_step", alone)


@mutation("tests/integrations/test_accelerate.py")
def accumulated_batches_not_averaged(patch: pytest.MonkeyPatch) -> None:
    accelerate: Any = importlib.import_module("offload.integrations.accelerate")
    backward = accelerate.OffloadAccelerator.backward

    def summed(self: Any, loss: Any, **more: Any) -> None:
        backward(self, loss * self.gradient_accumulation_steps, **more)

    patch.setattr(accelerate.OffloadAccelerator, "backward", summed)


@mutation("tests/integrations/test_trainer.py::test_what_is_saved_is_what_the_plain_trainer_saves")
def saved_weights_from_before_the_last_step(patch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import load_file, save_file

    transformers: Any = importlib.import_module("offload.integrations.transformers")
    export_into, step, before = transformers.export_into, OffloadOptimizer.step, dict[str, Any]()

    def stepped(self: OffloadOptimizer, closure: Any = None) -> None:
        before.update((name, value.clone()) for name, value in self.engine.named_parameters())
        step(self, closure)

    def exported(engine: Any, folder: Path, dtype: Any) -> None:
        export_into(engine, folder, dtype)
        for file in folder.glob("*.safetensors"):
            own = load_file(file)
            stale = {name: before[name].to(value.dtype) for name, value in own.items() if name in before}
            save_file({**own, **stale}, file, metadata={"format": "pt"})

    patch.setattr(OffloadOptimizer, "step", stepped)
    patch.setattr(transformers, "export_into", exported)


@mutation("tests/training/test_trainer.py::test_a_run_whose_updates_are_late_ends_with_the_newest_weights")
def late_updates_not_shown_at_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Updates, "catch_up", lambda self: None)


@mutation("tests/training/test_evaluation.py::test_loss_perplexity_and_bits_a_byte_are_those_of_plain_pytorch")
def evaluation_is_a_mean_over_batches(patch: pytest.MonkeyPatch) -> None:
    """All batches count the same, regardless of the target count."""
    patch.setattr(Objective, "count", lambda self, batch: 1)
