"""Compact optimizer moments, shared by rules with fp32, bf16 or int8 states."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from offload.errors import ConfigError, nearest
from offload.layout.planes import Plane
from offload.native.kernels import BLOCK
from offload.optim.rule import ParameterTraits, UpdateRule

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
        return (replace(whole, states="fp32", groups=()),) if self.states == "int8" else ()

    def choose_other(self, parameter: ParameterTraits) -> int | None:
        is_kept = parameter.is_embedding or math.prod(parameter.shape) < LEAST_NUMEL
        return 0 if self.states == "int8" and is_kept else None


def stored(states: Mapping[str, torch.Tensor], name: str) -> Any:
    """Return a moment in kernel form: the plane, or the int8 plane with the scale plane."""
    return (states[name], states[f"{name}_scale"]) if f"{name}_scale" in states else states[name]


def master(states: Mapping[str, torch.Tensor]) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the master weights in kernel form: fp32, both 16-bit halves, or bf16 for a rule without a low half."""
    return (states["weights"], states["low"]) if "low" in states else states["weights"]
