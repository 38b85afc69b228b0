"""Gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from offload.errors import ConfigError
from offload.layout.planes import Plane
from offload.native import kernels
from offload.optim.rule import UpdateRule, UpdateStep


@dataclass(frozen=True)
class SGD(UpdateRule):
    """Gradient descent with momentum, computed like `torch.optim.SGD`, without dampening and Nesterov momentum.

    `groups` and `decay_1d`: see `UpdateRule`. Weight decay is added to the gradient after clipping, and so enters the
    momentum. Without momentum there is no optimizer state.
    """

    lr: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    decay_1d: bool = False
    groups: tuple[tuple[str, Mapping[str, Any]], ...] = ()

    steered: ClassVar[tuple[str, ...]] = ("momentum",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.momentum < 1.0:
            raise ConfigError(f"optimizer.momentum is {self.momentum!r}; it must be a number in [0, 1).")

    @property
    def moments(self) -> tuple[Plane, ...]:
        if not self.momentum:  # the kernel then takes no buffer, and a run has no optimizer states
            return ()
        return (Plane("momentum_buffer", torch.float32),)

    def update(self, states: Mapping[str, torch.Tensor], gradients: torch.Tensor, by: UpdateStep) -> int | torch.Tensor:
        return descend(states, gradients, by, self.momentum)


def descend(
    states: Mapping[str, torch.Tensor], gradients: torch.Tensor, by: UpdateStep, momentum: float = 0.0
) -> int | torch.Tensor:
    """Do one step in place, and return the number of non-finite weights. Arguments as in `UpdateRule.update`."""
    return kernels.sgd(
        kernels.master(states),
        states.get("momentum_buffer"),
        gradients,
        lr=by.lr,
        momentum=momentum,
        weight_decay=by.weight_decay,
        grad_scale=by.scale,
    )
