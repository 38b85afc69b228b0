"""An engine as a torch optimizer, for training loops that expect one."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import torch

from offload.engine.engine import Engine
from offload.engine.methods.result import StepResult
from offload.errors import ConfigError, warn
from offload.integrations.rules import PLAIN, rate_of

FOLDER = "offload"
"""Folder for engine states inside another library's checkpoint."""


class OffloadOptimizer(torch.optim.Optimizer):
    """Torch optimizer over an engine: `step()` runs the engine's update.

    With a rule without gradients (MeZO), the update happens in `descend(batch)`.

    Parameter groups match the engine's. Each step reads `lr` from the groups, in a fixed ratio between groups;
    `weight_decay` for each group; and the `steered` settings of the rule (betas, eps, momentum), equal in all groups.
    Any other change to a group raises ConfigError with its name. Gradients are in the engine; `zero_grad` drops them.
    States are there too: `state` is unusable, `state_dict` contains the update count, `save` writes the states. After
    `load_state_dict`, a step raises ConfigError until `load` has read the matching states.

    engine: the engine to update. result: result of the last step; None before the first, and after a step without
    gradients.
    """

    def __init__(self, engine: Engine, groups: Iterable[tuple[float, float, list[str]]] | None = None) -> None:
        """`groups`: (learning rate scale, weight decay, parameter names) per group; None: `Engine.groups`."""
        self.engine = engine
        self.result: StepResult | None = None
        self._updates = 0  # of the states in the engine
        self._missing = 0  # updates of a loaded group state, until `load` has the states too
        self._has_descended = False
        parameters = dict(engine.model.named_parameters())
        settings = {key: getattr(engine.optimizer, key) for key in engine.optimizer.steered}
        torch_groups = [
            {"params": [parameters[name] for name in names], "lr": engine.lr * scale, "weight_decay": decay}
            for scale, decay, names in groups or engine.groups
        ]
        super().__init__(torch_groups, {"lr": engine.lr, "weight_decay": 0.0, **settings})
        self._begin(["weight_decay", *settings] if self.has_gradients else [])

    def take_over(self, optimizer: torch.optim.Optimizer, follows: Collection[str]) -> None:
        """Use the parameter groups of a torch optimizer, so schedulers over these groups keep working.

        The parameters must belong to the engine's model. `follows`: group keys applied at each update, besides `lr`.
        """
        # The same list and dictionaries, not copies: a scheduler holds them.
        self.param_groups = optimizer.param_groups
        self.defaults = optimizer.defaults
        vars(optimizer)["_opt_called"] = True  # or schedulers made before would warn that `step` was never called
        for name, value in vars(optimizer).items():
            # All hooks, and what a script keeps there. A scheduler's mark on `step` belongs to the old step.
            if name.endswith("_hooks") or (name not in vars(self) and not hasattr(type(self), name)):
                setattr(self, name, value)
        self._begin(follows)

    def _begin(self, follows: Collection[str]) -> None:
        names = {id(parameter): name for name, parameter in self.engine.model.named_parameters()}
        self._names = [[names[id(p)] for p in group["params"]] for group in self.param_groups]
        base = rate_of(self.param_groups[0])
        # An engine has one rate: a schedule may change it, and the ratios between groups stay.
        self._scales = [rate_of(group) / base if base else 1.0 for group in self.param_groups]
        self._follows = follows
        self._fixed = self._fixed_settings()
        self._tuned = self._settings()

    def _fixed_settings(self) -> list[dict[str, Any]]:
        """Return, per group, the torch settings that the engine cannot follow."""
        keys = (PLAIN.keys() | self.defaults.keys()) - {"lr", *self._follows}
        return [
            {key: group.get(key, PLAIN.get(key)) for key in sorted(keys)} | {"params": [*map(id, group["params"])]}
            for group in self.param_groups
        ]

    def _settings(self) -> tuple[list[dict[str, Any]], list[float]]:
        """Return the followed settings per group, and the weight decay per group."""
        keys, groups = set(self._follows) - {"weight_decay"}, self.param_groups
        return [{key: group[key] for key in sorted(keys)} for group in groups], [g["weight_decay"] for g in groups]

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update from all gradients since the last step. Without gradients on any rank, do nothing."""
        if closure is not None:
            raise ConfigError(
                "OffloadOptimizer.step was given a closure, which would need gradients several times over: call "
                "closure() or loss.backward() first, and then optimizer.step()."
            )
        if not self.has_gradients:
            # The update was made in `descend`. Without this call a loop would train nothing, and say nothing.
            if not self._has_descended:
                raise ConfigError(
                    f"OffloadOptimizer.step was called, but {type(self.engine.optimizer).__name__} updates without "
                    "gradients: call OffloadOptimizer.descend(batch) for a step, or train with OffloadTrainer."
                )
            self._has_descended = False
            return
        self._prepare()
        self.result = None
        if self.engine.has_gradients():
            self._record(self.engine.update(until_zero_grad=True))

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step found gradients that are not finite, and moved nothing."""
        return self.result is not None and self.result.skipped

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """A `torch.amp.GradScaler` asks for this before each step. False: it divides the gradients by its own scale."""
        self.engine.loss_scale.check_scaler()
        return False

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clip the gradients to `max_norm`, and return their norm before, over all parameters and ranks.

        The next step clips, instead of the engine's limit; gradients that are read before it are clipped at once.
        Like torch.nn.utils.clip_grad_norm_, also where no rank has a whole gradient. `parameters`: all that are
        trained. Raises ConfigError for some of them, another norm, or a `max_norm` of 0.
        """
        if not self.has_gradients:
            return torch.tensor(math.nan if self.result is None else self.result.grad_norm)  # nothing to clip
        if norm_type != 2:
            raise ConfigError(f"clip_grad_norm_ was given norm_type={norm_type!r}; an engine clips to the 2-norm only.")
        parameter_list = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not parameter_list:
            warn(
                "clip_grad_norm_ was given no parameters, perhaps from an exhausted iterator, so nothing is clipped in "
                "this step (as in plain PyTorch). Give model.parameters() in each call."
            )
            return torch.tensor(0.0)
        trained = sum(len(group["params"]) for group in self.param_groups)
        if len(parameter_list) < trained or max_norm <= 0:
            raise ConfigError(
                f"clip_grad_norm_ was given {len(parameter_list)} parameters and max_norm={max_norm}: an engine clips "
                f"all {trained} trainable parameters by their common norm, to a max_norm above 0. Give "
                "model.parameters(); leave the call out for no clipping."
            )
        if not self.engine.has_gradients():
            return torch.tensor(0.0)
        return torch.tensor(self.engine.clip_grad_norm(max_norm))

    @property
    def has_gradients(self) -> bool:
        """False if the engine trains with forward passes alone."""
        return self.engine.optimizer.has_gradients

    def descend(self, batch: Mapping[str, Any]) -> StepResult:
        """Run the whole step for a rule without gradients on this rank's rows of a batch.

        The next `step` call does nothing. Collective.
        """
        self._prepare()
        self._has_descended = True
        return self._record(self.engine.step(batch))

    def _prepare(self) -> None:
        """Set the engine's learning rate from the groups. Raises ConfigError if loaded states are missing."""
        if self._missing:
            raise ConfigError(
                f"the loaded optimizer state belongs to a run with {self._missing} updates, but the engine has made "
                f"{self._updates}: the engine's states, in the folder {FOLDER!r} of that checkpoint, were not loaded. "
                "Train with OffloadTrainer or the callback OffloadCallback, which load them, or call "
                "OffloadOptimizer.load(folder)."
            )
        self._follow()
        rates = [float(group["lr"]) for group in self.param_groups]
        base = rates[0] / (self._scales[0] or 1.0)  # each group rate is a fixed multiple
        # A schedule multiplies each rate, and rounds each product.
        if any(abs(rate - base * scale) > 1e-6 * abs(base) for rate, scale in zip(rates, self._scales, strict=True)):
            self._refuse(f"learning rates are {rates}, no longer in the ratio {self._scales}")
        self.engine.lr = base

    def _record(self, result: StepResult) -> StepResult:
        self.result = result
        self._updates += not result.skipped  # the moments have no trace of a skipped update
        return result

    def _follow(self) -> None:
        """Apply changed group settings to the engine. Raises ConfigError with the name of an unsupported change."""
        fixed_settings = self._fixed_settings()
        if len(fixed_settings) != len(self._fixed):
            self._refuse(f"number of groups was {len(self._fixed)}, and is {len(fixed_settings)}")
        for before, now in zip(self._fixed, fixed_settings, strict=True):
            for key in now:
                if now[key] != before[key]:
                    change = f" was {before[key]!r}, and is {now[key]!r}"
                    if key == "params":  # ids of parameters tell a reader nothing
                        change = " changed"
                    self._refuse(key + change)
        tuned = self._settings()
        settings, decays = tuned
        if tuned != self._tuned:
            if any(each != settings[0] for each in settings):
                self._refuse(f"settings are {settings}, no longer the same for all groups")
            changed = zip(self._names, decays, self._tuned[1], strict=True)
            self.engine.tune(settings[0], {name: now for names, now, old in changed if now != old for name in names})
            self._tuned = tuned

    def _refuse(self, change: str) -> NoReturn:
        steered = " and ".join(["learning rates (all in the same ratio)", *self._follows])
        raise ConfigError(
            f"the optimizer's {change}: once the engine is made, only {steered} can change. Set everything else before."
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, after a step or before a backward: see `Engine.zero_grad`. Collective."""
        if not self.engine.closed:
            self.engine.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_fixed"):
            raise ConfigError(
                "a parameter group was added to an OffloadOptimizer, but the engine holds states only for the "
                "parameters at its start: complete the model before making the engine."
            )
        super().add_param_group(param_group)

    # -- states ----------------------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """Unusable placeholder: the states are in the engine."""
        return _NoStates()

    @state.setter
    def state(self, _: Any) -> None:
        if hasattr(self, "_fixed"):  # torch's constructor sets an empty state
            _refuse_states()

    def state_dict(self) -> dict[str, Any]:
        """Return the group settings and update count, without the engine states."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = self._state_dict()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state)
            if changed is not None:
                state = changed
        return state

    def _state_dict(self) -> dict[str, Any]:
        return {"state": {}, "param_groups": self._group_settings(), "updates": self._updates}

    def _group_settings(self) -> list[dict[str, Any]]:
        return [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load group settings, learning rates included. Raises ConfigError for another optimizer's state."""
        state_dict = dict(state_dict)  # hooks may change it
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            if changed is not None:
                state_dict = changed
        self._load_state_dict(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if "updates" not in state_dict or len(state_dict["param_groups"]) != len(self.param_groups):
            raise ConfigError(
                "this optimizer state was not saved by an OffloadOptimizer over the same groups, and an engine cannot "
                "read the moments of another optimizer. Load only the weights."
            )
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved_group)
        self._missing = 0
        if state_dict["updates"] != self._updates:  # a step over other moments would be wrong without a word
            self._missing = state_dict["updates"]

    def _resume(self, num_updates: int) -> None:
        """Continue after so many updates, with all states there."""
        self._updates = num_updates
        self._missing = 0

    @property
    def misses_states(self) -> bool:
        """True after `load_state_dict` without `load`."""
        return self._missing > 0

    def save(self, folder: Path) -> None:
        """Write the engine states to a checkpoint folder. Collective.

        For a PEFT model, frozen weights are left out. Raises like `Engine.save_checkpoint`.
        """
        adapts = hasattr(self.engine.model, "peft_config")  # the base has its own files
        meta = {"updates": self._updates, "groups": self._group_settings()}
        self.engine.save_checkpoint(folder, meta=meta, trained_only=adapts)

    def load(self, folder: Path) -> None:
        """Load engine states written by `save`. Random generators and group settings are unchanged. Collective.

        Raises like `Engine.load_checkpoint`.
        """
        self._load(folder)

    def _load(self, folder: Path) -> Mapping[str, Any]:
        """Load engine states; return the contents of `meta` in `save`."""
        with keep_generators(self.engine.device):
            # A checkpoint sets the generators too, and a Trainer may draw the order of rows only after this load.
            meta = self.engine.load_checkpoint(folder)
        self._resume(int(meta.get("updates", 0)))
        return meta

    def follow(self, scheduler: Any) -> None:
        """Attach a scheduler made over another optimizer with these groups."""
        scheduler.optimizer = self
        # A scheduler of torch puts a function like `counted` on the optimizer it is made over.
        step = self.step

        @wraps(step.__func__)  # type: ignore[attr-defined]
        def counted(*args: Any, **kwargs: Any) -> None:
            self._opt_called = True
            step(*args, **kwargs)

        counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # or torch warns that steps are not counted
        self.step = counted  # type: ignore[method-assign]


def _refuse_states(*_: Any) -> NoReturn:
    raise ConfigError(
        "optimizer.state was used, but the states of the optimizer (moments, steps) are in the engine, and cannot be "
        "read or reset here: engine.save_checkpoint(folder) or accelerator.save_state writes them. To begin without "
        "moments, close the engine (close(restore=True)) and train on with a new one."
    )


class _NoStates:
    """Placeholder for optimizer states held by the engine."""

    __getattr__ = _refuse_states
    __getitem__ = _refuse_states
    __setitem__ = _refuse_states
    __delitem__ = _refuse_states
    __iter__ = _refuse_states
    __len__ = _refuse_states
    __contains__ = _refuse_states


def refuse_replaced(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError for methods that a script has replaced on a torch optimizer, which an engine never calls."""
    kind = type(optimizer)
    for name, value in vars(optimizer).items():
        own = getattr(kind, name, None)
        # Schedulers wrap `step`, to count its calls.
        is_counted = hasattr(value, "_wrapped_by_lr_sched") and getattr(value, "__wrapped__", None) is own
        if callable(own) and not is_counted:
            raise ConfigError(
                f"optimizer.{name} was replaced on the {kind.__name__} before an engine takes its groups over, and "
                f"the engine does not call it. Replace {name} on the optimizer that offload.wrap or prepare returns, "
                "or call optimizer.register_step_pre_hook and register_step_post_hook, which are taken over."
            )


def find_own(optimizer: Any) -> OffloadOptimizer | None:
    """Return the OffloadOptimizer inside `optimizer` and accelerate's wrappers. None: not found."""
    while optimizer is not None and not isinstance(optimizer, OffloadOptimizer):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer


@contextmanager
def keep_generators(device: torch.device) -> Iterator[None]:
    """Restore torch's random generators at exit, because other code depends on them."""
    if device.type == "cpu":
        forked = torch.random.fork_rng(devices=[])
    else:
        forked = torch.random.fork_rng(devices=[device.index or 0], device_type=device.type)
    with forked:
        yield
