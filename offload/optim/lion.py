"""The Lion update rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from offload.layout.planes import Plane
from offload.native import kernels
from offload.optim.rule import UpdateRule, UpdateStep, master


@dataclass(frozen=True)
class Lion(UpdateRule):
    """Evolved sign momentum (Chen et al., arXiv:2302.06675, algorithm 2), with one moment; `groups` and `decay_1d` as
    `UpdateRule` says.

    Every weight moves by the learning rate, so that it wants to be 3 to 10 times smaller than AdamW's, and the weight
    decay as many times larger (section 5 there). The defaults are the authors' own; those of the command line go by
    what AdamW has there. It cannot correct an update: with a sign nothing of the gradient's size is left.
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    decay_1d: bool = False
    groups: tuple[tuple[str, Mapping[str, Any]], ...] = ()

    @property
    def moments(self) -> tuple[Plane, ...]:
        return (Plane("exp_avg", torch.float32),)

    def update(self, states: Mapping[str, torch.Tensor], gradients: torch.Tensor, by: UpdateStep) -> int | torch.Tensor:
        return kernels.lion(
            master(states),
            states["exp_avg"],
            gradients,
            lr=by.lr,
            betas=self.betas,
            weight_decay=by.weight_decay,
            grad_scale=by.scale,
        )
