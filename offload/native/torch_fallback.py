"""The kernels in plain torch: for machines without a compiler and tensors that are not on the CPU.

Arguments are one-dimensional tensors that have been checked. The order of operations is that of csrc/*_kernel.inl,
spelled in torch operations that round alike on every device; on the CPU the results are the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from offload.native.moments import BLOCK, decode, encode, random_halves, round_between

_CHUNK = 1 << 18  # elements at a time on the CPU: temporaries stay in the cache, and small
SCRATCH_BYTES = 128 << 20
"""The most that an update takes for temporaries on another device. Pieces are as large as that allows: each takes 16 to
30 launches, which on a GPU cost more than small pieces do."""
_BYTES_AN_ELEMENT = {"fp32": 32, "bf16": 96, "int8": 96}  # at most, of temporaries; by how moments are stored
_BLOCK, _LANES = 1 << 14, 32  # csrc/reduce.cpp, csrc/reduce_kernel.inl


_Rule = Callable[..., None]


@torch.no_grad()
def update(
    rule: _Rule,
    states: str,
    master: Tensor,
    lo: Tensor | None,
    moments: Sequence[Tensor | tuple[Tensor, Tensor]],
    grad: Tensor,
    scalars: tuple[float, ...],
    drawn: tuple[int, int, int],
) -> Tensor:
    """Update in place by a `rule` below; return the number of new master weights that are not finite, 0-dim int64 on
    the device of the arrays.

    master: float32 [n], or with `lo` (int16 [n]) the bfloat16 plane of a split master. moments: as `states` says, see
    `offload.native.kernels.adamw`; `drawn`: the key, step and element they are rounded with.
    """
    num_nonfinite = torch.zeros((), dtype=torch.int64, device=master.device)
    key, step, element = drawn
    if states != "fp32":
        rule = _OF_ROUNDED.get(rule, rule)
    for part in _parts(master, _BYTES_AN_ELEMENT[states]):
        weight = master[part] if lo is None else join(master[part], lo[part])
        blocks = slice(part.start // BLOCK, -(-part.stop // BLOCK))
        wide = []
        for which, moment in enumerate(moments):
            if isinstance(moment, tuple):
                wide.append(decode(moment[0][part], moment[1][blocks], which == 0))
            else:
                wide.append(moment[part].float())  # itself where it is fp32
        rule(weight, wide, grad[part], *scalars)
        num_nonfinite += _count_nonfinite(weight)
        if lo is not None:
            split(weight, master[part], lo[part])
        del weight
        if states == "bf16":
            random = random_halves(wide[0].numel(), key, step, element + part.start, master.device)
        for which, moment in enumerate(moments):
            if isinstance(moment, tuple):
                encode(wide[which], moment[0][part], moment[1][blocks], which == 0)
            elif states == "bf16":
                round_between(wide[which], moment[part], random)
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
    # CUDA divides by a Python number through its reciprocal; by a tensor it divides.
    correction = _scalar(sqrt_correction2, weight)
    denom = _sqrt(v).div_(correction).add_(eps)
    change = (m * neg_step_size).div_(denom)  # addcdiv_, whose order differs between CPU and CUDA
    weight.mul_(decay).add_(change)


def short_adamw(
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
    """Do the same for moments that will be rounded, as `AdamwShortStep` in csrc/adamw_kernel.inl does."""
    m, v = moments
    _update_moments(m, v, grad, grad_scale, lerp_weight, beta2, one_minus_beta2)
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
    """Turn a step that was done with `applied_scale` into one with `grad_scale`. See
    `offload.native.kernels.correct_adamw`.
    """
    if applied_scale == grad_scale:
        return
    correction, weight1 = _scalar(sqrt_correction2, weight), _scalar(lerp_weight, weight)

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
    nothing_else = v <= factor * applied
    v.addcmul_(factor.neg(), applied)
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
    weight.mul_(decay).sub_((mix.sign() * lr).add_(mix - mix))


def sgd(
    weight: Tensor,
    moments: Sequence[Tensor],
    grad: Tensor,
    grad_scale: float,
    weight_decay: float,
    momentum: float,
    lr: float,
) -> None:
    """Do one step of gradient descent. See `offload.native.kernels.sgd`."""
    change = (grad.float() * grad_scale).addcmul_(weight, _scalar(weight_decay, weight))  # without value: one fma
    if moments:
        change = moments[0].mul_(momentum).add_(change)
    weight.addcmul_(change, _scalar(-lr, weight))


def _scalar(value: float, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=like.device)


def _parts(master: Tensor, bytes_an_element: int) -> Iterator[slice]:
    """Cut an array in pieces, by the memory that their temporaries take."""
    size = _CHUNK if master.device.type == "cpu" else SCRATCH_BYTES // bytes_an_element // BLOCK * BLOCK
    for begin in range(0, master.numel(), size):
        yield slice(begin, min(begin + size, master.numel()))


def _count_nonfinite(weight: Tensor) -> Tensor:
    """Return how many are not finite, 0-dim int64: less from itself is 0, or NaN. (isfinite alone is four launches.)"""
    return (weight - weight).isnan().sum()


def _sqrt(x: Tensor) -> Tensor:
    """Return the square root, correctly rounded: torch's own for float32 on the CPU may be off by an ulp (MKL's is)."""
    return x.double().sqrt_().float() if x.device.type == "cpu" else x.sqrt()


def split(master: Tensor, hi: Tensor, lo: Tensor) -> None:
    """Split float32 [n] into bfloat16 [n] and int16 [n]: hi = (bits + 0x8000) >> 16, lo = bits - (hi << 16)."""
    bits = master.view(torch.int32)
    hi.view(torch.int16).copy_((bits + 0x8000).bitwise_right_shift_(16))  # the sum may wrap around, as it does in C++
    lo.copy_(bits)  # conversion keeps the low 16 bits


def join(hi: Tensor, lo: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the float32 [n], new or `out`, whose halves are bfloat16 [n] and int16 [n]."""
    joined = hi.view(torch.int16).int().bitwise_left_shift_(16).add_(lo).view(torch.float32)
    return joined if out is None else out.copy_(joined)


def sum_squares(x: Tensor) -> Tensor:
    """Return the sum of squares of float32 or bfloat16 [n], 0-dim float64 on its device.

    On the CPU in the order of csrc/reduce_kernel.inl; elsewhere in an order of torch's, fixed for a length.
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
        while sums.shape[1] > 1:
            sums = sums[:, : sums.shape[1] // 2] + sums[:, sums.shape[1] // 2 :]
        for block_sum in sums.flatten():
            total += block_sum
    return total


@torch.no_grad()
def copy_sum_squares(source: Tensor, out: Tensor) -> Tensor:
    """Copy float32 or bfloat16 [n] to `out` of the same dtype and return its `sum_squares`."""
    out.copy_(source)
    return sum_squares(source)


def sum_squares_segments(x: Tensor, offsets: list[int], sizes: list[int]) -> Tensor:
    """Return the sums of squares of the slices x[offset : offset + size], float64 [k] on the device of x."""
    if not offsets:
        return torch.zeros(0, dtype=torch.float64, device=x.device)
    return torch.stack([sum_squares(x[offset : offset + size]) for offset, size in zip(offsets, sizes, strict=True)])


def to_bf16(source: Tensor, out: Tensor) -> None:
    """Round float32 [n] to bfloat16 [n], to nearest, ties to even."""
    out.copy_(source)


def round_bf16(x: Tensor) -> None:
    """Round float32 [n] in place to values that bfloat16 has."""
    x.copy_(x.bfloat16())


@torch.no_grad()
def accumulate(total: Tensor, x: Tensor) -> None:
    """Add float32 or bfloat16 [n] to float32 [n]."""
    total.add_(x)
