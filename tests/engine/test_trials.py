"""Trial runs leave no trace: forwards of modules, and the global state of torch, are as before the call."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import offload
from offload import Engine
from tests.cases.models import build
from tests.engine.device import cpu_only, own_device
from tests.engine.handmade import Block, Log, Stack, cross_entropy, words
from tests.matrix import quick

LR = 0.1
Loop = Callable[[nn.Module, Callable[[Tensor], None]], None]
"""Calls a model, and passes each loss to the second argument, which takes a step."""


def trained(make: Callable[[], nn.Module], loop: Loop, *, with_engine: bool, **settings: Any) -> list[float]:
    """Return the losses of a loop in plain PyTorch or over `offload.wrap`."""
    model, losses = build(make).to(own_device()), list[float]()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=LR)
    if with_engine:
        model, optimizer = offload.wrap(model, optimizer, **settings)

    def step(loss: Tensor) -> None:
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    loop(model, step)
    if with_engine:
        optimizer.engine.close()
    return losses


def assert_equal_losses(make: Callable[[], nn.Module], loop: Loop, within: float = 0.0, **settings: Any) -> None:
    wanted = trained(make, loop, with_engine=False)
    assert len(set(wanted)) > 1
    found = trained(make, loop, with_engine=True, **settings)
    assert found == (pytest.approx(wanted, rel=within) if within else wanted)


# -- forwards -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "recompute"),
    quick(
        [(place, way) for place in ("", "head", "blocks.1", "blocks.1.up") for way in ("always", "never")],
        [("", "always"), ("blocks.1.up", "always")],
    ),
)
def test_a_forward_may_be_replaced_for_one_call(place: str, recompute: str) -> None:
    """TRL and Lightning send other functions through the call of a model."""

    def loop(model: nn.Module, step: Callable[[Tensor], None]) -> None:
        for seed in range(3):
            target, batch = model.get_submodule(place), words(seed)
            before = target.forward

            def once(
                *args: Any, target: nn.Module = target, before: Callable[..., Tensor] = before, scale: int = seed
            ) -> Tensor:
                target.forward = before
                return target(*args) * (1 + scale)

            target.forward = once
            step(cross_entropy(model(batch["x"]), batch))
            step(cross_entropy(model(batch["x"]), batch))

    assert_equal_losses(Stack, loop, recompute=recompute)


def test_evaluations_and_labels_leave_replaced_forwards_alone() -> None:
    calls = 0

    def once(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        model.forward = before
        return model(x)

    model = build(Stack)
    before = model.forward
    engine = Engine(model)
    model.forward = once
    engine.evaluate(words(), loss_fn=cross_entropy)
    assert calls > 1, "the trials call it too"
    assert model.forward is before
    with torch.no_grad():
        model.forward = once
        model(words(1)["x"])
    assert model.forward is before


# -- torch's global state -------------------------------------------------------------------------------------------


def norm_block() -> nn.Module:
    block = Block()
    parametrizations.weight_norm(block.up)
    return block


def norms() -> nn.Module:
    return Stack(norm_block)


def cached_loop(model: nn.Module, step: Callable[[Tensor], None]) -> None:
    for seed in range(3):
        batch = words(seed)
        with parametrize.cached():
            loss = cross_entropy(model(batch["x"]), batch)
        step(loss)


def cached_loop_with_backward(model: nn.Module, step: Callable[[Tensor], None]) -> None:
    for seed in range(3):
        batch = words(seed)
        with parametrize.cached():
            step(cross_entropy(model(batch["x"]), batch))


def two_calls_in_one_cache(model: nn.Module, step: Callable[[Tensor], None]) -> None:
    for seed in range(3):
        batch = words(seed)
        with parametrize.cached():
            loss = cross_entropy(model(batch["x"]), batch) + cross_entropy(model(batch["x"].flip(0)), batch)
        step(loss)


@pytest.mark.parametrize(
    ("loop", "within", "recompute"),
    quick(
        [
            (loop, within, way)
            for loop, within in ((cached_loop, 0.0), (cached_loop_with_backward, 0.0), (two_calls_in_one_cache, 1e-6))
            for way in ("always", "never")
        ],
        [(cached_loop, 0.0, "always"), (cached_loop_with_backward, 0.0, "never")],
    ),
)
def test_parametrizations_may_be_cached(loop: Loop, within: float, recompute: str) -> None:
    """The two calls add gradients in another order than one cached weight."""
    assert_equal_losses(norms, loop, within, recompute=recompute)


class ChecksAPart(Block):
    def forward(self, h: Tensor) -> Tensor:
        return h + checkpoint(lambda x: self.down(torch.tanh(self.up(x))), self.norm(h), use_reentrant=False)


@pytest.mark.parametrize("is_inside", quick([False, True], [False]))
def test_a_checkpoint_in_a_block_may_run_under_autocast(is_inside: bool) -> None:
    """Autocast caches casts of weights: without the weights, their reads in a backward were not seen."""

    def loop(model: nn.Module, step: Callable[[Tensor], None]) -> None:
        for seed in range(3):
            batch = words(seed)
            with torch.autocast(own_device().type, torch.bfloat16):
                loss = cross_entropy(model(batch["x"]), batch)
                if is_inside:
                    step(loss)
            if not is_inside:
                step(loss)

    assert_equal_losses(lambda: Stack(ChecksAPart), loop)


Setting = tuple[Callable[[], Any], Callable[[Any], Any], Any]
SETTINGS: dict[str, Setting] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 1),
    "matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    "threads": (torch.get_num_threads, torch.set_num_threads, torch.get_num_threads() + 1),
    "anomaly": (torch.is_anomaly_enabled, torch.set_anomaly_enabled, True),
    "autocast cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, False),
    "autocast dtype": (
        lambda: torch.get_autocast_dtype("cpu"),
        lambda dtype: torch.set_autocast_dtype("cpu", dtype),
        torch.float16,
    ),
    "math attention": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, False),
    "flash attention": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
    "hooks of all modules": (
        lambda: len(modules._global_forward_hooks),
        lambda _: modules.register_module_forward_hook(lambda *_: None),
        None,
    ),
    "random numbers": (torch.initial_seed, lambda _: torch.manual_seed(torch.initial_seed() + 1), None),
    "grad mode": (torch.is_grad_enabled, lambda _: torch.set_grad_enabled(torch.is_grad_enabled()), None),
}


class ChangesTorch(Stack):
    """The forward changes each global setting of torch, after a look at it."""

    seen = Log()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append({name: read() for name, (read, _, _) in SETTINGS.items()})
        result = super().forward(x)
        for _, write, value in SETTINGS.values():
            write(value)
        return result


@contextmanager
def settings_restored() -> Iterator[None]:
    before = {name: read() for name, (read, _, _) in SETTINGS.items()}
    try:
        yield
    finally:
        modules._global_forward_hooks.clear()
        for name, (_, write, value) in SETTINGS.items():
            if value is not None:
                write(before[name])


@cpu_only("the settings are those of the host")
@pytest.mark.parametrize("is_own_loop", [False, True], ids=["step", "own loop"])
def test_no_trial_leaves_a_setting_of_torch_behind(is_own_loop: bool) -> None:
    model, batch = build(ChangesTorch), words()
    engine = Engine(model)
    with settings_restored():
        torch.manual_seed(3)
        if is_own_loop:
            engine.backward(cross_entropy(model(batch["x"]), batch))
        else:
            engine.step(batch, loss_fn=cross_entropy)
    assert len(model.seen) > 2
    if not is_own_loop:  # some trials of a step run without gradients
        for each in model.seen:
            del each["grad mode"]
    assert [each for each in model.seen if each != model.seen[0]] == []


_KINDS = (bool, int, float, str, type(None))


def torch_globals() -> dict[str, Any]:
    """Return the variables of all modules of torch: numbers and texts, and the contents of tables."""
    found: dict[str, Any] = {}
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        for key, value in list(vars(sys.modules[name]).items()):
            if isinstance(value, _KINDS) and not (isinstance(value, float) and math.isnan(value)):
                found[f"{name}.{key}"] = value
            elif isinstance(value, dict | list | set):
                items = value.values() if isinstance(value, dict) else value
                found[f"{name}.{key}"] = sorted(map(id, items))
    return found


_TABLES_OF_TORCH = {"torch.jit._builtins._builtin_table"}
"""Tables that torch fills at the first use of a function."""


@pytest.mark.slow
@cpu_only("the state is that of the host")
def test_no_trial_changes_a_variable_of_any_module_of_torch() -> None:
    """The independent list: everything that torch's modules hold, before and after the trials of a first call."""
    model = build(lambda: nn.Sequential(norms(), nn.Dropout(0.1)))
    engine, looks = Engine(model), list[dict[str, Any]]()
    # The first look is before the trials, the last one right before the forward of the loop.
    model.register_forward_pre_hook(lambda *_: looks.append(torch_globals()), prepend=True)
    model.register_forward_pre_hook(lambda *_: looks.append(torch_globals()))
    with parametrize.cached(), torch.autocast("cpu", torch.bfloat16):
        engine.model(words()["x"])
    assert len(looks) > 2
    before, after = looks[0], looks[-1]
    assert len(after) > 1000
    changed = {name for name, value in after.items() if name in before and before[name] != value}
    assert changed <= _TABLES_OF_TORCH
