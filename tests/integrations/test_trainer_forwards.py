"""The transformers Trainer over an engine without backward passes (MeZO)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from offload import Engine, MeZO
from offload.errors import ConfigError
from offload.integrations.optimizer import OffloadOptimizer
from tests.engine.zeroth_order import PlainMeZO
from tests.integrations.plain import PLACEMENT, assert_same_weights, common, llama, logged, needs, offload_trainer, rows

needs("accelerate")

from offload.integrations.accelerate import OffloadAccelerator  # noqa: E402
from offload.integrations.transformers import OffloadTrainer, offload_optimizer_factory  # noqa: E402

RULE = MeZO(lr=1e-3, eps=1e-2, weight_decay=0.1)


class Watched(OffloadTrainer):
    """Records the batches, and fails before batch `fails_at`."""

    fails_at = -1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.batches: list[Mapping[str, Any]] = []
        super().__init__(*args, **kwargs)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(self.batches) == self.fails_at:
            raise KeyError("told to")
        self.batches.append(inputs)
        return super().training_step(model, inputs, *args, **kwargs)


def trainer(folder: Path, rule: MeZO = RULE, kind: type = Watched, **more: Any) -> Any:
    offload = {"placement": PLACEMENT, "optimizer": rule, **more.pop("offload", {})}
    return offload_trainer(folder, llama(), kind, kwargs={"offload": offload, **more.pop("kwargs", {})}, **more)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [RULE, replace(RULE, num_perturbations=2, magnitude_quantile=0.5)], ids=["one", "two"])
def test_a_run_is_plain_mezo(tmp_path: Path, rule: MeZO) -> None:
    """The Trainer schedule applies, and the gradient norm clips nothing. The log can replay the run."""
    run = trainer(tmp_path, rule, save_strategy="no", warmup_steps=1)
    run.train()
    plain = PlainMeZO(llama(), rule, seed=run.args.seed)
    rates = logged(run, "lr")
    assert len(set(rates)) == len(rates) == 3
    for number, (batch, lr) in enumerate(zip(run.batches, rates, strict=True)):
        plain.rule = replace(rule, lr=lr)
        losses = plain.step(batch)
        sides = [logged(run, key)[number] for key in ("loss_plus", "loss_minus")]
        shown = list(zip(*sides, strict=True)) if rule.num_perturbations > 1 else [tuple(sides)]
        assert shown == losses
        mean = sum(map(sum, losses)) / (2 * len(losses))
        assert logged(run)[number] == pytest.approx(mean, rel=1e-6)
    found = dict(run.engine.named_parameters())
    assert_same_weights(found, plain.masters)
    again = Engine(llama(), rule, PLACEMENT)
    again.replay(line for line in run.state.log_history if "projected_grad" in line)
    assert_same_weights(dict(again.named_parameters()), found)
    again.close()


class OwnLoss(OffloadTrainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"gradient_accumulation_steps": 2}, "per_device_train_batch_size"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"kwargs": {"compute_loss_func": lambda outputs, labels, num_items_in_batch: outputs.loss}}, "loss_func"),
        ({"kind": OwnLoss}, "compute_loss of OwnLoss"),
    ],
)
def test_what_a_step_of_forwards_cannot_do_is_refused(tmp_path: Path, how: dict[str, Any], told: str) -> None:
    run = trainer(tmp_path, **how)
    with pytest.raises(ConfigError, match=told):
        run.train()
    run.engine.close()


def test_a_plain_trainer_goes_backward(tmp_path: Path) -> None:
    how = (offload_optimizer_factory, {"optimizer": RULE})
    plain = Trainer(llama(), TrainingArguments(**common(tmp_path)), train_dataset=rows(), optimizer_cls_and_kwargs=how)
    with pytest.raises(ConfigError, match="OffloadTrainer"):
        plain.train()


def test_a_loop_of_ones_own_over_the_optimizer() -> None:
    """`descend` is the step. `step` alone has no gradient and raises; accelerate calls are harmless."""
    engine = Engine(llama(), RULE, PLACEMENT)
    optimizer = OffloadOptimizer(engine)
    with pytest.raises(ConfigError, match="descend"):
        optimizer.step()
    batch = {key: torch.stack([row[key] for row in rows(4)]) for key in ("input_ids", "labels")}
    for group in optimizer.param_groups:
        group["lr"] = 1e-4
    result = optimizer.descend(batch)
    assert result.measured.lr == pytest.approx(1e-4)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ConfigError, match="descend"):
        optimizer.step()
    accelerator = OffloadAccelerator(cpu=True)
    accelerator.engine = engine
    accelerator._optimizers.append(optimizer)
    assert float(accelerator.clip_grad_norm_(engine.model.parameters(), 1.0)) == pytest.approx(result.grad_norm)
    engine.close()
