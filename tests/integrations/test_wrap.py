"""`offload.wrap`: a plain loop has the bits of the same loop without it, or is refused by name."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

import offload
from offload.errors import ConfigError, DoesNotFitError
from offload.integrations import wrap
from tests.engine.compare import assert_same
from tests.engine.device import TWO_KERNELS, own_device, twin
from tests.engine.handmade import WIDTH, Block, Stack, cross_entropy, words
from tests.integrations.plain import KernelAdamW
from tests.matrix import matrix

pytestmark = TWO_KERNELS


def groups(model: Any) -> list[dict[str, Any]]:
    """Return three groups with rates and decays of their own; the first has a frozen parameter."""
    return [
        {"params": [*model.embedding.parameters(), *model.blocks[0].parameters()]},
        {"params": [*model.blocks[1:].parameters()], "weight_decay": 0.1},
        {"params": [*model.head.parameters()], "lr": 0.01, "weight_decay": 0.0},
    ]


def adamw(model: Any, kind: Any = torch.optim.AdamW) -> Any:
    return kind(groups(model), lr=0.02, betas=(0.8, 0.9), weight_decay=0.01)


def adam(model: Any, kind: Any = torch.optim.Adam) -> Any:
    """Return Adam without weight decay: the same formula as AdamW's."""
    parts = [{**group, "weight_decay": 0.0} for group in groups(model)]
    return kind(parts, lr=0.02, betas=(0.8, 0.9), weight_decay=0.0)


def sgd(model: Any, kind: Any = None) -> Any:
    return torch.optim.SGD(groups(model), lr=0.02, momentum=0.9, weight_decay=0.01)


def model_of(frozen: bool = True) -> Any:
    torch.manual_seed(0)
    model = Stack(depth=2)
    model.embedding.requires_grad_(not frozen)
    return model


def train(model: Any, optimizer: Any, scheduler: Any, steps: range) -> list[float]:
    """Run a loop as people write it, which knows nothing of offload."""
    told = []
    for step in steps:
        for number in range(2):
            batch = {key: value.to(own_device()) for key, value in words(2 * step + number).items()}
            loss = cross_entropy(model(batch["x"]), batch) / 2
            loss.backward()
            told.append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        told += [norm.item(), scheduler.get_last_lr()[0]]
    return told


def schedule(optimizer: Any) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: step / 3 if step < 2 else 1 / step)


def stored(*parts: Any) -> Any:
    """Return state dicts as a file gives them back."""
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts], file)
    file.seek(0)
    return torch.load(file)


PLACES: dict[str, dict[str, Any]] = {
    "cpu": {"parameters": "cpu", "optimizer": "cpu"},
    "nvme": {"parameters": "cpu", "optimizer": "nvme", "gradients": "nvme"},
    "budget": {"device_memory": "24KiB", "host_memory": 1 << 20},
}


@pytest.mark.filterwarnings("ignore:gradients with several contributions are summed in host memory")
@matrix(strength=1, make=[adamw, adam, sgd], place=list(PLACES))
def test_a_plain_loop_has_the_bits_of_the_loop_without_wrap(
    make: Callable[..., Any], place: str, tmp_path: Path
) -> None:
    """With groups, accumulation, clipping, a scheduler, a frozen parameter, and a resume from state dicts, which plain
    PyTorch reads and writes as well."""
    where = PLACES[place] | ({"nvme_dir": tmp_path} if place == "nvme" else {})
    model = model_of()
    plain = twin(model)
    theirs = make(plain, KernelAdamW)
    their_schedule = schedule(theirs)
    before = make(model)
    our_schedule: Any = schedule(before)  # all rates are 0 now
    ours, optimizer = offload.wrap(model, before, **where)
    assert ours is model
    assert train(ours, optimizer, our_schedule, range(2)) == train(plain, theirs, their_schedule, range(2))
    found, wanted = optimizer.state_dict()["state"], theirs.state_dict()["state"]
    names = [name for name, p in plain.named_parameters() if p.requires_grad]
    assert len(found) == len(wanted) == len(names)
    for mine, its in zip(found.values(), wanted.values(), strict=True):
        assert_same({key: mine[key] for key in its}, its)
    weights, states, rates = stored(ours, optimizer, our_schedule)
    optimizer.engine.close()

    resumed = model_of()
    resumed.load_state_dict(weights)
    before = make(resumed)
    scheduler: Any = schedule(before)
    if place == "cpu":  # into torch's own optimizer, before the model goes into an engine
        before.load_state_dict(theirs.state_dict())
    ours, optimizer = offload.wrap(resumed, before, **where)
    if place != "cpu":
        scheduler = schedule(optimizer)
        optimizer.load_state_dict(states)
    scheduler.load_state_dict(rates)
    assert train(ours, optimizer, scheduler, range(2, 4)) == train(plain, theirs, their_schedule, range(2, 4))
    assert_same(ours.state_dict(), {name: value.cpu() for name, value in plain.state_dict().items()})
    optimizer.engine.close(restore=True)
    assert_same(ours.state_dict(), plain.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["adafactor", "lion", "lomo", "muon"])
def test_other_rules_resume_from_a_state_dict(rule: str) -> None:
    """As they go on without one."""
    kinds: dict[str, Callable[[Any], Any]] = {
        "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.02),
        "lion": lambda _: offload.Lion(lr=1e-3),
        "lomo": lambda _: offload.LOMO(lr=0.02),
        "muon": lambda _: offload.Muon(lr=0.02, rest=offload.AdamW(lr=0.02)),
    }
    model = model_of(frozen=False)
    ours, optimizer = offload.wrap(model, kinds[rule](model))
    train(ours, optimizer, schedule(optimizer), range(2))
    weights, states = stored(ours, optimizer)
    other = model_of(frozen=False)
    other.load_state_dict(weights)
    theirs, resumed = offload.wrap(other, kinds[rule](other))
    resumed.load_state_dict(states)
    found = train(theirs, resumed, schedule(resumed), range(2, 4))
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["initial_lr"]
    assert train(ours, optimizer, schedule(optimizer), range(2, 4)) == found
    assert_same(ours.state_dict(), theirs.state_dict())


def test_a_bf16_model_resumes_with_its_masters() -> None:
    model = model_of().bfloat16()
    ours, optimizer = offload.wrap(model, adamw(model))
    train(ours, optimizer, schedule(optimizer), range(2))
    weights, states = stored(ours, optimizer)
    assert weights["head.weight"].dtype == torch.bfloat16
    other = model_of().bfloat16()
    other.load_state_dict(weights)
    _, resumed = offload.wrap(other, adamw(other))
    resumed.load_state_dict(states)
    masters, found = (dict(each.engine.named_parameters()) for each in (optimizer, resumed))
    assert_same(found, masters)
    assert not torch.equal(found["head.weight"], found["head.weight"].bfloat16().float())


# -- refusals ------------------------------------------------------------------------------------------------


def tiny() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))


def of(make: Callable[..., Any], **more: Any) -> Callable[[Any], Any]:
    """Wrap the tiny model with an optimizer over all of its parameters."""
    return lambda model: offload.wrap(model, make(model.parameters(), **{"lr": 0.1, **more}))


def given(make: Callable[[Any], Any], **settings: Any) -> Callable[[Any], Any]:
    return lambda model: offload.wrap(model, make(model), **settings)


def two_rates(model: Any) -> Any:
    return torch.optim.AdamW([{"params": part.parameters(), "betas": (0.1 * n, 0.9)} for n, part in enumerate(model)])


def states_of_another(model: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model[0].weight] = {"step": 1, "exp_avg": torch.zeros(4, 4)}
    return optimizer


def wrapped(
    use: Callable[[Any, Any], Any], make: Any = None, given_dtype: torch.dtype = torch.float32, **settings: Any
) -> Callable[[Any], Any]:
    """Wrap, make a backward, and go on with a use of model and optimizer."""

    def refused(model: Any) -> None:
        model, optimizer = offload.wrap(model, (make or over_all)(model), **settings)
        model(torch.ones(2, 4, dtype=given_dtype)).sum().backward()
        use(model, optimizer)

    return refused


def over_all(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def two_groups(model: Any) -> Any:
    return torch.optim.AdamW([{"params": part.parameters()} for part in model], lr=0.1)


def one_rate(_: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.step()


def frozen_state(_: Any, optimizer: Any) -> None:
    optimizer.load_state_dict({"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1, 2, 3]}]})


def by_a_scaler(model: Any, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 4, dtype=torch.float16)).sum()).backward()
    scaler.step(optimizer)


def wrapped_again(model: Any, optimizer: Any) -> None:
    offload.wrap(model, optimizer)


Adam, AdamW, SGD = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD
REFUSALS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "amsgrad": (of(AdamW, amsgrad=True), r"has amsgrad=True.*offload.wrap\(model, rule\)"),
    "maximize": (of(SGD, maximize=True), "has maximize=True"),
    "differentiable": (of(SGD, differentiable=True), "has differentiable=True"),
    "nesterov": (of(SGD, momentum=0.9, nesterov=True), "has nesterov=True"),
    "dampening": (of(SGD, momentum=0.9, dampening=0.5), "has dampening=0.5"),
    "Adam with decay": (of(Adam, weight_decay=0.1), "not decoupled: give AdamW"),
    "LBFGS": (of(torch.optim.LBFGS), r"torch.optim.lbfgs.LBFGS, and offload has no equivalent.*torch.optim.AdamW"),
    "RMSprop": (of(torch.optim.RMSprop), "rmsprop.RMSprop, and offload has no equivalent update rule"),
    "two optimizers": (given(lambda m: [over_all(m), over_all(m)]), r"given 2 optimizers.*offload.Muon\(lr="),
    "another model": (given(lambda _: over_all(tiny())), "3 parameters of the optimizer are not the model's, .* has 3"),
    "some parameters": (given(lambda m: over_all(m[0])), "1 parameters with requires_grad are not .* first 1.weight"),
    "groups unlike": (given(two_rates), r"groups .* have betas .*can differ only in lr and weight_decay"),
    "another rule's states": (given(states_of_another), r"state of 0.weight has exp_avg \[4, 4\], and SGD has no mom"),
    "a rate alone": (wrapped(one_rate, two_groups), "no longer in the ratio"),
    "no model": (
        lambda model: wrap.wrap(cast("Any", [model]), over_all(model)),
        r"it must be wrap\(model, optimizer, \.\.\.\)",
    ),
    "no optimizer": (given(lambda m: m.parameters()), r"torch.optim.AdamW\(model.parameters\(\)\)"),
    "wrapped again": (wrapped(wrapped_again), "given the optimizer OffloadOptimizer|given the optimizer Wrapped"),
    "a keyword": (given(over_all, device_mem="1GiB"), r"'device_mem' \(did you mean device_memory\?\)"),
    "a removed keyword": (given(over_all, noise_scale=True), r"^train\.noise_scale is no longer a setting: measure"),
    "a removed keyword of an engine": (lambda m: offload.Engine(m, noise_scale=True), "noise_scale is no longer"),
    "a place twice": (given(over_all, placement={}, parameters="cpu"), "given parameters and a placement"),
    "a tier": (given(over_all, optimizer="disk"), "offload.optimizer is 'disk'; allowed"),
    "a size": (given(over_all, device_memory="much"), "offload.device_memory"),
    "no folder": (given(over_all, optimizer="nvme"), "offload.nvme_dir is not set"),
    "a closure": (wrapped(lambda _, o: o.step(lambda: 0.0)), r"call closure\(\) or loss.backward\(\) first"),
    "model.zero_grad": (wrapped(lambda m, _: m.zero_grad()), r"set to None during a step.*optimizer.zero_grad\(\)"),
    "a group added": (wrapped(lambda _, o: o.add_param_group({"params": []})), "complete the model before"),
    "states of others": (wrapped(frozen_state), r"groups of \[4\] parameters.*of \[3\].*before offload.wrap"),
    "states read": (wrapped(lambda _, o: o.state["x"]), "engine.save_checkpoint"),
    "bf16 states": (
        wrapped(lambda _, o: o.state_dict(), lambda _: offload.AdamW(lr=0.1, states="bf16")),
        r"not fp32 \(AdamW with bf16 states\): optimizer.save\(folder\)",
    ),
    "forwards alone": (wrapped(print, lambda _: offload.MeZO(lr=0.1)), r"call engine.step\(batch, loss_fn\)"),
    "a GradScaler": (
        wrapped(by_a_scaler, given_dtype=torch.float16, precision="fp16"),
        r"a loss scale of its own \(65536 now\).*Leave the GradScaler out",
    ),
    "a clip of some": (wrapped(lambda m, o: o.clip_grad_norm_([m[0].weight], 1.0)), "clips all 3 trainable parameters"),
    "a clip to another norm": (wrapped(lambda m, o: o.clip_grad_norm_(m.parameters(), 1.0, 1)), "norm_type=1"),
}


@pytest.mark.parametrize(("use", "why"), REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_go_is_refused(use: Callable[[Any], Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        use(tiny())


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_torchs_muon_is_refused_with_the_rule_to_write() -> None:
    model = tiny()
    optimizer = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.25)
    with pytest.raises(ConfigError, match=r"offload.Muon\(lr=0.25, weight_decay=0.1, rest=offload.AdamW\(lr="):
        offload.wrap(model, optimizer)


def test_states_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = offload.wrap(model := tiny(), over_all(model))
    monkeypatch.setattr(wrap, "memory", lambda: {"available_bytes": 10})
    with pytest.raises(DoesNotFitError, match=r"holds 288 B of optimizer states.*optimizer.save\(folder\)"):
        optimizer.state_dict()


def test_a_refused_model_is_whole() -> None:
    """Also where the states of its optimizer are refused late."""
    model = tiny()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError):
        offload.wrap(model, states_of_another(model))
    assert_same(model.state_dict(), before)
    ours, _ = offload.wrap(model, over_all(model))
    assert_same(ours.state_dict(), before)


class TwoCasts(Block):
    """Casts its input twice under autocast: the gradients of both are added in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 24)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.norm(h) + self.down(torch.tanh(self.up(h)) * self.gate(h))


def loss_with_kept_activation(model: Any, batch: Any) -> torch.Tensor:
    kept: list[torch.Tensor] = []
    handle = model.blocks[0].up.register_forward_hook(lambda _module, _inputs, result: kept.append(result))
    loss = cross_entropy(model(batch["x"]), batch)
    handle.remove()
    return loss + kept[-1].square().mean()


def loss_over_checkpoints(model: Any, batch: Any) -> torch.Tensor:
    h = model.embedding(batch["x"])
    for block in model.blocks:
        h = checkpoint(block, h, use_reentrant=False)
    return cross_entropy(model.head(h), batch)


def loss_under_autocast(model: Any, batch: Any) -> torch.Tensor:
    with torch.autocast(own_device().type, torch.bfloat16):
        return cross_entropy(model(batch["x"]), batch)


LOSSES: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "a hook keeps an activation for the loss, from the second step on": loss_with_kept_activation,
    "a checkpoint around each block": loss_over_checkpoints,
    "autocast": loss_under_autocast,
}


@pytest.mark.parametrize("loss_of", LOSSES.values(), ids=LOSSES)
def test_a_loss_has_the_bits_of_plain_pytorch(loss_of: Callable[[Any, Any], torch.Tensor]) -> None:
    def trained(model: Any, optimizer: Any) -> Any:
        for step in range(3):
            batch = {key: value.to(own_device()) for key, value in words(step).items()}
            loss = loss_of(model, batch) if step else cross_entropy(model(batch["x"]), batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    torch.manual_seed(0)
    model = Stack(TwoCasts)
    reference = twin(model)
    wrapped_model, optimizer = offload.wrap(model, adamw(model), parameters="cpu", optimizer="cpu")
    assert_same(trained(wrapped_model, optimizer), trained(reference, adamw(reference, KernelAdamW)))
    optimizer.engine.close()


def test_the_norm_of_a_result_is_that_before_the_clip() -> None:
    """Also where a script reads or changes clipped gradients: a Trainer logs this norm."""
    model = tiny()
    ours, optimizer = offload.wrap(model, offload.SGD(lr=0.1, decay_1d=True))
    ours(torch.ones(2, 4)).square().sum().backward()
    norm = optimizer.clip_grad_norm_(ours.parameters(), 0.5)
    clipped = torch.nn.utils.get_total_norm([p.grad for p in ours.parameters()])
    torch._foreach_mul_([p.grad for p in ours.parameters()], 0.5)
    optimizer.step()
    assert float(clipped) == pytest.approx(0.5, rel=1e-5)
    assert optimizer.result.grad_norm == pytest.approx(float(norm), rel=1e-6)


# -- settings of groups -----------------------------------------------------------------------------------------

S = lr_scheduler
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "ChainedScheduler": lambda o: S.ChainedScheduler([S.ConstantLR(o, 0.5, 2), S.ExponentialLR(o, 0.9)]),
    "ConstantLR": lambda o: S.ConstantLR(o, 0.5, 4),
    "CosineAnnealingLR": lambda o: S.CosineAnnealingLR(o, 9),
    "CosineAnnealingWarmRestarts": lambda o: S.CosineAnnealingWarmRestarts(o, 2, 2),
    "CyclicLR": lambda o: S.CyclicLR(o, [1e-3, 5e-4], [1e-1, 5e-2], 2),
    "ExponentialLR": lambda o: S.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: S.LambdaLR(o, lambda step: 1 / (1 + step)),
    "LinearLR": lambda o: S.LinearLR(o, 0.2, total_iters=5),
    "MultiStepLR": lambda o: S.MultiStepLR(o, [2, 4]),
    "MultiplicativeLR": lambda o: S.MultiplicativeLR(o, lambda step: 0.5 + 0.1 * step),
    "OneCycleLR": lambda o: S.OneCycleLR(o, [1e-2, 5e-3], total_steps=9),
    "PolynomialLR": lambda o: S.PolynomialLR(o, 9, 2.0),
    "ReduceLROnPlateau": lambda o: S.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: S.SequentialLR(o, [S.LinearLR(o), S.ExponentialLR(o, 0.9)], [3]),
    "StepLR": lambda o: S.StepLR(o, 2, 0.5),
}
NO_SCHEDULES = {"LRScheduler", "_LRScheduler", "Optimizer"}


def steps_of_schedule(scheduler: Any, optimizer: Any) -> list[Any]:
    """Step optimizer and scheduler, without gradients. Return the settings of the groups after each step."""
    found = []
    for _ in range(3):
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, S.ReduceLROnPlateau) else []))
        found.append([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])
    return found


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
def test_every_schedule_goes_on_in_a_fresh_optimizer(tmp_path: Path) -> None:
    """`save` and `load` keep what the state dict of a torch optimizer keeps; also back in the same optimizer."""
    names = {name for name, kind in vars(S).items() if isinstance(kind, type) and name.endswith(("LR", "Scheduler"))}
    names |= {"CosineAnnealingWarmRestarts", "ReduceLROnPlateau"}
    assert names - NO_SCHEDULES == set(SCHEDULERS)

    def fresh(kind: Any = torch.optim.AdamW) -> Any:
        model = tiny()
        return kind([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.05}], lr=0.1), model

    def wrapped_fresh() -> Any:
        optimizer, model = fresh()
        return offload.wrap(model, optimizer)[1]

    ours, resumed = wrapped_fresh(), wrapped_fresh()
    groups_before = [dict(group) for group in ours.param_groups]
    for name, make in SCHEDULERS.items():
        for each in (ours, resumed):
            for group, before in zip(each.param_groups, groups_before, strict=True):
                own = group["params"]
                group.clear()
                group |= before | {"params": own}
        plain = fresh()[0]
        theirs, schedule = make(plain), make(ours)
        assert steps_of_schedule(schedule, ours) == steps_of_schedule(theirs, plain), name
        ours.save(tmp_path / name)
        rates = schedule.state_dict()
        other = fresh()[0]
        other.load_state_dict(plain.state_dict())
        wanted = make(other)
        wanted.load_state_dict(theirs.state_dict())
        wanted = steps_of_schedule(wanted, other)
        for optimizer in (resumed, ours):
            optimizer.load(tmp_path / name)
            schedule = make(optimizer)
            schedule.load_state_dict(copy.deepcopy(rates))
            assert steps_of_schedule(schedule, optimizer) == wanted, name
