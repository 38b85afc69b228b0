"""Random directions: equal bits everywhere, and the number distribution."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from offload.errors import ConfigError
from offload.extras.zeroth import directions
from offload.extras.zeroth.directions import PURPOSE, ROUNDING, NoiseRange, descend, normal, perturb
from offload.native import kernels, moments

OF = NoiseRange(key=0xFEDCBA9876543210, step=7, element=128)
LENGTHS = (1, 63, 64, 65, 1000, 70_001)
HOWS: list[dict[str, Any]] = [{"isa": isa} for isa in kernels.available_isas()] + [{"threads": 3}, {"fallback": True}]


def run(
    monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], weights: torch.Tensor, master: Any, of: NoiseRange
) -> Any:
    """Return both perturbed weights, and the master after a step."""
    with monkeypatch.context() as patch:
        if how.get("fallback"):
            patch.setattr(directions, "_core", None)
        given = {key: value for key, value in how.items() if key != "fallback"}
        plus, minus = torch.empty_like(weights), torch.empty_like(weights)
        perturb(weights, plus, minus, 1e-2, of, direction=2, **given)
        count = descend(master, [0.5, -2.0, 3.0], of, lr=0.1, weight_decay=0.01, **given)
    return plus, minus, master, count


@pytest.mark.parametrize("threshold", [math.inf, 0.5])
@pytest.mark.parametrize("kept", ["fp32", "split", "bf16"])
def test_every_way_has_the_same_bits(monkeypatch: pytest.MonkeyPatch, kept: str, threshold: float) -> None:
    of = OF._replace(threshold=threshold)
    for length in LENGTHS:
        torch.manual_seed(length)
        whole = torch.randn(length)
        whole[0] = math.nan
        weights = whole if kept == "fp32" else whole.bfloat16()
        found = []
        for how in HOWS or [{"fallback": True}]:
            master = kernels.split(whole) if kept == "split" else weights.clone()
            plus, minus, master, count = run(monkeypatch, how, weights, master, of)
            assert count == 1, "the NaN alone"
            halves = master if kept == "split" else (master,)
            found.append([t.view(torch.uint8).clone() for t in (plus, minus, *halves)])
        for how, other in zip(HOWS, found, strict=False):
            assert all(torch.equal(a[4:], b[4:]) for a, b in zip(found[0], other, strict=True)), f"{how}, {length}"


def test_it_is_what_the_formula_says() -> None:
    weights = torch.randn(300)
    z = [normal(moments.words(300, OF.key, OF.step, PURPOSE + (k << 16), OF.element, weights.device)) for k in (0, 1)]
    plus, minus = torch.empty(300), torch.empty(300)
    perturb(weights, plus, minus, 1e-2, OF, direction=1)
    assert torch.equal(plus, weights + 1e-2 * z[1])
    assert torch.equal(minus, weights - 1e-2 * z[1])
    expected = weights - 0.1 * (0.5 * z[0] + -2.0 * z[1] + 0.25 * weights)
    assert descend(weights, [0.5, -2.0], OF, lr=0.1, weight_decay=0.25) == 0
    assert torch.equal(weights, expected)


def test_weights_in_bf16_alone_are_rounded_at_random() -> None:
    """bf16 weights without a master round the fp32 step stochastically.

    The result is a bf16 neighbour, chosen with probabilities from the distances. Small steps survive on average.
    """
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(1 << 18, generator=generator).bfloat16()
    exact, found = before.float(), before.clone()
    how: dict[str, Any] = {"lr": 3e-4, "weight_decay": 0.5}
    assert descend(exact, [1.0], OF, **how) == descend(found, [1.0], OF, **how) == 0
    bits = exact.view(torch.int32)
    lower = bits >> 16 << 16
    step = (lower + (1 << 16)).view(torch.float32).double() - lower.view(torch.float32).double()
    up = (bits - lower).double() / (1 << 16)
    is_up = (found.double() - lower.view(torch.float32).double()) / step
    assert set(is_up.unique().tolist()) == {0.0, 1.0}
    for share in range(10):  # the share rounded up equals the expected probability
        its = (up >= share / 10) & (up < (share + 1) / 10) & (up > 0)
        deviation = float((up[its] * (1 - up[its])).sum()) ** 0.5
        assert abs(float((is_up - up)[its].sum())) < 4 * deviation
    drawn = [
        moments.words(1 << 12, OF.key, OF.step, purpose, 0, before.device)
        for purpose in (ROUNDING, PURPOSE, PURPOSE + (1 << 16))
    ]
    assert not torch.isin(drawn[0], torch.cat(drawn[1:])).any(), "by words that no direction is made of"


def test_what_overflows_as_it_is_rounded_is_counted() -> None:
    weights = torch.full((1000,), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    count = descend(weights, [1.0], OF, lr=1e36)
    assert count == int(weights.isinf().sum())
    assert 0 < count < 1000


def test_large_weights_take_no_part() -> None:
    weights = torch.tensor([0.1, -0.5, 0.5, 0.6, -7.0])
    plus, minus = torch.empty(5), torch.empty(5)
    perturb(weights, plus, minus, 1e-2, OF._replace(threshold=0.5))
    assert (plus != weights).tolist() == (minus != weights).tolist() == [True, True, True, False, False]


def test_moments_and_independence() -> None:
    """All word values with their probabilities: mean exactly 0, variance 1, kurtosis 2.92."""
    ones = torch.tensor([math.comb(24, k) for k in range(25)], dtype=torch.float64) / 2**24
    whole = 512 * torch.arange(25)[:, None] + 2 * torch.arange(256).double() - 6399
    words = ((1 << torch.arange(25)) - 1)[:, None] * 256 + torch.arange(256)
    z = normal(words.flatten().to(torch.int32)).view(25, 256).double()
    assert torch.allclose(z, whole / math.sqrt(1594709), rtol=1e-6)
    weight = ones[:, None] / 256
    assert float((weight * whole).sum()) == 0.0
    assert float((weight * z**2).sum()) == pytest.approx(1.0, abs=1e-7)
    assert float((weight * z**4).sum()) == pytest.approx(2.9187, abs=1e-3)
    drawn = [
        normal(moments.words(1 << 16, key, step, PURPOSE + (k << 16), 0, torch.device("cpu"))).double()
        for key, step, k in ((1, 1, 0), (1, 1, 1), (1, 2, 0), (2, 1, 0))
    ]
    assert torch.corrcoef(torch.stack(drawn)).sub(torch.eye(4)).abs().max() < 5 / 256  # five standard deviations


def test_wrong_arguments_are_named() -> None:
    weights = torch.zeros(8)
    with pytest.raises(ConfigError, match="element is 3"):
        perturb(weights, weights, weights, 1e-3, OF._replace(element=3))
    with pytest.raises(ConfigError, match="minus has 7 elements"):
        perturb(weights, torch.zeros(8), torch.zeros(7), 1e-3, OF)
    with pytest.raises(ConfigError, match="plus has dtype bfloat16"):
        perturb(weights, weights.bfloat16(), weights, 1e-3, OF)
    with pytest.raises(ConfigError, match="a multiple of 128"):
        descend(weights.bfloat16(), [1.0], OF._replace(element=64), lr=0.1)
    with pytest.raises(ConfigError, match="coefficients"):
        descend(weights, [], OF, lr=0.1)
