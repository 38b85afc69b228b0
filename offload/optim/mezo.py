"""Training by forward passes alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
import xxhash

from offload.errors import ConfigError
from offload.native import directions, kernels
from offload.native.directions import NoiseRange
from offload.optim.rule import UpdateRule, UpdateStep, check_number, master

MASTERS = ("fp32", "bf16")
_OF_A_STEP = ("num_perturbations", "weight_decay", "layer_fraction", "magnitude_quantile", "decay_1d")
"""The numbers that an update follows from, beside what is measured and the learning rate."""
_LEAST_EPS = 1e-12
"""Below it w + eps z is w, in fp32 of any weight above 2e-5 even where z is 1."""
_BLOCKS = 2
"""The purpose for which the words are drawn that choose the blocks of a step."""


@dataclass(frozen=True)
class MeZO(UpdateRule):
    """Zeroth-order descent (Malladi et al., arXiv:2305.17333, algorithm 1; streamed as by ZO2, arXiv:2503.12668): along
    a random direction z the loss is measured at `eps` on either side of the weights, and these move by

        -lr ((loss(w + eps z) - loss(w - eps z)) / (2 eps) z + weight_decay w)

    with the mean over `num_perturbations` directions in place of the first term (n-SPSA). All passes of a step, two
    for each direction, are under way at once, each with its activations and its copy of what stays on the device.
    There are no gradients, no moments and no saved inputs; the loss needs no gradient either. `groups` and `decay_1d`
    as `UpdateRule` says, but for `rule`: the loss is measured for all parameters at once.

    `layer_fraction`: the share of a model's blocks that a step perturbs and updates, at least one of them, chosen anew
    in each (LeZO, arXiv:2410.09823); what is in no block always takes part. `magnitude_quantile`: of each parameter the
    weights of least magnitude take part, up to this quantile (Sparse-MeZO, arXiv:2402.15751); `weight_decay` takes from
    all of them. `master`: what weights are kept in that the device uses in bf16: "fp32", or "bf16", which is half of
    the bytes. A step, mostly less than the least change of a weight in bf16, is then added in fp32 and rounded up or
    down at random, with the probability of the distance: a function of the run's seed, the parameter, the step and the
    element.
    """

    lr: float = 1e-6
    eps: float = 1e-3
    num_perturbations: int = 1
    weight_decay: float = 0.0
    layer_fraction: float = 1.0
    magnitude_quantile: float = 1.0
    master: str = "fp32"
    decay_1d: bool = False
    groups: tuple[tuple[str, Mapping[str, Any]], ...] = ()

    method: ClassVar[str] = "forwards"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("eps", self.eps, _LEAST_EPS)
        count = self.num_perturbations
        if not 1 <= count < 1 << 15:
            raise ConfigError(f"optimizer.num_perturbations is {count!r}; it must be a whole number, at least 1.")
        for key in ("layer_fraction", "magnitude_quantile"):
            value = getattr(self, key)
            if not 0.0 < value <= 1.0:
                raise ConfigError(f"optimizer.{key} is {value!r}; it must be a number above 0, at most 1 (for all).")
        if self.master not in MASTERS:
            raise ConfigError(f"optimizer.master is {self.master!r}; it must be one of {', '.join(MASTERS)}.")
        if any("rule" in values for _, values in self.groups):
            raise ConfigError(
                "optimizer.groups gives some parameters another rule, and MeZO measures one loss for all of them "
                "without a gradient: leave `rule` out, freeze those parameters, or set another --optimizer.name."
            )

    @property
    def num_directions(self) -> int:
        return self.num_perturbations

    @property
    def by_parameter(self) -> bool:
        return True

    @cached_property
    def mark(self) -> str:
        """What a step follows from beside what it measures and its learning rate, as 16 hexadecimal digits."""
        numbers = [float(getattr(self, name)) for name in _OF_A_STEP]
        groups = [(key, sorted((name, float(value)) for name, value in values.items())) for key, values in self.groups]
        return xxhash.xxh64_hexdigest(repr([numbers, self.master, groups]).encode())

    @property
    def has_low(self) -> bool:
        return self.master == "fp32"

    @property
    def title(self) -> str:
        return super().title + ("" if self.has_low else " with weights in bf16 alone")

    def threshold(self, weights: torch.Tensor) -> float:
        """Return the magnitude up to which the weights of a parameter take part, as the device uses them: fp32 or bf16
        [n]; infinity for all.
        """
        rank = math.ceil(self.magnitude_quantile * weights.numel())
        if rank == weights.numel():
            return math.inf
        return float(weights.abs().float().kthvalue(rank).values)

    def slopes(self, losses: Sequence[tuple[float, float]]) -> list[float]:
        """Return how steep the loss is along each direction, from what it is on both sides (SPSA, Spall 1992)."""
        return [(plus - minus) / (2.0 * self.eps) for plus, minus in losses]

    def active_blocks(self, num_blocks: int, key: int, step: int) -> frozenset[int]:
        """Return the blocks that take part in a step: those whose random words are least."""
        count = max(1, round(self.layer_fraction * num_blocks))
        if count >= num_blocks:
            return frozenset(range(num_blocks))
        words = torch.empty(num_blocks, dtype=torch.int32, device="cpu")
        kernels.draw(words, key=key, step=step, purpose=_BLOCKS)
        return frozenset(words.argsort(stable=True)[:count].tolist())

    def update(self, states: Mapping[str, torch.Tensor], gradients: torch.Tensor, by: UpdateStep) -> int | torch.Tensor:
        """Take a step along the directions that `by` names; `gradients` are the slopes that were measured, on the CPU,
        fp64 [num_perturbations].
        """
        coefficients = (gradients / len(gradients)).tolist()
        of = NoiseRange(by.key, by.step, by.element, by.threshold)
        return directions.descend(master(states), coefficients, of, lr=by.lr, weight_decay=by.weight_decay)
