"""LOMO: gradient descent with immediately dropped gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from offload.errors import ConfigError
from offload.extras.rules.pieces import PIECE
from offload.optim.rule import UpdateRule, UpdateStep, check_number
from offload.optim.sgd import descend


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
            # 0 is a valid number elsewhere, and often meant as `off`.
            if value == 0:
                raise ConfigError(f"optimizer.{key} is 0, which would train nothing; set none for no clipping.")

    def clips_to(self, max_norm: float | None) -> float | None:
        return self.clip_norm or super().clips_to(max_norm)

    def update(self, states: Mapping[str, torch.Tensor], gradients: torch.Tensor, by: UpdateStep) -> int | torch.Tensor:
        if self.clip_value is None:
            return descend(states, gradients, by)
        num_wrong: int | torch.Tensor = 0
        # The clamped gradients of a whole unit would be a copy in fp32.
        for begin in range(0, gradients.numel(), PIECE):
            piece = slice(begin, begin + PIECE)
            clamped = gradients[piece].float().clamp(-self.clip_value, self.clip_value)
            num_wrong += descend({name: plane[piece] for name, plane in states.items()}, clamped, by)
        return num_wrong
