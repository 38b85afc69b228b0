"""Quantized moments and Philox random numbers in torch, bit for bit like `csrc/moments.inl` and `csrc/philox.inl`.
docs/reference/numerics.md explains the counters of the random numbers.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

# Constants of Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
_MASK = 2**32 - 1
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 7  # the fewest rounds to pass the tests of the paper, which proposes ten for safety
_DRAWN = 64  # elements per 16 neighbouring counters


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four random words per four-word counter. All are int64 [n] with 32 used bits; `key` has 64 bits."""
    first, second, third, fourth = counter
    key0, key1 = key & _MASK, key >> 32
    for _ in range(_ROUNDS):
        # A 64-bit product wraps around in int64 without losing bits.
        left = first * _MULTIPLIERS[0]
        right = third * _MULTIPLIERS[1]
        first = ((right >> 32) ^ second ^ key0) & _MASK
        third = ((left >> 32) ^ fourth ^ key1) & _MASK
        second = right & _MASK
        fourth = left & _MASK
        key0 = (key0 + _WEYL[0]) & _MASK
        key1 = (key1 + _WEYL[1]) & _MASK
    return first, second, third, fourth


def words(num_elements: int, key: int, step: int, purpose: int, element: int, device: torch.device) -> Tensor:
    """Return 32 random bits per element, int32 [num_elements]: a function of `key`, `step`, `purpose` and the element.

    `element`, a multiple of 64, numbers the first one.
    """
    num_blocks = -(-num_elements // _DRAWN)
    number = torch.arange(16 * num_blocks, dtype=torch.int64, device=device) + element // 4
    counter = number & _MASK, number >> 32, torch.full_like(number, step), torch.full_like(number, purpose)
    blocks = torch.stack([word.view(num_blocks, 16) for word in philox(counter, key)], 1)
    return blocks.view(-1)[:num_elements].to(torch.int32)  # the conversion keeps the low 32 bits


BLOCK = 128
"""Weights per scale in 8-bit moments."""
_UNITS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_LEAST_SIZE = 2.0**-23  # added to magnitudes
_LEAST_NORMAL = 0x00800000  # bits of fp32
_INFINITY = 0x7F800000


def round_between(x: Tensor, out: Tensor, random: Tensor) -> None:
    """Round fp32 [n] to bf16 [n] stochastically, with 16 random bits each (int32 [n])."""
    bits = x.view(torch.int32).add(random).bitwise_right_shift_(16)  # arithmetic shift: only the low half matters
    out.view(torch.int16).copy_(bits.masked_fill_(x.isnan(), 0x7FC0))


def random_halves(
    num_elements: int, key: int, step: int, element: int, device: torch.device, purpose: int = 0
) -> Tensor:
    """Return 16 random bits per element, int32 [num_elements]. `element`, a multiple of 128, numbers the first one."""
    num_words = -(-num_elements // BLOCK) * BLOCK // 2
    halves = words(num_words, key, step, purpose, element // 2, device).view(-1, 1, 16)
    return torch.cat([halves & 0xFFFF, (halves >> 16) & 0xFFFF], 1).view(-1)[:num_elements]


_SIGNED = 256, 128, 1, 2
_UNSIGNED = 255, 255, 2, 1
"""Of a map: divisor of the largest rank, codes of a sign, numbers on the lowest level, ranks from code to code."""


@cache
def _tables(is_signed: bool, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the map tables, like make_map in csrc/moments.inl.

    By exponent: factor and summand of numbers, fp32 [2, 8]. By level: slope, start and limit of positions, fp32 [3, 8].
    By upper exponent bits: level border, fp32 [16], with the level below in the lowest bits.
    """
    numbers = torch.zeros(2, 8, dtype=torch.float64)
    places = torch.zeros(3, 8, dtype=torch.float64)
    divisor, num_codes, num_lowest, rank_step = _UNSIGNED
    if is_signed:
        divisor, num_codes, num_lowest, rank_step = _SIGNED
    numbers[0, 7] = 1 / divisor
    if not is_signed:
        numbers[1, 7] = -numbers[0, 7].float().double()
    places[0, 0] = places[2, 0] = num_codes + 0.5
    before = 0.0  # the largest number of the level below
    thresholds = []
    for level, unit in enumerate(_UNITS):
        count = num_lowest << level
        first = unit * (0.1 + 0.45 / count)
        place = count
        if not is_signed:
            place -= 1
        thresholds.append((before + first) / 2 + _LEAST_SIZE)
        before = unit * (1 - 0.45 / count)
        step = unit * 0.9 / count
        numbers[:, level] = torch.tensor([step / rank_step, first - count * step], dtype=torch.float64)
        if is_signed and level == 0:
            numbers[:, 0] = torch.tensor([first / 2, 0], dtype=torch.float64)
        places[:, (level + 1) % 8] = torch.tensor(
            [1 / step, place - count / 9 - _LEAST_SIZE / step, place + count - 0.5], dtype=torch.float64
        )
    thresholds.append((before + 1) / 2 + _LEAST_SIZE)
    edges = torch.tensor(thresholds, dtype=torch.float64)
    least = 0.5 * 4.0 ** torch.arange(-15, 1, dtype=torch.float64)
    below = (edges[:, None] <= least).sum(0).clamp(max=7)
    tables = numbers.float(), places.float(), _marked(edges[below], below)
    return tuple(table.to(device) for table in tables)  # type: ignore[return-value]


def _marked(x: Tensor, number: Tensor) -> Tensor:
    """Return the largest fp32 not above x (float64, positive) with the lowest three bits equal to `number`."""
    # One step too far, and back as often as needed: the conversion to fp32 may round up.
    bits = x.float().view(torch.int32).long() + 1
    bits -= (bits.int().view(torch.float32).double() > x).long()
    bits -= (bits.int().view(torch.float32).double() > x).long()
    return (bits - (bits - number) % 8).int().view(torch.float32)


def decode(codes: Tensor, scales: Tensor, is_signed: bool) -> Tensor:
    """Decode codes (uint8 [n]) with block scales (fp32) to fp32 [n]."""
    numbers = _tables(is_signed, codes.device)[0]
    scale = scales.repeat_interleave(BLOCK)[: codes.numel()]
    rank = codes.float()
    if is_signed:
        rank.mul_(2).sub_(254)
    else:
        rank.add_(1)
    exponent = (rank.view(torch.int32) >> 23) & 7  # of the whole number: the level in the map
    begin = numbers[1][exponent].mul_(scale)
    if is_signed:
        begin = torch.where(rank < 0, -begin, begin)
    return begin.addcmul_(numbers[0][exponent].mul_(scale), rank)  # one fused multiply-add


def encode(x: Tensor, codes: Tensor, scales: Tensor, is_signed: bool) -> None:
    """Quantize fp32 [n] into `codes` (uint8 [n]) and block `scales`."""
    _, (slope, start, limit), borders = _tables(is_signed, x.device)
    padded = torch.nn.functional.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    largest = (padded.view(torch.int32) & 0x7FFFFFFF).amax(1)
    # Such blocks have no scale to divide by: they store 0, or NaN for a moment that is not finite.
    is_wrong, is_zero = largest >= _INFINITY, largest < _LEAST_NORMAL
    most = largest.view(torch.float32)
    scales.copy_(most.masked_fill(is_zero, 0).masked_fill_(is_wrong, torch.nan))
    inverse = torch.ones_like(most).div_(most).masked_fill_(is_zero | is_wrong, 0)
    numbers = padded.masked_fill((is_wrong | is_zero)[:, None], 0)
    magnitudes = numbers
    if is_signed:
        magnitudes = numbers.abs()
    size = torch.full_like(numbers, _LEAST_SIZE).addcmul_(magnitudes, inverse[:, None].expand_as(numbers).contiguous())
    border = borders[(size.view(torch.int32) >> 24) & 15]
    level = (border.view(torch.int32) + (size >= border)) & 7
    place = torch.minimum(torch.addcmul(start[level], slope[level], size), limit[level]).int()
    if is_signed:
        place = torch.where(numbers.view(torch.int32) < 0, -place, place).add_(127).clamp_(min=0)
    codes.copy_(place.view(-1)[: x.numel()])
