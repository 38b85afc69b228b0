"""The torch fallback gives the same bits as the C++ kernels."""

from __future__ import annotations

import pytest
import torch

from offload.native import kernels
from tests.native.states import ordinary, same_bits, wild

pytestmark = pytest.mark.skipif(
    not kernels.is_native(), reason="the C++ kernels were not built: nothing to compare with"
)
SETTINGS = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.01}


@pytest.fixture
def in_torch(monkeypatch):
    """Run a function in `offload.native.kernels` without the C++ module."""

    def run(function, *arguments, **settings):
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "_core", None)
            return function(*arguments, **settings)

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [0, 1, 32, 33, 16_385, 300_007])
def test_sum_squares(in_torch, dtype, n):
    x = (torch.randn(n) * torch.logspace(-10, 10, n)).to(dtype)
    assert in_torch(kernels.sum_squares, x) == kernels.sum_squares(x)
    segments = ([0, n // 3], [n // 2, n // 2])
    ours, theirs = kernels.sum_squares_segments(x, *segments), in_torch(kernels.sum_squares_segments, x, *segments)
    assert torch.equal(ours, theirs)


def test_conversions(in_torch):
    x = wild(5_000).g
    assert same_bits(in_torch(kernels.round_bf16_, x.clone()), kernels.round_bf16_(x.clone()))
    total = torch.ones(5_000)
    half = x.bfloat16()
    assert same_bits(in_torch(kernels.accumulate, total.clone(), half), kernels.accumulate(total.clone(), half))


def test_numpy(in_torch):
    x = ordinary(100).p.numpy()
    ours, theirs = kernels.split(x), in_torch(kernels.split, x)
    assert all((a == b).all() and a.dtype == b.dtype for a, b in zip(ours, theirs, strict=True))
    assert (in_torch(kernels.join, *theirs) == x).all()


def test_it_is_described(monkeypatch):
    monkeypatch.setattr(kernels, "_core", None)
    monkeypatch.setattr(kernels, "_isas", ())
    assert not kernels.is_native()
    assert kernels.default_isa() == "torch"
    assert kernels.describe()["threads"] == torch.get_num_threads()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.3, 0.5)])
def test_cuda_tensors_get_the_same_bits(is_split, betas):
    cpu, gpu = wild(100_003), wild(100_003)
    for name in ("p", "m", "v", "g"):
        setattr(gpu, name, getattr(gpu, name).cuda())
    masters = [kernels.split(s.p) if is_split else s.p for s in (cpu, gpu)]
    counts = [
        kernels.adamw(master, s.m, s.v, s.g, step=7, betas=betas, **SETTINGS)
        for master, s in zip(masters, (cpu, gpu), strict=True)
    ]
    assert counts[0] == int(counts[1])
    ours, theirs = (kernels.join(*master) if is_split else master for master in masters)
    assert same_bits(ours, theirs.cpu())
    assert same_bits(cpu.m, gpu.m.cpu())
    assert same_bits(cpu.v, gpu.v.cpu())
    assert kernels.sum_squares(gpu.g.bfloat16()) == pytest.approx(kernels.sum_squares(cpu.g.bfloat16()), rel=1e-14)
