"""Habits in custom Trainers and accelerate scripts: an engine gives the plain result or refuses the habit by name."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

import offload
from offload import SGD, Engine
from offload.engine.units.residency import engine_of
from offload.errors import ConfigError
from tests.integrations.plain import common, llama, logged, needs, reset_accelerate, rows

needs("accelerate")

from accelerate import Accelerator  # noqa: E402

from offload.integrations.accelerate import OffloadAccelerator  # noqa: E402
from offload.integrations.transformers import OffloadMixin, OffloadTrainer  # noqa: E402

EPS = 1e-4
"""Large epsilon: a difference in the last place of a gradient stays small."""


# -- subclasses and callbacks of a Trainer ---------------------------------------------------------------------


def by_depth(model: Any) -> torch.optim.Optimizer:
    """Return an optimizer with learning rates that decrease with depth."""
    layers = [{"params": [*layer.parameters()], "lr": 1e-2 / (1 + 9 * n)} for n, layer in enumerate(model.model.layers)]
    rest = [p for name, p in model.named_parameters() if ".layers." not in name]
    return torch.optim.AdamW([*layers, {"params": rest, "lr": 1e-4}], eps=EPS)


class OwnOptimizer(Trainer):
    def create_optimizer(self, *_: Any) -> Any:
        self.optimizer = by_depth(self.model)
        return self.optimizer


class OwnPair(Trainer):
    """An older style: optimizer and scheduler in one method, with a scheduler for the betas."""

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        self.optimizer = by_depth(self.model)
        self.lr_scheduler = lr_scheduler.OneCycleLR(self.optimizer, 1e-2, total_steps=num_training_steps + 1)


class Named(Trainer):
    kind: Any = (torch.optim.SGD, {"lr": 0.5, "momentum": 0.5})

    @classmethod
    def get_optimizer_cls_and_kwargs(cls, *_: Any) -> Any:
        return cls.kind


class NamedOther(Named):
    kind = (torch.optim.RMSprop, {"lr": 0.5})


class Surgery(Trainer):
    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(model, *args, **kwargs)
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.1)
        return loss


class Decayed(Trainer):
    """Assumes the two parameter groups of a plain Trainer."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert len(self.get_learning_rates()) == 2
        self.optimizer.param_groups[1]["weight_decay"] += 1.0
        return super().training_step(*args, **kwargs)


class Each(TrainerCallback):
    """Changes each parameter group after a step, or each parameter before the step."""

    def __init__(self, to_group: Callable[[Any], Any] = id, to_parameter: Callable[[Any], Any] = id) -> None:
        self.to_group, self.to_parameter = to_group, to_parameter

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        for p in model.parameters():
            self.to_parameter(p)

    def on_step_end(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        for group in optimizer.param_groups:
            self.to_group(group)


def puts(**values: Any) -> Callable[[Any], None]:
    return lambda group: group.update(values)


def given_pair(model: Any) -> Any:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=EPS, weight_decay=0.1, decoupled_weight_decay=True)
    return optimizer, lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=9)


IN_STEP = "during a step, but its gradients are in the engine"
TRAINERS: dict[str, tuple[Any, dict[str, Any], str | None]] = {
    "create_optimizer": (OwnOptimizer, {}, None),
    "create_optimizer_and_scheduler": (OwnPair, {}, None),
    "get_optimizer_cls_and_kwargs": (Named, {}, None),
    "another optimizer": (NamedOther, {}, "torch.optim.rmsprop.RMSprop, and offload has no equivalent update rule"),
    "optimizers": (Trainer, {"pair": given_pair}, None),
    "optimizer_cls_and_kwargs": (
        Trainer,
        {"kwargs": {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 1e-2, "eps": EPS})}},
        None,
    ),
    "two groups": (Decayed, {"weight_decay": 0.0}, None),
    "surgery": (Surgery, {}, None),
    "a callback that looks": (Trainer, {"calls": Each(to_parameter=lambda p: p.grad)}, None),
    "a callback that drops": (
        Trainer,
        {"calls": Each(to_parameter=lambda p: setattr(p, "grad", None))},
        f"was set to None {IN_STEP}",
    ),
    "betas": (Trainer, {"calls": Each(puts(betas=(0.0, 0.5)))}, None),
    "weight decay": (Trainer, {"calls": Each(puts(weight_decay=5.0))}, None),
    "amsgrad": (Trainer, {"calls": Each(puts(amsgrad=True))}, "amsgrad was False, and is True"),
    "no clipping": (Trainer, {"max_grad_norm": 0.0}, None),
    "optim_args": (Trainer, {"optim_args": "betas=(0.5,0.6)"}, "must be key=value"),
}


def run_trainer(folder: Path, kind: Any, pair: Any = None, calls: Any = None, **more: Any) -> list[float]:
    """Return the losses and the last learning rate."""
    model, kwargs = llama(), {"train_dataset": rows(), **more.pop("kwargs", {})}
    kwargs |= {"optimizers": pair(model)} if pair else {}
    set_seed(0)
    args = TrainingArguments(**common(folder, adam_epsilon=EPS, max_steps=4, **more))
    trainer = kind(model=model, args=args, callbacks=[calls] if calls else None, **kwargs)
    trainer.train()
    return [*logged(trainer), *trainer.get_learning_rates()]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "how", "refused"), TRAINERS.values(), ids=TRAINERS)
def test_habits_of_trainers(tmp_path: Path, kind: Any, how: dict[str, Any], refused: str | None) -> None:
    own = type("Own", (OffloadMixin, kind), {})
    if refused is not None:
        with pytest.raises(ConfigError, match=refused):
            run_trainer(tmp_path, own, **how)
        return
    wanted = run_trainer(tmp_path, kind, **how)
    assert run_trainer(tmp_path, own, **how) == pytest.approx(wanted, rel=1e-4)


class Twice(Trainer):
    def train(self, *args: Any, **kwargs: Any) -> Any:
        self.evaluate(rows(4))
        super().train(*args, **kwargs)
        return super().train(*args, **kwargs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the Trainer's engine has returned its model")
def test_a_subclass_of_the_offload_trainer_makes_its_optimizer_as_well(tmp_path: Path) -> None:
    """The optimizer is new for each train() and after an evaluation."""
    below: Any = type("Below", (Twice, OffloadTrainer), {"create_optimizer": OwnOptimizer.create_optimizer})
    wanted = run_trainer(tmp_path, type("Plain", (Twice, OwnOptimizer), {}))
    assert run_trainer(tmp_path, below) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("is_collected", [False, True])
def test_a_model_of_one_trainer_goes_on_in_another(tmp_path: Path, is_collected: bool) -> None:
    """The second trainer continues with the weights from the first, even while the first is alive.

    A later call on the first trainer takes the model back.
    """

    def runs(kind: Any) -> list[float]:
        model, found = llama(), []
        args = TrainingArguments(**common(tmp_path, adam_epsilon=EPS))
        trainers = []
        for _ in range(2):
            set_seed(0)
            trainer = kind(model=model, args=args, train_dataset=rows())
            trainer.train()
            found += logged(trainer)
            trainers += [] if is_collected else [trainer]
            del trainer
            gc.collect()
        if trainers:
            with nullcontext() if kind is Trainer else pytest.warns(UserWarning, match="its moments are lost"):
                found.append(trainers[0].evaluate(rows(4))["eval_loss"])
        return found

    assert runs(OffloadTrainer) == pytest.approx(runs(Trainer), rel=1e-4)


# -- scripts over accelerate -----------------------------------------------------------------------------------


class Script:
    """A training loop with the objects for a habit: model, optimizer, accelerator, parameter iterator for clipping."""

    def __init__(self, kind: Any, make: Any = None, **more: Any) -> None:
        torch.manual_seed(0)
        model: Any = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
        optimizer = make(model) if make else torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS)
        self.called: list[float] = []
        optimizer.register_step_pre_hook(lambda its, *_: self.called.append(its.param_groups[0]["lr"]))
        self.accelerator = kind(cpu=True, **more)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.group = self.optimizer.param_groups[0]
        self.once = self.model.parameters()

    def run(self, habit: Callable[[Any], Any]) -> list[float]:
        generator, losses = torch.Generator().manual_seed(1), []
        for _ in range(5):
            loss = (self.model(torch.randn(6, 8, generator=generator)) - 1).pow(2).mean()
            self.accelerator.backward(loss)
            habit(self)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses + self.called


def halves(model: Any, kind: Any = torch.optim.AdamW, **more: Any) -> Any:
    first, second = [*model[:2].parameters()], [*model[2:].parameters()]
    return kind([{"params": first}, {"params": second, "weight_decay": 0.1}], lr=1e-2, **more)


def adam(model: Any, **more: Any) -> Any:
    return torch.optim.Adam(model.parameters(), lr=1e-2, eps=EPS, **more)


def sgd(model: Any, **more: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, **more)


def stepped(model: Any) -> Any:
    optimizer = adam(model)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def two_rates(model: Any) -> Any:
    optimizer = halves(model)
    optimizer.param_groups[1]["lr"] = 1.0
    return optimizer


def nothing(_: Script) -> None:
    pass


SCRIPTS: dict[str, tuple[Callable[[Any], Any], dict[str, Any], str | None]] = {
    "Adam that is AdamW": (nothing, {"make": lambda m: adam(m, weight_decay=0.1, decoupled_weight_decay=True)}, None),
    "Adam's decay later": (lambda s: puts(weight_decay=0.1)(s.group), {"make": adam}, "weight_decay was 0, and is 0.1"),
    "betas of a group": (
        lambda s: puts(betas=(0.0, 0.5))(s.group),
        {"make": halves},
        "no longer the same for all groups",
    ),
    "momentum later": (lambda s: puts(momentum=0.5)(s.group), {"make": sgd}, "stores other moments"),
    "nesterov": (lambda s: puts(nesterov=True)(s.group), {"make": lambda m: sgd(m, momentum=0.5)}, "nesterov was Fal"),
    "fewer parameters": (lambda s: s.group["params"].pop(), {}, "params changed"),
    "another group": (lambda s: s.optimizer.param_groups.append(s.group), {}, "groups was 1, and is 2"),
    "states before": (nothing, {"make": stepped}, None),
    "rates of a rule": (
        nothing,
        {"make": two_rates, "offload": {"optimizer": SGD(lr=1e-2)}},
        "have different learning rates",
    ),
    "state emptied": (lambda s: s.optimizer.state.clear(), {}, "optimizer.state was used"),
    "state replaced": (lambda s: setattr(s.optimizer, "state", {}), {}, "optimizer.state was used"),
    "frozen in turns": (lambda s: s.model[1].requires_grad_(len(s.called) % 2 == 0), {}, None),
    "an exhausted clip": (lambda s: s.accelerator.clip_grad_norm_(s.once, 0.01), {}, None),
}


@pytest.mark.filterwarnings("ignore:clip_grad_norm_ was given no parameters")
@pytest.mark.parametrize(("habit", "how", "refused"), SCRIPTS.values(), ids=SCRIPTS)
def test_habits_of_scripts(habit: Callable[[Any], Any], how: dict[str, Any], refused: str | None) -> None:
    own = {"offload": {}, **how}
    if refused is not None:
        with pytest.raises(ConfigError, match=refused):
            Script(OffloadAccelerator, **own).run(habit)
        return
    wanted = Script(Accelerator, **how).run(habit)
    assert Script(OffloadAccelerator, **own).run(habit) == pytest.approx(wanted, rel=1e-4)


def test_a_model_of_one_accelerator_goes_on_in_another() -> None:
    """The first engine computes in bf16, and the weights keep the original dtype."""
    first = Script(OffloadAccelerator, mixed_precision="bf16", offload={})
    model = first.model
    reset_accelerate()
    with pytest.raises(ConfigError, match="engine of a Trainer or an accelerator"):
        Engine(model)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    accelerator = OffloadAccelerator(cpu=True)
    accelerator.prepare(model, optimizer)
    assert next(model.parameters()).dtype == torch.float32
    assert first.accelerator.engine.closed


# -- what a script puts on an optimizer before the engine takes it ----------------------------------------------


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def by_wrap(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return offload.wrap(model, optimizer)[1]


def by_accelerate(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return OffloadAccelerator(cpu=True).engage(model, optimizer)


def by_trainer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    with TemporaryDirectory() as folder:
        args = TrainingArguments(folder, report_to=[], use_cpu=True)
        return OffloadTrainer(model, args, optimizers=(optimizer, None)).create_optimizer()


WAYS_IN = pytest.mark.parametrize("take", [by_wrap, by_accelerate, by_trainer])


@WAYS_IN
@pytest.mark.parametrize(
    ("name", "is_scheduled"), [("step", False), ("step", True), ("zero_grad", True), ("load_state_dict", False)]
)
def test_a_method_replaced_before_is_refused(take: Any, name: str, is_scheduled: bool) -> None:
    """A scheduler, which wraps `step`, hides nothing. Break: take every wrapped step for a scheduler's own."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replaced = MethodType(lambda *_args, **_kwargs: None, optimizer)
    setattr(optimizer, name, replaced)
    if is_scheduled:
        torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(ConfigError, match=rf"optimizer\.{name} was replaced on the SGD"):
        take(model, optimizer)
    assert engine_of(model) is None


@WAYS_IN
def test_hooks_and_attributes_of_an_optimizer_are_taken_over(take: Any) -> None:
    """Torch's scheduler too. Break: take over the hooks around `step` alone; call none around states."""
    model = small()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    calls: list[str] = []
    kinds = [f"{what}_{when}" for what in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")]
    for kind in kinds:
        getattr(optimizer, f"register_{kind}_hook")(lambda *_, kind=kind: calls.append(kind))
    optimizer.note = "of the script"
    own = take(model, optimizer)
    assert own.note == "of the script"
    model(torch.ones(2, 4)).sum().backward()
    own.step()
    own.load_state_dict(own.state_dict())
    assert calls == kinds
    own.engine.close()
