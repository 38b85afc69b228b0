"""Failing steps: non-finite gradients, and exceptions during a step. Weights are never wrong."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offload import Engine, MeZO
from offload.errors import ConfigError, NonFiniteError, OffloadError, TornError
from tests.cases.models import build, llama, tokens
from tests.engine.compare import assert_same, assert_same_states, assert_weights, step_of, weights
from tests.engine.device import cpu_only
from tests.engine.handmade import Block, Log, Stack, cross_entropy, words
from tests.engine.inside import parts_of, states
from tests.engine.reference import Reference
from tests.matrix import quick


class Mined(Block):
    """`explodes` gives only `up.weight` a NaN gradient, with a finite loss. `raises_in`: number of the forward call
    that raises.
    """

    explodes = False
    raises_in: int | None = None
    calls = Log()

    def forward(self, h: Tensor) -> Tensor:
        self.calls.append(True)
        if self.raises_in == len(self.calls):
            raise KeyError("told to")
        h = super().forward(h)
        if self.explodes:
            h = h + (self.up.weight.sum() * 0).sqrt()  # 0 * inf in the backward
        return h


def engine_model() -> Stack:
    return build(lambda: Stack(Mined))


def mined(**settings: Any) -> Engine:
    return Engine(engine_model(), **settings)


def step(engine: Engine, seed: int = 0) -> Any:
    return engine.step(words(seed), loss_fn=cross_entropy)


@contextmanager
def untouched(engine: Engine) -> Iterator[None]:
    """Assert that weights and states stay as they are."""
    before, states_before = weights(engine), states(engine)
    yield
    assert_same(weights(engine), before)
    assert_same_states(states(engine), states_before)


@pytest.mark.parametrize(("block", "precision"), quick([(0, "fp32"), (2, "bf16")], [(0, "fp32")]))
def test_stop_names_the_parameter_and_the_unit_and_changes_nothing(block: int, precision: str) -> None:
    engine = mined(precision=precision)
    reference = Reference(engine_model(), precision=precision)
    step(engine)
    reference.step(words(), cross_entropy)
    with untouched(engine):
        engine.model.blocks[block].explodes = True
        with pytest.raises(NonFiniteError, match=rf"blocks\.{block}\.up\.weight in unit blocks\.{block} "):
            step(engine)
    engine.model.blocks[block].explodes = False
    assert step_of(engine, words(1), cross_entropy) == step_of(reference, words(1), cross_entropy)
    assert_weights(engine, reference)


@pytest.mark.parametrize(("max_grad_norm", "micro_batch_size"), quick([(1.0, None), (None, 2)], [(1.0, None)]))
def test_skip_leaves_every_state_as_it_was(micro_batch_size: int | None, max_grad_norm: float | None) -> None:
    engine, never = (
        mined(on_nonfinite="skip", max_grad_norm=max_grad_norm, micro_batch_size=micro_batch_size) for _ in range(2)
    )
    assert not step(engine).skipped
    step(never)
    with untouched(engine):
        engine.model.blocks[0].explodes = True
        result = step(engine, 5)
    assert result.skipped
    assert math.isnan(result.grad_norm)
    assert torch.isfinite(result.loss)
    engine.model.blocks[0].explodes = False
    assert not step(engine, 1).skipped
    step(never, 1)
    assert_same(weights(engine), weights(never))


@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_is_skipped_or_refused(factor: float) -> None:
    def bad(outputs: Tensor, batch: Any) -> Tensor:
        return cross_entropy(outputs, batch) * factor

    engine = mined(on_nonfinite="skip")
    with untouched(engine):
        assert engine.step(words(), loss_fn=bad).skipped
    with pytest.raises(NonFiniteError):
        mined().step(words(), loss_fn=bad)


@pytest.mark.parametrize("skips", [True, False])
def test_own_loops_meet_non_finite_gradients_alike(skips: bool) -> None:
    engine = mined(on_nonfinite="skip" if skips else "stop")
    step(engine)
    with untouched(engine):
        engine.model.blocks[1].explodes = True
        engine.backward(cross_entropy(engine.model(words()["x"]), words()))
        if skips:
            assert engine.update().skipped
        else:
            with pytest.raises(NonFiniteError, match=r"blocks\.1\.up\.weight"):
                engine.update()


@pytest.mark.parametrize("settings", [{"max_grad_norm": None}, {"clip": "speculative"}], ids=str)
def test_an_early_unit_can_tear_a_step_whose_updates_do_not_wait(settings: dict[str, Any], tmp_path: Path) -> None:
    """Later units are already updated when the NaN gradient arrives: the states are from different steps, so every use
    raises.
    """
    engine = mined(**settings)
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
    """The gradient of the last unit comes first, before any update."""
    engine = mined(max_grad_norm=None)
    step(engine)

    def no_number(outputs: Tensor, batch: Any) -> Tensor:
        return cross_entropy(outputs, batch) + (outputs * 0).sum().sqrt()

    with untouched(engine), pytest.raises(NonFiniteError, match=r"head\."):
        engine.step(words(), loss_fn=no_number)
    step(engine)


@cpu_only("what a lane finds after a step is reported by the next call")
def test_an_update_that_overflows_is_reported() -> None:
    """Earlier units are already updated, so the states are torn."""
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
    measures, finish = parts_of(engine).gradients.measures, parts_of(engine).gradients.transfer.finish

    def finish_hugely() -> None:
        finish()
        measures.squares = {piece: 1e308 + index * 1e304 for index, piece in enumerate(measures.squares)}

    parts_of(engine).gradients.transfer.finish = finish_hugely  # type: ignore[method-assign]
    with pytest.raises(NonFiniteError, match=r"gradient norm is inf.*blocks\.2\.down\.bias"):
        step(engine, 1)
    engine.close()


def test_a_learning_rate_that_is_none_and_a_step_where_gradients_are_off_are_refused() -> None:
    """A bad rate would otherwise raise in the middle of the updates, and a step without gradients would train
    nothing.
    """
    engine, undisturbed = Engine(build(llama)), Engine(build(llama))
    for rate in (-1.0, float("nan"), float("inf"), None, "x"):
        with pytest.raises(ConfigError, match=r"engine\.lr"):
            engine.lr = rate  # type: ignore[assignment]
    for off in (torch.no_grad, torch.inference_mode):
        with off(), pytest.raises(ConfigError, match="no_grad"):
            engine.step(tokens())
    assert engine.step(tokens()).loss == undisturbed.step(tokens()).loss
    assert_same(weights(engine), weights(undisturbed))


def test_a_backward_over_a_forward_that_a_failed_step_gave_up_is_refused() -> None:
    """The buffers of the failed forward are free again, and may already have another user."""
    engine, undisturbed = mined(), mined()
    loss = cross_entropy(engine.model(words(1)["x"]), words(1))
    engine.model.blocks[2].raises_in = len(engine.model.blocks[2].calls) + 1
    with pytest.raises(KeyError, match="told to"):
        step(engine, 9)
    engine.model.blocks[2].raises_in = None
    with pytest.raises(OffloadError, match=r"unit head: the step of this forward was given up.* run the forward again"):
        engine.backward(loss)
    for seed in range(2):
        assert step_of(engine, words(seed), cross_entropy) == step_of(undisturbed, words(seed), cross_entropy)
