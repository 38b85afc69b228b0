"""Gradient descent against torch, instruction sets, threads, pieces and the fallback against one another."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from offload.errors import ConfigError
from offload.native import kernels
from tests.native.states import ordinary, same_bits, wild

ISAS = kernels.available_isas() or (None,)  # None: the torch fallback, where C++ was not built
SETTINGS = {"lr": 3e-2, "momentum": 0.9, "weight_decay": 0.1}
N = 20_001


def step(p: Tensor, m: Tensor | None, g: Tensor, is_split: bool = False, **settings: object) -> tuple:
    """Return the count, the weights and the moment after a step from copies."""
    p, m = p.clone(), None if m is None else m.clone()
    master = kernels.split(p) if is_split else p
    count = kernels.sgd(master, m, g, **(SETTINGS | settings))  # type: ignore[arg-type]
    return int(count), kernels.join(*master) if is_split else p, torch.zeros(0) if m is None else m


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_steps_are_torchs_to_the_bit(isa, momentum, weight_decay):
    s = ordinary(N)
    settings = {"lr": 3e-2, "momentum": momentum, "weight_decay": weight_decay}
    parameter = torch.nn.Parameter(s.p.clone())
    optimizer = torch.optim.SGD([parameter], foreach=False, fused=False, **settings)
    p, m = s.p, torch.zeros(N) if momentum else None
    for number in range(3):
        parameter.grad = ordinary(N, seed=number).g
        optimizer.step()
        count, p, m = step(p, m if momentum else None, parameter.grad, isa=isa, **settings)
        assert count == 0
        assert same_bits(p, parameter.detach())
        if momentum:
            assert same_bits(m, optimizer.state[parameter]["momentum_buffer"])


@pytest.mark.parametrize("make", [ordinary, wild])
@pytest.mark.parametrize("has_moment", [False, True])
@pytest.mark.parametrize("n", [0, 1, 31, 33, 3 * (1 << 16) + 4_097])
def test_isas_threads_pieces_masters_and_the_fallback_give_the_same_bits(make, has_moment, n, monkeypatch):
    s = make(n)
    s.g = s.g.bfloat16().float()
    m = s.m if has_moment else None
    wanted = step(s.p, m, s.g, isa=ISAS[-1], threads=1, grad_scale=0.7)

    def check(found: tuple, how: object) -> None:
        assert found[0] == wanted[0], how
        assert same_bits(found[1], wanted[1]), how
        assert same_bits(found[2], wanted[2]), how

    for isa in ISAS:
        for threads in (1, 3):
            for is_split in (False, True):
                for g in (s.g, s.g.bfloat16()):
                    how = {"isa": isa, "threads": threads, "is_split": is_split, "grad_scale": 0.7}
                    check(step(s.p, m, g, **how), (how, g.dtype))
    cuts = [0, n // 3, n // 3 + 5, n] if n > 31 else [0, n]
    pieces = [step(s.p[a:b], None if m is None else m[a:b], s.g[a:b], grad_scale=0.7) for a, b in pairwise(cuts)]
    check((sum(one[0] for one in pieces), *(torch.cat([one[k] for one in pieces]) for k in (1, 2))), cuts)
    monkeypatch.setattr(kernels, "_core", None)
    for is_split in (False, True):
        for g in (s.g, s.g.bfloat16()):
            check(step(s.p, m, g, is_split=is_split, grad_scale=0.7), ("torch", is_split, g.dtype))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"momentum_buffer": torch.ones(9)}, r"^momentum_buffer\b.*9 elements"),
        ({"momentum_buffer": torch.ones(8).bfloat16()}, r"^momentum_buffer\b.*must be float32"),
        ({"momentum": 1.0}, r"is 1\.0"),
        ({"lr": -1.0}, r"^lr is -1\.0"),
    ],
)
def test_a_wrong_argument_is_named_and_nothing_modified(wrong, message):
    arrays = {"master": torch.ones(8), "momentum_buffer": torch.ones(8), "grad": torch.ones(8)}
    with pytest.raises(ConfigError, match=message):
        kernels.sgd(**(arrays | SETTINGS | wrong))
    assert torch.equal(arrays["master"], torch.ones(8))
