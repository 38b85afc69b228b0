"""Rules by matrix on one parameter: against torch, against the paper in float64, for all pieces and threads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from offload import LOMO, Adafactor, AdaLomo, AdamW, Lion, Muon
from offload.app.config.config import Config
from offload.app.training.parts import make_update_rule
from offload.errors import ConfigError
from offload.extras.rules import factored, muon
from offload.native import kernels
from offload.optim.rule import ParameterTraits, UpdateRule, UpdateStep
from tests.threads import torch_threads

SHAPES = [(33, 48), (48, 33), (5, 7, 9), (2, 3, 4, 5), (1, 40), (40, 1), (17,), ()]


@pytest.fixture(params=[1 << 20, 100], ids=["whole", "pieces"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (factored, muon):
        monkeypatch.setattr(module, "PIECE", request.param)


class Alone:
    """One parameter with an update rule."""

    def __init__(self, rule: UpdateRule, first: Tensor, is_split: bool = False) -> None:
        self.rule, self.shape, self.step_number, self.is_split = rule, tuple(first.shape), 0, is_split
        flat = first.reshape(-1).clone()
        self.states = {"weights": flat}
        if is_split:
            self.states = dict(zip(("weights", "low"), kernels.split(flat), strict=True))
        self.states |= {plane.name: torch.zeros(flat.numel()) for plane in rule.moments}
        self.states |= {factor.name: torch.zeros(factor.numel(self.shape)) for factor in rule.factors}

    def step(self, gradient: Tensor, lr: float | None = None, scale: float = 1.0) -> Tensor:
        self.step_number += 1
        rate = self.rule.lr if lr is None else lr
        by = UpdateStep(self.step_number, rate, self.rule.weight_decay, scale, shape=self.shape)
        assert not self.rule.update(self.states, gradient.reshape(-1), by)
        weights = self.states["weights"]
        return (kernels.join(weights, self.states["low"]) if self.is_split else weights).view(self.shape).clone()


def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return normal numbers with very different row magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(shape, generator=generator)
    return found * torch.logspace(-4, 0, shape[-2])[:, None] if len(shape) > 1 else found


def torchs(optimizer: type, first: Tensor, **settings: Any) -> Iterator[Tensor]:
    """Receive gradients and yield weights from the torch optimizer."""
    p = torch.nn.Parameter(first.clone())
    own = optimizer([p], **settings)
    weights = None
    while True:
        p.grad = yield weights  # type: ignore[misc]
        own.step()
        weights = p.detach().clone()


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.1, "d": 2.0, "eps": (1e-6, 1e-2), "beta2_decay": -0.5}])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_adafactor_is_torchs(shape: tuple[int, ...], settings: dict[str, Any]) -> None:
    first = drawn(shape, 99)
    ours = Alone(Adafactor(lr=0.3, **settings), first)
    theirs = torchs(torch.optim.Adafactor, first, lr=0.3, foreach=False, **settings)
    next(theirs)
    before = first
    for seed in range(6):
        gradient = drawn(shape, seed)
        found, wanted = ours.step(gradient), theirs.send(gradient)
        size = (wanted - before).abs().max().item()
        assert size > 1e-4, "something is updated"
        torch.testing.assert_close(found, wanted, rtol=3e-7 * (seed + 1), atol=2e-6 * size)
        before = wanted


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_adalomo_is_the_papers(shape: tuple[int, ...]) -> None:
    """In float64: r and c by row and column, update normalised by parameter, rate relative to the weights."""
    rule = AdaLomo(lr=0.05, weight_decay=0.2)
    weights = drawn(shape, 99)
    ours, w = Alone(rule, weights), weights.double()
    r = c = v = torch.zeros((), dtype=torch.float64)
    for number in range(1, 6):
        gradient = drawn(shape, number)
        g, share = gradient.double(), number**-0.8
        squares = g.square() + 1e-30
        if len(shape) > 1:
            r = (1 - share) * r + share * squares.mean(-1, keepdim=True)
            c = (1 - share) * c + share * squares.mean(-2, keepdim=True)
            u = g / (r * c / r.mean(-2, keepdim=True)).sqrt()
        else:
            v = (1 - share) * v + share * squares
            u = g / v.sqrt()
        u = u / max(1.0, math.sqrt(u.square().mean()))
        rate = 0.05 * max(1e-3, math.sqrt(w.square().mean()))
        w = w * (1 - rate * 0.2) - rate * u
        torch.testing.assert_close(ours.step(gradient).double(), w, rtol=2e-6, atol=2e-6 * rate)


@pytest.mark.parametrize("rule", [Adafactor(), AdaLomo()])
def test_neither_threads_nor_halves_of_the_master_change_a_bit(rule: UpdateRule) -> None:
    shape, found = (700, 601), []
    for count, is_split in ((1, False), (4, False), (3, True)):
        alone = Alone(rule, drawn(shape, 0), is_split)
        with torch_threads(count):
            found.append([alone.step(drawn(shape, seed).bfloat16(), scale=0.7) for seed in range(3)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("settings", [{}, {"nesterov": False, "ns_steps": 3, "momentum": 0.5, "weight_decay": 0.0}])
@pytest.mark.parametrize("shape", [(32, 48), (49, 33), (20, 20), (1, 40), (40, 1)], ids=str)
def test_muon_is_torchs_bit_for_bit(shape: tuple[int, ...], settings: dict[str, Any], adjust: str | None) -> None:
    first = drawn(shape, 99)
    ours = Alone(Muon(lr=0.02, adjust_lr_fn=adjust, **settings), first)
    theirs = torchs(torch.optim.Muon, first, lr=0.02, adjust_lr_fn=adjust, **settings)
    next(theirs)
    for seed in range(4):
        gradient = drawn(shape, seed)
        assert torch.equal(ours.step(gradient), theirs.send(gradient))


def test_muon_takes_the_matrices_of_experts_one_by_one() -> None:
    rule, first = Muon(lr=0.02), drawn((3, 20, 12), 99)
    together, apart = Alone(rule, first), [Alone(rule, first[expert]) for expert in range(3)]
    for seed in range(3):
        gradient = drawn((3, 20, 12), seed)
        wanted = torch.stack([one.step(gradient[expert]) for expert, one in enumerate(apart)])
        assert torch.equal(together.step(gradient), wanted)


def test_muon_works_in_what_it_is_given() -> None:
    rule, first = Muon(lr=0.02), drawn((20, 12), 99)
    states = Alone(rule, first).states
    memory = torch.zeros(rule.workspace_bytes((20, 12)), dtype=torch.uint8)
    by = UpdateStep(1, 0.02, 0.1, 1.0, shape=(20, 12), workspace=memory)
    rule.update(states, drawn((20, 12), 0).view(-1), by)
    assert memory.any()
    assert torch.equal(states["weights"].view(20, 12), Alone(rule, first).step(drawn((20, 12), 0)))


def test_muon_has_a_rule_for_what_is_no_matrix_of_a_block() -> None:
    rest = AdamW(lr=1e-4, weight_decay=0.3, groups=(("head", {"lr_scale": 2.0, "rule": Lion(lr=1e-4)}),))
    rule = Muon(lr=1e-2, rest=rest, groups=(("slow", {"lr_scale": 0.5}), ("other", {"rule": Adafactor(lr=1e-3)})))
    assert [type(part) for part in rule.parts] == [Muon, AdamW, Lion, Adafactor]

    def chosen(name: str, *shape: int, **place: bool) -> tuple[int, float, float]:
        choice = rule.choose(ParameterTraits(name, shape, **{"in_block": True, **place}))
        return choice.rule, pytest.approx(choice.lr_scale), choice.weight_decay

    assert chosen("q", 4, 4) == (0, 1.0, 0.1)
    assert chosen("experts", 2, 4, 4) == (0, 1.0, 0.1)
    assert chosen("slow", 4, 4) == (0, 0.5, 0.1)
    assert chosen("norm", 4) == (1, 0.01, 0.0)
    assert chosen("slow norm", 4) == (1, 0.005, 0.0)
    assert chosen("table", 4, 4, in_block=False) == chosen("bias", 4, 4, is_embedding=True) == (1, 0.01, 0.3)
    assert chosen("conv", 4, 4, 4, is_filter=True) == (1, 0.01, 0.3)
    assert chosen("head", 4, 4, in_block=False) == (2, 0.02, 0.0)
    assert chosen("other", 4, 4) == (3, 0.1, 0.0)


@pytest.mark.parametrize("norm", [1.0, 0.25])
def test_lomo_is_gradient_descent(norm: float) -> None:
    first = drawn((33, 48), 9)
    plain, clamped = Alone(LOMO(lr=0.1), first), Alone(LOMO(lr=0.1, clip_value=0.01), first)
    gradient = drawn((33, 48), 1)
    for alone, its in ((plain, gradient), (clamped, gradient.clamp(-0.01, 0.01))):
        parameter = torch.nn.Parameter(first.clone())
        parameter.grad = its * norm
        torch.optim.SGD([parameter], lr=0.1, foreach=False).step()
        assert torch.equal(alone.step(gradient, scale=norm), parameter)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        *[(Adafactor, wrong) for wrong in ({"eps": 1e-8}, {"eps": (1e-8, -1.0)}, {"d": 0.5}, {"beta2_decay": 0.5})],
        *[(AdaLomo, wrong) for wrong in ({"eps": (None, 1e-3)}, {"eps": (0.0, 1e-3)}, {"lr": -1.0})],
        *[(LOMO, wrong) for wrong in ({"clip_norm": 0}, {"clip_value": -1.0}, {"clip_norm": "x"})],
        *[(Muon, wrong) for wrong in ({"momentum": -1}, {"ns_steps": 100}, {"adjust_lr_fn": "x"})],
    ],
)
def test_a_setting_is_checked(kind: type[UpdateRule], wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"\.{next(iter(wrong))} is "):
        kind(**wrong)


@pytest.mark.parametrize("rest", [None, Muon()])
def test_the_rest_of_muon_is_a_rule_for_vectors_too(rest: Any) -> None:
    with pytest.raises(ConfigError, match="rest"):
        Muon(rest=rest)


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "lomo", "adalomo", "muon"])
def test_a_configuration_names_every_rule(name: str) -> None:
    groups = f"{{head: {{rule: {name}, lr_scale: 2}}}}"
    given = {"optimizer.name": name, "optimizer.lr": 0.5, "optimizer.weight_decay": 0.25, "optimizer.groups": groups}
    rule = make_update_rule(Config.load(None, given))
    assert type(rule).__name__.lower() == name
    assert (rule.lr, rule.weight_decay) == (0.5, 0.25)
    (other,) = [values["rule"] for _, values in rule.groups]
    assert type(other) is type(rule)
    if isinstance(rule, Muon):
        assert (rule.adjust_lr_fn, rule.eps, rule.rest) == ("match_rms_adamw", 1e-7, rule.rest)
        assert (rule.rest.lr, rule.rest.betas, rule.rest.eps) == (0.5, (0.9, 0.95), 1e-8)
        own = {"momentum": 0.5, "nesterov": False, "ns_steps": 3, "adjust_lr_fn": "original"}
    else:
        own = {
            "lomo": {"clip_value": 0.5},
            "adafactor": {"beta2_decay": -0.5, "d": 2.0},
            "adalomo": {"beta2_decay": -0.5, "d": 2.0},
        }.get(name, {"betas": (0.5, 0.25)})
    found = make_update_rule(Config.load(None, given | {f"optimizer.{key}": value for key, value in own.items()}))
    assert {key: getattr(found, key) for key in own} == own
