"""bfloat16 conversion and accumulation against torch, bit for bit."""

from __future__ import annotations

import pytest
import torch

from offload.native import kernels
from tests.native.states import same_bits, wild


def rounding_cases() -> torch.Tensor:
    """Return all high halves, with low halves around a tie: denormals, both tie directions, overflow, inf, NaN."""
    high = torch.arange(1 << 16, dtype=torch.int64) << 16
    return torch.cat([high + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).to(torch.int32).view(torch.float32)


def test_round_bf16_in_place(isa):
    x = rounding_cases()
    expected = x.bfloat16().float()
    assert kernels.round_bf16_(x, isa=isa) is x
    assert same_bits(x, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulate(isa, dtype):
    state = wild(300_001)
    x = state.m.to(dtype)
    expected = state.p + x.float()
    kernels.accumulate(state.p, x, threads=2, isa=isa)
    assert same_bits(state.p, expected)


def test_short_lengths_and_offsets(isa):
    x = torch.randn(200)
    for n in range(70):
        piece = x[1 : n + 1]
        out = torch.empty(n + 3, dtype=torch.bfloat16)[3:].copy_(piece)
        rounded = piece.clone()
        kernels.round_bf16_(rounded, isa=isa)
        assert torch.equal(rounded, out.float())
        total = torch.ones(n + 1)[1:]
        kernels.accumulate(total, out, isa=isa)
        assert torch.equal(total, 1 + out.float())
