"""The Adafactor update rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from offload.optim.factored import Factored
from offload.optim.rule import UpdateStep

_EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Adafactor(Factored):
    """Factored second moments and no first one (Shazeer & Stern, arXiv:1804.04235), as `torch.optim.Adafactor` computes
    it; `groups` and `decay_1d` as `UpdateRule` says.

    The learning rate is a share of what the weights are, and at most 1 / sqrt(step). A parameter of n x m keeps n + m
    numbers, a vector as many as it has elements. Sums are made in float64 where torch has float32, so that an update
    is torch's within a few parts in 10 million, and has the same bits with any number of threads.
    """

    lr: float = 1e-2
    beta2_decay: float = -0.8
    eps: tuple[float | None, float] = (None, 1e-3)
    d: float = 1.0
    weight_decay: float = 0.0
    decay_1d: bool = False
    groups: tuple[tuple[str, Mapping[str, Any]], ...] = ()

    @property
    def _eps(self) -> float:
        return _EPS if self.eps[0] is None else self.eps[0]

    def _inverse_root(self, rows: torch.Tensor, columns: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        return (rows * columns).div_(mean.clamp(min=self._eps)).clamp_(min=self._eps**2).rsqrt_()

    def _inverse_root_of(self, variance: torch.Tensor) -> torch.Tensor:
        return variance.clamp(min=self._eps**2).rsqrt_()

    def _rates(self, by: UpdateStep, size: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rate = size.clamp(min=self.eps[1]) * min(by.lr, by.step**-0.5)
        return rate, torch.full_like(rate, by.lr)
