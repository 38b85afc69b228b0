"""Comparison of results and gradients from two runs of the same code, with the tolerances."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch.nn import functional

from offload.tiers.blocks import CACHES

OTHER_ORDER, OTHER_KERNELS = "sums in another order", "other kernels"


class Tolerance(NamedTuple):
    """Allowed differences between two runs. Runs with the same order of sums must have the same bits."""

    result: float
    """Distance of results and losses, relative to their norm."""
    gradient: float
    """Distance of a gradient, relative to the norm of this gradient."""
    rounding: float
    """Distance of a gradient, relative to all gradients: some are only the rounding error of cancelling terms."""
    element: float
    """Distance of one element, relative to the largest element of the tensor."""
    loss: float
    """Distance of two losses over the same logits, relative to the loss."""
    token: float
    """Distance of the final states of tokens, relative to their norm, on average."""


_TOLERANCES = {
    (OTHER_ORDER, False): Tolerance(1e-4, 1e-4, 1e-6, 1e-5, 1e-5, 3.4526698e-4),
    (OTHER_ORDER, True): Tolerance(3e-2, 3e-2, 4e-3, 2**-6, 1e-2, 8.8388348e-2),
    (OTHER_KERNELS, False): Tolerance(1e-4, 1e-3, 1e-6, 1e-5, 1e-5, 3.4526698e-4),
    (OTHER_KERNELS, True): Tolerance(3e-2, 1e-1, 4e-4, 2**-6, 1e-2, 8.8388348e-2),
}
"""Tolerances by (difference between the runs, True for 16-bit tensors)."""


def tolerance(difference: str, tensors: Iterable[torch.Tensor] = (), *, is_half: bool = False) -> Tolerance:
    """Return the tolerance for runs with a `difference`. `is_half`: 16 bits even if none of the `tensors` has 16."""
    return _TOLERANCES[difference, is_half or any(t.dtype in (torch.bfloat16, torch.float16) for t in tensors)]


_SAME_LOSS_TOLERANCE = 1e-6
"""Relative difference of two losses over the same targets, far below the effect of one target."""


def same_bits(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """True if two tensors have equal shape, dtype and elements; NaN equals NaN, 0.0 equals -0.0, None equals None."""
    if one is None or other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
        return one is other
    if torch.equal(one, other):  # a tenth of the time of `allclose`
        return True
    # For `torch.equal`, NaN differs from NaN.
    can_have_nan = one.is_floating_point() or one.is_complex()
    return can_have_nan and torch.allclose(one.detach(), other.detach(), rtol=0.0, atol=0.0, equal_nan=True)


def are_near(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if all elements are equal up to the order of sums; NaN equals NaN."""
    if one.shape != other.shape or not one.is_floating_point():
        return torch.equal(one, other)
    if not one.numel():  # no elements, no largest element
        return True
    most = float(one.nan_to_num().abs().max())
    distances = (one.nan_to_num().float() - other.nan_to_num().float()).abs()
    return bool((distances <= tolerance(OTHER_ORDER, [one]).element * most).all())


def are_same_loss(one: float, other: float) -> bool:
    """True if two losses have the same targets; NaN equals NaN."""
    is_same_nan = math.isnan(one) and math.isnan(other)
    return is_same_nan or math.isclose(one, other, rel_tol=_SAME_LOSS_TOLERANCE)


_SUMS = 256
_CHUNK = _SUMS * 251
"""Period of the signs, in elements: not a power of two, to avoid repeated signs from row to row."""
_PERIODS_PER_LAUNCH = 32
"""Periods in one sum on an accelerator: 2 Mi elements. A CPU takes one period: the float64 copy stays in the cache."""


@cache
def _signs(device: torch.device) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(1)  # equal signs on every device
    return (torch.randint(0, 2, (_CHUNK,), generator=generator, dtype=torch.int8, device="cpu") * 2 - 1).to(device)


CACHES.append(_signs.cache_clear)


def _sum_of_periods(flat: torch.Tensor) -> torch.Tensor:
    """Return the sum of all periods of a flat tensor, float64 [64256]."""
    period = torch.zeros(_CHUNK, dtype=torch.float64, device=flat.device)
    whole = flat.numel() // _CHUNK * _CHUNK
    num_periods = 1
    if flat.device.type != "cpu":
        num_periods = _PERIODS_PER_LAUNCH
    for part in (*flat[:whole].split(_CHUNK * num_periods), flat[whole:]):
        if part.numel() > _CHUNK:
            part = part.view(-1, _CHUNK).sum(0, dtype=torch.float64)
        if part.numel():
            period[: part.numel()] += part.double()
    return period


def signed_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sums of a sketch on the device of the tensor, float64 [256]."""
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    flat = values.reshape(-1)
    length = min(_CHUNK, -(-flat.numel() // _SUMS) * _SUMS)
    # The signs repeat, so sums over all periods come first, and then one product with the signs.
    if flat.numel() <= _CHUNK:  # most tensors of a trial are small
        period = flat.double()
        if len(period) < length:
            period = functional.pad(period, (0, length - len(period)))
    else:
        period = _sum_of_periods(flat)
    return (period * _signs(flat.device)[:length]).view(-1, _SUMS).sum(0)


@dataclass(frozen=True, eq=False)
class Sketch:
    """Signed sums over tensor elements, float64 (count sketch, Charikar et al. 2002).

    Equal tensors have equal sketches. The distance between two sketches is within about 10 % of the distance between
    the tensors, unless differences repeat with the signs (period: 64,256 elements).
    """

    shape: torch.Size
    """Tensor shape."""
    sums: torch.Tensor
    """float64 [256], on the CPU."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Sketch:
        """Return the sketch for a tensor with any dtype and device. Waits for the device."""
        return cls(tensor.shape, signed_sums(tensor).cpu())

    def __add__(self, other: Sketch) -> Sketch:
        return Sketch(self.shape, self.sums + other.sums)

    @property
    def norm(self) -> float:
        """Approximate tensor norm."""
        return float(self.sums.norm())

    def equals(self, other: Sketch) -> bool:
        """True if both tensors have the same shape and elements. NaN equals NaN."""
        return self.shape == other.shape and same_bits(self.sums, other.sums)

    def distance(self, other: Sketch) -> float:
        """Return the approximate distance; infinite for different shapes or if only one tensor is finite."""
        if self.shape != other.shape:
            return math.inf
        distance = float((self.sums - other.sums).norm())
        if not math.isnan(distance):
            return distance
        # The same sums overflow in both runs.
        if torch.equal(self.sums.isfinite(), other.sums.isfinite()):
            return 0.0
        return math.inf


def largest_excess(
    ones: Iterable[Sketch | None], others: Iterable[Sketch | None], share: float, rounding: float
) -> float:
    """Return the largest distance of a tensor, relative to the own norm, above the allowed distance. 0: none.

    Allowed are `share` of the own norm (in `ones`) and `rounding` of the norm of all tensors: some are only the
    rounding error of cancelling terms. NaN counts as infinity, None equals zeros.
    """
    pairs = list(zip_longest(ones, others))
    norms = [_norm(one) for one, _ in pairs]
    least = rounding * math.hypot(*norms, 0.0) + 1e-30  # above 0, for runs with zeros alone
    excess = 0.0
    for (one, other), norm in zip(pairs, norms, strict=True):
        distance = _distance(one, other)
        if distance <= share * norm + least:
            continue
        ratio = math.inf
        if norm and not math.isnan(distance / norm):
            ratio = distance / norm
        excess = max(excess, ratio)
    return excess


def _norm(sketch: Sketch | None) -> float:
    if sketch is None:
        return 0.0
    return sketch.norm


def _distance(one: Sketch | None, other: Sketch | None) -> float:
    if one is None or other is None:  # zeros
        return _norm(one) + _norm(other)
    return one.distance(other)


def gradient_deviations(
    ones: Sequence[Sketch | None], others: Sequence[Sketch | None], allowed: Tolerance
) -> list[float]:
    """Return the deviation of each gradient, relative to the tolerance: above 1 the gradients differ. NaN: unknown.

    `ones`, `others`: all gradients of a unit in two runs. None equals zeros.
    """
    norms = list(map(_norm, ones))
    rounding = allowed.rounding * math.hypot(*norms, 0.0)
    deviations = []
    for one, other, norm in zip(ones, others, norms, strict=True):
        deviations.append(_distance(one, other) / (allowed.gradient * norm + rounding + 1e-30))
    return deviations


def are_near_gradients(
    ones: Sequence[Sketch | None], others: Sequence[Sketch | None], tensors: Iterable[torch.Tensor]
) -> bool:
    """True if gradients are equal up to the order of sums. `tensors`: inputs of the runs, for the dtype."""
    return all(each <= 1 for each in gradient_deviations(ones, others, tolerance(OTHER_ORDER, tensors)))
