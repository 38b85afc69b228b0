"""The split master is a bijection, and the high half is the nearest bfloat16."""

from __future__ import annotations

import pytest
import torch

from offload.native import kernels


def floats(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).view(torch.float32)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


def test_every_half_comes_back(isa):
    low = torch.arange(1 << 16, dtype=torch.int64)
    edges = (0, 1, 0x7F, 0x80, 0x3F80, 0x3FFF, 0x4000, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF)
    for high in [*edges, *(edge | 0x8000 for edge in edges)]:
        master = floats((high << 16) + low)
        hi, lo = kernels.split(master, isa=isa)
        assert torch.equal(bits(kernels.join(hi, lo, isa=isa)), bits(master))
        assert torch.equal(hi.view(torch.int16), ((((high << 16) + low + 0x8000) >> 16) & 0xFFFF).to(torch.int16))
        assert torch.equal(lo, low.to(torch.int16))
    high = low << 16
    for value in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        master = floats(high + value)
        assert torch.equal(bits(kernels.join(*kernels.split(master, isa=isa), isa=isa)), bits(master))


def test_every_pair_of_halves_is_some_master():
    hi = torch.arange(1 << 16, dtype=torch.int64).to(torch.int16).view(torch.bfloat16)
    for value in (-0x8000, -1, 0, 1, 0x7FFF):
        lo = torch.full((1 << 16,), value, dtype=torch.int16)
        again = kernels.split(kernels.join(hi, lo))
        assert torch.equal(again[0].view(torch.int16), hi.view(torch.int16))
        assert torch.equal(again[1], lo)


@pytest.mark.usefixtures("either")
def test_halves_round_away_from_zero():
    master = floats(torch.tensor([0x3F808000, 0x3F818000, -0x407F8000, 0x3F807FFF]))
    hi, lo = kernels.split(master)
    assert hi.view(torch.int16).tolist() == [0x3F81, 0x3F82, 0xBF81 - 0x10000, 0x3F80]
    assert lo.tolist() == [-0x8000, -0x8000, -0x8000, 0x7FFF]
    arrays = kernels.split(master.numpy())
    assert [array.dtype for array in arrays] == ["uint16", "int16"]
    assert [array.view("i2").tolist() for array in arrays] == [hi.view(torch.int16).tolist(), lo.tolist()]
    assert (kernels.join(*arrays) == master.numpy()).all()


def test_lengths_offsets_threads_and_out(isa):
    master = torch.randn(3 * (1 << 17) + 13)
    for n in [*range(70), master.numel() - 1]:
        piece = master[1 : n + 1]
        out = (torch.empty(n, dtype=torch.int16), torch.empty(n, dtype=torch.int16))
        hi, lo = kernels.split(piece, out, threads=3, isa=isa)
        assert hi is out[0]
        assert lo is out[1]
        back = torch.empty(n + 1)[1:]
        assert kernels.join(hi, lo, back, threads=3, isa=isa) is back
        assert torch.equal(back, piece)
