"""An engine as a torch optimizer, for loops that know only those."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import torch

from offload.engine.engine import Engine
from offload.engine.methods.result import StepResult
from offload.errors import ConfigError
from offload.integrations.rules import PLAIN, rate_of

FOLDER = "offload"
"""Of the engine's states, within another library's checkpoint."""


class OffloadOptimizer(torch.optim.Optimizer):
    """Makes the engine's update in `step()`; with a rule without gradients (MeZO) it is part of `descend(batch)`.

    Its parameter groups are the engine's. Each step goes by `lr` there, as long as the groups keep their ratio, by the
    `weight_decay` of each, and by the rule's `steered` settings (betas, eps, momentum), which all groups have alike;
    whatever else changes in a group is refused by name. Gradients are the engine's; `zero_grad` drops them there. So
    are states: `state` cannot be used, `state_dict` says how many updates were made, `save` writes them, and a step is
    refused after `load_state_dict` until `load` has read those that belong to it.

    engine: whose update it makes. result: of the last step, None before the first.
    """

    def __init__(self, engine: Engine, groups: Iterable[tuple[float, float, list[str]]] | None = None) -> None:
        """`groups`: as `Engine.groups` gives them, which they are by default."""
        self.engine = engine
        self._max_grad_norm: float | None = None
        self.result: StepResult | None = None
        self._updates, self._missing, self._has_descended = 0, 0, False
        named = dict(engine.model.named_parameters())
        settings = {key: getattr(engine.optimizer, key) for key in engine.optimizer.steered}
        made = [
            {"params": [named[name] for name in names], "lr": engine.lr * scale, "weight_decay": decay}
            for scale, decay, names in groups or engine.groups
        ]
        super().__init__(made, {"lr": engine.lr, "weight_decay": 0.0, **settings})
        self._begin(["weight_decay", *settings] if self.has_gradients else [])

    def take_over(self, optimizer: torch.optim.Optimizer, follows: Collection[str]) -> None:
        """Let the groups of a torch optimizer, which schedulers may hold, be this one's: of parameters of the engine's
        model. `follows`: their keys that updates go by, beside `lr`.
        """
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
        self._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks
        self._begin(follows)

    def _begin(self, follows: Collection[str]) -> None:
        names = {id(parameter): name for name, parameter in self.engine.model.named_parameters()}
        self._names = [[names[id(p)] for p in group["params"]] for group in self.param_groups]
        base = rate_of(self.param_groups[0])
        self._scales = [rate_of(group) / base if base else 1.0 for group in self.param_groups]
        self._follows = follows
        self._fixed, self._tuned = self._facts(), self._settings()

    def _facts(self) -> list[dict[str, Any]]:
        """Return what of each group a torch optimizer would go by, and the engine cannot follow."""
        keys = (PLAIN.keys() | self.defaults.keys()) - {"lr", *self._follows}
        return [
            {key: group.get(key, PLAIN.get(key)) for key in sorted(keys)} | {"params": [*map(id, group["params"])]}
            for group in self.param_groups
        ]

    def _settings(self) -> tuple[list[dict[str, Any]], list[float]]:
        """Return what the engine follows: of each group the rule's settings, and the weight decay."""
        keys, groups = set(self._follows) - {"weight_decay"}, self.param_groups
        return [{key: group[key] for key in sorted(keys)} for group in groups], [g["weight_decay"] for g in groups]

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
        limit, self._max_grad_norm = self._max_grad_norm, None
        self._done(self.engine.update(limit))

    def clip_next(self, max_grad_norm: float) -> None:
        """Clip the next step to this norm, and not to what the engine was told; 0 for no clipping."""
        self._max_grad_norm = max_grad_norm

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
        self._follow()
        self.engine.lr = self._base_lr()

    def _done(self, result: StepResult) -> StepResult:
        self.result = result
        self._updates += not result.skipped
        return result

    def _follow(self) -> None:
        """Let the engine go by what has changed in the groups. Raises ConfigError, by name, where it cannot."""
        facts = self._facts()
        if len(facts) != len(self._fixed):
            self._refuse(f"groups were {len(self._fixed)}, and are {len(facts)}")
        for before, now in zip(self._fixed, facts, strict=True):
            for key in now:
                if now[key] != before[key]:
                    what = " changed" if key == "params" else f" was {before[key]!r}, and is {now[key]!r}"
                    self._refuse(key + what)
        settings, decays = tuned = self._settings()
        if tuned != self._tuned:
            if any(each != settings[0] for each in settings):
                self._refuse(f"settings are {settings}, no longer those of all groups")
            changed = zip(self._names, decays, self._tuned[1], strict=True)
            self.engine.tune(settings[0], {name: now for names, now, old in changed if now != old for name in names})
            self._tuned = tuned

    def _base_lr(self) -> float:
        """Return the engine's learning rate, of which each group's is a multiple."""
        rates = [float(group["lr"]) for group in self.param_groups]
        base = rates[0] / (self._scales[0] or 1.0)
        if any(abs(rate - base * scale) > 1e-6 * abs(base) for rate, scale in zip(rates, self._scales, strict=True)):
            self._refuse(f"learning rates are {rates}, no longer in the ratio {self._scales}")
        return base

    def _refuse(self, what: str) -> NoReturn:
        more = f", by {' and '.join(self._follows)}" if self._follows else ""
        raise ConfigError(
            f"the optimizer's {what}: an engine goes by the learning rate of its groups, in the ratio in which they "
            f"were{more}. Whatever else is to be given before the engine is made."
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

    @property
    def state(self) -> Any:
        """Nothing that can be used: the states are in the engine."""
        return _NoStates()

    @state.setter
    def state(self, _: Any) -> None:
        if hasattr(self, "_fixed"):  # torch's own constructor gives an empty one
            _refuse_states()

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


def _refuse_states(*_: Any) -> NoReturn:
    raise ConfigError(
        "optimizer.state was used, and the states of the optimizer (moments, steps) are in the engine, which neither "
        "shows nor resets them: engine.save_checkpoint(folder) or accelerator.save_state writes them. To begin with "
        "none, close the engine (close(restore=True)) and train on with a new one."
    )


class _NoStates:
    """Stands for the states of an optimizer, which are in an engine."""

    __getattr__ = __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = __contains__ = _refuse_states


def find_own(optimizer: Any) -> OffloadOptimizer | None:
    """Return the OffloadOptimizer that `optimizer` is or wraps, as accelerate does."""
    while optimizer is not None and not isinstance(optimizer, OffloadOptimizer):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Within, whatever is drawn or restored of torch's generators leaves no trace: other code counts on them."""
    more = {} if device.type == "cpu" else {"device_type": device.type}
    with torch.random.fork_rng(devices=[device.index or 0] if more else [], **more):
        yield
