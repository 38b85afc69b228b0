"""Random directions over weights, computed on the fly and never stored (SPSA; MeZO, arXiv:2305.17333, algorithm 1).
`perturb` adds and subtracts one direction, `descend` takes a step against several.

Each element's value z depends only on (key, step, direction, element). C++ (`csrc/direction_kernel.inl`) and torch on
any device give the same bits, because no result depends on fused operations. docs/reference/numerics.md defines z.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from offload.errors import ConfigError
from offload.native.arrays import BF16, BITS16, FP32, FP32_OR_BF16, address_of, flat, on_cpu, tensor
from offload.native.core import core as _core
from offload.native.kernels import BLOCK, _execution

if TYPE_CHECKING:
    import torch

PURPOSE = 1
"""Philox purpose for a step's first direction. Each further direction adds 65536."""
ROUNDING = 3
"""Philox purpose for stochastic rounding, for bf16 weights without a low half."""
_NEXT = 1 << 16
_SCALE = float.fromhex("0x1.9f2c5p-11")  # 1 / sqrt(1594709), rounded to fp32 like every number here
_PIECE = 1 << 16  # elements at a time: fits the CPU cache
PIECE_OF_DEVICE = 1 << 21  # few launches


class NoiseRange(NamedTuple):
    """Random stream for directions over weights in one parameter."""

    key: int
    """64-bit key for the parameter and the run seed."""
    step: int
    """Training step, 32 bits."""
    element: int = 0
    """First weight's position in the flat parameter, a multiple of 64."""
    threshold: float = math.inf
    """Weights with a larger magnitude in the compute dtype get z = 0."""

    def check(self, multiple: int = 64) -> None:
        """Raise ConfigError for a field outside its range."""
        if not (0 <= self.key < 2**64 and 0 <= self.step < 2**32 and self.element >= 0) or self.element % multiple:
            raise ConfigError(
                f"key is {self.key}, step is {self.step} and element is {self.element}; key must fit in 64 bits, step "
                f"in 32 bits, and element must be a multiple of {multiple}."
            )


def perturb(
    weights: Any,
    plus: Any,
    minus: Any,
    eps: float,
    of: NoiseRange,
    *,
    direction: int = 0,
    threads: int | None = None,
    isa: str | None = None,
) -> None:
    """Fill plus and minus with weights + eps z and weights - eps z. All three are float32 [n] or all are bfloat16 [n],
    rounded to nearest. `direction`: index within the step.
    """
    of.check()
    noise = of.key, of.step, PURPOSE + _NEXT * direction, of.element, of.threshold
    if _core is None or not on_cpu(weights):
        first = tensor("weights", weights, FP32_OR_BF16)
        both = [tensor(name, each, FP32_OR_BF16, first) for name, each in (("plus", plus), ("minus", minus))]
        for piece in _pieces(first):  # z in fp32 for all weights at once would need twice their memory and more
            moved = _direction(first[piece], of, direction, piece).mul_(eps)
            both[0][piece] = first[piece].float() + moved
            both[1][piece] = first[piece].float() - moved
        return
    address, n, is_bf16 = flat("weights", weights, FP32_OR_BF16)
    dtypes = FP32
    if is_bf16:
        dtypes = BF16
    addresses = address_of("plus", plus, dtypes, n), address_of("minus", minus, dtypes, n)
    _core.perturb(address, *addresses, is_bf16, n, *noise, eps, *_execution(threads, isa))


def descend(
    master: Any,
    coefficients: Sequence[float],
    of: NoiseRange,
    *,
    lr: float,
    weight_decay: float = 0.0,
    threads: int | None = None,
    isa: str | None = None,
) -> int | torch.Tensor:
    """Step against the directions: weight -= lr (sum of coefficient * z + weight_decay * weight).

    The arithmetic is fp32, each operation rounded separately, directions in order. Returns the number of non-finite
    weights, on an accelerator as a 0-dim int64 tensor.

    master: float32 [n]; or halves (hi: bfloat16 [n], lo: int16 [n]), with `of.threshold` compared with hi; or bfloat16
    [n] alone, starting at a multiple of 128, with stochastic rounding.
    """
    if not coefficients:
        raise ConfigError(
            "coefficients is empty; it must have one number for each direction of the step, at least one."
        )
    of.check()
    weights, lo = master, None
    name, dtypes = "master", FP32_OR_BF16
    if isinstance(master, tuple):
        weights, lo = master
        name, dtypes = "hi", BF16
    if _core is None or not on_cpu(weights):
        first = tensor(name, weights, dtypes)
        low = None
        if lo is not None:
            low = tensor("lo", lo, BITS16, first)
        count = _descend(first, low, coefficients, of, lr, weight_decay)
        if on_cpu(weights):
            return int(count)
        return count
    address, n, is_bf16 = flat(name, weights, dtypes)
    if is_bf16 and lo is None:
        of.check(BLOCK)
    low_address = address_of("lo", lo, BITS16, n)
    arrays, noise = (address, low_address, is_bf16, n), (of.key, of.step, PURPOSE, of.element, of.threshold)
    return _core.descend(*arrays, *noise, ROUNDING, list(coefficients), lr, weight_decay, *_execution(threads, isa))


def normal(words: torch.Tensor) -> torch.Tensor:
    """Return one float32 number per int32 word, with mean 0 and variance 1. See docs/reference/numerics.md."""
    upper = words.bitwise_right_shift(8).bitwise_and_(0xFFFFFF)
    # The number of ones in 24 bits is close to normal, by sums of neighbouring fields. The low byte fills the steps.
    ones = upper.bitwise_and(0x555555).add_(upper.bitwise_right_shift(1).bitwise_and_(0x555555))
    ones = ones.bitwise_and(0x333333).add_(ones.bitwise_right_shift(2).bitwise_and_(0x333333))
    ones = ones.bitwise_and(0x0F0F0F).add_(ones.bitwise_right_shift(4).bitwise_and_(0x0F0F0F))
    ones = ones.bitwise_and(0xFF).add_(ones.bitwise_right_shift(8).bitwise_and_(0xFF)).add_(ones >> 16)
    whole = ones.mul_(512).add_(words.bitwise_and(0xFF).mul_(2)).sub_(6399)
    return whole.float().mul_(_SCALE)


def _descend(
    first: torch.Tensor,
    low: torch.Tensor | None,
    coefficients: Sequence[float],
    of: NoiseRange,
    lr: float,
    weight_decay: float,
) -> torch.Tensor:
    import torch

    from offload.native import moments, torch_fallback

    is_short = low is None and first.dtype == torch.bfloat16
    if is_short:
        of.check(BLOCK)
    num_nonfinite = torch.zeros((), dtype=torch.int64, device=first.device)
    for piece in _pieces(first):
        stored = first[piece]
        weights = torch_fallback.widened(first, low, piece)
        slope: torch.Tensor | None = None
        for direction, coefficient in enumerate(coefficients):
            term = _direction(first[piece], of, direction, piece).mul_(coefficient)
            slope = term if slope is None else slope.add_(term)
        assert slope is not None
        # The order of the C++ kernel: sums of fp32 differ by their order.
        slope.add_(weights * weight_decay)
        weights.sub_(slope.mul_(lr))
        if low is not None:
            torch_fallback.split(weights, stored, low[piece])
        elif is_short:
            bits = weights.numel(), of.key, of.step, of.element + piece.start, stored.device, ROUNDING
            moments.round_between(weights, stored, moments.random_halves(*bits))
            weights = stored
        num_nonfinite += weights.isfinite().logical_not_().sum()
    return num_nonfinite


def _direction(used: torch.Tensor, of: NoiseRange, direction: int, piece: slice) -> torch.Tensor:
    """Return z over `piece`. `used`: weights in the compute dtype."""
    from offload.native import moments

    purpose = PURPOSE + _NEXT * direction
    z = normal(moments.words(used.numel(), of.key, of.step, purpose, of.element + piece.start, used.device))
    if of.threshold == math.inf:
        return z
    return z.masked_fill_((used.abs() <= of.threshold).logical_not_(), 0.0)  # not above: a NaN has no z either


def _pieces(flat: torch.Tensor) -> list[slice]:
    step = PIECE_OF_DEVICE
    if flat.is_cpu:
        step = _PIECE
    return [slice(begin, min(begin + step, flat.numel())) for begin in range(0, flat.numel(), step)]
