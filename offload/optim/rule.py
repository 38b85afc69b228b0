"""Base classes for update rules: settings, state planes, stored moments, and the update for a range of weights."""

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

from offload.arguments import check_types
from offload.errors import ConfigError, nearest
from offload.layout.planes import Factor, Plane
from offload.native.kernels import BLOCK

_GROUP_KEYS = ("lr_scale", "weight_decay", "rule")


@dataclass(frozen=True)
class ParameterTraits:
    """Parameter properties on which a rule may base a choice."""

    name: str
    shape: tuple[int, ...]
    is_embedding: bool = False
    """True for an embedding table, and for a weight tied to one."""
    in_block: bool = False
    """True for a parameter inside a repeated block."""
    is_filter: bool = False
    """True for a convolution weight; the last two dimensions form no matrix."""


@dataclass(frozen=True)
class RuleChoice:
    """Update settings for one parameter."""

    rule: int
    """Index into `parts` of the queried rule."""
    lr_scale: float
    """Factor on the learning rate."""
    weight_decay: float
    """Decoupled weight decay."""


@dataclass(frozen=True)
class UpdateStep:
    """Arguments of one update call, shared by all weights in the call."""

    step: int
    """Step number, counted from 1."""
    lr: float
    """Learning rate."""
    weight_decay: float
    """Decoupled weight decay."""
    scale: float
    """Factor on the gradients: the clipping coefficient, divided by the loss scale."""
    key: int = 0
    """64-bit hash of parameter name and run seed, for `by_parameter` rules."""
    element: int = 0
    """Offset of the first weight in the flat parameter, for `by_parameter` rules."""
    shape: tuple[int, ...] = ()
    """Parameter shape, for `by_matrix` rules, which receive the whole parameter."""
    threshold: float = math.inf
    """Largest magnitude updated, for rules with partial updates; larger weights are skipped."""
    workspace: torch.Tensor | None = None
    """Device memory, uint8 [at least `workspace_bytes`], for rules with device compute. None: allocate temporaries
    beside the weights.
    """


class UpdateRule(ABC):
    """Base class for update rules. Every rule is a frozen dataclass with at least the settings below.

    `groups` is a sequence of (regular expression, {"lr_scale": x, "weight_decay": y, "rule": another rule}), or a
    mapping with the same content. The first expression found in the parameter name by `re.search` applies; omitted keys
    keep their defaults. Parameters with fewer than two dimensions (biases, norms) have no weight decay unless
    `decay_1d` is set or their group sets `weight_decay`. Another rule uses separate settings, and the ratio between
    both learning rates stays constant.

    A rule of another package needs no registration, `Engine(model, Sign())`:

        @dataclass(frozen=True)
        class Sign(UpdateRule):
            lr: float = 1e-3
            weight_decay: float = 0.0
            decay_1d: bool = False
            groups: tuple = ()

            def update(self, states, gradients, by):
                weights, low = states["weights"], states.get("low")
                master = weights if low is None else kernels.join(weights, low)
                master.sub_(gradients.sign(), alpha=by.lr)
                if low is not None:
                    kernels.split(master, (weights, low))
                return master.isfinite().logical_not().sum()

    `moments` lists optimizer states, each a plane in `states` too. `kernels`: `offload.native.kernels`.
    """

    by_matrix: ClassVar[bool] = False
    """True if an update needs the whole parameter and the shape: each call receives exactly one parameter."""
    drops_gradients: ClassVar[bool] = False
    """True if gradients are dropped before the norm is known. A step with clipping then needs a separate backward for
    the norm.
    """
    method: ClassVar[str] = "backward"
    """Training method, by name in `METHODS`: "backward" or "forwards" (losses from forward passes alone)."""
    steered: ClassVar[tuple[str, ...]] = ()
    """Settings allowed to change between steps, for example by a torch scheduler."""

    lr: float
    weight_decay: float
    decay_1d: bool
    groups: tuple[tuple[str, Mapping[str, Any]], ...]

    @property
    def num_directions(self) -> int:
        """Directions per step along which forward passes measure the loss; 0 for a rule with gradients."""
        return 0

    @property
    def has_gradients(self) -> bool:
        """True if a step runs a backward pass."""
        return not self.num_directions

    @property
    def has_low(self) -> bool:
        """True if trainable bf16 and fp16 weights have a plane `low`, so the master weights are fp32."""
        return True

    @property
    def can_correct(self) -> bool:
        """True if `correct` is implemented, as speculative clipping requires."""
        return False

    @property
    def by_parameter(self) -> bool:
        """True if an update needs the parameter key and offset: each call then covers a single parameter."""
        return False

    @property
    def moments(self) -> tuple[Plane, ...]:
        """Optimizer-state planes, parallel to the weights."""
        return ()

    @property
    def factors(self) -> tuple[Factor, ...]:
        """Per-parameter state in addition to the planes, for `by_matrix` rules."""
        return ()

    def clips_to(self, max_norm: float | None) -> float | None:
        """Return the norm for gradient clipping, given `max_grad_norm`; None: no clipping."""
        return max_norm or None

    def place_update(self, place: str, num_ranks: int) -> str:  # noqa: ARG002
        """Return the update place (cpu, device, both or slot), given `Settings.update`. auto: the plan chooses."""
        return place

    def workspace_bytes(self, shape: tuple[int, ...]) -> int:  # noqa: ARG002
        """Return the device bytes needed during the update of a parameter with this shape."""
        return 0

    @property
    def title(self) -> str:
        """Name in error messages, with the state dtype unless fp32."""
        name = type(self).__name__
        states = getattr(self, "states", "fp32")
        if states != "fp32":
            name += f" with {states} states"
        return name

    @classmethod
    def configured(cls, settings: Mapping[str, Any]) -> UpdateRule:
        """Create the rule from configuration settings. Unknown settings are ignored; None selects the default. Raises
        ConfigError.
        """
        field_names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: value for name, value in settings.items() if name in field_names and value is not None})

    @property
    def others(self) -> tuple[UpdateRule, ...]:
        """Rules to which `choose_other` may assign parameters, independent of groups."""
        return ()

    def choose_other(self, parameter: ParameterTraits) -> int | None:  # noqa: ARG002
        """Return the index into `others` for a parameter; None: this rule."""
        return None

    @cached_property
    def parts(self) -> tuple[UpdateRule, ...]:
        """All rules available to parameters, this one first."""
        # Also the rules within a group's rule, so one index names any of them.
        rules = [values["rule"] for _, values in self.groups if "rule" in values]
        return (self, *self.others, *(part for rule in rules for part in rule.parts))

    def __post_init__(self) -> None:
        if isinstance(self.groups, Mapping):  # mapping, as in a configuration
            object.__setattr__(self, "groups", tuple(self.groups.items()))
        check_types(type(self), vars(self))
        # A copy: a later change to the caller's mappings must not change the rule.
        object.__setattr__(self, "groups", tuple((pattern, dict(values)) for pattern, values in self.groups))
        if hasattr(self, "betas"):
            object.__setattr__(self, "betas", tuple(self.betas))
            if not all(0.0 <= beta < 1.0 for beta in self.betas):
                raise ConfigError(f"optimizer.betas is {self.betas}; it must be two numbers, each in [0, 1).")
        for key in ("lr", "eps", "weight_decay"):
            value = getattr(self, key, 0.0)
            if not isinstance(value, tuple):  # a rule with several values checks them itself
                check_number(key, value)
        # A mistake in a group shows here, not when the first parameter is compared.
        for pattern, values in self.groups:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"optimizer.groups: {pattern!r} is not a regular expression: {error}.") from error
            for key in values:
                if key not in _GROUP_KEYS:
                    raise ConfigError(
                        f"optimizer.groups[{pattern!r}]: unknown key {key!r}{nearest(key, _GROUP_KEYS)}; allowed: "
                        f"{', '.join(_GROUP_KEYS)}."
                    )
                if key == "rule":
                    if not isinstance(values[key], UpdateRule):
                        raise ConfigError(
                            f"optimizer.groups[{pattern!r}]: rule is {values[key]!r}; it must be an update rule."
                        )
                    if self.has_gradients and not values[key].has_gradients:
                        raise ConfigError(
                            f"optimizer.groups[{pattern!r}]: rule is {values[key].title}, which trains with losses of "
                            f"the whole model, but {self.title} needs gradients: choose one of them for all parameters "
                            "with --optimizer.name, and freeze parameters that must not change."
                        )
                elif not isinstance(values[key], int | float) or not 0.0 <= values[key] < math.inf:
                    raise ConfigError(
                        f"optimizer.groups[{pattern!r}]: {key} is {values[key]!r}; it must be a number, finite and not "
                        "negative."
                    )

    def default(self, parameter: ParameterTraits) -> RuleChoice:
        """Return the settings for a parameter without a matching group. Raises ConfigError."""
        rule = 0
        other = self.choose_other(parameter)
        if other is not None:
            rule = 1 + other  # this rule is the first in `parts`
        decay = 0.0
        if len(parameter.shape) >= 2 or self.decay_1d:
            decay = self.weight_decay
        return RuleChoice(rule, 1.0, decay)

    def choose(self, parameter: ParameterTraits) -> RuleChoice:
        """Return the settings for a parameter. Raises ConfigError."""
        chosen = self.default(parameter)
        first = 1 + len(self.others)  # index in `parts` of the next group's rule
        for pattern, values in self.groups:
            rule = values.get("rule")
            if re.search(pattern, parameter.name):
                if rule is not None:
                    chosen = rule.choose(parameter)
                    # An engine has one learning rate, the rate of this rule: the other rate is a multiple.
                    chosen = replace(chosen, rule=first + chosen.rule, lr_scale=chosen.lr_scale * self.ratio(rule))
                scale = values.get("lr_scale", 1.0)
                decay = values.get("weight_decay", chosen.weight_decay)
                return replace(chosen, lr_scale=chosen.lr_scale * scale, weight_decay=decay)
            if rule is not None:
                first += len(rule.parts)
        return chosen  # the first expression found applies, and none was

    def ratio(self, rule: UpdateRule) -> float:
        """Return the learning rate of another rule divided by the learning rate here. Raises ConfigError."""
        if not self.lr:
            raise ConfigError(
                "optimizer.lr is 0, so the learning rates of rules in optimizer.groups cannot be scaled with it: set "
                "--optimizer.lr above 0."
            )
        return rule.lr / self.lr

    @abstractmethod
    def update(self, states: Mapping[str, torch.Tensor], gradients: torch.Tensor, by: UpdateStep) -> int | torch.Tensor:
        """Update weights in place and return the number of non-finite weights.

        states: planes by name: `weights`, `low` (see `has_low`) and the `moments`; [n] each, or scales per block.
        gradients: fp32, bf16 or fp16 [n], to be multiplied by `by.scale`.
        """

    def correct(
        self, states: Mapping[str, torch.Tensor], gradients: torch.Tensor, by: UpdateStep, applied_scale: float
    ) -> int | torch.Tensor:
        """Turn an update made with `applied_scale` into the update with `by.scale`, and return the number of non-finite
        weights.
        """
        raise NotImplementedError


STATES = ("fp32", "bf16", "int8")
LEAST_NUMEL = 4096
"""Smaller parameters keep fp32 moments with int8 states, as embeddings do (Dettmers et al., arXiv:2110.02861)."""


class StoredMoments(UpdateRule):
    """Base class for rules with a `states` setting, the storage format of the moments. Weights are always fp32, whole
    or split.

    An update computes exact new moments and rounds only to store them. bf16 uses stochastic rounding, so small step
    contributions survive on average; the random bits depend on run seed, parameter, step and element. int8 stores one
    scale per block with 128 elements.
    """

    states: str

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Moment names."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.states not in STATES:
            raise ConfigError(
                f"optimizer.states is {self.states!r}{nearest(str(self.states), STATES)}; it must be one of "
                f"{', '.join(STATES)}."
            )

    @property
    def moments(self) -> tuple[Plane, ...]:
        if self.states != "int8":
            dtype = torch.float32 if self.states == "fp32" else torch.bfloat16
            return tuple(Plane(name, dtype) for name in self.names)
        planes = ((Plane(name, torch.uint8), Plane(f"{name}_scale", torch.float32, block=BLOCK)) for name in self.names)
        return tuple(plane for both in planes for plane in both)

    @property
    def by_parameter(self) -> bool:
        return self.states != "fp32"

    @property
    def others(self) -> tuple[UpdateRule, ...]:
        whole: Any = self  # the instance is a dataclass
        if self.states != "int8":
            return ()
        # For parameters with fp32 moments. Without groups: `choose` has searched them already.
        return (replace(whole, states="fp32", groups=()),)

    def choose_other(self, parameter: ParameterTraits) -> int | None:
        is_kept = parameter.is_embedding or math.prod(parameter.shape) < LEAST_NUMEL
        if self.states == "int8" and is_kept:
            return 0
        return None


def check_number(key: str, value: Any, least: float = 0.0) -> None:
    """Raise ConfigError unless `value` is a number, finite and at least `least`."""
    if not isinstance(value, int | float) or not least <= value < math.inf:
        bound = "not negative" if not least else f"at least {least:g}"
        raise ConfigError(f"optimizer.{key} is {value!r}; it must be a number, finite and {bound}.")


def parameter_key(name: str, seed: int) -> int:
    """Return the hash for `UpdateStep.key`."""
    # Of the name: neither the order of parameters nor a layout has an influence on random bits.
    return xxh3_64_intdigest(name.encode(), seed % 2**64)
