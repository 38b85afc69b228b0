"""The AdaLomo update rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from offload.errors import ConfigError
from offload.optim.factored import Factored
from offload.optim.rule import UpdateStep


@dataclass(frozen=True)
class AdaLomo(Factored):
    """LOMO with an adaptive learning rate (Lv et al., arXiv:2310.10195, algorithm 1): factored second moments, and
    updates that are normalised by parameter; `groups` and `decay_1d` as `UpdateRule` says.

    With g the gradient and t the step, r and c come nearer to the means of g^2 + eps[0] over rows and over columns by
    t^beta2_decay, u = g / sqrt(r c / mean(r)), and w -= lr max(eps[1], rms(w)) u / max(1, rms(u) / d): the learning
    rate is a share of what the weights are. A parameter of n x m keeps n + m numbers. No gradient waits: it needs no
    clipping, and where a norm is asked for all the same, or non-finite gradients are to be skipped, a step learns that
    by a backward of its own.
    """

    lr: float = 1e-3
    beta2_decay: float = -0.8
    eps: tuple[float | None, float] = (1e-30, 1e-3)
    d: float = 1.0
    weight_decay: float = 0.0
    decay_1d: bool = False
    groups: tuple[tuple[str, Mapping[str, Any]], ...] = ()

    drops_gradients: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.eps[0] or self.eps[0] < torch.finfo(torch.float32).tiny:
            raise ConfigError(f"optimizer.eps is {self.eps!r}; the first must be at least 1.2e-38 for AdaLomo.")

    @property
    def _floor(self) -> float:
        return self.eps[0] or 0.0

    def _inverse_root(self, rows: torch.Tensor, columns: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        return (rows / mean).rsqrt_() * columns.rsqrt()  # their product may be too small for fp32

    def _inverse_root_of(self, variance: torch.Tensor) -> torch.Tensor:
        return variance.rsqrt()

    def _rates(self, by: UpdateStep, size: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rate = size.clamp(min=self.eps[1]) * by.lr
        return rate, rate
