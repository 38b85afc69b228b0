"""Signed sums that distinguish tensors, in 2 KiB for any tensor size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

_SUMS = 256
_CHUNK = _SUMS * 251
"""Period of the signs, in elements: not a power of two, to avoid repeated signs from row to row."""
_PERIODS_PER_LAUNCH = 32
"""Periods in one float64 copy on an accelerator: a launch sums 2 Mi elements. A CPU takes one period, 512 KiB: the
copy stays in the cache, and larger freed copies fragment the heap.
"""


@cache
def _signs(device: torch.device) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(1)
    return (torch.randint(0, 2, (_CHUNK,), generator=generator, dtype=torch.int8, device="cpu") * 2 - 1).to(device)


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
        """Return the sketch for a tensor with any dtype and device."""
        flat = tensor.detach()
        flat = (torch.view_as_real(flat.resolve_conj()) if flat.is_complex() else flat).reshape(-1)
        signs, sums = _signs(flat.device), torch.zeros(_SUMS, dtype=torch.float64, device=flat.device)
        whole = flat.numel() // _CHUNK * _CHUNK
        periods = 1 if flat.device.type == "cpu" else _PERIODS_PER_LAUNCH
        for part in flat[:whole].split(periods * _CHUNK):
            sums += (part.view(-1, _CHUNK).double() * signs).view(-1, _SUMS).sum(0)
        signed = flat[whole:].double() * signs[: flat.numel() - whole]
        even = signed.numel() // _SUMS * _SUMS
        sums += signed[:even].view(-1, _SUMS).sum(0)
        sums[: signed.numel() - even] += signed[even:]
        return cls(tensor.shape, sums.cpu())

    def __add__(self, other: Sketch) -> Sketch:
        return Sketch(self.shape, self.sums + other.sums)

    @property
    def norm(self) -> float:
        """Approximate tensor norm."""
        return float(self.sums.norm())

    def equals(self, other: Sketch) -> bool:
        """True if both tensors have the same shape and elements. NaN equals NaN."""
        return self.shape == other.shape and bool(torch.equal(self.sums.nan_to_num(), other.sums.nan_to_num()))

    def distance(self, other: Sketch) -> float:
        """Return the approximate distance; infinite for different shapes or if only one tensor is finite."""
        if self.shape != other.shape:
            return math.inf
        distance = float((self.sums - other.sums).norm())
        if distance == distance:
            return distance
        return 0.0 if torch.equal(self.sums.isfinite(), other.sums.isfinite()) else math.inf
