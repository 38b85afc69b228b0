"""What an update rule is to the rest: settings, planes, and the update of a stretch of weights."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from offload.errors import ConfigError, nearest
from offload.layout.planes import Plane

_GROUP_KEYS = ("lr_scale", "weight_decay")


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


class UpdateRule(ABC):
    """A rule is a frozen dataclass with at least the settings below.

    `groups` is a sequence of (regular expression, {"lr_scale": x, "weight_decay": y}); the first expression that
    `re.search` finds in a parameter's name decides, and a key that it leaves out keeps its default. Parameters with
    fewer than two dimensions (biases, norms) are not decayed unless `decay_1d`, or unless their group sets
    `weight_decay`.
    """

    moments: ClassVar[tuple[Plane, ...]] = ()
    """The planes that the rule keeps of what it trains."""
    can_correct: ClassVar[bool] = False
    """True where there is a `correct`, which speculative clipping needs."""

    lr: float
    weight_decay: float
    decay_1d: bool
    groups: tuple[tuple[str, Mapping[str, float]], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple((pattern, dict(values)) for pattern, values in self.groups))
        if hasattr(self, "betas"):
            object.__setattr__(self, "betas", _checked_betas(self.betas))
        for key in ("lr", "eps", "weight_decay"):
            value = getattr(self, key, 0.0)
            if not isinstance(value, int | float) or not 0.0 <= value < math.inf:
                raise ConfigError(f"optimizer.{key} is {value!r}; it must be a number, finite and not negative.")
        for pattern, values in self.groups:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"optimizer.groups: {pattern!r} is no regular expression: {error}.") from error
            for key in values:
                if key not in _GROUP_KEYS:
                    raise ConfigError(
                        f"optimizer.groups[{pattern!r}]: unknown key {key!r}{nearest(key, _GROUP_KEYS)}; allowed: "
                        f"lr_scale, weight_decay."
                    )
                if not isinstance(values[key], int | float) or not 0.0 <= values[key] < math.inf:
                    raise ConfigError(
                        f"optimizer.groups[{pattern!r}]: {key} is {values[key]!r}; it must be a number, finite and not "
                        "negative."
                    )

    def settings(self, name: str, num_dimensions: int) -> tuple[float, float]:
        """Return (learning-rate multiplier, weight decay) of the parameter called `name`."""
        decay = self.weight_decay if num_dimensions >= 2 or self.decay_1d else 0.0
        for pattern, values in self.groups:
            if re.search(pattern, name):
                return values.get("lr_scale", 1.0), values.get("weight_decay", decay)
        return 1.0, decay

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


def _checked_betas(betas: Sequence[float]) -> tuple[float, float]:
    """Return both decay rates of moments as a pair. Raises ConfigError."""
    try:
        first, second = (float(beta) for beta in betas)
    except (TypeError, ValueError):
        first = second = math.nan
    if not (0.0 <= first < 1.0 and 0.0 <= second < 1.0):
        raise ConfigError(f"optimizer.betas is {betas}; it must be two numbers, each in [0, 1).")
    return first, second


def master(states: Mapping[str, torch.Tensor]) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the master weights as kernels take them: fp32, or both halves."""
    return (states["weights"], states["low"]) if "low" in states else states["weights"]
