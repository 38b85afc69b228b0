"""Gradient clipping: the deferred mode is exact, the speculative mode as exact as the correction."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offload import AdamW, Engine
from offload.engine.gradients.updates import UNCLIPPED_STEPS
from tests.cases.models import build, llama, tokens
from tests.engine.compare import assert_same, own_step_of, step_of, weights
from tests.engine.handmade import Stack, cross_entropy, words
from tests.engine.inside import keep_gradients, parts_of, states
from tests.matrix import quick

RULE = AdamW(lr=1e-3)
NO_LIMIT = 1e9


class Spiking(Stack):
    """`factor` scales the embedding gradient, the last one to arrive in host memory."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * self.factor)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def pair(max_grad_norm: float, **settings: Any) -> tuple[Engine, Engine]:
    """Return two engines, different only in the clip mode: (deferred, speculative)."""
    return tuple(  # type: ignore[return-value]
        Engine(build(Spiking), optimizer=RULE, max_grad_norm=max_grad_norm, clip=clip, **settings)
        for clip in ("deferred", "speculative")
    )


def in_double(engine: Engine, before: dict[str, Tensor], moments: dict[str, Any], gradients: Any, scale: float) -> Any:
    """Compute AdamW in float64 from these fp32 states. Return (new weights, largest change)."""
    wanted, largest = {}, 0.0
    infos = {info.name: info for info in parts_of(engine).infos}
    for name, weight in before.items():
        state, decay = moments[name], infos[name].weight_decay
        step, (beta1, beta2) = state.num_steps + 1, RULE.betas
        gradient = gradients[name].double() * scale
        m = state.exp_avg.double() * beta1 + (1 - beta1) * gradient
        v = state.exp_avg_sq.double() * beta2 + (1 - beta2) * gradient**2
        change = RULE.lr / (1 - beta1**step) * m / (v.sqrt() / math.sqrt(1 - beta2**step) + RULE.eps)
        largest = max(largest, change.abs().max().item())
        wanted[name] = weight.double() * (1 - RULE.lr * decay) - change.view(weight.shape)
    return wanted, largest


@pytest.mark.parametrize(
    ("factor", "precision", "num_steps_before"),
    quick([(1.0, "fp32", 0), (20.0, "bf16", 3), (1000.0, "fp32", 3)], [(20.0, "bf16", 3)]),
)
def test_speculative_against_float64(factor: float, precision: str, num_steps_before: int) -> None:
    is_coarse = factor == 1000.0
    deferred, speculative = pair(NO_LIMIT, precision=precision)
    for seed in range(num_steps_before):
        for engine in (deferred, speculative):
            result = engine.step(words(seed), loss_fn=cross_entropy)
            assert result.corrected == 0
    assert_same(weights(speculative), weights(deferred), None, "while nothing is clipped")
    gradients = keep_gradients(deferred)
    before, moments = weights(deferred), states(deferred)
    norms = []
    for engine in (deferred, speculative):
        engine.model.factor = factor
        parts_of(engine).updates.max_norm = 0.01
        result = engine.step(words(7), loss_fn=cross_entropy)
        norms.append(result.grad_norm)
    assert norms[0] == norms[1]
    assert result.corrected == len([r for r in parts_of(speculative).regions if r.trainable]) - 1, "all but the last"
    so_far = math.sqrt(sum(float(gradients[f"head.{name}"].double().square().sum()) for name in ("weight", "bias")))
    ratio = norms[0] / so_far
    assert result.coarse == (ratio > 8) == is_coarse
    wanted, largest = in_double(deferred, before, moments, gradients, 0.01 / (norms[0] + 1e-6))
    share = 1e-5 if not is_coarse else 0.1
    for engine, allowed in ((deferred, 1e-6), (speculative, share)):
        for name, found in weights(engine).items():
            ulp = torch.nextafter(found.abs(), torch.tensor(math.inf)) - found.abs()
            excess = (found.double() - wanted[name]).abs() - 2 * ulp
            assert excess.max().item() <= allowed * largest, (name, engine.clip, excess.max().item() / largest)


def test_own_loops_are_deferred_in_every_mode() -> None:
    deferred, speculative = pair(0.1)
    losses = [own_step_of(each, lambda model: model(words()["x"]).square().mean()) for each in (deferred, speculative)]
    assert losses[0] == losses[1]
    assert_same(weights(speculative), weights(deferred))


def train_unevenly(engine: Engine, steps: range, clipped: int) -> tuple[list[Any], dict[str, Tensor]]:
    """Train; only step `clipped` has a norm above 100. Return ([(loss, norm)] per step, weights at the end)."""
    found = []
    for step in steps:
        engine.model.factor = 1e6 if step == clipped else 1.0
        found.append(step_of(engine, words(step), cross_entropy))
        assert (found[-1][1] > 100.0) == (step == clipped)
    return found, weights(engine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clipped", "clip"),
    [(0, "deferred"), (UNCLIPPED_STEPS - 1, "deferred"), (UNCLIPPED_STEPS, "speculative")],
)
def test_auto_has_the_bits_of_what_its_steps_decide(tmp_path: Path, clipped: int, clip: str) -> None:
    """`auto` gives the bits of the mode chosen by the steps, also when resumed from a checkpoint before the choice.
    Break: forget the count of unclipped steps, or restart the count.
    """
    settings: dict[str, Any] = {"optimizer": RULE, "max_grad_norm": 100.0, "throttle": {"update": "8MiB"}}
    steps = range(UNCLIPPED_STEPS + 2)
    auto, fixed = (Engine(build(Spiking), **settings, clip=how) for how in ("auto", clip))
    assert auto.resolve_clip(1) == "auto"
    wanted = train_unevenly(fixed, steps, clipped)
    first, _ = train_unevenly(auto, steps[:5], clipped)
    auto.save_checkpoint(tmp_path / "states")
    rest, found = train_unevenly(auto, steps[5:], clipped)
    assert auto.clip == clip
    assert first + rest == wanted[0]
    assert_same(found, wanted[1])
    for resumed in (Engine(build(Spiking), **settings), auto):
        resumed.load_checkpoint(tmp_path / "states")
        assert resumed.clip == "auto" or clipped == 0
        again, found = train_unevenly(resumed, steps[5:], clipped)
        assert (resumed.clip, again) == (clip, rest)
        assert_same(found, wanted[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("throttle", "clip"),
    [(None, "deferred"), ({"update": "1MiB"}, "auto"), ({"update": "8MiB", "h2d": "512KiB"}, "deferred")],
)
def test_auto_is_left_to_the_steps_where_adamw_outlasts_a_forward(throttle: dict[str, str] | None, clip: str) -> None:
    engine = Engine(build(llama), throttle=throttle, max_grad_norm=NO_LIMIT)
    assert engine.clip == "auto"
    engine.step(tokens())
    assert engine.clip == clip
    engine.step(tokens(1, rows=1, length=2))
    assert engine.clip == clip, "decided once"
    engine.close()
