"""The Lion update rule: the moment is stored in fp32, bf16 or int8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from offload.native import kernels
from offload.optim.rule import StoredMoments, UpdateStep


@dataclass(frozen=True)
class Lion(StoredMoments):
    """Evolved sign momentum (Chen et al., arXiv:2302.06675, algorithm 2), with one moment.

    `groups` and `decay_1d`: see `UpdateRule`. `states`: see `StoredMoments`. Every weight moves by the learning rate,
    so a suitable rate is 3 to 10 times smaller than for AdamW, and the weight decay larger by the same factor (section
    5 of the paper). The defaults here come from the authors; command-line defaults derive from AdamW. Speculative
    clipping is impossible: after the sign, the gradient magnitude is lost.
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
        # The key and the element decide the random bits of moments in bf16: the same for any cut into tiles.
        return kernels.lion(
            kernels.master(states),
            kernels.stored(states, "exp_avg"),
            gradients,
            lr=by.lr,
            betas=self.betas,
            weight_decay=by.weight_decay,
            grad_scale=by.scale,
            step=by.step,
            key=by.key,
            element=by.element,
        )
