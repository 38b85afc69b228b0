"""The Lion update rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from offload.native import kernels
from offload.optim.rule import UpdateStep, master
from offload.optim.states import StoredMoments, stored


@dataclass(frozen=True)
class Lion(StoredMoments):
    """Evolved sign momentum (Chen et al., arXiv:2302.06675, algorithm 2), with one moment; `groups` and `decay_1d` as
    `UpdateRule` says, `states` as `StoredMoments`.

    Every weight moves by the learning rate, so that it wants to be 3 to 10 times smaller than AdamW's, and the weight
    decay as many times larger (section 5 there). The defaults are the authors' own; those of the command line go by
    what AdamW has there. It cannot correct an update: with a sign nothing of the gradient's size is left.
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    decay_1d: bool = False
    groups: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    states: str = "fp32"

    steered: ClassVar[tuple[str, ...]] = ("betas",)

    @property
    def names(self) -> tuple[str, ...]:
        return ("exp_avg",)

    def update(self, states: Mapping[str, torch.Tensor], gradients: torch.Tensor, by: UpdateStep) -> int | torch.Tensor:
        return kernels.lion(
            master(states),
            stored(states, "exp_avg"),
            gradients,
            lr=by.lr,
            betas=self.betas,
            weight_decay=by.weight_decay,
            grad_scale=by.scale,
            step=by.step,
            key=by.key,
            element=by.element,
        )
