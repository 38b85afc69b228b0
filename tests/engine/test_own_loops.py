"""The model called by the user: `engine.model`, `engine.backward`, `engine.update`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from offload import Engine
from offload.errors import ConfigError
from tests.engine.compare import PROPORTIONAL, assert_weights, weights
from tests.engine.families import build, gemma2, gpt2, llama, mamba, mixtral, qwen3, tokens
from tests.engine.handmade import Namespace, ReadFromOutside, Stack, cross_entropy, words
from tests.engine.inside import states
from tests.engine.reference import Reference

Maker = Callable[[], nn.Module]


def pair(make: Maker, **settings: Any) -> tuple[Engine, Reference]:
    model = build(make)
    reference = Reference(model, **settings)
    return Engine(model, **settings), reference


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("make", [llama, qwen3, mixtral])
def test_gradients_of_several_backward_calls_add_up(make: Maker, precision: str) -> None:
    """In fp32, whatever the precision, and rounded once."""
    engine, reference = pair(make, precision=precision)
    for step in range(3):
        losses = []
        for number in range(2 + step % 2):
            batch = tokens(10 * step + number)
            loss = engine.model(**batch).loss / 2
            engine.backward(loss)
            losses.append(loss.detach().float())
            (reference.model(**batch).loss / 2).backward()
            reference.collect()
        result = engine.update()
        assert result.grad_norm == reference.update()
        assert result.tokens is None
        assert not result.skipped
        assert result.loss.item() == torch.stack(losses).mean().item()
        assert_weights(engine, reference, when=f"step {step}")


@pytest.mark.parametrize("make", [gemma2, gpt2, mamba])
def test_tied_weights_in_own_loops(make: Maker) -> None:
    """The uses of a tied weight are added up over the whole step: another order of the sum."""
    engine, reference = pair(make, optimizer=PROPORTIONAL)
    for seed in range(2):
        torch.manual_seed(seed)
        engine.backward(engine.model(**tokens(seed)).loss)
        torch.manual_seed(seed)
        reference.model(**tokens(seed)).loss.backward()
        reference.collect()
    assert engine.update().grad_norm == pytest.approx(reference.update(), rel=1e-6)
    assert_weights(engine, reference, within=1e-6)


@pytest.mark.parametrize("debug", [False, True], ids=["", "poisoned"])
@pytest.mark.parametrize("make", [llama, mixtral])
def test_one_loss_of_two_forward_calls(make: Maker, debug: bool) -> None:
    """As DPO has it: two sequences through the same weights, one loss of both; every unit is used twice before its
    first backward."""

    def loss_of(model: nn.Module) -> Tensor:
        chosen, rejected = (
            model(input_ids=tokens(seed)["input_ids"]).logits.log_softmax(-1)[..., 5].mean() for seed in (1, 2)
        )
        return -functional.logsigmoid(chosen - rejected)

    model = build(make)
    reference = Reference(model)
    engine = Engine(model, debug=debug)
    for step in range(3):
        loss = loss_of(engine.model)
        engine.backward(loss)
        result = engine.update()
        wanted = loss_of(reference.model)
        wanted.backward()
        reference.collect()
        assert (result.loss.item(), result.grad_norm) == (wanted.item(), reference.update())
        assert_weights(engine, reference, when=f"step {step}")


def test_steps_and_own_loops_take_turns() -> None:
    engine, reference = pair(llama)
    for seed in range(4):
        loss, norm = reference.step(tokens(seed))
        if seed % 2:
            engine.backward(engine.model(**tokens(seed)).loss)
            result = engine.update()
        else:
            result = engine.step(tokens(seed))
        assert (result.loss.item(), result.grad_norm) == (loss.item(), norm)
        assert_weights(engine, reference, when=f"step {seed}")


def test_a_submodule_called_by_itself_starts_a_step_too() -> None:
    """Parameters whose gradient is None after all backward calls are left as they were; no gradient is applied a
    second time."""
    engine = Engine(build(Stack))
    engine.backward(cross_entropy(engine.model(words()["x"]), words()))
    engine.update()
    before, counts = weights(engine), {name: state.num_steps for name, state in states(engine).items()}
    hidden = engine.model.embedding(words()["x"])
    engine.backward(engine.model.head(hidden).square().mean())
    engine.update()
    after = weights(engine)
    for name in after:
        idle = name.startswith("blocks")
        assert torch.equal(after[name], before[name]) == idle, name
        assert states(engine)[name].num_steps == counts[name] + (not idle), name


def test_logits_under_no_grad_are_those_of_the_model() -> None:
    engine, reference = pair(gemma2)
    engine.step(tokens())
    reference.step(tokens())
    engine.model.eval()
    reference.model.eval()
    with torch.no_grad():
        found, wanted = (m(input_ids=tokens()["input_ids"]).logits for m in (engine.model, reference.model))
    assert torch.equal(found, wanted)


def test_a_forward_without_backward_changes_nothing() -> None:
    engine, reference = pair(llama)
    engine.model(**tokens(7)).loss  # noqa: B018 - the loss is dropped, and with it the step
    loss = engine.model(**tokens(0)).loss
    engine.backward(loss)
    engine.update()
    reference.step(tokens(0))
    assert_weights(engine, reference)


def test_unit_inputs_are_given_back_when_a_loss_is_dropped() -> None:
    engine = Engine(build(llama))
    engine.backward(engine.model(**tokens()).loss)
    engine.update()
    before = engine.allocations
    loss = engine.model(**tokens()).loss
    assert engine.allocations != before, "nothing waits for the backward"
    del loss
    assert engine.allocations == before


@pytest.mark.parametrize("recompute", ["always", "never"])
def test_a_step_leaves_no_tensor_behind(recompute: str) -> None:
    """A cycle of a result and its graph would keep every unit's activations."""
    engine = Engine(build(llama), recompute=recompute)
    engine.step(tokens())
    counts = []
    gc.collect()
    gc.disable()
    try:
        for seed in range(3):
            engine.step(tokens(seed))
            engine.backward(engine.model(**tokens(seed)).loss)
            engine.update()
            engine.model(**tokens(seed))  # without a backward, which would free what the graph has saved
            counts.append(sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects()))
    finally:
        gc.enable()
    assert counts[2] == counts[1]


def test_a_gradient_without_a_graph_is_refused() -> None:
    engine = Engine(build(llama))
    with pytest.raises(RuntimeError):
        engine.backward(torch.tensor(1.0))
    with pytest.raises(ConfigError, match="backward"):
        engine.update()
    engine.step(tokens())


def test_the_tied_reference_itself_sums_uses_in_fp32() -> None:
    """A check of the checker: untied copies of one weight follow one master."""
    reference = Reference(build(Namespace), precision="bf16")
    assert len(reference.named["transformer.wte.weight"]) == 2
    reference.step(words(), cross_entropy)
    first, second = reference.named["transformer.wte.weight"]
    assert first is not second
    assert torch.equal(first, second)


class Switched(Stack):
    """A call of another kind reads a unit's weight from outside."""

    def forward(self, x: Tensor, outside: bool = False) -> Tensor:
        h = super().forward(x)
        return h + self.blocks[0].up.bias.sum() if outside else h


BETWEEN: dict[str, Callable[[Engine], Any]] = {
    "evaluation": lambda engine: engine.evaluate(words(7), cross_entropy),
    "forward of another kind": lambda engine: engine.model(words(7)["x"][None, 0], None),
    "another mode": lambda engine: engine.model.blocks[0].norm.eval(),
}


class TakesMore(Stack):
    def forward(self, x: Tensor, nothing: None = None) -> Tensor:
        return super().forward(x)


class OutsideTakesMore(ReadFromOutside):
    def forward(self, x: Tensor, nothing: None = None) -> Tensor:
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:unit .* is read from outside")
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("make", [TakesMore, OutsideTakesMore])
def test_a_recording_pass_within_a_step_takes_nothing_from_its_gradients_and_adds_nothing(
    make: Maker, between: str
) -> None:
    engine, reference = pair(make)
    for step in range(2):
        for number in range(2):
            batch = words(2 * step + number)
            engine.backward(cross_entropy(engine.model(batch["x"]), batch))
            cross_entropy(reference.model(batch["x"]), batch).backward()
            reference.collect()
            if number == 0:
                BETWEEN[between](engine)
        assert engine.update().grad_norm == reference.update()
        assert_weights(engine, reference, when=f"step {step}")


def test_a_unit_that_is_found_to_stay_on_the_device_within_a_step_keeps_its_gradients() -> None:
    engine, reference = pair(Switched)

    def train(seed: int, outside: bool) -> None:
        batch = words(seed)
        engine.backward(cross_entropy(engine.model(batch["x"], outside=outside), batch))
        cross_entropy(reference.model(batch["x"], outside=outside), batch).backward()
        reference.collect()

    train(0, outside=False)
    with pytest.warns(UserWarning, match="blocks.0.*from outside"):
        train(1, outside=True)
    train(2, outside=False)
    assert engine.update().grad_norm == reference.update()
    assert_weights(engine, reference)
