"""copy_sum_squares: an exact copy in `out`, no write outside, and the bits of sum_squares."""

from __future__ import annotations

import math
import threading

import pytest
import torch

from offload.errors import ConfigError
from offload.native import kernels
from tests.native.states import ISAS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BLOCK = 1 << 14  # summation block
FEW = 1 << 17  # threads share work from this size on
STREAM_BYTES = 1 << 20  # stores bypass the caches from this size on
GUARD = 40  # elements on both sides of `out`, more than a cache line


def spread(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Return n values with very different magnitudes: every summation order gives other bits."""
    return (torch.randn(n) * torch.logspace(-10, 10, n)).to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def check(x: torch.Tensor, offset: int = 0, **how: object) -> None:
    """Copy x to an address `offset` elements past a cache line start, and check all bits."""
    around = torch.full((x.numel() + 2 * GUARD + 128,), 3.0, dtype=x.dtype)
    begin = GUARD + -(around.data_ptr() // x.itemsize + GUARD) % 64 + offset % 64
    out = around[begin : begin + x.numel()]
    source_bits = bits(x).clone()
    expected = kernels.sum_squares(x, threads=1, isa=ISAS[-1])
    assert kernels.copy_sum_squares(x, out, **how) == expected
    assert torch.equal(bits(out), source_bits)
    assert torch.equal(bits(x), source_bits)
    assert (around[:begin] == 3).all()
    assert (around[begin + x.numel() :] == 3).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_short_lengths_at_every_address(dtype, isa):
    source = spread(200, dtype)
    for n in range(132):
        check(source[:n], isa=isa)
        check(source[n % 7 :][:n], n * 5, isa=isa)
    for offset in range(64):
        check(source[:131], offset, isa=isa)
        check(source[1:101], offset, isa=isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_lengths_around_the_borders(dtype, isa, threads):
    borders = {BLOCK, 2 * BLOCK, FEW, STREAM_BYTES // dtype.itemsize}
    source = spread(max(borders) + 100, dtype)
    for border in sorted(borders):
        for delta, offset in ((-33, 0), (-1, 31), (0, 0), (0, 7), (1, 1), (31, 15), (65, 33)):
            check(source[delta % 3 :][: border + delta], offset, isa=isa, threads=threads)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 31, 33, BLOCK - 1, BLOCK, BLOCK + 1, 300_007])
def test_native_and_torch_alike(dtype, n):
    check(spread(n, dtype), 5)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n", [1 << 16, 7 * (1 << 16) + 5])
def test_every_bit_pattern_of_bfloat16(isa, n):
    x = torch.arange(n, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    out = torch.zeros(n + 1, dtype=torch.bfloat16)[1:]
    assert math.isnan(kernels.copy_sum_squares(x, out, isa=isa if kernels.is_native() else None))
    assert torch.equal(bits(out), bits(x))


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n", [50, 1_000, 300_000])
def test_special_values(isa, n):
    isa = isa if kernels.is_native() else None
    patterns = [0x7FC00000, 0x7F800001, -0x400001, 0x7FABCDEF, -1]  # NaN: quiet and signalling, both signs
    patterns += [-0x80000000, 1, -0x7FFFFFFF]  # -0 and the smallest denormals
    x = torch.randn(n)
    where = torch.arange(0, n, 7)
    bits(x)[where] = torch.tensor(patterns, dtype=torch.int32)[torch.arange(where.numel()) % len(patterns)]
    out = torch.zeros(n)
    assert math.isnan(kernels.copy_sum_squares(x, out, isa=isa))
    assert torch.equal(bits(out), bits(x))

    x = torch.full((n,), -0.0)
    assert math.copysign(1, kernels.copy_sum_squares(x, out, isa=isa)) == 1
    assert torch.equal(bits(out), bits(x))
    x[n // 2] = -math.inf
    assert kernels.copy_sum_squares(x, out, isa=isa) == math.inf
    assert torch.equal(bits(out), bits(x))


@pytest.mark.usefixtures("either")
def test_numpy_and_shapes():
    x = torch.randn(6, 50)
    out = torch.empty(300)
    assert kernels.copy_sum_squares(x.numpy(), out.numpy()) == kernels.sum_squares(x)
    assert torch.equal(out, x.flatten())
    half, half_bits = x.bfloat16(), torch.empty(300, dtype=torch.int16)
    assert kernels.copy_sum_squares(half, half_bits) == kernels.sum_squares(half)
    assert torch.equal(half_bits, bits(half).flatten())
    parameter = torch.nn.Parameter(torch.empty(300))
    assert kernels.copy_sum_squares(x, parameter) == kernels.sum_squares(x)
    assert torch.equal(parameter.detach(), x.flatten())


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize(
    ("source", "out", "message"),
    [
        (torch.ones(8), torch.zeros(9), "^out has 9 elements, the first array of this call has 8"),
        (torch.ones(8), torch.zeros(8, dtype=torch.bfloat16), "^out has dtype bfloat16; it must be float32"),
        (torch.ones(8).bfloat16(), torch.zeros(8), "^out has dtype float32; it must be bfloat16"),
        (torch.ones(8).double(), torch.zeros(8).double(), "^source has dtype float64"),
        (torch.ones(1), [0.0], "^out is a list"),
        (torch.ones(8), torch.zeros(8, device="meta"), "^out is on meta"),
    ],
)
def test_wrong_arrays(source, out, message):
    with pytest.raises(ConfigError, match=message):
        kernels.copy_sum_squares(source, out)
    assert out == [0.0] or out.is_meta or not out.any()


def test_concurrent_callers():
    lengths = (400_000, 1_000)  # a shared copy, and a copy with the GIL held
    x = torch.randn(max(lengths))
    expected = {n: kernels.sum_squares(x[:n], threads=1) for n in lengths}
    right: list[bool] = []

    def call() -> None:
        for n in lengths * 10:
            out = torch.zeros(n)
            total = kernels.copy_sum_squares(x[:n], out, threads=3)
            right.append(total == expected[n] and torch.equal(out, x[:n]))

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert right == [True] * 60


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda(dtype):
    x = torch.randn(100_003, device="cuda").to(dtype)
    out = torch.zeros_like(x)
    assert kernels.copy_sum_squares(x, out) == kernels.sum_squares(x)
    assert torch.equal(out, x)
    with pytest.raises(ConfigError, match="^out is on cpu"):
        kernels.copy_sum_squares(x, torch.zeros(100_003, dtype=dtype))
