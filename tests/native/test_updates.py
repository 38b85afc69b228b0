"""Lion and gradient descent against their formulas.

Every update rule gives equal bits for all instruction sets, threads, pieces, split masters and the fallback.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.native import kernels
from tests.matrix import matrix
from tests.native.states import ISAS, State, ordinary, same_bits, ulps_apart, wild

N = 20_001
ADAMW = {"step": 7, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
CORRECTED = {"step": 3, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "applied_scale": 0.9, "grad_scale": 0.13}
LION = {"lr": 3e-4, "betas": (0.9, 0.99), "weight_decay": 0.1}
SGD = {"lr": 3e-2, "momentum": 0.9, "weight_decay": 0.1}
RULES: dict[str, tuple[str, str, dict[str, Any]]] = {  # kernel, moments, settings
    "adamw": ("adamw", "mv", ADAMW),
    "adamw of a short memory": ("adamw", "mv", ADAMW | {"betas": (0.3, 0.5)}),
    "corrected adamw": ("correct_adamw", "mv", CORRECTED),
    "lion": ("lion", "m", LION),
    "sgd": ("sgd", "", SGD),
    "sgd with momentum": ("sgd", "m", SGD),
}


def step(rule: str, s: State, is_split: bool = False, **settings: Any) -> tuple[int, list[Tensor]]:
    """Return (non-finite count, [weights, moments]) after a step, from copies."""
    kernel, names, own = RULES[rule]
    moments = [getattr(s, name).clone() for name in names]
    master = kernels.split(s.p) if is_split else s.p.clone()
    count = getattr(kernels, kernel)(master, *(moments or [None]), s.g, **(own | settings))
    return int(count), [kernels.join(*master) if is_split else master, *moments]


@matrix(make=[ordinary, wild], rule=[*RULES], n=[0, 1, 31, 33, 1_000, 3 * (1 << 16) + 4_097])
def test_isas_threads_pieces_masters_and_the_fallback_give_the_same_bits(make, rule, n, monkeypatch):
    s = make(n)
    s.g = s.g.bfloat16().float()
    if rule == "corrected adamw":  # a correction comes after its step
        kernels.adamw(
            s.p, s.m, s.v, s.g, **ADAMW | {"step": CORRECTED["step"], "grad_scale": CORRECTED["applied_scale"]}
        )
    wanted = step(rule, s, isa=ISAS[-1], threads=1, grad_scale=0.7)

    def check(found: tuple[int, list[Tensor]], how: object) -> None:
        assert found[0] == wanted[0], how
        assert all(same_bits(x, y) for x, y in zip(found[1], wanted[1], strict=True)), how

    def check_masters_and_gradients(**how: Any) -> None:
        for is_split in (False, True):
            for g in (s.g, s.g.bfloat16()):
                found = step(rule, State(s.p, s.m, s.v, g), is_split, grad_scale=0.7, **how)
                check(found, (how, is_split, g.dtype))

    for isa in ISAS:
        for threads in (1, 2, 3):
            check_masters_and_gradients(isa=isa, threads=threads)
    cuts = [0, n // 3, n // 3 + 5, n] if n > 31 else [0, n]
    pieces = [step(rule, State(*(x[a:b] for x in vars(s).values())), grad_scale=0.7) for a, b in pairwise(cuts)]
    arrays = [torch.cat(parts) for parts in zip(*(piece for _, piece in pieces), strict=True)]
    check((sum(count for count, _ in pieces), arrays), cuts)
    monkeypatch.setattr(kernels, "_core", None)
    check_masters_and_gradients()


@pytest.mark.parametrize("make", [ordinary, wild])
@pytest.mark.parametrize("rule", RULES)
def test_a_master_with_a_float16_copy_has_the_bits_of_one_alone(make, rule, isa):
    s = make(N)
    s.g = (1e3 * s.g).half().float()
    kernel, names, own = RULES[rule]
    count, (master, *moments) = step(rule, s, grad_scale=0.7, isa=isa)
    assert all(
        same_bits(x, y)
        for x, y in zip(
            step(rule, State(s.p, s.m, s.v, s.g.half()), grad_scale=0.7)[1], (master, *moments), strict=True
        )
    )
    for g in (s.g, s.g.half()):
        pair = torch.zeros(N, dtype=torch.float16), s.p.clone()
        states = [getattr(s, name).clone() for name in names]
        found = getattr(kernels, kernel)(pair, *(states or [None]), g, **own | {"grad_scale": 0.7}, isa=isa)
        assert int(found) == count
        assert all(same_bits(x, y) for x, y in zip((pair[1], *states), (master, *moments), strict=True))
        assert same_bits(pair[0], master.half())
        assert kernels.join(*pair) is pair[1]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("rule", ["adamw", "lion", "sgd with momentum", "corrected adamw"])
def test_every_short_length_and_address_has_its_bits_and_nothing_beyond_is_written(isa, is_split, rule):
    kernel, names, settings = RULES[rule]
    s = ordinary(200)
    before = [*(kernels.split(s.p) if is_split else (s.p,)), *(getattr(s, name) for name in names)]

    def updated(window: slice) -> list[Tensor]:
        planes = [plane.clone() for plane in before]
        *master, grad = (plane[window] for plane in (*planes, s.g))
        weights = (tuple(master[:2]), *master[2:]) if is_split else master
        assert getattr(kernels, kernel)(*weights, grad, isa=isa, **settings) == 0
        return planes

    after = updated(slice(None))
    for n in range(71):
        for offset in (32, 33, 35):
            for now, then, whole in zip(updated(slice(offset, offset + n)), before, after, strict=True):
                wanted = torch.cat([then[:offset], whole[offset : offset + n], then[offset + n :]])
                assert torch.equal(now, wanted), (n, offset)


def lion_by_algorithm_2(s: State, lr: float, betas: tuple[float, float], weight_decay: float) -> tuple:
    """Return lines 4 to 7 in algorithm 2 (float64), and whether the mix has a certain sign in float32."""
    p, m, g = s.p.double(), s.m.double(), s.g.double()
    old, new = betas[0] * m, (1 - betas[0]) * g
    mix = old + new
    is_sure = (mix == 0) & (old == 0) | (mix.abs() > 1e-6 * (old.abs() + new.abs())) & (mix.abs() > 1e-40)
    return p - lr * (mix.sign() + weight_decay * p), betas[1] * m + (1 - betas[1]) * g, is_sure


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("make", [ordinary, wild])
@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.95, 0.98), (0.0, 0.5), (0.5, 0.0)])
def test_lion_is_within_two_ulp_of_the_formula(isa, make, betas):
    s = make(N, seed=1)
    s.m[::7], s.g[::7] = 0.0, 0.0
    s.g[3::14] = -0.0
    count, (p, m) = step("lion", s, isa=isa, betas=betas)
    wanted_p, wanted_m, is_sure = lion_by_algorithm_2(s, **(LION | {"betas": betas}))
    assert count == 0
    assert is_sure.double().mean() > 0.9, "the comparison compares nothing"
    assert ulps_apart(p, wanted_p.float(), s.p)[is_sure].max() <= 2
    # Under cancellation the larger product determines the ulp.
    unit = torch.maximum(betas[1] * s.m.abs(), (1 - betas[1]) * s.g.abs()).clamp(min=1e-38).double() * 2**-23
    assert ((m.double() - wanted_m).abs() <= 2 * unit).all()


def test_the_sign_of_zero_is_zero_and_the_decay_is_decoupled():
    def moved(p: Tensor, m: Tensor, g: Tensor, **settings: Any) -> Tensor:
        return step("lion", State(p, m, m, g), **settings)[1][0]

    p = torch.tensor([1.0, -1.0, 0.0, -0.0, 2.0])
    m, g = torch.tensor([0.0, -0.0, 0.0, 0.0, 9.0]), torch.tensor([0.0, 0.0, -0.0, 0.0, -81.0])  # 0.9 * 9 = 0.1 * 81
    assert same_bits(moved(p, m, g, weight_decay=0.0)[:4], p[:4])
    assert same_bits(moved(p, torch.zeros(5), torch.zeros(5), lr=0.5, weight_decay=0.5), p * 0.75)
    found = moved(torch.ones(2), torch.zeros(2), torch.tensor([1e-30, -1e30]), lr=0.25, weight_decay=0.0)
    assert found.tolist() == [0.75, 1.25]


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("n", [5, 100, 200_000])
@pytest.mark.parametrize("rule", ["adamw", "corrected adamw", "lion"])
def test_what_is_not_finite_is_counted(isa, rule, n, is_split):
    """The sign of Lion hides nothing."""
    s = ordinary(n)
    assert step(rule, s, is_split, isa=isa)[0] == 0
    s.g[0], s.g[1], s.m[2], s.p[n - 1] = float("nan"), float("inf"), float("-inf"), float("inf")
    count, (p, *_) = step(rule, s, is_split, isa=isa)
    assert count == 4
    assert p.isfinite().sum() == n - 4


def test_a_split_nan_that_looks_like_zero_is_counted():
    master = torch.tensor([-1], dtype=torch.int32).view(torch.float32)  # 0xFFFFFFFF
    m, v, g = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    assert kernels.split(master)[0].item() == 0
    assert kernels.adamw(kernels.split(master), m, v, g, **ADAMW) == 1
    for grad_scale in (0.9, 0.13):
        assert kernels.correct_adamw(kernels.split(master), m, v, g, **CORRECTED | {"grad_scale": grad_scale}) == 1


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_steps_of_sgd_are_torchs_to_the_bit(isa, momentum, weight_decay):
    s = ordinary(N)
    s.m.zero_()
    settings = {"lr": 3e-2, "momentum": momentum, "weight_decay": weight_decay}
    parameter = torch.nn.Parameter(s.p.clone())
    optimizer = torch.optim.SGD([parameter], foreach=False, fused=False, **settings)
    for number in range(3):
        s.g = parameter.grad = ordinary(N, seed=number).g
        optimizer.step()
        count, (s.p, *moments) = step("sgd with momentum" if momentum else "sgd", s, isa=isa, **settings)
        assert count == 0
        assert same_bits(s.p, parameter.detach())
        if momentum:
            (s.m,) = moments
            assert same_bits(s.m, optimizer.state[parameter]["momentum_buffer"])
