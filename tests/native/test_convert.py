"""bfloat16 and float16 conversion and accumulation against torch, bit for bit."""

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


def test_every_float16_is_read_as_torch_reads_it(isa):
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    total = torch.zeros(1 << 16)
    kernels.accumulate(total, x, isa=isa)
    assert same_bits(total, torch.zeros(1 << 16) + x.float())


def test_a_master_is_rounded_to_float16_as_torch_rounds(isa):
    # Low halves around every border between two float16 numbers, of all exponents: ties, denormals and overflow.
    high = torch.arange(1 << 16, dtype=torch.int64) << 16
    lows = (0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0xF000, 0xFFFF)
    master = torch.cat([high + low for low in lows]).to(torch.int32).view(torch.float32)
    expected = torch.where(master.isinf(), torch.nan, master)  # 0 times infinity, in a step of length 0
    copy, exact = torch.empty_like(master, dtype=torch.float16), master.clone()
    kernels.sgd((copy, exact), None, torch.zeros_like(master), lr=0.0, momentum=0.0, weight_decay=0.0, isa=isa)
    assert same_bits(exact, expected)
    assert same_bits(copy, expected.half())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
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
