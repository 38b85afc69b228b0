"""AdamW states for the tests, and the corresponding torch update."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from offload.native import kernels

ISAS = kernels.available_isas() or (None,)
"""None: the torch fallback, if the C++ kernels are not built."""


@dataclass
class State:
    """Arrays for one AdamW step, float32 [n] each."""

    p: Tensor
    m: Tensor
    v: Tensor
    g: Tensor

    def copy(self) -> State:
        return State(*(getattr(self, f.name).clone() for f in fields(self)))

    def at(self, offset: int) -> State:
        """Return the same values at an address `offset` elements past the alignment."""
        return State(*(torch.cat([x.new_zeros(offset), x])[offset:] for x in (self.p, self.m, self.v, self.g)))


def ordinary(n: int, seed: int = 0) -> State:
    """Return typical training values."""
    r = torch.Generator().manual_seed(seed)
    normal = lambda: torch.randn(n, generator=r)  # noqa: E731
    return State(normal() * 0.02, normal() * 1e-3, (normal() * 1e-3) ** 2, normal() * 1e-3)


def wild(n: int, seed: int = 0) -> State:
    """Return all magnitudes from the smallest denormal to 1e30, signed zeros, and zero or tiny weights."""
    r = torch.Generator().manual_seed(seed)

    def magnitudes(low: float, high: float) -> Tensor:
        exponent = torch.rand(n, generator=r, dtype=torch.float64) * (high - low) + low
        sign = torch.randint(0, 2, (n,), generator=r) * 2 - 1
        values = (sign * 10**exponent).float()
        values[torch.rand(n, generator=r) < 0.1] = 0.0
        values[torch.rand(n, generator=r) < 0.02] = -0.0
        return values

    g = magnitudes(-45, 30)
    near = magnitudes(-1, 1).abs()
    m = torch.where(torch.rand(n, generator=r) < 0.5, -g / 9 * near, magnitudes(-45, 30))  # lerp may cancel
    v = torch.where(torch.rand(n, generator=r) < 0.5, g * g * near, magnitudes(-45, 38).abs())
    p = torch.where(torch.rand(n, generator=r) < 0.5, magnitudes(-6, -1), magnitudes(-45, 30))
    return State(p, m, v, g)


def torch_step(
    state: State, step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> State:
    """Return the state after one single-tensor torch AdamW step, from a copy."""
    s = state.copy()
    parameter = torch.nn.Parameter(s.p)
    parameter.grad = s.g
    optimizer = torch.optim.AdamW(
        [parameter], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, foreach=False, fused=False
    )
    optimizer.state[parameter] = {"step": torch.tensor(float(step - 1)), "exp_avg": s.m, "exp_avg_sq": s.v}
    optimizer.step()
    return State(parameter.detach(), s.m, s.v, s.g)


def native_step(state: State, **settings: object) -> State:
    """Return the state after one step of the tested kernel, from a copy with a float32 master."""
    s = state.copy()
    kernels.adamw(s.p, s.m, s.v, s.g, **settings)  # type: ignore[arg-type]
    return s


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors with one dtype are equal in every bit. Any NaN equals any NaN."""
    assert a.dtype == b.dtype
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}.get(a.dtype, a.dtype)
    return bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())


def ulps_apart(ours: Tensor, theirs: Tensor, before: Tensor) -> Tensor:
    """Return |ours - theirs| in ulps at max(|p|, |update|). 0 if both are the same non-finite value."""
    import numpy

    scale = torch.maximum(theirs.abs(), (theirs.double() - before.double()).abs().float())
    unit = torch.from_numpy(numpy.spacing(scale.numpy())).double()
    apart = (ours.double() - theirs.double()).abs() / unit
    alike = (ours == theirs) | (ours.isnan() & theirs.isnan())
    return torch.where(alike, torch.zeros_like(apart), apart)
