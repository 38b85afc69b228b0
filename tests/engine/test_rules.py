"""Update rules: separate planes on all tiers, clipping for rules without a correction, and rules on whole matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import SGD, Adafactor, AdaLomo, AdamW, Engine, Lion, Muon, Placement
from offload.engine.methods import method
from offload.engine.steps import METHODS
from offload.errors import ConfigError, DoesNotFitError
from offload.layout import build_regions
from offload.layout.planes import Plane
from offload.native import kernels
from offload.optim import rule as optimizer_rule
from offload.optim.rule import ParameterTraits, UpdateRule
from tests.cases.models import batches, build, llama, tokens
from tests.engine.compare import PLACES, assert_same, assert_weights, placed, train_both, updating_device, weights
from tests.engine.device import LEDGER, own_device
from tests.engine.handmade import Stack
from tests.engine.inside import parts_of, run_example, stored_factors, stored_plane
from tests.engine.ranks import run
from tests.engine.ranks_child import refusal
from tests.engine.reference import Reference
from tests.engine.test_delay import Late

pytestmark = pytest.mark.usefixtures("small_tiles")


def subtract(states: Mapping[str, torch.Tensor], change: torch.Tensor) -> torch.Tensor:
    """Subtract from the master weights. Return the number of weights that are not finite."""
    weights = kernels.master(states)
    whole = kernels.join(*weights) if isinstance(weights, tuple) else weights
    whole -= change
    if isinstance(weights, tuple):
        for half, new in zip(weights, kernels.split(whole), strict=True):
            half.copy_(new)
    return whole.isfinite().logical_not_().sum()


@dataclass(frozen=True)
class Counting(UpdateRule):
    """Gradient descent with an update counter per weight."""

    lr: float = 0.1
    betas: tuple[float, float] = (0.0, 0.0)
    weight_decay: float = 0.0
    decay_1d: bool = False
    groups: tuple[tuple[str, Mapping[str, float]], ...] = ()

    moments = (Plane("times", torch.int16),)

    def update(self, states, gradients, by):
        states["times"].add_(1)
        return subtract(states, gradients.float() * by.scale * by.lr)


@dataclass(frozen=True)
class Blocks(Counting):
    """A rule that depends on blocks, elements and parameters: a code byte per weight, and a maximum per 128 weights."""

    by_parameter = True
    moments = (Plane("code", torch.int8), Plane("largest", torch.float32, block=128))

    def update(self, states, gradients, by):
        numel = gradients.numel()
        assert by.element % 128 == 0
        element = torch.arange(by.element, by.element + numel, device=gradients.device)
        states["code"] += ((element * 31 + by.key % 1009 + by.step) % 5).to(torch.int8)
        padded = torch.zeros(-(-numel // 128) * 128, device=gradients.device)
        padded[:numel] = gradients.float().abs() * by.scale
        torch.maximum(states["largest"], padded.view(-1, 128).amax(1), out=states["largest"])
        return subtract(states, states["largest"].repeat_interleave(128)[:numel] * states["code"] * 1e-3)


@pytest.fixture
def small_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the size limit, so most parameters of small models get 8-bit states."""
    monkeypatch.setattr(optimizer_rule, "LEAST_NUMEL", 1000)


SMALL: dict[str, UpdateRule] = {
    f"{kind.__name__} {width}": kind(lr=3e-3, weight_decay=0.1, groups=(("q_proj", {"lr_scale": 0.5}),), states=width)
    for kind in (AdamW, Lion)
    for width in ("bf16", "int8")
}
MATRIX: dict[str, UpdateRule] = {
    "adafactor": Adafactor(lr=0.03, weight_decay=0.1, groups=(("(q|x)_proj", {"lr_scale": 0.5}),)),
    "adalomo": AdaLomo(lr=0.03),
    "muon": Muon(lr=0.02, rest=AdamW(lr=1e-3), groups=(("norm", {"lr_scale": 2.0}),)),
}
RULES: dict[str, UpdateRule] = {
    "counting": Counting(),
    "blocks": Blocks(),
    "sgd": SGD(lr=0.1, weight_decay=0.1, groups=(("q_proj", {"lr_scale": 0.5}),)),
    **{name: rule for name, rule in SMALL.items() if name != "AdamW int8"},
}
"""Rules without a case of their own in `tests.contracts`."""


WAYS = list(zip(RULES, cycle(PLACES), cycle(["fp32", "bf16"]), cycle([0.2, 0.2, None, None]), strict=False))
"""Each rule with one placement and one precision."""


def assert_planes(engine: Engine, reference: Reference) -> None:
    engine.finish()
    for info in parts_of(engine).infos:
        factors = stored_factors(engine, info.name)
        for plane, wanted in reference.states[info.name].items():
            if plane != "weights" and wanted.numel():
                found = factors[plane] if plane in factors else stored_plane(parts_of(engine).store, info.index, plane)
                assert torch.equal(found.cpu().view(-1), wanted.cpu().view(-1)), (info.name, plane)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "place", "precision", "max_grad_norm"), WAYS)
def test_a_rule_is_plain_torch_with_its_kernel_and_goes_on_from_a_checkpoint(
    rule: str, place: str, precision: str, max_grad_norm: float | None, tmp_path: Path, small_bytes: None
) -> None:
    """Weights and optimizer states are bit-equal on any tier. Tiles of 2048 elements end inside parameters."""
    settings = {"optimizer": RULES[rule], "precision": precision, "max_grad_norm": max_grad_norm}
    engine, reference = train_both(build(llama), batches(3), placement=placed(place, tmp_path), **settings)
    names = {plane.name for region in parts_of(engine).regions for plane in region.states}
    assert names - {"weights", "low"} == {plane.name for part in RULES[rule].parts for plane in part.moments}
    assert_planes(engine, reference)
    engine.save_checkpoint(tmp_path / "saved")
    engine.close()
    where = placed(place, tmp_path) if place == "device" else Placement()  # an accelerator's kernel differs in bits
    resumed = Engine(build(llama, seed=9), placement=where, **settings)
    resumed.load_checkpoint(tmp_path / "saved")
    assert resumed.step(tokens(3)).loss.item() == reference.step(tokens(3))[0].item()
    assert_same(weights(resumed), reference.masters)
    assert_planes(resumed, reference)


@pytest.mark.parametrize(
    ("rule", "place", "precision", "delay"),
    [
        (AdamW(lr=1e-2), "nvme", "bf16", 0),
        (AdamW(lr=1e-2), "cpu", "fp32", 1),
        (MATRIX["muon"], "cpu", "bf16", 0),
        pytest.param(SMALL["AdamW int8"], "device", "bf16", 0, marks=pytest.mark.slow),
        pytest.param(SMALL["Lion bf16"], "cpu", "bf16", 0, marks=pytest.mark.slow),
        pytest.param(MATRIX["adafactor"], "nvme", "fp32", 0, marks=pytest.mark.slow),
        pytest.param(MATRIX["adalomo"], "cpu", "fp32", 0, marks=pytest.mark.slow),
    ],
)
def test_an_empty_state_begins_anew(
    rule: UpdateRule, place: str, precision: str, delay: int, tmp_path: Path, small_bytes: None
) -> None:
    """After a reset, every rule goes on like a new optimizer. Break: leave the number of updates unchanged."""
    settings = {"optimizer": rule, "precision": precision, "max_grad_norm": None}
    reference = (Late if delay else Reference)(build(llama), **settings)
    engine = Engine(build(llama), delay=delay, placement=placed(place, tmp_path), **settings)
    reference.update_on(updating_device(engine))
    for seed in range(5):
        if seed == 3:
            engine.load_moments({name: {} for name in reference.named})
            reference.steps = dict.fromkeys(reference.named, 0)
            for states in reference.states.values():
                for name in states.keys() - {"weights"}:
                    states[name].zero_()
        assert engine.step(tokens(seed)).loss.item() == reference.step(tokens(seed))[0].item(), seed
    assert_same(weights(engine), reference.masters)
    assert_planes(engine, reference)


class Wide(nn.Module):
    """Blocks of any width. Their parameters end anywhere in a page."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def mean_square(outputs: torch.Tensor, _batch: Any) -> torch.Tensor:
    return outputs.square().mean()


def test_eps_may_be_zero() -> None:
    """If no gradient is zero. The padding between parameters is zero, without gradients."""
    batch = {"x": torch.randn(4, 12, generator=torch.Generator().manual_seed(0)).to(own_device())}
    rule = AdamW(eps=0.0, weight_decay=0.0)
    train_both(build(lambda: Wide(12)), [batch] * 3, loss_fn=mean_square, optimizer=rule, clip="deferred")
    engine = Engine(build(lambda: Wide(12)), rule, max_grad_norm=1e-3, clip="speculative")
    assert [engine.step(batch, mean_square).corrected > 0 for _ in range(2)] == [True, True]


def test_a_rule_without_a_correction_is_deferred() -> None:
    with pytest.raises(ConfigError, match=r"train\.clip is speculative.*Counting.*deferred or auto"):
        Engine(Stack(), optimizer=Counting(), clip="speculative")
    with Engine(build(llama), optimizer=Counting(), clip="auto", throttle={"update": 1e5}) as engine:
        assert engine.resolve_clip(1) == "deferred"
        assert engine.step(tokens()).corrected == 0
    with Engine(build(llama), throttle={"update": 1e5}) as engine:
        assert engine.resolve_clip(1) == "auto", "the throttle says so: it is left to the steps"


@pytest.mark.parametrize(
    "plane", [Plane("low", torch.float32), Plane("weights", torch.float32), Plane("q", torch.int8, block=96)]
)
def test_a_plane_that_cannot_be_is_refused(plane: Plane) -> None:
    @dataclass(frozen=True)
    class Wrong(Counting):
        moments = (Plane("times", torch.int16), plane)

    with pytest.raises(ConfigError, match=f"invalid plane {plane.name}"):
        Engine(build(llama), optimizer=Wrong())


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": float("inf")},
        {"lr": "x"},
        {"betas": None},
        {"betas": (0.9, 1.0)},
        {"weight_decay": -1.0},
        {"groups": (("a", {"lr_scale": "x"}),)},
        {"groups": (("a",),)},
        {"groups": None},
    ],
)
@pytest.mark.parametrize("kind", [AdamW, Lion])
def test_a_setting_of_a_rule_is_checked(kind: type[UpdateRule], wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"optimizer\.{next(iter(wrong))}"):
        kind(**wrong)


# -- moments in fewer bytes --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["AdamW int8", "Lion bf16"])
def test_small_states_depend_on_the_seed_where_they_are_drawn(rule: str, small_bytes: None) -> None:
    found = []
    for seed in (0, 1):
        engine = Engine(build(llama), SMALL[rule], seed=seed)
        for number in range(2):
            engine.step(tokens(number))
        engine.finish()
        info = next(info for info in parts_of(engine).infos if "up_proj" in info.name)
        found.append(stored_plane(parts_of(engine).store, info.index, "exp_avg").clone())
    assert torch.equal(*found) == ("int8" in rule)


def test_int8_keeps_embeddings_and_small_parameters_in_fp32() -> None:
    rule = AdamW(states="int8", groups=(("up", {"rule": Lion(states="int8")}), ("q", {"lr_scale": 0.5})))
    kept = {"is_embedding": True, "shape": (1000, 10)}, {"shape": (4095,)}, {"shape": (63, 65)}
    for settings in kept:
        for name, choices in (("q", (1, 0.5)), ("k", (1, 1.0)), ("up", (3, 1e-4 / 1e-3))):
            choice = rule.choose(ParameterTraits(name, **settings))  # type: ignore[arg-type]
            assert (choice.rule, choice.lr_scale) == choices
            assert {plane.dtype for plane in rule.parts[choice.rule].moments} == {torch.float32}
    for name, number in (("q", 0), ("up", 2)):
        choice = rule.choose(ParameterTraits(name, (64, 64)))
        assert choice.rule == number
        assert rule.parts[number].moments[0] == Plane("exp_avg", torch.uint8)
    assert AdamW(states="bf16").choose(ParameterTraits("a", (3,), is_embedding=True)).rule == 0


@pytest.mark.parametrize(
    ("rule", "bytes_each", "place", "clips"),
    [
        (AdamW(), 12, "cpu", True),
        (AdamW(states="bf16"), 8, "nvme", True),
        (AdamW(states="int8"), 4 + 2 * (1 + 4 / 128), "cpu", False),
        (Lion(), 8, "nvme", False),
        (Lion(states="bf16"), 6, "cpu", True),
        (Lion(states="int8"), 4 + 1 + 4 / 128, "nvme", True),
    ],
)
def test_small_states_take_the_bytes_that_are_promised(
    rule: UpdateRule, bytes_each: float, place: str, clips: bool, tmp_path: Path
) -> None:
    """Exact bytes in bf16, for parameters with small states: 2 bytes more for a gradient that waits for the norm."""
    settings = {"precision": "bf16", "max_grad_norm": 1.0 if clips else None, "clip": "deferred"}
    make = partial(llama, hidden_size=40, intermediate_size=107, num_hidden_layers=1, vocab_size=67)
    engine = Engine(build(make), rule, placed(place, tmp_path), **settings)
    layout = parts_of(engine)
    small = sum(r.numel for r in layout.regions if r.rule == 0)
    kept = sum(r.numel for r in layout.regions) - small
    whole = 12 if isinstance(rule, AdamW) else 8
    planes = ("weights", "low", "exp avg", "exp avg sq", "exp avg scale", "exp avg sq scale", "gradients")
    held = sum(
        size
        for tier, name, size in engine.allocations
        if tier == place and name.removesuffix(" bf16").removesuffix(" uint8") in planes
    )
    wanted = small * bytes_each + kept * whole + 2 * clips * (small + kept)
    assert held == wanted if place == "cpu" else wanted <= held <= wanted + 4096 * 20
    assert small


def test_small_states_are_deferred_when_clipped_and_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.states is 'int4'.*; it must be one of fp32, bf16, int8"):
        AdamW(states="int4")
    with pytest.raises(ConfigError, match=r"train\.clip is speculative.*AdamW with states in bf16 cannot"):
        Engine(Stack(), AdamW(states="bf16"), clip="speculative")
    engine = Engine(build(llama), AdamW(states="bf16"))
    engine.save_checkpoint(tmp_path / "saved")
    for other in ("fp32", "int8"):
        with pytest.raises(ConfigError, match=r"AdamW with bf16 states .*exp_avg bfloat16.*--optimizer\.reset"):
            Engine(build(llama), AdamW(states=other)).load_checkpoint(tmp_path / "saved")


# -- SGD ---------------------------------------------------------------------------------------------------------------


def test_sgd_has_settings_of_its_own() -> None:
    for wrong in (1.0, -0.1, "x"):
        with pytest.raises(ConfigError, match=r"optimizer\.momentum"):
            SGD(momentum=wrong)  # type: ignore[arg-type]
    assert Engine(build(llama), SGD(), clip="auto", throttle={"update": 1e3}).resolve_clip(1) == "deferred"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "how", "within"),
    [
        (AdamW(betas=(0.5, 0.9)), {"max_grad_norm": None}, None),
        (SGD(momentum=0.5), {"max_grad_norm": 1.0, "throttle": {"update": 1e7}}, None),
        (AdamW(betas=(0.5, 0.9)), {"max_grad_norm": 1.0, "clip": "speculative"}, 1e-5),
    ],
    ids=["at once", "deferred", "speculative"],
)
def test_settings_move_from_step_to_step(rule: Any, how: dict[str, Any], within: float | None) -> None:
    """Settings change as in torch's schedulers. A running update keeps the old ones."""
    model, name = build(llama), "model.norm.weight"
    reference = Reference(model, rule, max_grad_norm=how["max_grad_norm"])
    engine = Engine(model, rule, Placement(**PLACES["cpu"]), **how)
    reference.update_on(updating_device(engine))
    for step in range(4):
        share = 0.1 * step
        settings = {"betas": (share, 0.9 - share)} if isinstance(rule, AdamW) else {"momentum": 0.9 - share}
        engine.tune(settings, {name: share})
        reference.rule = replace(rule, **settings)
        reference.choices[name] = replace(reference.choices[name], weight_decay=share)
        reference.step(tokens(step))
        engine.step(tokens(step))
    assert_weights(engine, reference, within, "at the end")
    assert engine.optimizer == reference.rule
    assert (1.0, pytest.approx(0.3), [name]) in engine.groups
    for wrong, decays, message in (
        ({"lr": 1.0}, {}, "cannot change lr"),
        ({"momentum": 0.0}, {}, "other moments|cannot change momentum"),
        ({}, {name: -1.0}, "weight_decay of model.norm.weight is -1.0; it must be a number"),
        ({}, {name: "x"}, "weight_decay of model.norm.weight is 'x'; it must be a number"),
        ({}, {"model.norm": 0.1}, "no parameter 'model.norm'"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine.tune(wrong, decays)
    engine.step(tokens())  # no state was lost


def test_the_example_of_a_rule_trains() -> None:
    rule = run_example(optimizer_rule, UpdateRule, kernels=kernels)["Sign"](lr=0.01)
    model = build(llama)
    expected = {name: value.detach().clone() for name, value in model.named_parameters()}
    engine = Engine(model, rule, precision="fp32", max_grad_norm=None)
    engine.backward(model(**tokens()).loss)
    for name, parameter in model.named_parameters():
        expected[name].sub_(parameter.grad.sign(), alpha=0.01)
    engine.update()
    assert_same(weights(engine), expected)
    train_both(build(llama), batches(2), optimizer=rule, precision="bf16", max_grad_norm=None)


def test_the_example_of_a_method_trains(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(METHODS, "_objects", {**METHODS})
    run_example(method, method.Method, METHODS=METHODS)
    printed, plain = (
        Engine(build(llama), type("Printed", (SGD,), {"method": "printed"})(lr=0.1)),
        Engine(build(llama), SGD(lr=0.1)),
    )
    result = plain.step(tokens())
    assert printed.step(tokens()).loss == result.loss
    assert capsys.readouterr().out == f"{result.grad_norm}\n"
    assert_same(weights(printed), weights(plain))


# -- rules on whole matrices -----------------------------------------------------------------------------------------


@LEDGER
def test_what_is_kept_is_planned_to_the_byte() -> None:
    """Adafactor's factors on the host and Muon's workspace on the device are planned exactly. One byte less on the host
    is refused at once.
    """
    for rule, key, tier in ((MATRIX["adafactor"], "host_memory", "cpu"), (MATRIX["muon"], "device_memory", "device")):
        places = {"parameters": "cpu", "optimizer": "cpu"}
        engine = Engine(build(llama), rule, Placement(**places))
        needed = sum(size for where, _, size in engine.allocations if where == tier)
        Engine(build(llama), rule, Placement(**places, **{key: needed})).close()
        if tier == "cpu":  # with less device memory, smaller units would fit
            with pytest.raises(DoesNotFitError, match="row var"):
                Engine(build(llama), rule, Placement(**places, **{key: needed - 1}))
    infos = parts_of(engine).infos
    largest = max(MATRIX["muon"].workspace_bytes(info.shape) for info in infos if info.rule == 0)
    assert ("device", "update workspace", largest) in engine.allocations


def refused_padding() -> str:
    """Build an engine with ranges of mostly padding. Return the error message."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_regions, "_MOST_PADDING", 0)
        return refusal(optimizer=Adafactor(), zero_stage=3)


@pytest.mark.slow
def test_ranges_that_would_be_mostly_padding_are_refused() -> None:
    for told in run(3, refused_padding):
        assert "needs whole matrices" in told
        assert "--offload.zero_stage 0" in told
        assert "--optimizer.groups" in told


@pytest.mark.slow
def test_another_rules_states_are_refused_or_begin_anew(tmp_path: Path) -> None:
    """With `reset=True` the engine equals a new engine over the loaded weights, regardless of earlier training."""
    first = Engine(build(llama), AdamW(lr=0.01))
    for seed in range(2):
        first.step(tokens(seed))
    first.save_checkpoint(tmp_path / "saved", {"step": 2})
    for rule in MATRIX.values():
        engine = Engine(build(llama, seed=3), rule, placed("nvme", tmp_path))
        engine.step(tokens(8))
        told = rf"saved contains optimizer states of AdamW .*exp_avg.*{type(rule).__name__}.*"
        with pytest.raises(ConfigError, match=told + r"--optimizer\.name.*--optimizer\.reset.*reset=True"):
            engine.load_checkpoint(tmp_path / "saved")
        with pytest.warns(UserWarning, match="another update rule"):
            assert engine.load_checkpoint(tmp_path / "saved", reset=True) == {"step": 2}
        assert_same(weights(engine), weights(first))
        other = build(llama)
        with torch.no_grad():
            for (_, p), value in zip(other.named_parameters(), weights(first).values(), strict=True):
                p.copy_(value)
        anew = Engine(other, rule)
        for seed in range(2):
            assert engine.step(tokens(seed)).loss.item() == anew.step(tokens(seed)).loss.item()
        assert_same(weights(engine), weights(anew))
        engine.close()


def test_another_models_checkpoint_is_refused_with_reset_too(tmp_path: Path) -> None:
    engine = Engine(build(llama), AdamW())
    engine.save_checkpoint(tmp_path / "saved")
    other = Engine(build(lambda: llama(intermediate_size=64)), Adafactor())
    with pytest.raises(ConfigError, match="does not fit the model"):
        other.load_checkpoint(tmp_path / "saved", reset=True)
    with pytest.raises(ConfigError, match=r"bfloat16.*--train\.precision"):
        Engine(build(llama), precision="bf16").load_checkpoint(tmp_path / "saved")
