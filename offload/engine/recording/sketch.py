"""Sums that tell tensors apart, in 2 KiB for a tensor of any size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

_SUMS = 256
_CHUNK = _SUMS * 251
"""Elements that are summed at once: no power of two, in which signs would repeat from row to row."""


@cache
def _signs(device: torch.device) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(1)
    return (torch.randint(0, 2, (_CHUNK,), generator=generator, dtype=torch.int8, device="cpu") * 2 - 1).to(device)


@dataclass(frozen=True, eq=False)
class Sketch:
    """Sums of a tensor's elements in float64, each with a random sign (a count sketch, Charikar et al. 2002).

    Equal tensors have equal sketches. The norm of the difference of two sketches is about that of the difference of the
    tensors, within a tenth, as far as differences do not repeat with the signs, every 64,256 elements.
    """

    shape: torch.Size
    """The shape of the tensor."""
    sums: torch.Tensor
    """float64 [256], on the CPU"""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Sketch:
        """Return the sketch of a tensor of any dtype and device."""
        flat = tensor.detach()
        flat = (torch.view_as_real(flat.resolve_conj()) if flat.is_complex() else flat).reshape(-1)
        signs, sums = _signs(flat.device), torch.zeros(_SUMS, dtype=torch.float64, device=flat.device)
        for chunk in flat.split(_CHUNK):
            signed = chunk.double() * signs[: chunk.numel()]
            whole = signed.numel() // _SUMS * _SUMS
            sums += signed[:whole].view(-1, _SUMS).sum(0)
            sums[: signed.numel() - whole] += signed[whole:]
        return cls(tensor.shape, sums.cpu())

    def __add__(self, other: Sketch) -> Sketch:
        return Sketch(self.shape, self.sums + other.sums)

    @property
    def norm(self) -> float:
        """About the norm of the tensor."""
        return float(self.sums.norm())

    def is_as(self, other: Sketch) -> bool:
        """True where both tensors have the same shape and elements; NaN equals NaN."""
        return self.shape == other.shape and bool(torch.equal(self.sums.nan_to_num(), other.sums.nan_to_num()))

    def distance(self, other: Sketch) -> float:
        """About the norm of the difference; infinite where the shapes differ, or one alone is not finite."""
        if self.shape != other.shape:
            return math.inf
        apart = float((self.sums - other.sums).norm())
        if apart == apart:
            return apart
        return 0.0 if torch.equal(self.sums.isfinite(), other.sums.isfinite()) else math.inf
