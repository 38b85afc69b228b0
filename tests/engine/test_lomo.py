"""LOMO: no optimizer states, gradients dropped after use, and a separate backward for the norm."""

from __future__ import annotations

import pytest
import torch

from offload import LOMO, AdaLomo, Engine, Placement
from offload.errors import NonFiniteError
from tests.cases.models import build, llama, tokens
from tests.engine.compare import assert_same, backward_both, train_both, update_both, weights
from tests.engine.handmade import Shifting, cross_entropy, words
from tests.engine.inside import parts_of
from tests.engine.reference import Reference
from tests.engine.test_clipping import Spiking

pytestmark = pytest.mark.usefixtures("small_tiles")


@pytest.mark.parametrize("recompute", ["always", "never"])
def test_the_second_pass_begins_with_the_buffers_of_the_first_one(recompute: str) -> None:
    settings = {"optimizer": LOMO(lr=0.3, clip_norm=0.2), "recompute": recompute}
    engine, reference = train_both(
        build(Shifting), [words(seed) for seed in range(3)], loss_fn=cross_entropy, **settings
    )
    assert parts_of(engine).runner.step_number == 3
    found = dict(engine.model.named_buffers())
    for name, buffer in reference.model.named_buffers():
        assert torch.equal(found[name], buffer), name


@pytest.mark.slow
@pytest.mark.parametrize("rule", [LOMO(lr=0.1), LOMO(lr=0.1, clip_norm=0.2), LOMO(lr=0.1, clip_value=1e-3), AdaLomo()])
def test_no_more_than_two_units_have_a_gradient(rule: LOMO) -> None:
    model = build(lambda: llama(num_hidden_layers=6))
    places = {"parameters": "cpu", "optimizer": "cpu"}
    engine = Engine(model, rule, Placement(**places), max_grad_norm=None, throttle={"update": 1e9})
    for seed in range(3):
        engine.step(tokens(seed))
    engine.finish()
    largest = max(sum(region.weight_bytes for region in unit.regions) for unit in parts_of(engine).units)
    held = {(tier, name): size for tier, name, size in engine.allocations}
    assert not [name for _, name in held if name in ("gradients", "exp avg")]
    assert held["cpu", "gradient staging"] <= 2 * largest
    assert held["device", "gradient buffer"] <= 2 * largest
    states = sum(size for (tier, name), size in held.items() if tier == "cpu" and name != "gradient staging")
    assert engine.counters.peak_host_bytes <= states + 2 * largest
    small = sum(size for (_, name), size in held.items() if name in ("row var", "col var", "variance"))
    total = sum(info.numel for info in parts_of(engine).infos)
    assert states - small <= 4 * total + 4 * 2048 * len(parts_of(engine).regions), "weights, and nothing else"


@pytest.mark.slow
def test_the_engines_norm_is_that_of_the_rule_unless_it_has_one() -> None:
    for rule, norm in ((LOMO(lr=0.3), 0.2), (LOMO(lr=0.3, clip_norm=0.2), 5.0)):
        engine = Engine(build(llama), rule, max_grad_norm=norm)
        wanted = Engine(build(llama), LOMO(lr=0.3, clip_norm=0.2), max_grad_norm=None)
        engine.step(tokens())
        wanted.step(tokens())
        assert_same(weights(engine), weights(wanted))


def test_a_gradient_that_is_not_finite_is_found_before_anything_is_updated() -> None:
    """ "stop" leaves the engine usable; "skip" changes only the step number."""
    for on_nonfinite in ("stop", "skip"):
        engine = Engine(build(Spiking), LOMO(lr=0.1, clip_norm=1.0), on_nonfinite=on_nonfinite)
        engine.step(words(0), loss_fn=cross_entropy)
        before = weights(engine)
        engine.model.factor = float("inf")
        if on_nonfinite == "stop":
            with pytest.raises(NonFiniteError, match="is not finite"):
                engine.step(words(1), loss_fn=cross_entropy)
        else:
            assert engine.step(words(1), loss_fn=cross_entropy).skipped
        assert_same(weights(engine), before)
        engine.model.factor = 1.0
        assert not engine.step(words(2), loss_fn=cross_entropy).skipped
        assert not torch.equal(next(iter(weights(engine).values())), next(iter(before.values())))


def test_an_own_loop_keeps_its_gradients_until_the_update() -> None:
    rule = LOMO(lr=0.3, clip_norm=0.2)
    engine, reference = Engine(build(llama), rule), Reference(build(llama), rule)
    for step in range(3):
        for part in range(2):
            backward_both(engine, reference, lambda model, seed: model(**tokens(seed)).loss, 10 * step + part)
        update_both(engine, reference)
        if step == 1:  # a step with both passes in between
            torch.manual_seed(0)
            reference.step(tokens(99))
            engine.step(tokens(99))
