"""The LOMO update rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from offload.errors import ConfigError
from offload.optim.rule import PIECE, UpdateRule, UpdateStep, check_number, count_of, master_piece, put_piece


@dataclass(frozen=True)
class LOMO(UpdateRule):
    """Low-memory optimization (Lv et al., arXiv:2306.09782): gradient descent without any state, w -= lr g, in which a
    unit's gradient is updated from and dropped; `groups` and `decay_1d` as `UpdateRule` says.

    `clip_value` clamps each element of a gradient. `clip_norm` clips all of them to a norm, which a step learns by a
    backward of its own, so that it computes twice; it stands for the engine's `max_grad_norm`, and where it is None
    that is what counts: a step is done at once where both are None.
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
                raise ConfigError(f"optimizer.{key} is 0, which would train nothing; give none for no clipping.")

    def update(self, states: Mapping[str, torch.Tensor], gradients: torch.Tensor, by: UpdateStep) -> int | torch.Tensor:
        num_wrong = torch.zeros((), dtype=torch.int64, device=gradients.device)
        for begin in range(0, gradients.numel(), PIECE):
            piece = slice(begin, begin + PIECE)
            change = gradients[piece].float()
            if self.clip_value is not None:
                change = change.clamp(-self.clip_value, self.clip_value)
            if by.scale != 1.0:
                change = change * by.scale
            weights = master_piece(states, piece)
            if by.weight_decay:
                weights.mul_(1.0 - by.lr * by.weight_decay)
            num_wrong += put_piece(states, piece, weights.sub_(change * by.lr))
        return count_of(num_wrong)
