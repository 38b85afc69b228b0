"""Sums of squares: close to the exact sum, with equal bits for all implementations."""

from __future__ import annotations

import math

import pytest
import torch

from offload.native import kernels
from tests.native.states import ISAS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 1_000, (1 << 14) - 1, (1 << 14) + 1, 100_003])
def test_close_to_the_exact_sum(dtype, n):
    x = (torch.randn(n) * torch.logspace(-18, 18, n)).to(dtype)
    exact = math.fsum(value * value for value in x.double().tolist())
    assert kernels.sum_squares(x) == pytest.approx(exact, rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_isas_threads_addresses_and_the_fallback_give_the_same_bits(dtype, monkeypatch):
    most = 3 if dtype == torch.float16 else 10  # above, fp16 is infinite
    storage = (torch.randn(300_000) * torch.logspace(-10, most, 300_000)).to(dtype)
    lengths, found = [*range(70), 16_385, 70_001, 299_000], {}
    for n in lengths:
        x = storage[:n].clone()
        expected = found[n] = kernels.sum_squares(x, threads=1, isa=ISAS[-1])
        for isa in ISAS:
            for threads in (1, 3):
                assert kernels.sum_squares(x, threads=threads, isa=isa) == expected
            moved = torch.cat([x.new_zeros(1), x])[1:]
            assert kernels.sum_squares(moved, isa=isa) == expected
    monkeypatch.setattr(kernels, "_core", None)
    assert found == {n: kernels.sum_squares(storage[:n]) for n in lengths}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_segments_equal_their_slices(dtype, isa, monkeypatch):
    x = torch.randn(200_003).to(dtype)
    offsets = [0, 5, 5, 100, 20_000, 199_999, 200_003, 0]
    sizes = [5, 0, 1, 19_900, 170_001, 4, 0, 200_003]
    sums = kernels.sum_squares_segments(x, offsets, sizes, threads=2, isa=isa)
    assert sums.dtype == torch.float64
    if dtype == torch.float32:
        assert kernels.sum_squares_segments(x.numpy(), offsets, sizes, isa=isa).tolist() == sums.tolist()
    monkeypatch.undo()
    slices = [kernels.sum_squares(x[o : o + s]) for o, s in zip(offsets, sizes, strict=True)]
    assert sums.tolist() == slices
    assert kernels.sum_squares_segments(x, [], []).shape == (0,)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("where", [0, 40, 99_999])
def test_nonfinite_values_come_through(isa, where):
    x = torch.randn(100_000)
    x[where] = float("inf")
    assert kernels.sum_squares(x, isa=isa) == math.inf
    x[where] = float("nan")
    assert math.isnan(kernels.sum_squares(x, isa=isa))
    assert math.isnan(kernels.sum_squares(x.bfloat16(), isa=isa))
    assert math.isnan(kernels.sum_squares(x.half(), isa=isa))


def test_the_largest_floats_do_not_overflow():
    x = torch.full((1_000,), torch.finfo(torch.float32).max)
    assert kernels.sum_squares(x) == pytest.approx(1_000 * float(x[0]) ** 2)
