"""Gradient descent: SGD with momentum, and LOMO with immediately dropped gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from offload.errors import ConfigError
from offload.layout.planes import Plane
from offload.native import kernels
from offload.optim.rule import PIECE, UpdateRule, UpdateStep, check_number
from offload.optim.states import master


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
        return (Plane("momentum_buffer", torch.float32),) if self.momentum else ()

    def update(self, states: Mapping[str, torch.Tensor], gradients: torch.Tensor, by: UpdateStep) -> int | torch.Tensor:
        return _descend(states, gradients, by, self.momentum)


@dataclass(frozen=True)
class LOMO(UpdateRule):
    """Low-memory optimization (Lv et al., arXiv:2306.09782): bit for bit SGD without momentum, with each unit gradient
    applied and dropped at once.

    `groups` and `decay_1d`: see `UpdateRule`. `clip_value` clamps each gradient element. `clip_norm` replaces the
    `max_grad_norm` of the engine; None: the engine setting applies. With either norm, a separate backward first
    computes the norm, so the step computes twice.
    """

    lr: float = 1e-2
    clip_norm: float | None = None
    clip_value: float | None = None
    weight_decay: float = 0.0
    decay_1d: bool = False
    groups: tuple[tuple[str, Mapping[str, Any]], ...] = ()

    drops_gradients: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("clip_norm", "clip_value"):
            value = getattr(self, key)
            if value is not None:
                check_number(key, value)
            if value == 0:
                raise ConfigError(f"optimizer.{key} is 0, which would train nothing; set none for no clipping.")

    def update(self, states: Mapping[str, torch.Tensor], gradients: torch.Tensor, by: UpdateStep) -> int | torch.Tensor:
        if self.clip_value is None:
            return _descend(states, gradients, by)
        num_wrong: int | torch.Tensor = 0
        for begin in range(0, gradients.numel(), PIECE):
            piece = slice(begin, begin + PIECE)
            clamped = gradients[piece].float().clamp(-self.clip_value, self.clip_value)
            num_wrong += _descend({name: plane[piece] for name, plane in states.items()}, clamped, by)
        return num_wrong


def _descend(
    states: Mapping[str, torch.Tensor], gradients: torch.Tensor, by: UpdateStep, momentum: float = 0.0
) -> int | torch.Tensor:
    return kernels.sgd(
        master(states),
        states.get("momentum_buffer"),
        gradients,
        lr=by.lr,
        momentum=momentum,
        weight_decay=by.weight_decay,
        grad_scale=by.scale,
    )
