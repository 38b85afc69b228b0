"""Steps that go wrong: gradients that are not finite, exceptions half way. Never a wrong weight."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offload import Engine, MeZO
from offload.errors import ConfigError, NonFiniteError, OffloadError, TornError
from tests.engine.compare import assert_same, assert_weights, same_bits, weights
from tests.engine.device import cpu_only, own_device
from tests.engine.families import build, llama, tokens
from tests.engine.handmade import Block, Log, Shifting, Stack, cross_entropy, words
from tests.engine.inside import parts_of, states
from tests.engine.reference import Reference, count_labels
from tests.matrix import matrix


class Mined(Block):
    """Can be told to give its own `up.weight`, and nothing else, a gradient of NaN while the loss stays finite, or to
    raise."""

    explodes = False
    raises_in: int | None = None
    calls = Log()

    def forward(self, h: Tensor) -> Tensor:
        self.calls.append(True)
        if self.raises_in == len(self.calls):
            raise KeyError("told to")
        h = super().forward(h)
        if self.explodes:
            h = h + (self.up.weight.sum() * 0).sqrt()  # 0 * inf on the way back
        return h


def mined(**settings: Any) -> Engine:
    return Engine(build(lambda: Stack(Mined)), **settings)


def step(engine: Engine, seed: int = 0) -> Any:
    return engine.step(words(seed), loss_fn=cross_entropy)


def assert_untouched(engine: Engine, before: dict[str, Tensor], states_before: dict[str, Any]) -> None:
    assert_same(weights(engine), before)
    for name, state in states(engine).items():
        assert state.num_steps == states_before[name].num_steps, name
        assert same_bits(state.exp_avg, states_before[name].exp_avg), name
        assert same_bits(state.exp_avg_sq, states_before[name].exp_avg_sq), name


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("block", [0, 2])
def test_stop_names_the_parameter_and_the_unit_and_changes_nothing(block: int, precision: str) -> None:
    engine = mined(precision=precision)
    reference = Reference(engine_model(), precision=precision)
    step(engine)
    reference.step(words(), cross_entropy, count_labels)
    before, states_before = weights(engine), states(engine)
    engine.model.blocks[block].explodes = True
    with pytest.raises(NonFiniteError, match=rf"blocks\.{block}\.up\.weight in unit blocks\.{block} "):
        step(engine)
    assert_untouched(engine, before, states_before)
    engine.model.blocks[block].explodes = False
    result = step(engine, 1)
    loss, norm = reference.step(words(1), cross_entropy, count_labels)
    assert (result.loss.item(), result.grad_norm) == (loss.item(), norm)
    assert_weights(engine, reference)


def engine_model() -> Stack:
    return build(lambda: Stack(Mined))


@pytest.mark.slow
@pytest.mark.parametrize("max_grad_norm", [1.0, None], ids=["clipped", "unclipped"])
@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_skip_leaves_every_state_as_it_was(micro_batch_size: int | None, max_grad_norm: float | None) -> None:
    engine = mined(on_nonfinite="skip", max_grad_norm=max_grad_norm, micro_batch_size=micro_batch_size)
    never = mined(on_nonfinite="skip", max_grad_norm=max_grad_norm, micro_batch_size=micro_batch_size)
    assert not step(engine).skipped
    step(never)
    before, states_before = weights(engine), states(engine)
    engine.model.blocks[0].explodes = True
    result = step(engine, 5)
    assert result.skipped
    assert result.grad_norm != result.grad_norm
    assert torch.isfinite(result.loss)
    assert_untouched(engine, before, states_before)
    engine.model.blocks[0].explodes = False
    assert not step(engine, 1).skipped
    step(never, 1)
    assert_same(weights(engine), weights(never))


def test_an_infinite_loss_is_skipped_or_refused() -> None:
    def infinite(outputs: Tensor, batch: Any) -> Tensor:
        return outputs.sum() * float("inf")

    engine = mined(on_nonfinite="skip")
    before = weights(engine)
    assert engine.step(words(), loss_fn=infinite).skipped
    assert_same(weights(engine), before)
    with pytest.raises(NonFiniteError):
        mined().step(words(), loss_fn=infinite)


@pytest.mark.parametrize("skips", [True, False])
def test_own_loops_meet_non_finite_gradients_alike(skips: bool) -> None:
    engine = mined(on_nonfinite="skip" if skips else "stop")
    step(engine)
    before, states_before = weights(engine), states(engine)
    engine.model.blocks[1].explodes = True
    engine.backward(cross_entropy(engine.model(words()["x"]), words()))
    if skips:
        assert engine.update().skipped
    else:
        with pytest.raises(NonFiniteError, match=r"blocks\.1\.up\.weight"):
            engine.update()
    assert_untouched(engine, before, states_before)


def test_without_clipping_an_early_unit_can_tear_the_step(tmp_path: Any) -> None:
    """Later units are updated by the time its gradient comes: the states from different steps, and nothing may be made
    of them."""
    engine = mined(max_grad_norm=None)
    step(engine)
    engine.model.blocks[0].explodes = True
    with pytest.raises(NonFiniteError, match=r"blocks\.0\.up\.weight"):
        step(engine)
    engine.model.blocks[0].explodes = False
    for use in (
        lambda: step(engine),
        lambda: dict(engine.named_parameters()),
        lambda: engine.export(tmp_path / "export"),
        lambda: engine.evaluate(words(), loss_fn=cross_entropy),
        lambda: engine.backward(torch.zeros((), requires_grad=True)),
        lambda: engine.update(),
    ):
        with pytest.raises(TornError, match="from different steps"):
            use()
    assert not (tmp_path / "export").exists()
    engine.close()


@cpu_only("updates that were begun beside the backward are made")
def test_without_clipping_the_last_unit_tears_nothing() -> None:
    """Its gradient comes first, before any update."""
    engine = mined(max_grad_norm=None)
    step(engine)
    before = weights(engine)

    def no_number(outputs: Tensor, batch: Any) -> Tensor:
        return cross_entropy(outputs, batch) + (outputs * 0).sum().sqrt()

    with pytest.raises(NonFiniteError, match=r"head\."):
        engine.step(words(), loss_fn=no_number)
    assert_same(weights(engine), before)
    step(engine)


@pytest.mark.slow
@matrix(
    strength=1,
    max_grad_norm={"clipped": 1.0, "unclipped": None},
    settings=[{}, {"micro_batch_size": 2}, {"debug": True}],
)
def test_an_exception_in_the_forward_costs_that_step_only(
    settings: dict[str, Any], max_grad_norm: float | None
) -> None:
    engine, undisturbed = (mined(max_grad_norm=max_grad_norm, **settings) for _ in range(2))
    for seed in range(3):
        before = sorted(engine.allocations)
        engine.model.blocks[2].raises_in = len(engine.model.blocks[2].calls) + 1
        with pytest.raises(KeyError, match="told to"):
            step(engine, 9)
        engine.model.blocks[2].raises_in = None
        result, wanted = step(engine, seed), step(undisturbed, seed)
        assert (result.loss.item(), result.grad_norm) == (wanted.loss.item(), wanted.grad_norm)
        assert_same(weights(engine), weights(undisturbed), when=f"step {seed}")
        if seed and own_device().type == "cpu":  # else spare memory, which the failure took back, comes with the steps
            assert sorted(engine.allocations) == before, "something of the failed step is still held"


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"micro_batch_size": 2}, {"debug": True}], ids=str)
def test_an_exception_in_the_backward_costs_that_step_only(settings: dict[str, Any]) -> None:
    engine, undisturbed = mined(**settings), mined(**settings)
    step(engine, 0), step(undisturbed, 0)
    engine.model.blocks[1].raises_in = (
        len(engine.model.blocks[1].calls) + 2
    )  # the recompute; a kept graph would not call it
    with pytest.raises(KeyError, match="told to"):
        step(engine, 9)
    engine.model.blocks[1].raises_in = None
    result, wanted = step(engine, 1), step(undisturbed, 1)
    assert (result.loss.item(), result.grad_norm) == (wanted.loss.item(), wanted.grad_norm)
    assert_same(weights(engine), weights(undisturbed))


def test_an_exception_in_the_loss_function_costs_that_step_only() -> None:
    engine, reference = Engine(build(llama)), Reference(build(llama))
    for seed in range(2):
        with pytest.raises(ZeroDivisionError):
            engine.step(tokens(9), loss_fn=lambda outputs, batch: 1 / 0)
        engine.step(tokens(seed))
        reference.step(tokens(seed))
    assert_weights(engine, reference)
    assert "unit inputs" not in {name for _, name, _ in engine.allocations}


@cpu_only("what a lane finds after a step is reported by the next call")
def test_an_update_that_overflows_is_reported() -> None:
    """Units before it were updated, so the states are torn."""
    engine = mined()
    step(engine)
    engine.lr = 3e38
    with pytest.raises(NonFiniteError, match="lr"):
        step(engine, 1)
    with pytest.raises(TornError):
        step(engine, 2)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": None}, {"optimizer": MeZO(lr=1e-3)}], ids=str)
def test_weights_that_were_not_finite_are_not_blamed_on_the_learning_rate(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    with Engine(engine_model(), **settings) as engine:
        engine.save_checkpoint(tmp_path / "saved")
    model = engine_model()
    with torch.no_grad():
        model.blocks[1].up.weight[0, :3] = math.nan
    for does_load, words_of in ((False, r" 3 weights of blocks\.1\.up\.weight were not .* loaded"), (True, "Lower")):
        with Engine(copy.deepcopy(model), **settings) as engine:
            if does_load:
                engine.load_checkpoint(tmp_path / "saved")
                step(engine)
            with pytest.raises(NonFiniteError, match=words_of):
                engine.step(words(), loss_fn=lambda outputs, _: outputs.sum() * math.inf)


def test_a_norm_that_is_not_finite_where_every_square_is_names_the_largest() -> None:
    engine = mined()
    step(engine)
    measures, finish = parts_of(engine).gradients.measures, parts_of(engine).gradients.landing.finish

    def finish_hugely() -> None:
        finish()
        measures.squares = {piece: 1e308 + index * 1e304 for index, piece in enumerate(measures.squares)}

    parts_of(engine).gradients.landing.finish = finish_hugely  # type: ignore[method-assign]
    with pytest.raises(NonFiniteError, match=r"gradient norm is inf.*blocks\.2\.down\.bias"):
        step(engine, 1)
    engine.close()


class Drawing(Shifting):
    """Moves its buffers, also one outside of all units, draws random numbers, and can be told to raise after that."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.sum()
        out = torch.nn.functional.dropout(super().forward(x), 0.5)
        if self.fails:
            raise KeyError("told to")
        return out


def test_a_step_that_fails_leaves_buffers_and_generators_as_they_were() -> None:
    """Also the first, which records."""
    engine, undisturbed = Engine(build(Drawing)), Engine(build(Drawing))
    for seed in range(2):
        torch.manual_seed(seed)
        wanted = undisturbed.step(words(seed), cross_entropy).loss
        torch.manual_seed(seed)
        engine.model.fails = True
        with pytest.raises(KeyError):
            engine.step(words(seed), cross_entropy)
        engine.model.fails = False
        assert engine.step(words(seed), cross_entropy).loss == wanted
    for buffer, other in zip(engine.model.buffers(), undisturbed.model.buffers(), strict=True):
        assert torch.equal(buffer, other)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf"), None, "x"])
def test_a_learning_rate_that_is_none_is_refused_where_it_is_set(rate: Any) -> None:
    """It would be found within the updates, some of which were made by then."""
    engine, undisturbed = Engine(build(llama)), Engine(build(llama))
    with pytest.raises(ConfigError, match=r"engine\.lr"):
        engine.lr = rate
    assert engine.step(tokens()).loss == undisturbed.step(tokens()).loss
    assert_same(weights(engine), weights(undisturbed))


@pytest.mark.slow
@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_step_where_gradients_are_off_is_refused(off: Any) -> None:
    """It would train nothing, and say a norm of 0."""
    engine, undisturbed = Engine(build(llama)), Engine(build(llama))
    with off(), pytest.raises(ConfigError, match="no_grad"):
        engine.step(tokens())
    assert engine.step(tokens()).loss == undisturbed.step(tokens()).loss
    assert_same(weights(engine), weights(undisturbed))


def test_a_step_that_is_skipped_leaves_running_values_as_they_were() -> None:
    """They would be NaN for good, and with them every later step."""
    engine = Engine(build(Drawing), on_nonfinite="skip")
    engine.step(words(0), cross_entropy)
    before = [buffer.clone() for buffer in engine.model.buffers()]
    assert engine.step(words(1), lambda outputs, batch: cross_entropy(outputs, batch) * float("nan")).skipped
    assert all(map(same_bits, engine.model.buffers(), before))


def test_a_backward_over_a_forward_that_a_failed_step_gave_up_is_refused() -> None:
    """What it had reserved is given back, and may be another's by now."""
    engine, undisturbed = mined(), mined()
    loss = cross_entropy(engine.model(words(1)["x"]), words(1))
    engine.model.blocks[2].raises_in = len(engine.model.blocks[2].calls) + 1
    with pytest.raises(KeyError, match="told to"):
        step(engine, 9)
    engine.model.blocks[2].raises_in = None
    with pytest.raises(OffloadError, match=r"unit head: the step of this forward ended .* run the forward again"):
        engine.backward(loss)
    for seed in range(2):
        assert step(engine, seed).grad_norm == step(undisturbed, seed).grad_norm
