"""Kernels in plain torch, for installations without C++ and for tensors on other devices.

Arguments are checked one-dimensional tensors. The order of operations follows csrc/*_kernel.inl, in torch operations
with the same rounding on every device. On the CPU the results equal C++ bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from offload.native.moments import BLOCK, decode, encode, random_halves, round_between

_CHUNK = 1 << 18  # elements at a time on the CPU: temporaries stay small and in the cache
SCRATCH_BYTES = 128 << 20
"""Maximum temporary memory for an update on another device, in bytes. Pieces are as large as this allows: each piece
takes 16 to 30 launches, on a GPU more time than a small piece itself.
"""
_BYTES_AN_ELEMENT = {"fp32": 32, "bf16": 96, "int8": 96}  # maximum temporary bytes per element, by moment dtype
_BLOCK = 1 << 14  # csrc/reduce.cpp
_LANES = 32  # csrc/reduce_kernel.inl
_Rule = Callable[..., None]


class Arguments(NamedTuple):
    """Checked arguments of an update, on one device.

    master: float32 [n], or with `lo` the high part of a split master, see `offload.native.kernels.split`. moments: see
    `offload.native.kernels.adamw`. rounding_key: key, step and element for stochastic rounding.
    """

    master: Tensor
    lo: Tensor | None
    moments: Sequence[Tensor | tuple[Tensor, Tensor]]
    grad: Tensor
    scalars: tuple[float, ...]
    rounding_key: tuple[int, int, int]


@torch.no_grad()
def update(rule: _Rule, states: str, arguments: Arguments) -> Tensor:
    """Update in place with a `rule` from below, with moments stored as in `states`. Return the number of non-finite new
    master weights, 0-dim int64 on the same device.
    """
    master, lo, moments, grad, scalars, (key, step, element) = arguments
    num_nonfinite = torch.zeros((), dtype=torch.int64, device=master.device)
    if states != "fp32":
        rule = _OF_ROUNDED.get(rule, rule)
    for part in _parts(master, _BYTES_AN_ELEMENT[states]):
        weight = widened(master, lo, part)
        blocks = slice(part.start // BLOCK, -(-part.stop // BLOCK))
        wide = []
        for index, moment in enumerate(moments):
            if isinstance(moment, tuple):
                wide.append(decode(moment[0][part], moment[1][blocks], index == 0))
            else:
                wide.append(moment[part].float())  # no copy for fp32
        rule(weight, wide, grad[part], *scalars)
        num_nonfinite += (weight - weight).isnan().sum()  # x - x is 0 or NaN; isfinite alone takes four launches
        if lo is not None:
            split(weight, master[part], lo[part])
        del weight
        if states == "bf16":
            random = random_halves(wide[0].numel(), key, step, element + part.start, master.device)
        for index, moment in enumerate(moments):
            if isinstance(moment, tuple):
                encode(wide[index], moment[0][part], moment[1][blocks], index == 0)
            elif states == "bf16":
                round_between(wide[index], moment[part], random)
    return num_nonfinite


def adamw(
    weight: Tensor,
    moments: Sequence[Tensor],
    grad: Tensor,
    grad_scale: float,
    decay: float,
    lerp_weight: float,
    beta2: float,
    one_minus_beta2: float,
    sqrt_correction2: float,
    eps: float,
    neg_step_size: float,
) -> None:
    """Do one AdamW step. See `offload.native.kernels.adamw`."""
    m, v = moments
    _update_moments(m, v, grad, grad_scale, lerp_weight, beta2, one_minus_beta2)
    # Divide by a tensor: CUDA divides by a Python number through the reciprocal.
    correction = _scalar(sqrt_correction2, weight)
    denom = _sqrt(v).div_(correction).add_(eps)
    change = (m * neg_step_size).div_(denom)  # instead of addcdiv_, because its order differs between CPU and CUDA
    weight.mul_(decay).add_(change)


def short_adamw(weight: Tensor, moments: Sequence[Tensor], grad: Tensor, *scalars: float) -> None:
    """Do one AdamW step for moments with later rounding, like `AdamwShortStep` in csrc/adamw_kernel.inl. `scalars`: as
    in `adamw`.
    """
    grad_scale, decay, *coefficients, sqrt_correction2, eps, neg_step_size = scalars
    m, v = moments
    _update_moments(m, v, grad, grad_scale, *coefficients)
    correction = _scalar(sqrt_correction2, weight)
    denom = _sqrt(v).add_(_scalar(eps, weight) * correction)
    change = (m * (_scalar(neg_step_size, weight) * correction)).div_(denom)
    weight.copy_(change.addcmul_(weight, _scalar(decay, weight)))  # without value: one fma


_OF_ROUNDED = {adamw: short_adamw}


def _update_moments(
    m: Tensor, v: Tensor, grad: Tensor, grad_scale: float, lerp_weight: float, beta2: float, one_minus_beta2: float
) -> None:
    scaled = grad.float() * grad_scale
    m.lerp_(scaled, lerp_weight)
    v.mul_(beta2).addcmul_(scaled, scaled, value=one_minus_beta2)


def correct_adamw(
    weight: Tensor,
    moments: Sequence[Tensor],
    grad: Tensor,
    applied_scale: float,
    grad_scale: float,
    lerp_weight: float,
    one_minus_beta2: float,
    least_v_per_m2: float,
    sqrt_correction2: float,
    eps: float,
    neg_step_size: float,
) -> None:
    """Change a step with `applied_scale` into a step with `grad_scale`. See `offload.native.kernels.correct_adamw`."""
    if applied_scale == grad_scale:
        return
    correction = _scalar(sqrt_correction2, weight)
    weight1 = _scalar(lerp_weight, weight)

    def change(m: Tensor, v: Tensor) -> Tensor:
        return (m * neg_step_size).div_(_sqrt(v).div_(correction).add_(eps))

    m, v = moments
    raw = grad.float()
    applied, scaled = raw * applied_scale, raw * grad_scale
    del raw
    old_change = change(m, v)
    nothing_else = m == applied * lerp_weight
    m.addcmul_(applied.neg(), weight1).masked_fill_(nothing_else, 0)  # addcmul_ without value: one fma
    factor = applied * one_minus_beta2
    nothing_else = v <= factor * applied  # the past was lost in rounding
    v.addcmul_(factor.neg(), applied)
    # Then the smallest past that agrees with m, or the corrected step could be far too large.
    v.copy_(torch.where(nothing_else, (m * least_v_per_m2).mul_(m), v))
    m.addcmul_(scaled, weight1)
    v.addcmul_(scaled * one_minus_beta2, scaled)
    weight.add_(change(m, v).sub_(old_change))


def lion(
    weight: Tensor,
    moments: Sequence[Tensor],
    grad: Tensor,
    grad_scale: float,
    decay: float,
    beta1: float,
    one_minus_beta1: float,
    beta2: float,
    one_minus_beta2: float,
    lr: float,
) -> None:
    """Do one Lion step. See `offload.native.kernels.lion`."""
    (m,) = moments
    scaled = grad.float() * grad_scale
    mix = (m * beta1).addcmul_(scaled, _scalar(one_minus_beta1, weight))  # without value: one fma
    m.mul_(beta2).addcmul_(scaled, _scalar(one_minus_beta2, weight))
    weight.mul_(decay).sub_((mix.sign() * lr).add_(mix - mix))  # mix - mix is 0, or NaN: sign() would hide inf


def sgd(
    weight: Tensor,
    moments: Sequence[Tensor],
    grad: Tensor,
    grad_scale: float,
    weight_decay: float,
    momentum: float,
    lr: float,
) -> None:
    """Do one SGD step. See `offload.native.kernels.sgd`."""
    change = (grad.float() * grad_scale).addcmul_(weight, _scalar(weight_decay, weight))  # without value: one fma
    if moments:
        change = moments[0].mul_(momentum).add_(change)
    weight.addcmul_(change, _scalar(-lr, weight))


def _scalar(value: float, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=like.device)


def _parts(master: Tensor, bytes_an_element: int) -> Iterator[slice]:
    """Yield array slices, sized by their temporary memory."""
    size = SCRATCH_BYTES // bytes_an_element // BLOCK * BLOCK
    if master.device.type == "cpu":
        size = _CHUNK
    for begin in range(0, master.numel(), size):
        yield slice(begin, min(begin + size, master.numel()))


def _sqrt(x: Tensor) -> Tensor:
    """Return the correctly rounded square root. torch with float32 on the CPU may be off by an ulp (with MKL)."""
    if x.device.type == "cpu":
        return x.double().sqrt_().float()
    return x.sqrt()


def split(master: Tensor, hi: Tensor, lo: Tensor) -> None:
    """Split float32 [n] into bfloat16 [n] and int16 [n]: hi = (bits + 0x8000) >> 16, lo = bits - (hi << 16).

    Or into float16 [n] and the float32 [n] itself.
    """
    if hi.dtype == torch.float16:
        hi.copy_(master)
        lo.copy_(master)
        return
    bits = master.view(torch.int32)
    hi.view(torch.int16).copy_((bits + 0x8000).bitwise_right_shift_(16))  # the sum may wrap around, as in C++
    lo.copy_(bits)  # the conversion keeps the low 16 bits


def join(hi: Tensor, lo: Tensor, out: Tensor | None = None) -> Tensor:
    """Return float32 [n], new or `out`, from hi and lo of `split`."""
    if hi.dtype == torch.float16:
        joined = lo
    else:
        joined = hi.view(torch.int16).int().bitwise_left_shift_(16).add_(lo).view(torch.float32)
    if out is None:
        return joined
    return out.copy_(joined)


def widened(master: Tensor, lo: Tensor | None, part: slice) -> Tensor:
    """Return a part of weights as float32: the halves joined, or without `lo` the stored weights (no copy of fp32)."""
    if lo is None:
        return master[part].float()
    return join(master[part], lo[part])


def sum_squares(x: Tensor) -> Tensor:
    """Return the sum of squares for float32, bfloat16 or float16 [n], 0-dim float64 on the same device.

    On the CPU in the order of csrc/reduce_kernel.inl, elsewhere in a torch order fixed by the length.
    """
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    if x.device.type != "cpu":
        for begin in range(0, x.numel(), 64 * _CHUNK):
            total += x[begin : begin + 64 * _CHUNK].double().square_().sum()
        return total
    for begin in range(0, x.numel(), 16 * _BLOCK):
        part = x[begin : begin + 16 * _BLOCK]
        num_blocks = -(-part.numel() // _BLOCK)
        squares = torch.zeros(num_blocks * _BLOCK, dtype=torch.float64)
        squares[: part.numel()] = part
        lanes = squares.square_().view(num_blocks, -1, _LANES)
        sums = torch.zeros(num_blocks, _LANES, dtype=torch.float64)
        for row in range(lanes.shape[1]):
            sums += lanes[:, row]
        # In halves, as the C++ kernel folds its vectors: another order would have other bits.
        while sums.shape[1] > 1:
            sums = sums[:, : sums.shape[1] // 2] + sums[:, sums.shape[1] // 2 :]
        for block_sum in sums.flatten():
            total += block_sum
    return total


@torch.no_grad()
def copy_sum_squares(source: Tensor, out: Tensor) -> Tensor:
    """Copy float32, bfloat16 or float16 [n] to `out`, with the same dtype, and return the `sum_squares`."""
    out.copy_(source)
    return sum_squares(source)


def sum_squares_segments(x: Tensor, offsets: list[int], sizes: list[int]) -> Tensor:
    """Return `sum_squares` for each slice x[offset : offset + size], float64 [k] on the same device."""
    if not offsets:
        return torch.zeros(0, dtype=torch.float64, device=x.device)
    return torch.stack([sum_squares(x[offset : offset + size]) for offset, size in zip(offsets, sizes, strict=True)])


def round_bf16(x: Tensor) -> None:
    """Round float32 [n] in place to bfloat16 values."""
    x.copy_(x.bfloat16())


@torch.no_grad()
def accumulate(total: Tensor, x: Tensor) -> None:
    """Add float32, bfloat16 or float16 [n] to float32 [n]."""
    total.add_(x)
