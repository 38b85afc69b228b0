"""Every way in has the same net: each situation has the bits of plain PyTorch, or is refused with the line to write.

The situations stand in `ways_in.yaml`, from which `docs/make.py` makes a page.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import offload
from offload.errors import OffloadError
from offload.optim.update import clip_coefficient
from tests.engine.compare import assert_same
from tests.engine.device import cpu_only
from tests.integrations.plain import KernelAdamW, common, needs

needs("transformers", "accelerate")

from transformers import TrainerCallback, TrainingArguments  # noqa: E402

from offload.integrations.accelerate import OffloadAccelerator  # noqa: E402
from offload.integrations.transformers import OffloadTrainer  # noqa: E402

pytestmark = cpu_only("the ways in are the same on every device")

WIDTH, STEPS, CLIP = 16, 4, 0.05
SETTINGS = {"lr": 0.02, "betas": (0.8, 0.9), "weight_decay": 0.1}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(self.up(h).tanh())


class Net(nn.Module):
    """`last` stays on the device; with `short`, the second block is not used."""

    block = Block

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(2))
        self.last = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, short: bool = False) -> Tensor:
        h = self.first(x)
        for block in self.blocks[: 1 if short else 2]:
            h = block(h)
        return self.head(self.last(h))


class Scaled(Net):
    """Has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, short: bool = False) -> Tensor:
        return super().forward(x, short) * self.scale


class KeepingBlock(Block):
    """Keeps a loss on itself."""

    def forward(self, h: Tensor) -> Tensor:
        out = super().forward(h)
        self.aux_loss = out.square().mean()
        return out


class Keeping(Net):
    block = KeepingBlock


class WatchedBlock(Block):
    """Scales the gradients of its input and its result by hooks, also where no graph is needed otherwise."""

    def forward(self, h: Tensor) -> Tensor:
        h.register_hook(lambda gradient: 2 * gradient)
        out = super().forward(h)
        out.register_hook(lambda gradient: 0.5 * gradient)
        out.grad_fn.register_hook(lambda *_: None)  # type: ignore[union-attr]
        return out


class Watched(Net):
    block = WatchedBlock


class Scripted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = torch.jit.script(self.blocks[1])


class Projected(Net):
    """Replaces the memory of a weight in the forward, as PEFT's CPT does."""

    def forward(self, x: Tensor, short: bool = False) -> Tensor:
        self.last.weight.data = self.last.weight.detach() / self.last.weight.detach().norm().clamp(min=1)
        return super().forward(x, short)


class Shared(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.first.weight


def batch_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(2, 3, WIDTH, generator=generator), "y": torch.randn(2, 3, WIDTH, generator=generator)}


# -- ways in -------------------------------------------------------------------------------------------------


class Script:
    """A loop in plain PyTorch: the reference, and the base of all ways in."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case, self.model, self.number, self.norm = case, case.make(), 0, 0.0
        self.open()

    def open(self) -> None:
        self.optimizer: Any = KernelAdamW(self.model.parameters(), **SETTINGS)

    def run(self) -> dict[str, Tensor]:
        """Train, and return the weights."""
        self.case.begin(self)
        for self.number in range(STEPS):
            self.case.turn(self)
            self.case.between(self)
        return self.weights()

    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def loss(self) -> Tensor:
        batch = batch_of(self.number)
        return self.case.loss(self.model, self.model(batch["x"]), batch)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self, **how: Any) -> None:
        self.optimizer.zero_grad(**how)

    def clip(self, limit: float = CLIP) -> Any:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
        self.optimizer.scale = min(self.optimizer.scale, clip_coefficient(norm, limit))
        return norm

    def set(self, **settings: Any) -> None:
        self.optimizer.param_groups[0].update(settings)

    def save(self, folder: Path) -> None:
        torch.save([self.model.state_dict(), self.optimizer.state_dict()], folder / "states")

    def load(self, folder: Path) -> None:
        weights, states = torch.load(folder / "states")
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(states)


class Wrapped(Script):
    def open(self) -> None:
        optimizer = torch.optim.AdamW(self.model.parameters(), **SETTINGS)
        self.model, self.optimizer = offload.wrap(self.model, optimizer, parameters="cpu", optimizer="cpu")

    def clip(self, limit: float = CLIP) -> Any:
        return self.optimizer.clip_grad_norm_(self.model.parameters(), limit)

    def save(self, folder: Path) -> None:
        self.optimizer.save(folder / "saved")

    def load(self, folder: Path) -> None:
        self.optimizer.load(folder / "saved")


class Accelerated(Wrapped):
    def open(self) -> None:
        optimizer = torch.optim.AdamW(self.model.parameters(), **SETTINGS)
        self.accelerator: Any = OffloadAccelerator(cpu=True, offload={"placement": PLACEMENT})
        self.model, self.optimizer = self.accelerator.prepare(self.model, optimizer)

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def clip(self, limit: float = CLIP) -> Any:
        return self.accelerator.clip_grad_norm_(self.model.parameters(), limit)

    def save(self, folder: Path) -> None:
        self.accelerator.save_state(str(folder / "saved"))

    def load(self, folder: Path) -> None:
        self.accelerator.load_state(str(folder / "saved"))


class Loop(Script):
    """A loop of the caller, with the engine's own calls."""

    def open(self) -> None:
        rule = offload.AdamW(**SETTINGS, decay_1d=True)
        self.engine = offload.Engine(self.model, rule, PLACEMENT, max_grad_norm=None)

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def step(self) -> None:
        self.engine.update()

    def zero_grad(self, **how: Any) -> None:
        self.engine.zero_grad(**how)

    def clip(self, limit: float = CLIP) -> Any:
        return torch.tensor(self.engine.clip_grad_norm(limit))

    def set(self, **settings: Any) -> None:
        self.engine.lr = settings.pop("lr", self.engine.lr)
        decay = settings.pop("weight_decay", None)
        names = dict(self.model.named_parameters())
        self.engine.tune(settings, {} if decay is None else dict.fromkeys(names, decay))

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(folder / "saved")

    def load(self, folder: Path) -> None:
        self.engine.load_checkpoint(folder / "saved")


class Step(Loop):
    """Whole steps of the engine, with the loss in its `loss_fn`."""

    def run(self) -> dict[str, Tensor]:
        self.case.begin(self)
        for self.number in range(STEPS):
            batch = batch_of(self.number)
            self.engine.step(batch, lambda outputs, batch: self.case.loss(self.model, outputs, batch))
            self.case.between(self)
        return self.weights()


class Trained(Script):
    """transformers' Trainer: a situation has its place in the loss, a callback or an overridden method."""

    def open(self) -> None:
        optimizer = torch.optim.AdamW(self.model.parameters(), **SETTINGS)
        arguments = common(
            Path(tempfile.mkdtemp()),
            max_steps=STEPS,
            learning_rate=SETTINGS["lr"],
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            per_device_train_batch_size=1,
            remove_unused_columns=False,
        )
        self.trainer: Any = self._trainer_class()(
            model=self.model,
            args=TrainingArguments(**arguments),
            train_dataset=[batch_of(step) for step in range(STEPS)],
            data_collator=lambda rows: rows[0],
            optimizers=(optimizer, None),
            offload={"placement": PLACEMENT},
            callbacks=[self._callback()],
        )

    def _trainer_class(self) -> Any:
        way = self

        class Own(OffloadTrainer):
            def _get_train_sampler(self, *_: Any) -> Any:
                return range(STEPS)

            def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
                way.model, way.optimizer = model, self.optimizer.optimizer
                if way.case.compute is not None:
                    return way.case.compute(way)
                return way.case.loss(model, model(inputs["x"]), inputs)

            def training_step(self, *args: Any, **kwargs: Any) -> Any:
                way.number, way.told = self.state.global_step, lambda: super(Own, self).training_step(*args, **kwargs)
                way.returned = torch.tensor(0.0)
                way.case.turn(way)
                return way.returned

        return Own

    def _callback(self) -> Any:
        way = self

        class Own(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                way.case.between(way)

            def on_optimizer_step(self, *_: Any, **__: Any) -> None:
                way.case.after(way)

        return Own()

    def run(self) -> dict[str, Tensor]:
        self.case.begin(self)
        self.trainer.train()
        return self.weights()

    def loss(self) -> Tensor:
        return torch.zeros(())  # the Trainer computes it

    def backward(self, loss: Tensor) -> None:
        self.returned = self.told()

    def step(self) -> None:
        """The Trainer does this."""

    def zero_grad(self, **how: Any) -> None:
        """The Trainer does this."""

    def set(self, **settings: Any) -> None:
        super().set(**settings)
        self.trainer.lr_scheduler.base_lrs = [settings["lr"]]

    def clip(self, limit: float = CLIP) -> Any:
        return self.trainer.accelerator.clip_grad_norm_(self.model.parameters(), limit)


PLACEMENT = offload.Placement(parameters="cpu", optimizer="cpu")
WAYS: dict[str, type[Script]] = {
    "step": Step,
    "loop": Loop,
    "wrap": Wrapped,
    "trainer": Trained,
    "accelerate": Accelerated,
}


# -- situations ----------------------------------------------------------------------------------------------


def nothing(_: Script) -> None:
    pass


def own_loss(_: nn.Module, outputs: Tensor, batch: Any) -> Tensor:
    return mse_loss(outputs, batch["y"])


def usual(way: Script, edit: Callable[[Script], Any] = nothing) -> None:
    """One step of a loop, with `edit` between backward and step."""
    way.backward(way.loss())
    edit(way)
    way.step()
    way.case.after(way)
    way.zero_grad()


@dataclass
class Case:
    """A situation: parts of a loop, which the ways in put in their own places."""

    make: Callable[[], Any] = Net
    loss: Callable[[nn.Module, Tensor, Any], Tensor] = own_loss
    begin: Callable[[Script], Any] = nothing
    """Called before the first step."""
    compute: Callable[[Script], Tensor] | None = None
    """Computes the loss in the Trainer, in place of `loss` after a call of the model."""
    turn: Callable[[Script], Any] = usual
    """One step. Not called by `Engine.step`."""
    after: Callable[[Script], Any] = nothing
    """Called after the update, before the gradients are cleared."""
    between: Callable[[Script], Any] = nothing
    """Called after each step."""


def edited(edit: Callable[[Script], Any], **more: Any) -> Case:
    return Case(turn=lambda way: usual(way, edit), **more)


def written(write: Callable[[Any], Any], name: str = "first.weight", make: Any = Net, last: bool = False) -> Case:
    """Write to a weight after the second step, or after the last one, under no_grad."""

    def between(way: Script) -> None:
        if way.number == (STEPS - 1 if last else 1):
            with torch.no_grad():
                write(way.model.get_parameter(name))

    return Case(make=make, between=between)


def clamp(weight: Tensor) -> None:
    weight.clamp_(-0.05, 0.05)


def clear(cleared: Callable[[Script], Any]) -> Case:
    """Clear gradients by other means. In the Trainer, after the update."""

    def turn(way: Script) -> None:
        way.backward(way.loss())
        way.step()
        if not isinstance(way, Trained):
            cleared(way)

    return Case(turn=turn, after=cleared)


def script_loss(way: Script, **more: Tensor) -> Tensor:
    batch = batch_of(way.number) | more
    return own_loss(way.model, way.model(batch["x"]), batch)


def with_loss(loss: Callable[[Script], Tensor]) -> Case:
    """Compute the loss in other ways. In the Trainer, in `compute_loss`."""

    def turn(way: Script) -> None:
        way.backward(way.loss() if isinstance(way, Trained) else loss(way))
        way.step()
        way.zero_grad()

    return Case(turn=turn, compute=loss)


def part_first(way: Script) -> None:
    way.backward(way.model.blocks[0](batch_of(way.number)["x"]).square().mean())
    usual(way)


def input_gradient(way: Script) -> Tensor:
    x = batch_of(way.number)["x"].requires_grad_()
    (slope,) = torch.autograd.grad(script_loss(way, x=x), x)
    return script_loss(way, x=(x + 0.1 * slope.sign()).detach())


def weight_gradient(way: Script) -> Tensor:
    loss = script_loss(way)
    (slope,) = torch.autograd.grad(loss, way.model.head.weight, retain_graph=True)
    return loss * slope.norm()


def with_inputs(name: str, way: Script) -> Tensor:
    script_loss(way).backward(inputs=[way.model.get_parameter(name)])
    return script_loss(way)


def second_gradient(way: Script) -> Tensor:
    x = batch_of(way.number)["x"].requires_grad_()
    (slope,) = torch.autograd.grad(script_loss(way, x=x), x, create_graph=True)
    return slope.square().mean()


def functional(way: Script) -> Tensor:
    return torch.func.grad(lambda x: script_loss(way, x=x))(batch_of(way.number)["x"]).square().mean()


def kept_loss(model: nn.Module, outputs: Tensor, batch: Any) -> Tensor:
    return own_loss(model, outputs, batch) + sum(block.aux_loss for block in model.blocks)


def grads_of(way: Script) -> list[Tensor]:
    return [p.grad for p in way.model.parameters()]


def scale_by_data(way: Script) -> None:
    for p in way.model.parameters():
        assert p.grad is not None
        p.grad.data.mul_(3.0 if p.dim() > 1 else -0.5)
    way.clip()


def clipped_and_changed(way: Script) -> None:
    gradients = grads_of(way) if way.number % 2 else []  # held since before the clip, or read after it
    way.clip()
    gradients = gradients or grads_of(way)
    if type(way) is Script:
        for gradient in gradients:
            gradient.mul_(way.optimizer.scale)
        way.optimizer.scale = 1.0
    for gradient in gradients:
        gradient.clamp_(-0.5 * CLIP, 0.1 * CLIP)


def clip_by_value(way: Script) -> None:
    accelerator = getattr(getattr(way, "trainer", way), "accelerator", None)
    (accelerator or nn.utils).clip_grad_value_(way.model.parameters(), 0.1 * CLIP)


def clipped_between(way: Script) -> None:
    """A clip, new memory for the gradients, and a clip to a smaller norm."""
    for p in way.model.parameters():
        p.grad.data = 2 * p.grad
    clipped_and_changed(way)
    way.clip(0.5 * CLIP)


def skip(way: Script) -> None:
    if way.number not in (0, 2):
        way.backward(way.loss())
    way.step()
    way.zero_grad()


def clip_nothing(way: Script) -> None:
    if way.number != 1:
        way.backward(way.loss())
    else:
        assert way.clip() == 0.0
    way.step()
    way.zero_grad()


def cleared_early(way: Script) -> None:
    way.backward(way.loss())
    if way.number == 1:
        way.clip()
        way.zero_grad()
    way.step()
    way.zero_grad()


def before_backward(way: Script) -> None:
    loss = way.loss()
    way.zero_grad()
    way.backward(loss)
    way.step()


def never(way: Script) -> None:
    way.backward(way.loss())
    way.step()
    if way.number % 2:
        way.zero_grad()


def to_zero(way: Script) -> None:
    """The second block has a gradient in the first step alone, and the last step has no backward."""
    batch = batch_of(way.number)
    if way.number < STEPS - 1:
        way.backward(mse_loss(way.model(batch["x"], short=way.number > 0), batch["y"]))
    way.step()
    way.zero_grad(set_to_none=False)


def by_the_model(way: Script) -> None:
    way.model.zero_grad(set_to_none=way.number % 2 == 0)


def by_hand(way: Script) -> None:
    """Each step in another way."""
    gradients = [p.grad for p in way.model.parameters() if p.grad is not None]
    if way.number == 0:
        torch._foreach_zero_(gradients)
    elif way.number == 1:
        for gradient in gradients:
            gradient.detach_()
            gradient.zero_()
    else:
        for p in way.model.parameters():
            if way.number == 2:
                p.grad = None
            else:
                del p.grad


def read_between(way: Script) -> None:
    way.backward(way.loss())
    norms = [gradient.norm() for gradient in grads_of(way)]
    way.backward(way.loss() / max(norms))
    way.step()


def change_groups(way: Script) -> None:
    if way.number == 0:
        way.set(lr=0.01, betas=(0.5, 0.6))
    elif way.number == 1:
        way.set(lr=0.015, weight_decay=0.3)


def save_and_load() -> Case:
    folder = Path(tempfile.mkdtemp())

    def between(way: Script) -> None:
        if way.number == 0:
            way.set(lr=0.01, betas=(0.5, 0.6))
            way.save(folder)
        elif way.number == 1:
            way.set(lr=0.5, betas=(0.1, 0.2))
        elif way.number == 2:
            way.load(folder)

    return Case(between=between)


def set_one(value: Callable[[Tensor], Tensor | None]) -> Case:
    return edited(lambda way: setattr(way.model.head.weight, "grad", value(way.model.head.weight)))


CASES: dict[str, Callable[[], Case]] = {
    "in place": lambda: written(clamp),
    "in place on the device": lambda: written(clamp, "last.weight"),
    "after the last step": lambda: written(clamp, "last.weight", last=True),
    "of the model itself": lambda: written(clamp, "scale", Scaled),
    "by data": lambda: written(lambda weight: weight.data.mul_(0.5)),
    "another tensor": lambda: written(lambda weight: setattr(weight, "data", torch.ones_like(weight))),
    "load_state_dict": lambda: Case(between=lambda way: way.model.load_state_dict(way.model.state_dict())),
    "scaled": lambda: edited(lambda way: [gradient.mul_(0.25) for gradient in grads_of(way)]),
    "scaled by data": lambda: edited(scale_by_data),
    "one alone": lambda: edited(lambda way: nn.utils.clip_grad_norm_(way.model.last.parameters(), 1e-3)),
    "one set to None": lambda: set_one(lambda _: None),
    "one given": lambda: set_one(torch.ones_like),
    "read between backwards": lambda: Case(turn=read_between),
    "read after the step": lambda: Case(after=lambda way: [gradient.norm() for gradient in grads_of(way)]),
    "no backward": lambda: Case(turn=skip),
    "clip without gradients": lambda: Case(turn=clip_nothing),
    "cleared before the step": lambda: Case(turn=cleared_early),
    "never": lambda: Case(turn=never),
    "before the backward": lambda: Case(turn=before_backward),
    "by the model": lambda: clear(by_the_model),
    "by hand": lambda: clear(by_hand),
    "to zero": lambda: Case(turn=to_zero),
    "changed": lambda: Case(between=change_groups),
    "saved and loaded": save_and_load,
    "register_hook": lambda: Case(begin=lambda way: way.model.first.weight.register_hook(lambda g: 2 * g)),
    "after the gradient": lambda: Case(
        between=lambda way: way.model.last.weight.register_post_accumulate_grad_hook(print)
    ),
    "clipped twice": lambda: edited(lambda way: [way.clip(2 * CLIP), way.clip()]),
    "by value": lambda: edited(clip_by_value),
    "clipped and changed": lambda: edited(clipped_and_changed),
    "clipped between": lambda: edited(clipped_between),
    "not finite": lambda: Case(loss=lambda model, outputs, batch: own_loss(model, outputs, batch) * math.inf),
    "part first": lambda: Case(turn=part_first),
    "block alone": lambda: with_loss(lambda way: way.model.blocks[1](batch_of(way.number)["x"]).square().mean()),
    "input gradient": lambda: with_loss(input_gradient),
    "weight gradient": lambda: with_loss(weight_gradient),
    "weight inputs": lambda: with_loss(partial(with_inputs, "first.weight")),
    "device weight inputs": lambda: with_loss(partial(with_inputs, "last.weight")),
    "functional": lambda: with_loss(functional),
    "twice": lambda: with_loss(lambda way: (loss := script_loss(way), loss.backward(retain_graph=True))[0]),
    "create_graph": lambda: with_loss(second_gradient),
    "kept loss": lambda: Case(make=Keeping, loss=kept_loss),
    "own graph": lambda: Case(make=Watched),
    "scripted": lambda: Case(make=Scripted),
    "projected": lambda: Case(make=Projected),
    "shared": lambda: Case(make=Shared),
}


# -- cells ---------------------------------------------------------------------------------------------------

TABLE = yaml.safe_load(Path(__file__).with_name("ways_in.yaml").read_text())
CELLS = {(row["name"], way): row.get(way, row.get("others")) for part in TABLE for row in part["rows"] for way in WAYS}


@lru_cache(maxsize=1)
def reference(name: str) -> dict[str, Tensor]:
    return Script(CASES[name]()).run()


def test_every_situation_has_a_row() -> None:
    assert {name for name, _ in CELLS} == set(CASES)


def cells() -> Iterator[Any]:
    """Yield the cells. Of the equal cells of a situation one is in the quick run, on another way for the next one."""
    for number, name in enumerate(CASES):
        tested = [way for way in WAYS if not CELLS[name, way].startswith("n/a ")]
        equal = [way for way in tested if CELLS[name, way] == "equal"]
        once = [way for place, way in enumerate(equal) if (place - number) % len(equal)]
        for way in tested:
            marks = [pytest.mark.slow] if way in once else []
            yield pytest.param(name, way, id=f"{name}-{way}".replace(" ", "-"), marks=marks)


@pytest.mark.parametrize(("name", "way"), [*cells()])
def test_a_cell(name: str, way: str) -> None:
    """A cell is equal or refused, as the table says."""
    kind, _, line = CELLS[name, way].partition(" ")
    found, why = outcome(name, way)
    assert ("refused" if why else "equal") == kind, why
    assert line in why
    if found is not None:
        assert_same(found, reference(name))


def outcome(name: str, way: str) -> tuple[dict[str, Tensor] | None, str]:
    """Return the weights after a case, or the text of an error by name."""
    try:
        return WAYS[way](CASES[name]()).run(), ""
    except OffloadError as error:
        return None, str(error)
