"""The AdamW update rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from offload.layout.planes import Plane
from offload.native import kernels
from offload.optim.rule import UpdateRule, UpdateStep, master


@dataclass(frozen=True)
class AdamW(UpdateRule):
    """Decoupled weight decay Adam (Loshchilov & Hutter, arXiv:1711.05101, algorithm 2), as `torch.optim.AdamW` computes
    it; `groups` and `decay_1d` as `UpdateRule` says.

    The defaults are torch's. Those of the command line are others: `optimizer.betas` is (0.9, 0.95) there, and the
    learning rate goes by the kind of weights.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    decay_1d: bool = False
    groups: tuple[tuple[str, Mapping[str, Any]], ...] = ()

    can_correct: ClassVar[bool] = True

    @property
    def moments(self) -> tuple[Plane, ...]:
        return Plane("exp_avg", torch.float32), Plane("exp_avg_sq", torch.float32)

    def update(self, states: Mapping[str, torch.Tensor], gradients: torch.Tensor, by: UpdateStep) -> int | torch.Tensor:
        return kernels.adamw(
            master(states),
            states["exp_avg"],
            states["exp_avg_sq"],
            gradients,
            step=by.step,
            lr=by.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=by.weight_decay,
            grad_scale=by.scale,
        )

    def correct(
        self, states: Mapping[str, torch.Tensor], gradients: torch.Tensor, by: UpdateStep, applied_scale: float
    ) -> int | torch.Tensor:
        return kernels.correct_adamw(
            master(states),
            states["exp_avg"],
            states["exp_avg_sq"],
            gradients,
            step=by.step,
            lr=by.lr,
            betas=self.betas,
            eps=self.eps,
            applied_scale=applied_scale,
            grad_scale=by.scale,
        )
