"""The AdamW update rule: moments are stored in fp32, bf16 or int8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from offload.native import kernels
from offload.optim.rule import StoredMoments, UpdateStep


@dataclass(frozen=True)
class AdamW(StoredMoments):
    """Adam with decoupled weight decay (Loshchilov & Hutter, arXiv:1711.05101, algorithm 2), computed like
    `torch.optim.AdamW`.

    `groups` and `decay_1d`: see `UpdateRule`. `states`: see `StoredMoments`; only fp32 states allow a later correction.
    Defaults follow torch except `decay_1d`: torch decays biases and norms as well. The command line uses other
    defaults: `optimizer.betas` is (0.9, 0.95), and the learning rate depends on the initial weights.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    decay_1d: bool = False
    groups: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    states: str = "fp32"

    # Both go into each kernel call, and no stored state depends on them.
    steered: ClassVar[tuple[str, ...]] = ("betas", "eps")

    @property
    def names(self) -> tuple[str, ...]:
        return "exp_avg", "exp_avg_sq"

    @property
    def by_parameter(self) -> bool:
        return super().by_parameter or not self.eps  # padding between parameters is zero: 0 / 0 without eps

    @property
    def can_correct(self) -> bool:
        return self.states == "fp32"

    def update(self, states: Mapping[str, torch.Tensor], gradients: torch.Tensor, by: UpdateStep) -> int | torch.Tensor:
        return kernels.adamw(
            kernels.master(states),
            kernels.stored(states, "exp_avg"),
            kernels.stored(states, "exp_avg_sq"),
            gradients,
            step=by.step,
            lr=by.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=by.weight_decay,
            grad_scale=by.scale,
            key=by.key,
            element=by.element,
        )

    def correct(
        self, states: Mapping[str, torch.Tensor], gradients: torch.Tensor, by: UpdateStep, applied_scale: float
    ) -> int | torch.Tensor:
        return kernels.correct_adamw(
            kernels.master(states),
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
