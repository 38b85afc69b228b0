"""What an update rule is to the rest: settings, planes, and the update of a stretch of weights."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from xxhash import xxh3_64_intdigest

from offload.config.arguments import check_types
from offload.errors import ConfigError, nearest
from offload.layout.planes import Factor, Plane
from offload.native import kernels

PIECE = 1 << 20
"""Elements of which a rule in torch makes temporaries at once."""
_GROUP_KEYS = ("lr_scale", "weight_decay", "rule")


@dataclass(frozen=True)
class Trained:
    """What a rule may choose by, of a parameter."""

    name: str
    shape: tuple[int, ...]
    is_embedding: bool = False
    """True for the table of an embedding, and for what is tied to it."""
    in_block: bool = False
    """True within one of a row of blocks that are alike."""
    is_filter: bool = False
    """True for the weight of a convolution, whose last two dimensions are no matrix."""


@dataclass(frozen=True)
class Choice:
    """How a parameter is updated."""

    rule: int
    """Which of the `parts` of the rule that was asked."""
    lr_scale: float
    """What multiplies the learning rate."""
    weight_decay: float
    """The decoupled weight decay."""


@dataclass(frozen=True)
class UpdateStep:
    """What one update goes by, of weights that are updated alike."""

    step: int
    """Its number, counted from 1."""
    lr: float
    """The learning rate."""
    weight_decay: float
    """The decoupled weight decay."""
    scale: float
    """What multiplies the gradients: the clipping coefficient."""
    key: int = 0
    """64 bits that stand for the parameter and the run's seed, for rules that update `by_parameter`."""
    element: int = 0
    """The place of the first weight in its flat parameter, for those."""
    shape: tuple[int, ...] = ()
    """That of the parameter, for rules by matrix, which get all of it."""
    threshold: float = math.inf
    """Weights of larger magnitude take no part, for rules that leave some out."""
    workspace: torch.Tensor | None = None
    """Memory of the device, uint8 [what `workspace_bytes` says at least], for those that compute there; None for
    memory beside the weights.
    """


class UpdateRule(ABC):
    """A rule is a frozen dataclass with at least the settings below.

    `groups` is a sequence of (regular expression, {"lr_scale": x, "weight_decay": y, "rule": another rule}), or a
    mapping of the same; the first expression that `re.search` finds in a parameter's name decides, and a key that it
    leaves out keeps its default. Parameters with fewer than two dimensions (biases, norms) are not decayed unless
    `decay_1d`, or unless their group sets `weight_decay`. Another rule goes by its own settings; its learning rate
    keeps its ratio to that of this one.
    """

    by_matrix: ClassVar[bool] = False
    """True where an update needs a parameter as a whole, and its shape: it is given one at a time, all of it."""
    drops_gradients: ClassVar[bool] = False
    """True where no gradient is to wait for the norm: a step that clips learns it by a backward of its own."""
    method: ClassVar[str] = "backward"
    """How steps are made that the rule updates by: by a "backward", or by "forwards" alone."""
    clip_norm: float | None = None
    """The norm to which gradients are clipped, where the rule says so itself."""
    steered: ClassVar[tuple[str, ...]] = ()
    """Settings that may differ from step to step, as torch's schedulers move them."""

    lr: float
    weight_decay: float
    decay_1d: bool
    groups: tuple[tuple[str, Mapping[str, Any]], ...]

    @property
    def num_directions(self) -> int:
        """Along how many directions a step measures the loss, by forward passes alone; 0 for a rule with gradients."""
        return 0

    @property
    def has_gradients(self) -> bool:
        """True where a step makes a backward."""
        return self.method == "backward"

    @property
    def has_low(self) -> bool:
        """True where trained weights that are used in bf16 have a low half beside them, and are fp32 by that."""
        return True

    @property
    def can_correct(self) -> bool:
        """True where there is a `correct`, which speculative clipping needs."""
        return False

    @property
    def by_parameter(self) -> bool:
        """True where an update has to know which weights of which parameter it gets: those of one at a time."""
        return False

    @property
    def moments(self) -> tuple[Plane, ...]:
        """The planes that the rule keeps of what it trains."""
        return ()

    @property
    def factors(self) -> tuple[Factor, ...]:
        """What a rule by matrix keeps of each parameter beside the planes."""
        return ()

    def workspace_bytes(self, shape: tuple[int, ...]) -> int:  # noqa: ARG002
        """Return the bytes of the device that the update of a parameter of this shape takes while it runs."""
        return 0

    @property
    def title(self) -> str:
        """What it is called in errors: with the width of its states, where that is not fp32."""
        states = getattr(self, "states", "fp32")
        return type(self).__name__ + ("" if states == "fp32" else f" with {states} states")

    @classmethod
    def configured(cls, settings: Mapping[str, Any]) -> UpdateRule:
        """Return the rule with those of a configuration's settings that it has; None is its own default. Raises
        ConfigError.
        """
        known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: value for name, value in settings.items() if name in known and value is not None})

    @property
    def others(self) -> tuple[UpdateRule, ...]:
        """Rules by which `choose_other` has some parameters updated, without regard to groups."""
        return ()

    def choose_other(self, parameter: Trained) -> int | None:  # noqa: ARG002
        """Return which of the `others` a parameter has; None for this one."""
        return None

    @cached_property
    def parts(self) -> tuple[UpdateRule, ...]:
        """All rules that parameters may have; this one is the first."""
        rules = [values["rule"] for _, values in self.groups if "rule" in values]
        return (self, *self.others, *(part for rule in rules for part in rule.parts))

    def __post_init__(self) -> None:
        if isinstance(self.groups, Mapping):  # as a configuration has them
            object.__setattr__(self, "groups", tuple(self.groups.items()))
        check_types(type(self), vars(self))
        object.__setattr__(self, "groups", tuple((pattern, dict(values)) for pattern, values in self.groups))
        if hasattr(self, "betas"):
            object.__setattr__(self, "betas", tuple(self.betas))
            if not all(0.0 <= beta < 1.0 for beta in self.betas):
                raise ConfigError(f"optimizer.betas is {self.betas}; it must be two numbers, each in [0, 1).")
        for key in ("lr", "eps", "weight_decay"):
            value = getattr(self, key, 0.0)
            if not isinstance(value, tuple):  # which a rule checks that has several
                check_number(key, value)
        for pattern, values in self.groups:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"optimizer.groups: {pattern!r} is no regular expression: {error}.") from error
            for key in values:
                if key not in _GROUP_KEYS:
                    raise ConfigError(
                        f"optimizer.groups[{pattern!r}]: unknown key {key!r}{nearest(key, _GROUP_KEYS)}; allowed: "
                        f"{', '.join(_GROUP_KEYS)}."
                    )
                if key == "rule":
                    if not isinstance(values[key], UpdateRule):
                        raise ConfigError(f"optimizer.groups[{pattern!r}]: rule is {values[key]!r}; it must be a rule.")
                    if self.has_gradients and not values[key].has_gradients:
                        raise ConfigError(
                            f"optimizer.groups[{pattern!r}]: rule is {values[key].title}, which measures losses of the "
                            f"whole model, and {self.title} takes gradients: choose one of both for all parameters by "
                            "--optimizer.name, and freeze those that are not to be trained."
                        )
                elif not isinstance(values[key], int | float) or not 0.0 <= values[key] < math.inf:
                    raise ConfigError(
                        f"optimizer.groups[{pattern!r}]: {key} is {values[key]!r}; it must be a number, finite and not "
                        "negative."
                    )

    def default(self, parameter: Trained) -> Choice:
        """Return how a parameter is updated of which no group says otherwise. Raises ConfigError."""
        other = self.choose_other(parameter)
        decay = self.weight_decay if len(parameter.shape) >= 2 or self.decay_1d else 0.0
        return Choice(0 if other is None else 1 + other, 1.0, decay)

    def choose(self, parameter: Trained) -> Choice:
        """Return how a parameter is updated. Raises ConfigError."""
        chosen, first = self.default(parameter), 1 + len(self.others)
        for pattern, values in self.groups:
            rule = values.get("rule")
            if re.search(pattern, parameter.name):
                if rule is not None:
                    chosen = rule.choose(parameter)
                    chosen = replace(chosen, rule=first + chosen.rule, lr_scale=chosen.lr_scale * self.ratio(rule))
                scale, decay = values.get("lr_scale", 1.0), values.get("weight_decay", chosen.weight_decay)
                return replace(chosen, lr_scale=chosen.lr_scale * scale, weight_decay=decay)
            first += 0 if rule is None else len(rule.parts)
        return chosen

    def ratio(self, rule: UpdateRule) -> float:
        """Return another rule's learning rate over this one's. Raises ConfigError."""
        if not self.lr:
            raise ConfigError(
                "optimizer.lr is 0, and another rule's learning rate has no ratio to it: give another one."
            )
        return rule.lr / self.lr

    @abstractmethod
    def update(self, states: Mapping[str, torch.Tensor], gradients: torch.Tensor, by: UpdateStep) -> int | torch.Tensor:
        """Update weights in place; return how many are no longer finite. `states` has their planes, and `gradients` are
        fp32 or bf16, [n] each.
        """

    def correct(
        self, states: Mapping[str, torch.Tensor], gradients: torch.Tensor, by: UpdateStep, applied_scale: float
    ) -> int | torch.Tensor:
        """Turn an update that was done with `applied_scale` into what `update` would have made of it; return what that
        returns.
        """
        raise NotImplementedError


def check_number(key: str, value: float, least: float = 0.0) -> None:
    """Raise ConfigError unless a number is finite and at least that."""
    if not least <= value < math.inf:
        bound = "not negative" if not least else f"at least {least:g}"
        raise ConfigError(f"optimizer.{key} is {value!r}; it must be a number, finite and {bound}.")


def parameter_key(name: str, seed: int) -> int:
    """Return `UpdateStep.key`."""
    return xxh3_64_intdigest(name.encode(), seed % 2**64)


def master_piece(states: Mapping[str, torch.Tensor], piece: slice) -> torch.Tensor:
    """Return elements of the master weights in fp32: themselves, or put together from both halves."""
    weights = states["weights"][piece]
    return kernels.join(weights, states["low"][piece]) if "low" in states else weights


def put_piece(states: Mapping[str, torch.Tensor], piece: slice, weights: torch.Tensor) -> torch.Tensor:
    """Let elements of the master weights be what `master_piece` gave and was changed since; return how many are no
    longer finite, 0-dim int64.
    """
    if "low" in states:
        kernels.split(weights, out=(states["weights"][piece], states["low"][piece]))
    return weights.isfinite().logical_not_().sum()


def count_of(num_wrong: torch.Tensor) -> int | torch.Tensor:
    """Return a count as `update` does: of an accelerator nobody waits for it."""
    return int(num_wrong) if num_wrong.is_cpu else num_wrong


def master(states: Mapping[str, torch.Tensor]) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the master weights as kernels take them: fp32, or both halves; or bf16, of a rule that has no low one."""
    return (states["weights"], states["low"]) if "low" in states else states["weights"]
