"""Reference dequantization, one block at a time: the oracle for codecs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LEVELS = torch.tensor(
    (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    )
)


def int8(weights: Tensor) -> Tensor:
    """Symmetric int8: 127 steps per sign, scaled by the largest magnitude in a block with 128 elements."""
    found = []
    for block in weights.float().split(128):
        step = block.abs().max() / 127
        found.append((block / step).round() * step)
    return torch.cat(found)


def nf4(weights: Tensor) -> Tensor:
    """Nearest level per element, scaled by the largest magnitude in a block with 64 elements.

    The magnitudes, minus their mean, are quantized to 8 bits in groups with 256.
    """
    blocks = weights.float().split(64)
    sizes = torch.stack([block.abs().max() for block in blocks])
    levels = [
        LEVELS[(block[:, None] / size - LEVELS).abs().argmin(1)] for block, size in zip(blocks, sizes, strict=True)
    ]
    mean, magnitudes = sizes.mean(), []
    for some in (sizes - mean).split(256):
        most = some.abs().max()
        on_grid = ((some / most + 1) * 32767.5 + 0.5).floor() / 32767.5 - 1
        nearest = (on_grid[:, None].double() - _dynamic()).abs().argmin(1)
        magnitudes.append(_dynamic()[nearest].float() * most + mean)
    return torch.cat([level * size for level, size in zip(levels, torch.cat(magnitudes), strict=True)])


def fp8(weights: Tensor) -> Tensor:
    """Nearest e4m3 number (to an even one, between two) per element, scaled by the largest magnitude of all over 448.

    Weights are first rounded to bf16, away from zero between two numbers. The product is exact in float64.
    """
    bits = (weights.float().view(torch.int32) + 0x8000) & -0x10000
    used = bits.view(torch.float32)
    scale = used.abs().max().clamp(min=1e-12) / torch.tensor(448.0)
    normal = [(1 + mantissa / 8) * 2.0**exponent for exponent in range(-6, 9) for mantissa in range(8)]
    numbers = torch.tensor([mantissa / 512 for mantissa in range(8)] + normal[:-1])  # the last one is NaN
    above = torch.searchsorted(numbers, used.div(scale).abs()).clamp(max=126)
    below = (above - 1).clamp(min=0)
    sizes = used.div(scale).abs().double()
    away, towards = numbers[above].double() - sizes, sizes - numbers[below].double()
    nearest = torch.where((away < towards) | ((away == towards) & (above % 2 == 0)), above, below)
    return (numbers[nearest].copysign(used).double() * scale.double()).float()


PLAIN: dict[str, Callable[[Tensor], Tensor]] = {"int8": int8, "fp8": fp8, "nf4": nf4}
"""Reference function by codec name."""


def _dynamic() -> Tensor:
    """Return the 256 numbers in arXiv:2110.02861, section 2."""
    sizes = [
        (0.1 + 0.9 * (2 * place + 1) / (2 << level)) * 10.0 ** (level - 6)
        for level in range(7)
        for place in range(1 << level)
    ]
    return torch.tensor(sorted([0.0, 1.0, *sizes, *(-size for size in sizes)]), dtype=torch.float64)
