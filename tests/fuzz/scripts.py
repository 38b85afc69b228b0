"""Scripts that change more optimizer group values than the learning rate, in a scheduler or directly.

Over an engine they train like torch's optimizer, or are refused by name (by torch for an unknown group key).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.optim import lr_scheduler

import offload
from offload import Engine, Placement
from offload.errors import ConfigError
from offload.integrations.accelerate import OffloadAccelerator
from offload.integrations.optimizer import OffloadOptimizer
from tests.fuzz import habits, models
from tests.fuzz.cases import Case

_NUM_STEPS, _RATE = 8, 0.03
_NEAR = 1e-4
"""Allowed relative loss difference: torch kernels round differently."""
_SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=_NUM_STEPS + 1),
    "one cycle of rates": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, _RATE, total_steps=_NUM_STEPS + 1, cycle_momentum=False
    ),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, _RATE / 10, _RATE, step_size_up=2),
}
_CHANGES = {"adamw": {"betas": (0.5, 0.6), "eps": 0.1, "weight_decay": 5.0}, "sgd": {"momentum": 0.1}}


def draw_script(dice: random.Random) -> dict[str, Any]:
    rule = dice.choice(["adamw", "adamw", "sgd"])
    drawn = {"rule": rule, "over": dice.choice(["accelerator", "optimizer"]), "tier": dice.choice(["cpu", "device"])}
    if dice.random() < 0.6:
        return drawn | {"scheduler": dice.choice(list(_SCHEDULERS))}
    return drawn | {"change": dice.choice(list(_CHANGES[rule]))}


def run_script(case: Case) -> Any:
    """Check a script. Return the Outcome."""
    from tests.fuzz.runner import Outcome

    outcome, settings = Outcome(), {"rule": "adamw", "over": "accelerator", "tier": "cpu", **case.settings}
    wanted = _losses(settings, "torch")
    try:
        found = _losses(settings, settings["over"])
    except (ConfigError, ValueError) as error:
        outcome.refused = f"{type(error).__name__}: {error}"
        if not habits.is_named(str(error), ["scheduler", "change"]):
            outcome.wrong = f"refused, and not by name: {error}"
        return outcome
    if not all(abs(one - other) <= _NEAR * abs(other) for one, other in zip(found, wanted, strict=True)):
        outcome.wrong = f"losses are {found}, and plain PyTorch gives {wanted}"
    return outcome


def _losses(settings: dict[str, Any], over: str) -> list[float]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    model = models.build({"make": "mosaic", "width": 8, "words": 16, "own-loss": True})
    engine, placement = None, Placement(parameters=settings["tier"], optimizer=settings["tier"])
    schedule = _SCHEDULERS.get(settings.get("scheduler", ""), lambda _: None)
    if over == "optimizer":
        rule = offload.SGD(_RATE, momentum=0.9) if settings["rule"] == "sgd" else offload.AdamW(_RATE, decay_1d=True)
        engine = Engine(model, rule, max_grad_norm=None, placement=placement)
    try:
        optimizer: Any = _torch_optimizer(settings["rule"], model) if engine is None else OffloadOptimizer(engine)
        scheduler, backward = schedule(optimizer), torch.Tensor.backward
        if engine is None:
            how = {} if over == "torch" else {"offload": {"placement": placement}}
            accelerator = (Accelerator if over == "torch" else OffloadAccelerator)(cpu=True, **how)
            prepared = accelerator.prepare(*filter(None, (model, optimizer, scheduler)))
            model, optimizer, scheduler = (*prepared, None)[:3]
            engine, backward = getattr(accelerator, "engine", None), accelerator.backward
        return _train(settings, model, optimizer, scheduler, backward)
    finally:
        if engine is not None:
            engine.close()


def _train(settings: dict[str, Any], model: nn.Module, optimizer: Any, scheduler: Any, backward: Any) -> list[float]:
    losses, key = [], settings.get("change")
    for step in range(_NUM_STEPS):
        drawn = {"rows": [3], "lengths": [5], "padding": [0], "seed": step}
        given = models.batch({"make": "mosaic", "words": 16}, drawn)
        loss = models.loss_of(model, given, True)
        losses.append(loss.item())
        backward(loss)
        if step == 2 and key:
            for group in optimizer.param_groups:
                group[key] = _CHANGES[settings["rule"]][key]
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return losses


def _torch_optimizer(rule: str, model: nn.Module) -> torch.optim.Optimizer:
    if rule == "sgd":
        return torch.optim.SGD(model.parameters(), _RATE, momentum=0.9, foreach=False)
    return torch.optim.AdamW(model.parameters(), _RATE, foreach=False)
