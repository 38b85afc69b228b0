"""Single-launch updates from the kernel sources have the bits of the host and of torch operations."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from offload import AdamW, Engine, Lion
from offload.native import device_update, kernels, torch_fallback
from tests.accelerator.control import Control
from tests.cases.models import build, llama, tokens
from tests.native.states import ordinary, same_bits, wild

pytestmark = [pytest.mark.accelerator, pytest.mark.skipif(not kernels.is_native(), reason="there is no source")]

ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}
DRAWN = {"key": 2**63 + 11, "element": 128 * (2**32 + 3)}
RULES: dict[str, tuple[str, int, tuple[str, ...], dict[str, Any]]] = {
    "adamw": ("adamw", 2, ("fp32", "bf16", "int8"), ADAMW | DRAWN | {"weight_decay": 0.1, "step": 3}),
    "adamw without decay, of a short memory": (
        "adamw", 2, ("fp32", "bf16", "int8"), ADAMW | DRAWN | {"weight_decay": 0.0, "step": 1, "betas": (0.3, 0.5)},
    ),
    "correction": ("correct_adamw", 2, ("fp32",), ADAMW | {"step": 5, "applied_scale": 0.9}),
    "lion": (
        "lion", 1, ("fp32", "bf16", "int8"),
        DRAWN | {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1, "step": 4},
    ),
    "sgd": ("sgd", 0, ("fp32",), {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.1}),
    "momentum": ("sgd", 1, ("fp32",), {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
}  # fmt: skip
CASES = [(rule, states) for rule, (_, _, all_states, _) in RULES.items() for states in all_states]


@pytest.fixture(autouse=True)
def simulated(sim: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    # The square root on GPUs is correctly rounded. The simulation uses torch's CPU kernels, with another rounding.
    monkeypatch.setattr(torch_fallback, "_sqrt", lambda x: x.double().sqrt_().float())


def stored(exact: Tensor, states: str, is_signed: bool) -> tuple[Tensor, ...]:
    """Return a moment in the stored format, as written by an update."""
    if states != "int8":
        return (exact if states == "fp32" else exact.bfloat16(),)
    moments = [(torch.zeros(len(exact), dtype=torch.uint8), torch.zeros(-(-len(exact) // 128))) for _ in range(2)]
    grad = exact if is_signed else exact.abs().sqrt()
    kernels.adamw(torch.zeros(len(exact)), *moments, grad, step=1, weight_decay=0.0, **(ADAMW | {"betas": (0.0, 0.0)}))
    return moments[0 if is_signed else 1]


def run(
    rule: str, states: str, s: Any, high: torch.dtype | None, grad: Tensor, scale: float, device: str
) -> list[Tensor]:
    """Return all planes after two updates, with joined weights, and the counts."""
    function, num_moments, _, settings = RULES[rule]
    master: tuple[Tensor, ...] = (s.p,)
    if high == torch.bfloat16:
        master = kernels.split(s.p)
    elif high is not None:
        master = s.p.half(), s.p
    given = [master, stored(s.m, states, True), stored(s.v, states, False)][: 1 + num_moments]
    there = [tuple(part.to(device, copy=True) for part in each) for each in given]
    arrays = [each if len(each) == 2 else each[0] for each in there] + [None] * (function == "sgd" and not num_moments)
    counts = []
    for number in range(2):
        more = {"step": settings["step"] + number} if "step" in settings else {}
        count = getattr(kernels, function)(*arrays, grad.to(device), grad_scale=scale, **settings | more)
        counts.append(torch.tensor(int(count)))
    found = [part.cpu() for each in there for part in each]
    if high == torch.bfloat16:
        found[:2] = [kernels.join(*found[:2])]
    return [*found, *counts]


@pytest.mark.parametrize("make", [ordinary, wild])
@pytest.mark.parametrize(("rule", "states"), CASES)
def test_bits_are_the_hosts_and_those_of_torchs_operations(
    rule: str, states: str, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in (1, 15, 129, 5_003):
        s = make(n)
        s.g[n // 2], s.p[n // 3] = float("nan"), float("-inf")
        for high in (None, torch.bfloat16, torch.float16):
            for grad, scale in ((s.g, 1.0), (s.g.to(high or torch.bfloat16), 0.37)):
                given = rule, states, s, high, grad, scale
                found, on_host = run(*given, "sim"), run(*given, "cpu")
                with monkeypatch.context() as patch:
                    patch.setattr(device_update, "update", lambda *arguments: None)
                    in_operations = run(*given, "sim")
                for a, b, c in zip(found, on_host, in_operations, strict=True):
                    assert a.dtype == b.dtype
                    a, b, c = (x.float() if x.dtype in (torch.bfloat16, torch.float16) else x for x in (a, b, c))
                    assert same_bits(a, b), (n, high, scale)
                    assert same_bits(a, c), (n, high, scale)


def launches(sim: Control, *given: Any) -> int:
    run(*given, "sim")
    sim.reset_counters()
    run(*given, "sim")
    return sim.counters()["launches"] // 2


@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
def test_an_update_is_one_launch_and_a_count_of_zero(
    sim: Control, states: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = ordinary(5_000)
    given = "adamw", states, s, torch.bfloat16, s.g.bfloat16(), 0.5
    assert launches(sim, *given) == 2
    monkeypatch.setattr(device_update, "update", lambda *arguments: None)
    assert launches(sim, *given) >= 25


@pytest.mark.parametrize("optimizer", [AdamW(), AdamW(states="bf16"), AdamW(states="int8"), Lion()])
def test_a_step_has_the_bits_of_updates_on_the_host(
    sim: Control, optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(update: str) -> tuple[list[float], list[Tensor], int]:
        with Engine(build(llama), optimizer=optimizer, precision="bf16", update=update, debug=1) as engine:
            engine.step(tokens(0))
            engine.finish()
            sim.reset_counters()
            losses = [engine.step(tokens(seed)).loss.item() for seed in (1, 2)]
            engine.finish()
            count = sim.counters()["launches"]
            return losses, [value.clone() for _, value in engine.edit()], count

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses, weights, fused = trained("device")
    wanted_losses, wanted, host = trained("cpu")
    assert losses == wanted_losses
    assert all(same_bits(a, b) for a, b in zip(weights, wanted, strict=True))
    monkeypatch.setattr(device_update, "update", lambda *arguments: None)
    _, _, apart = trained("device")
    print("launches of two steps' updates", fused - host, apart - host)
    assert (fused - host) * 4 < apart - host
