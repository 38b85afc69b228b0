"""An engine as a torch optimizer, for loops that know only those."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import torch

from offload.engine.engine import Engine
from offload.engine.methods.result import StepResult
from offload.errors import ConfigError
from offload.integrations.rules import rate_of

FOLDER = "offload"
"""Of the engine's states, within another library's checkpoint."""


class OffloadOptimizer(torch.optim.Optimizer):
    """Makes the engine's update in `step()`; with a rule without gradients (MeZO) it is part of `descend(batch)`.

    Its parameter groups are the engine's: `lr` of each is what a scheduler makes it, as long as their ratio stays;
    `weight_decay` is for reading. Gradients are the engine's; `zero_grad` drops them there. `state_dict` says
    how many updates were made; the states themselves are in what `save` writes, and a step is refused after
    `load_state_dict` until `load` has read those that belong to it.

    engine: whose update it makes. result: of the last step, None before the first. max_grad_norm: to what the next step
    clips; None for what the engine was told, 0 for no clipping.
    """

    def __init__(self, engine: Engine, groups: list[dict[str, Any]] | None = None) -> None:
        """`groups`: of parameters of the engine's model, which a scheduler may hold; they become this one's."""
        self.engine = engine
        self.max_grad_norm: float | None = None
        self.result: StepResult | None = None
        self._updates, self._missing, self._has_descended = 0, 0, False
        named = dict(engine.model.named_parameters())
        made = [
            {
                "params": [named[name] for name in names],
                "lr": engine.lr * scale,
                "weight_decay": decay,
                "lr_scale": scale,
            }
            for scale, decay, names in engine.groups
        ]
        super().__init__(made, {"lr": engine.lr, "weight_decay": 0.0, "lr_scale": 1.0})
        if groups is not None:
            self._take_over(groups)
        else:
            engine.leave_grads_untold()  # a Trainer looks what kind they are, and clips what it finds: nothing
        self._fixed = [(group["lr_scale"], group["weight_decay"], len(group["params"])) for group in self.param_groups]

    def _take_over(self, groups: list[dict[str, Any]]) -> None:
        """Let the other's groups, one for each of this one's or several, be this one's."""
        base = rate_of(groups[0])
        for group in groups:
            group["lr_scale"] = rate_of(group) / base if base else 1.0
        self.param_groups = groups

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update from the gradients of every backward since the last step."""
        if closure is not None:
            raise ConfigError(
                "OffloadOptimizer.step was given a closure, which would need gradients several times over."
            )
        if not self.has_gradients:
            if not self._has_descended:
                raise ConfigError(
                    f"OffloadOptimizer.step was called, and {type(self.engine.optimizer).__name__} has no gradients to "
                    "update from: call OffloadOptimizer.descend(batch) for a step, or train with OffloadTrainer."
                )
            self._has_descended = False
            return
        self._prepare()
        limit, self.max_grad_norm = self.max_grad_norm, None
        self._done(self.engine.update(limit))

    @property
    def has_gradients(self) -> bool:
        """False where the engine trains by forward passes alone."""
        return self.engine.optimizer.has_gradients

    def descend(self, batch: Mapping[str, Any]) -> StepResult:
        """Make the whole step of a rule without gradients on this rank's rows of a batch; the `step` that comes next
        does nothing. Collective.
        """
        self._prepare()
        self._has_descended = True
        return self._done(self.engine.step(batch))

    def _prepare(self) -> None:
        """Let the engine's learning rate be that of the groups, whose states have to be there."""
        if self._missing:
            raise ConfigError(
                f"the optimizer's state was loaded, of a run with {self._missing} updates, and the engine has made "
                f"{self._updates}: its states are in the folder {FOLDER!r} of that checkpoint, and were not read. "
                "Train with OffloadTrainer, or with the callback OffloadCallback, which read them; or call "
                "OffloadOptimizer.load(folder)."
            )
        self.engine.lr = self._base_lr()

    def _done(self, result: StepResult) -> StepResult:
        self.result = result
        self._updates += not result.skipped
        return result

    def _base_lr(self) -> float:
        """Return the engine's learning rate, of which each group's is a multiple."""
        groups = self.param_groups
        now = [(group["lr_scale"], group["weight_decay"], len(group["params"])) for group in groups]
        if now != self._fixed:
            self._refuse(f"groups changed from (lr_scale, weight_decay, parameters) {self._fixed} to {now}")
        rates = [float(group["lr"]) for group in groups]
        base = rates[0] / (groups[0]["lr_scale"] or 1.0)
        for group, rate in zip(groups, rates, strict=True):
            if abs(rate - base * group["lr_scale"]) > 1e-6 * abs(base):
                self._refuse(f"learning rates are {rates}, no longer in the ratio {[s for s, _, _ in self._fixed]}")
        return base

    def _refuse(self, what: str) -> NoReturn:
        raise ConfigError(
            f"the optimizer's {what}: an engine has one learning rate, and multiples of it that were fixed when it was "
            "made. Give the groups when it is made, and change them alike."
        )

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002
        """Drop the gradients since the last step: none, right after one, which consumes them. Collective."""
        if not self.engine.closed:
            self.engine.zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_fixed"):
            raise ConfigError(
                "a parameter group was added to an OffloadOptimizer, whose engine holds the states of those that there "
                "were: make the model, all of it, before the engine."
            )
        super().add_param_group(param_group)

    # -- states ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what is no state of the engine's."""
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        return {"state": {}, "param_groups": groups, "updates": self._updates}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the learning rates. Raises ConfigError where it is another optimizer's."""
        if "updates" not in state_dict or len(state_dict["param_groups"]) != len(self.param_groups):
            raise ConfigError(
                "this optimizer state was not saved by an OffloadOptimizer over the same groups: moments of another "
                "optimizer cannot be taken over. Begin with the weights alone."
            )
        for group, its in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(its)
        self._missing = 0 if state_dict["updates"] == self._updates else state_dict["updates"]

    @property
    def misses_states(self) -> bool:
        """True where `load_state_dict` was called, and `load` was not."""
        return self._missing > 0

    def save(self, folder: Path) -> None:
        """Write the engine's states to a checkpoint; of a model with PEFT's adapters without what is frozen, as theirs.
        Collective. Raises as `Engine.save_checkpoint`.
        """
        adapts = hasattr(self.engine.model, "peft_config")
        self.engine.save_checkpoint(folder, meta={"updates": self._updates}, trained_only=adapts)

    def load(self, folder: Path) -> None:
        """Take the engine's states from what `save` wrote; generators stay as they are. Collective. Raises as
        `Engine.load_checkpoint`.
        """
        with generators_kept(self.engine.device):
            meta = self.engine.load_checkpoint(folder)
        self._updates, self._missing = int(meta.get("updates", 0)), 0

    def follow(self, scheduler: Any) -> None:
        """Let a scheduler that was made over another optimizer with these groups be this one's."""
        scheduler.optimizer = self
        step = self.step

        @wraps(step.__func__)  # type: ignore[attr-defined]
        def counted(*args: Any, **kwargs: Any) -> None:
            self._opt_called = True
            step(*args, **kwargs)

        counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # or torch warns that steps are not counted
        self.step = counted  # type: ignore[method-assign]


def find_own(optimizer: Any) -> OffloadOptimizer | None:
    """Return the OffloadOptimizer that `optimizer` is or wraps, as accelerate does."""
    while optimizer is not None and not isinstance(optimizer, OffloadOptimizer):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Within, whatever is drawn or restored of torch's generators leaves no trace: other code counts on them."""
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            yield
    else:
        with torch.random.fork_rng(devices=[device.index or 0], device_type=device.type):
            yield
