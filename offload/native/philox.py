"""Philox4x32-7 random numbers in torch, on any device, equal to `csrc/philox.inl` (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011). docs/reference/numerics.md explains the counters.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 2**32 - 1
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 7
_DRAWN = 64  # elements per 16 neighbouring counters


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four random words per four-word counter. All are int64 [n] with 32 used bits; `key` has 64 bits."""
    first, second, third, fourth = counter
    key0, key1 = key & _MASK, key >> 32
    for _ in range(_ROUNDS):
        # A 64-bit product wraps around in int64 without losing bits.
        left, right = first * _MULTIPLIERS[0], third * _MULTIPLIERS[1]
        first, third = (right >> 32) ^ second ^ key0, (left >> 32) ^ fourth ^ key1
        first, second, third, fourth = first & _MASK, right & _MASK, third & _MASK, left & _MASK
        key0, key1 = (key0 + _WEYL[0]) & _MASK, (key1 + _WEYL[1]) & _MASK
    return first, second, third, fourth


def words(num_elements: int, key: int, step: int, purpose: int, element: int, device: torch.device) -> Tensor:
    """Return 32 random bits per element, int32 [num_elements]. `element`, a multiple of 64, numbers the first one."""
    num_blocks = -(-num_elements // _DRAWN)
    number = torch.arange(16 * num_blocks, dtype=torch.int64, device=device) + element // 4
    counter = number & _MASK, number >> 32, torch.full_like(number, step), torch.full_like(number, purpose)
    blocks = torch.stack([word.view(num_blocks, 16) for word in philox(counter, key)], 1)
    return blocks.view(-1)[:num_elements].to(torch.int32)  # the conversion keeps the low 32 bits
