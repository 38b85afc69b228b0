"""Moments in fewer bytes: what rules share whose moments are stored in fp32, in bf16 or as a byte each."""

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
from offload.optim.rule import Trained, UpdateRule

STATES = ("fp32", "bf16", "int8")
LEAST_NUMEL = 4096
"""Parameters with fewer elements keep fp32 where others have a byte, as embeddings do (Dettmers et al.,
arXiv:2110.02861).
"""


class StoredMoments(UpdateRule):
    """A rule with `states`: how its moments are stored. The weights are fp32, whole or split, in any case.

    An update is made with the exact new moments, which are rounded only then. In bf16 they are rounded up or down at
    random, with the probability of the distance, so that what a step adds is not lost: a function of the run's seed,
    the parameter, the step and the element. In int8, blocks of 128 share a scale.
    """

    states: str

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """What the moments are called."""

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
        whole: Any = self  # a dataclass
        return (replace(whole, states="fp32", groups=()),) if self.states == "int8" else ()

    def choose_other(self, parameter: Trained) -> int | None:
        is_kept = parameter.is_embedding or math.prod(parameter.shape) < LEAST_NUMEL
        return 0 if self.states == "int8" and is_kept else None


def stored(states: Mapping[str, torch.Tensor], name: str) -> Any:
    """Return a moment as kernels take it: its plane, or both of its planes."""
    return (states[name], states[f"{name}_scale"]) if f"{name}_scale" in states else states[name]
