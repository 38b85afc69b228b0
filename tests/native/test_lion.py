"""Lion against its formula, instruction sets, threads, pieces and the fallback against one another."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from offload.errors import ConfigError
from offload.native import kernels
from tests.native.states import ordinary, same_bits, ulps_apart, wild

ISAS = kernels.available_isas() or (None,)  # None: the torch fallback, where C++ was not built
SETTINGS = {"lr": 3e-4, "betas": (0.9, 0.99), "weight_decay": 0.1}
N = 20_001


def step(p: Tensor, m: Tensor, g: Tensor, is_split: bool = False, **settings: object) -> tuple[int, Tensor, Tensor]:
    """Return the count, the weights and the moment after a step from copies."""
    p, m = p.clone(), m.clone()
    master = kernels.split(p) if is_split else p
    count = kernels.lion(master, m, g, **(SETTINGS | settings))  # type: ignore[arg-type]
    return int(count), kernels.join(*master) if is_split else p, m


def algorithm_2(p: Tensor, m: Tensor, g: Tensor, lr: float, betas: tuple[float, float], weight_decay: float) -> tuple:
    """Lines 4 to 7 of the paper, in float64; and where the sign of the mix is beyond doubt in float32."""
    p, m, g = p.double(), m.double(), g.double()
    old, new = betas[0] * m, (1 - betas[0]) * g
    mix = old + new
    is_sure = (mix == 0) & (old == 0) | (mix.abs() > 1e-6 * (old.abs() + new.abs())) & (mix.abs() > 1e-40)
    return p - lr * (mix.sign() + weight_decay * p), betas[1] * m + (1 - betas[1]) * g, is_sure


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("make", [ordinary, wild])
@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.95, 0.98), (0.0, 0.5), (0.5, 0.0)])
def test_within_two_ulp_of_the_formula(isa, make, betas):
    s = make(N, seed=1)
    s.m[::7], s.g[::7] = 0.0, 0.0
    s.g[3::14] = -0.0
    settings = SETTINGS | {"betas": betas}
    count, p, m = step(s.p, s.m, s.g, isa=isa, **settings)
    wanted_p, wanted_m, is_sure = algorithm_2(s.p, s.m, s.g, **settings)
    assert count == 0
    assert is_sure.double().mean() > 0.9, "the comparison compares nothing"
    assert ulps_apart(p, wanted_p.float(), s.p)[is_sure].max() <= 2
    # Where a sum of two products cancels its ulp is that of the larger one.
    unit = torch.maximum(betas[1] * s.m.abs(), (1 - betas[1]) * s.g.abs()).clamp(min=1e-38).double() * 2**-23
    assert ((m.double() - wanted_m).abs() <= 2 * unit).all()


def test_the_sign_of_zero_is_zero_and_the_decay_is_decoupled():
    p = torch.tensor([1.0, -1.0, 0.0, -0.0, 2.0])
    m, g = torch.tensor([0.0, -0.0, 0.0, 0.0, 9.0]), torch.tensor([0.0, 0.0, -0.0, 0.0, -81.0])  # 0.9 * 9 = 0.1 * 81
    _, moved, _ = step(p, m, g, betas=(0.9, 0.99), weight_decay=0.0)
    assert same_bits(moved[:4], p[:4])
    _, decayed, _ = step(p, torch.zeros(5), torch.zeros(5), lr=0.5, weight_decay=0.5)
    assert same_bits(decayed, p * 0.75)
    _, moved, m = step(torch.ones(2), torch.zeros(2), torch.tensor([1e-30, -1e30]), lr=0.25, weight_decay=0.0)
    assert moved.tolist() == [0.75, 1.25]


@pytest.mark.parametrize("make", [ordinary, wild])
@pytest.mark.parametrize("n", [0, 1, 31, 33, 3 * (1 << 16) + 4_097])
def test_isas_threads_pieces_masters_and_the_fallback_give_the_same_bits(make, n, monkeypatch):
    s = make(n)
    s.g = s.g.bfloat16().float()
    wanted = step(s.p, s.m, s.g, isa=ISAS[-1], threads=1, grad_scale=0.7)

    def check(found: tuple[int, Tensor, Tensor], how: object) -> None:
        assert found[0] == wanted[0], how
        assert same_bits(found[1], wanted[1]), how
        assert same_bits(found[2], wanted[2]), how

    for isa in ISAS:
        for threads in (1, 3):
            for is_split in (False, True):
                for g in (s.g, s.g.bfloat16()):
                    how = {"isa": isa, "threads": threads, "is_split": is_split, "grad_scale": 0.7}
                    check(step(s.p, s.m, g, **how), (how, g.dtype))
    cuts = [0, n // 3, n // 3 + 5, n] if n > 31 else [0, n]
    pieces = [step(s.p[a:b], s.m[a:b], s.g[a:b], grad_scale=0.7) for a, b in pairwise(cuts)]
    check((sum(one[0] for one in pieces), *(torch.cat([one[k] for one in pieces]) for k in (1, 2))), cuts)
    monkeypatch.setattr(kernels, "_core", None)
    for is_split in (False, True):
        for g in (s.g, s.g.bfloat16()):
            check(step(s.p, s.m, g, is_split=is_split, grad_scale=0.7), ("torch", is_split, g.dtype))


@pytest.mark.parametrize("isa", ISAS)
def test_nothing_beyond_the_range_is_written(isa):
    for n in (0, 1, 15, 33, 63):
        s = ordinary(n + 64)
        hi, lo = kernels.split(s.p)
        before, window = [x.clone() for x in (hi, lo, s.m)], slice(32, 32 + n)
        kernels.lion((hi[window], lo[window]), s.m[window], s.g[window], isa=isa, **SETTINGS)
        for now, then in zip((hi, lo, s.m), before, strict=True):
            assert torch.equal(now[:32], then[:32])
            assert torch.equal(now[32 + n :], then[32 + n :])
            assert n == 0 or not torch.equal(now, then)


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("isa", [*ISAS, "torch"])
@pytest.mark.parametrize("n", [5, 100])
def test_a_sign_hides_nothing_that_is_not_finite(isa, n, is_split, monkeypatch):
    s = ordinary(n)
    s.g[0], s.g[1], s.m[2], s.p[n - 1] = float("nan"), float("inf"), float("-inf"), float("inf")
    if isa == "torch":
        monkeypatch.setattr(kernels, "_core", None)
    count, p, _ = step(s.p, s.m, s.g, is_split=is_split, isa=None if isa == "torch" else isa)
    assert count == 4
    assert p.isfinite().sum() == n - 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"exp_avg": torch.ones(9)}, r"^exp_avg\b.*9 elements"),
        ({"grad": torch.ones(8, dtype=torch.float64)}, r"^grad\b.*float64"),
        ({"lr": -1.0}, r"^lr is -1\.0"),
        ({"betas": (0.9, 1.0)}, r"^betas\[1\] is 1\.0"),
        ({"grad_scale": float("nan")}, "^grad_scale is nan"),
    ],
)
def test_a_wrong_argument_is_named_and_nothing_modified(wrong, message):
    arrays = {"master": torch.ones(8), "exp_avg": torch.ones(8), "grad": torch.ones(8)}
    with pytest.raises(ConfigError, match=message):
        kernels.lion(**(arrays | SETTINGS | wrong))
    assert all(torch.equal(array, torch.ones(8)) for array in arrays.values())
