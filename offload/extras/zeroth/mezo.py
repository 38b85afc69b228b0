"""Training with forward passes alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
import xxhash

from offload.errors import ConfigError
from offload.extras.zeroth import directions
from offload.extras.zeroth.directions import NoiseRange
from offload.layout.residence import HOST, SLOT
from offload.native import kernels
from offload.optim.rule import UpdateRule, UpdateStep, check_number

MASTERS = ("fp32", "bf16")
_OF_A_STEP = ("num_perturbations", "weight_decay", "layer_fraction", "magnitude_quantile", "decay_1d")
"""Settings with an influence on an update, in addition to measured losses and learning rate."""
_LEAST_EPS = 1e-12
"""For smaller eps, w + eps z equals w in fp32 for any weight above 2e-5, even at z = 1."""
_BLOCKS = 2
"""Purpose number for the random words choosing the blocks of a step."""


@dataclass(frozen=True)
class MeZO(UpdateRule):
    """Zeroth-order descent (Malladi et al., arXiv:2305.17333, algorithm 1; streamed as in ZO2, arXiv:2503.12668). The
    loss is measured at distance `eps` on both sides of the weights along a random direction z, and the weights move:

        -lr ((loss(w + eps z) - loss(w - eps z)) / (2 eps) z + weight_decay w)

    With `num_perturbations` directions, the first term is the mean over all directions (n-SPSA). All passes of a step,
    two per direction, run at once, each with activations and a copy of the device-resident weights. There are no
    gradients, moments or saved inputs, and the loss needs no gradient. `groups` and `decay_1d`: see `UpdateRule`, but a
    group cannot set `rule`: one loss covers all parameters.

    `layer_fraction`: share of the blocks perturbed and updated in a step, at least one block, sampled anew each step
    (LeZO, arXiv:2410.09823); parameters outside blocks always participate. `magnitude_quantile`: only weights up to
    this magnitude quantile in each parameter participate (Sparse-MeZO, arXiv:2402.15751); `weight_decay` applies to
    all. `master`: master-weight dtype where the device uses bf16. With "bf16", half the bytes, the step is added in
    fp32 and stochastically rounded, because most steps are smaller than a bf16 increment; the random bits depend on run
    seed, parameter, step and element.
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
                "optimizer.groups gives some parameters another rule, but MeZO uses one loss and no gradients for all "
                "parameters: leave `rule` out, freeze those parameters, or set another --optimizer.name."
            )

    @property
    def num_directions(self) -> int:
        return self.num_perturbations

    @property
    def by_parameter(self) -> bool:
        return True

    def clips_to(self, max_norm: float | None) -> float | None:  # noqa: ARG002
        return None

    def place_update(self, place: str, num_ranks: int) -> str:
        if place == HOST or num_ranks > 1:  # a rank updates a part of the weights
            return HOST
        return SLOT

    @cached_property
    def mark(self) -> str:
        """Hash of all settings with an influence on a step, as 16 hexadecimal digits. Measured losses and learning rate
        are excluded.
        """
        # As float: 1 and 1.0 are the same setting.
        numbers = [float(getattr(self, name)) for name in _OF_A_STEP]
        groups = [(key, sorted((name, float(value)) for name, value in values.items())) for key, values in self.groups]
        return xxhash.xxh64_hexdigest(repr([numbers, self.master, groups]).encode())

    @property
    def has_low(self) -> bool:
        return self.master == "fp32"

    @property
    def title(self) -> str:
        if self.has_low:
            return super().title
        return f"{super().title} with weights in bf16 alone"

    def threshold(self, weights: torch.Tensor) -> float:
        """Return the largest magnitude among participating weights of a parameter; infinity: all participate.

        weights: fp32 or bf16 [n], as used on the device.
        """
        rank = math.ceil(self.magnitude_quantile * weights.numel())
        if rank == weights.numel():
            return math.inf
        # By rank: `torch.quantile` takes at most 16 million numbers.
        return float(weights.abs().float().kthvalue(rank).values)

    def slopes(self, losses: Sequence[tuple[float, float]]) -> list[float]:
        """Return the loss slope along each direction from (loss at +eps, loss at -eps) (SPSA, Spall 1992)."""
        return [(plus - minus) / (2.0 * self.eps) for plus, minus in losses]

    def active_blocks(self, num_blocks: int, key: int, step: int) -> frozenset[int]:
        """Return the blocks active in a step: the ones with the smallest random words."""
        count = max(1, round(self.layer_fraction * num_blocks))
        if count >= num_blocks:
            return frozenset(range(num_blocks))
        words = torch.empty(num_blocks, dtype=torch.int32, device="cpu")
        # By key and step: a resumed run, a replay and all ranks choose the same blocks.
        kernels.draw(words, key=key, step=step, purpose=_BLOCKS)
        # Stable: of two equal words the first block wins, on any machine.
        return frozenset(words.argsort(stable=True)[:count].tolist())

    def update(self, states: Mapping[str, torch.Tensor], gradients: torch.Tensor, by: UpdateStep) -> int | torch.Tensor:
        """Step along the directions given by `by`. gradients: measured slopes, fp64 [num_perturbations] on the CPU."""
        coefficients = (gradients / len(gradients)).tolist()
        of = NoiseRange(by.key, by.step, by.element, by.threshold)
        return directions.descend(kernels.master(states), coefficients, of, lr=by.lr, weight_decay=by.weight_decay)
