"""Training loops of the caller: `engine.model`, `engine.backward`, `engine.update`."""

from __future__ import annotations

import contextvars
import copy
import gc
import inspect
import io
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from offload import Engine, Placement
from offload.errors import ConfigError, OffloadError
from tests.cases.models import build, gemma2, llama, share, tokens
from tests.engine import ranks
from tests.engine.compare import (
    PROPORTIONAL,
    assert_same,
    assert_weights,
    backward_both,
    same_bits,
    update_both,
    weights,
)
from tests.engine.device import own_device, twin
from tests.engine.handmade import (
    WIDTH,
    Block,
    InPlaceBlocks,
    Log,
    ReadFromOutside,
    ScalingBlocks,
    Stack,
    cross_entropy,
    words,
)
from tests.engine.inside import states, steps_of
from tests.engine.reference import Reference
from tests.leaks import no_graph_is_left, no_tensor_waits_for_collection

Maker = Callable[[], nn.Module]


def pair(make: Maker, **settings: Any) -> tuple[Engine, Reference]:
    model = build(make)
    known = {key: value for key, value in settings.items() if key not in ("recompute", "placement")}
    reference = Reference(model, **known)
    return Engine(model, **settings), reference


def token_loss(model: nn.Module, seed: int) -> Tensor:
    return model(**tokens(seed)).loss


def word_loss(model: nn.Module, seed: int = 0, **more: Any) -> Tensor:
    batch = words(seed)
    return cross_entropy(model(batch["x"], **more), batch)


def recordings(engine: Engine) -> list[Any]:
    """Return a list with an entry per recorded or watched call."""
    found: list[Any] = []
    trial_runs = steps_of(engine).trial_runs
    record, settled = trial_runs._record, trial_runs._run_until_settled

    def watch(run: Any, *of_a_recording: Any) -> Any:
        found.extend([] if of_a_recording else ["watch"])
        return settled(run, *of_a_recording)

    trial_runs._record = lambda runs: (found.append("record"), record(runs))[1]  # type: ignore[method-assign]
    trial_runs._run_until_settled = watch  # type: ignore[method-assign]
    return found


@pytest.mark.slow
def test_a_number_that_is_another_in_every_call_is_recorded_a_few_times() -> None:
    """`logits_to_keep` follows the batch length."""
    engine, reference = pair(llama)
    found = recordings(engine)
    inputs = {"input_ids": tokens(0)["input_ids"]}

    def loss_of(model: nn.Module, number: int) -> Tensor:
        return model(**inputs, logits_to_keep=number).logits.log_softmax(-1)[..., 5].mean()

    for number in (*range(1, 11), 3):
        backward_both(engine, reference, loss_of, number)
        update_both(engine, reference)
    assert found == ["record"] * 4
    with torch.no_grad():
        for number in range(1, 11):
            engine.model(**inputs, logits_to_keep=number)
    assert found == ["record"] * 4 + ["watch"]
    engine.backward(engine.model(**inputs, logits_to_keep=0).logits.mean())
    assert found[-1] == "record", "0 keeps all of them"


def test_another_mode_drops_recorded_calls_and_a_checkpoint_keeps_them(tmp_path: Path) -> None:
    engine = Engine(build(Ways))
    found = recordings(engine)

    def call() -> int:
        engine.backward(word_loss(engine.model, way=1))
        engine.update()
        return len(found)

    assert [call(), call()] == [1, 1]
    engine.model.eval()
    assert [call(), call()] == [2, 2]
    engine.save_checkpoint(tmp_path / "saved")
    engine.load_checkpoint(tmp_path / "saved")
    assert [call(), call()] == [2, 2]


class Ways(Stack):
    """With way 2 or True, the model reads the head weight outside the head."""

    def forward(self, x: Tensor, way: int | bool = 0) -> Tensor:
        h = super().forward(x)
        return h + self.embedding(x) @ self.head.weight.t() if way == 2 or way is True else h


@pytest.mark.slow
@pytest.mark.parametrize(("ways", "by_name"), [((1, 3, 2, 1, 2), True), ((False, True, False), False)])
@pytest.mark.filterwarnings("ignore:unit head is read from outside")
def test_a_number_that_chooses_a_way_is_recorded(ways: tuple[int, ...], by_name: bool) -> None:
    engine, reference = pair(Ways, optimizer=PROPORTIONAL)
    found = recordings(engine)

    def by_place(model: nn.Module, seed: int, way: int) -> Tensor:
        return cross_entropy(model(words(seed)["x"], way), words(seed))

    for seed, way in enumerate(ways):
        backward_both(engine, reference, word_loss if by_name else by_place, seed, way=way)
        update_both(engine, reference, within=1e-6)
    assert len(found) == len(set(ways))


def test_a_submodule_called_by_itself_starts_a_step_too() -> None:
    """Parameters without a gradient after all backward calls stay unchanged. No gradient is applied twice."""
    engine = Engine(build(Stack))
    engine.backward(word_loss(engine.model))
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


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["always", "never"])
def test_a_step_leaves_no_tensor_behind(recompute: str) -> None:
    """A reference cycle between a result and the graph would keep all activations."""
    engine = Engine(build(llama), recompute=recompute)
    for seed in range(4):
        with nullcontext() if seed < 2 else no_graph_is_left(), no_tensor_waits_for_collection():
            engine.step(tokens(seed))
            engine.backward(engine.model(**tokens(seed)).loss)
            engine.update()
            engine.model(**tokens(seed))  # without backward, which would free the saved tensors


def test_a_gradient_without_a_graph_is_refused() -> None:
    engine = Engine(build(llama))
    with pytest.raises(RuntimeError):
        engine.backward(torch.tensor(1.0))
    with pytest.raises(ConfigError, match="backward"):
        engine.update()
    engine.step(tokens())


SCALE = contextvars.ContextVar("SCALE", default=1.0)


class Surrounded(Block):
    """Depends on a context variable and on the default device."""

    devices = Log()

    def forward(self, h: Tensor) -> Tensor:
        self.devices.append(torch.empty(1).device)
        return super().forward(h) * SCALE.get()


def test_a_recompute_has_the_context_variables_and_the_default_device_of_its_forward() -> None:
    """Backward may have other values: if called elsewhere, or on a GPU in a thread of autograd."""
    found, batch = [], words()
    for stays in (True, False):
        engine = Engine(build(lambda: Stack(Surrounded)))
        before = SCALE.set(0.5)
        with torch.device("meta"):
            loss = cross_entropy(engine.model(batch["x"]), batch)
        if not stays:
            SCALE.reset(before)
        engine.backward(loss)
        SCALE.set(1.0)
        found.append(engine.update().grad_norm)
        for block in engine.model.blocks:
            assert block.devices[-2:] == [torch.device("meta")] * 2, "the forward's and the recompute's"
    assert found[0] == found[1]


class Switched(Stack):
    """With `outside`, the model reads a unit's weight outside the unit."""

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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unit .* is read from outside")
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("make", [TakesMore, OutsideTakesMore])
def test_a_recording_pass_within_a_step_takes_nothing_from_its_gradients_and_adds_nothing(
    make: Maker, between: str
) -> None:
    engine, reference = pair(make)
    for step in range(2):
        for number in range(2):
            backward_both(engine, reference, word_loss, 2 * step + number)
            if number == 0:
                BETWEEN[between](engine)
        update_both(engine, reference, f"step {step}")


def test_a_unit_that_is_found_to_stay_on_the_device_within_a_step_keeps_its_gradients() -> None:
    engine, reference = pair(Switched)
    backward_both(engine, reference, word_loss, 0)
    with pytest.warns(UserWarning, match="blocks.0.*from outside"):
        backward_both(engine, reference, word_loss, 1, outside=True)
    backward_both(engine, reference, word_loss, 2)
    update_both(engine, reference)


@pytest.mark.parametrize("make", [Stack, InPlaceBlocks, ScalingBlocks])
def test_a_forward_that_has_no_backward_leaves_nothing(make: Maker) -> None:
    """Also for units with in-place changes of inputs, since the inputs are outputs of other units."""
    engine = Engine(build(make))
    for _ in range(3):
        word_loss(engine.model)
    gc.collect()
    assert not {"unit inputs", "kept tensors"}.intersection(name for _, name, _ in engine.allocations)
    engine.close()


class Watching(Stack):
    """Records weak references to the block inputs."""

    def forward(self, x: Tensor) -> Tensor:
        h, self.inputs = self.embedding(x), []
        for block in self.blocks:
            self.inputs.append(weakref.ref(h))
            h = block(h)
        return self.head(h)


def test_inputs_that_wait_on_the_host_do_not_stay_on_the_device_as_well() -> None:
    engine = Engine(build(Watching), placement=Placement(activations="cpu"))
    loss = word_loss(engine.model)
    assert [held() for held in engine.model.inputs] == [None] * 3
    engine.backward(loss)
    engine.update()
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "recompute"), [("update", "always"), ("step", "never"), ("load_checkpoint", "always")]
)
def test_a_backward_over_a_forward_with_other_weights_is_refused(recompute: str, change: str, tmp_path: Path) -> None:
    """Plain PyTorch also refuses if the update has changed saved tensors."""
    engine = Engine(build(llama), recompute=recompute)
    engine.save_checkpoint(tmp_path / "saved")
    first, second = (engine.model(**tokens(seed)).loss for seed in (0, 1))
    if change == "update":
        engine.backward(first)
        engine.update()
    elif change == "step":
        engine.step(tokens(2))
    else:
        engine.load_checkpoint(tmp_path / "saved")
    before = weights(engine)
    with pytest.raises(OffloadError, match="weights have changed since"):
        engine.backward(second)
    assert_same(weights(engine), before)
    engine.backward(engine.model(**tokens(3)).loss)
    engine.update()


@pytest.mark.slow
@pytest.mark.parametrize("make", [llama, gemma2], ids=["", "tied"])
def test_the_norm_may_be_asked_for_before_the_update(make: Maker) -> None:
    """The update clips by this norm, with the limit of that step."""
    limits = [None, 0.05, 0, None]
    engine, reference = pair(make, max_grad_norm=0.1)
    for step, limit in enumerate(limits):
        batch = tokens(step)
        backward_both(engine, reference, token_loss, step)
        reference.max_grad_norm = {None: 0.1, 0: None}.get(limit, limit)
        norm = engine.grad_norm()
        assert engine.grad_norm() == norm
        for refused in (partial(engine.step, batch), partial(engine.save_checkpoint, "nowhere")):
            with pytest.raises(ConfigError, match="a step of your training loop"):
                refused()
        result = engine.update(limit)
        within = None if make is llama else 1e-6
        assert result.grad_norm == norm == pytest.approx(reference.update(), rel=within or 0)
        if within is None:
            assert_weights(engine, reference, when=f"step {step}")
    with pytest.raises(ConfigError, match="there are no gradients"):
        engine.grad_norm()
    engine.backward(engine.model(**batch).loss)
    with pytest.raises(ConfigError, match="max_grad_norm is -1"):
        engine.update(-1)
    with pytest.raises(ConfigError, match="must be a number above 0"):
        engine.clip_grad_norm(0)
    engine.grad_norm()
    loss = engine.model(**batch).loss
    with pytest.raises(ConfigError, match="had measured the gradients"):
        loss.backward()
    engine.backward(engine.model(**batch).loss)  # the failed step was abandoned; this is a new one
    engine.update()


def test_what_is_read_from_outside_is_found_in_a_call_without_gradients_too() -> None:
    """A reference model computes log probabilities from the head weights before training starts."""

    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = Stack(), nn.Linear(32, 512, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(self.body(x), self.head.weight)

    torch.manual_seed(0)
    model = Outside()
    with torch.no_grad():
        wanted = twin(model)(words(0)["x"])
        engine = Engine(model)
        with pytest.warns(UserWarning, match="read from outside"):
            found = engine.model(words(0)["x"])
        assert torch.equal(found, wanted)
        assert torch.equal(engine.model(words(0)["x"]), wanted)


def plain_backward(zero_stage: int) -> tuple[list[Any], list[str]]:
    """Take equal steps by `engine.backward` and by `loss.backward`. Return the results and the refusals."""
    found: list[Any] = []
    refused: list[str] = []
    for own in (False, True):
        engine = Engine(build(llama), zero_stage=zero_stage)
        for step in range(2):
            batch = share(tokens(step), (2, 2), engine.rank)
            if own:  # drop gradients, also after the norm was computed
                for number in range(2):
                    engine.model(**share(tokens(7 + number), (2, 2), engine.rank)).loss.backward()
                    if number:
                        engine.grad_norm()
                    engine.zero_grad()
                    assert not engine.has_gradients()
            loss = engine.model(**batch).loss / engine.world_size
            if own:
                loss.backward()
            else:
                engine.backward(loss)
            norm = engine.grad_norm()
            result = engine.update(max_grad_norm=0.5)
            assert result.grad_norm == norm
            assert result.loss.isnan() == own
            found.append(norm)
        found.append({name: value.sum().item() for name, value in engine.named_parameters()})
        loss = engine.model(**batch).loss
        loss.backward()
        for differs in (
            lambda engine: engine.update(max_grad_norm=1.0 + engine.rank),
            lambda engine: engine.tune({"betas": (0.5, 0.5 + engine.rank / 10)}),
            lambda engine: engine.model.lm_head.weight.grad,
        ):
            try:
                differs(engine)
            except ConfigError as error:
                refused.append(str(error))
        engine.close()
    return found, refused


def zeros_kept(zero_stage: int) -> list[Any]:
    """Set gradients to zero, and give some parameters no other gradient. Return weights and update counts."""
    engine = Engine(build(Stack), PROPORTIONAL, zero_stage=zero_stage)
    for step in range(2):
        for rank in range(2) if engine.world_size == 1 else (engine.rank,):
            batch = share(words(step), (2, 2), rank)
            h = engine.model.head(engine.model.embedding(batch["x"])) if step else engine.model(batch["x"])
            engine.backward(cross_entropy(h, batch) / 2)
        engine.update(until_zero_grad=True)
        engine.zero_grad(set_to_none=False)
    found = [weights(engine), {name: state.num_steps for name, state in states(engine).items()}]
    engine.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_gradients_set_to_zero_stay_over_ranks(zero_stage: int) -> None:
    (wanted, counts), told = zeros_kept(1), ranks.run(2, zeros_kept, zero_stage=zero_stage)
    assert set(counts.values()) == {2}
    for found, other_counts in told:
        assert other_counts == counts
        assert_same(found, wanted, within=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_ranks_agree_on_losses_that_nobody_told(zero_stage: int) -> None:
    """Ranks agree on the norm and the update, and refuse different clip limits."""
    told = ranks.run(2, plain_backward, zero_stage=zero_stage)
    (found, refused), (other, also_refused) = told
    assert found == other
    assert found[:3] == found[3:]
    for each in (refused, also_refused):
        assert len(each) == 6
        assert "lm_head.weight was read during a step, but the gradients are divided over 2 ranks" in each[2]
        assert "rank 0: update(max_grad_norm=1); rank 1: update(max_grad_norm=2)" in each[0]
        assert "rank 0: tune({'betas': (0.5, 0.5)}, {}); rank 1: tune({'betas': (0.5, 0.6)}, {})" in each[1]


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}], ids=["fp32", "bf16"])
def test_a_gradient_of_a_parameter_is_the_engines_own(settings: dict[str, Any]) -> None:
    """Reads change nothing; changes in place are measured and clipped again; other writes are refused."""
    model = build(Stack)
    plain, engine, other = twin(model), Engine(model, **settings), Engine(build(Stack), **settings)
    parameter = engine.model.get_parameter("head.weight")
    assert parameter.grad is None
    for step in range(3):
        for each in (engine.model, other.model, plain):
            word_loss(each, step).backward()
        norm = torch.stack([p.grad.norm() for p in engine.model.parameters()]).norm()
        if not settings and step == 0:
            for name, p in plain.named_parameters():
                assert same_bits(engine.model.get_parameter(name).grad, p.grad), name
        result = other.update()
        assert norm.item() == pytest.approx(result.grad_norm, rel=1e-2 if settings else 1e-6)
        assert engine.grad_norm() == result.grad_norm == engine.update().grad_norm, "a look changes nothing"
        assert_same(weights(engine), weights(other))
        assert parameter.grad is None
    for each in (engine.model, other.model):
        word_loss(each).backward()
    norm = engine.grad_norm()
    with pytest.raises(ConfigError, match="the grad of head.weight was set to None during a step"):
        parameter.grad = None
    with pytest.raises(ConfigError, match="head.weight cannot be given a gradient"):
        parameter.grad = torch.ones_like(parameter)
    for p in engine.model.parameters():
        p.grad *= 0.5
    assert engine.grad_norm() == pytest.approx(norm / 2, rel=1e-2 if settings else 1e-12)
    assert engine.update(max_grad_norm=norm / 4).grad_norm == pytest.approx(norm / 2, rel=1e-2)
    other.update(max_grad_norm=norm / 4)
    assert_same(weights(engine), weights(other), within=1e-6)


class WideHead(Stack):
    def __init__(self) -> None:
        super().__init__(depth=1)
        self.head = nn.Linear(WIDTH, 1024)


def test_a_gradient_that_is_not_whole_in_one_place_is_refused() -> None:
    engine = Engine(build(WideHead), placement=Placement(device_memory="48KiB"))
    word_loss(engine.model).backward()
    with pytest.raises(ConfigError, match=r"head.weight was read .*cut the parameter into pieces.*clip_grad_norm_"):
        torch.nn.utils.clip_grad_norm_(engine.model.head.parameters(), 1.0)
    engine.update(max_grad_norm=1.0)


@pytest.mark.filterwarnings("ignore:unit blocks.0 is read from outside")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_gradient_of_each_parameter_answers_alone(precision: str) -> None:
    """Also for units that stay on the device, as the first look at a gradient of the step."""
    model = build(Switched)
    plain, engine = twin(model), Engine(model, precision=precision)
    for name in dict(plain.named_parameters()):
        plain.zero_grad()
        for each in (engine.model, plain):
            word_loss(each, outside=True).backward()
        found, wanted = engine.model.get_parameter(name).grad, plain.get_parameter(name).grad
        if precision == "fp32":
            assert same_bits(found, wanted), name
        else:
            assert (found - wanted).norm() < 0.1 * wanted.norm(), name
        found.zero_()
        norm = torch.stack([p.grad.norm() for other, p in plain.named_parameters() if other != name]).norm().item()
        assert engine.grad_norm() == pytest.approx(norm, rel=1e-6 if precision == "fp32" else 0.02)
        engine.zero_grad()
        assert engine.model.get_parameter(name).grad is None


@pytest.mark.filterwarnings("ignore:unit blocks.0 is read from outside")
def test_a_parameter_on_the_device_is_an_ordinary_one_to_others() -> None:
    """Copies and files have no trace of the engine; a hook that would find no gradient is refused."""
    engine = Engine(build(Switched))
    engine.backward(word_loss(engine.model, outside=True))
    parameter = engine.model.blocks[0].up.weight
    engine.update()
    copied, file = copy.deepcopy(parameter), io.BytesIO()
    torch.save(parameter, file)
    file.seek(0)
    for each in (copied, torch.load(file)):
        assert type(each) is nn.Parameter
        assert same_bits(each, parameter)
    assert type(parameter + 1) is Tensor
    with pytest.raises(ConfigError, match="hook on blocks.0.up.weight"):
        parameter.register_post_accumulate_grad_hook(print)
    found = []
    handle = parameter.register_hook(lambda gradient: found.append(parameter.grad))
    with pytest.raises(ConfigError, match=r"blocks.0.up.weight was read .*a backward is still running"):
        word_loss(engine.model, outside=True).backward()
    assert not found
    handle.remove()
    engine.backward(word_loss(engine.model, outside=True))
    engine.update()


class Given(Stack):
    """Takes embeddings as input, so a loop can look up, change and differentiate them."""

    def forward(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
        return self.head(h)


@pytest.mark.parametrize("recompute", ["always", "never"])
@pytest.mark.parametrize("by", ["grad", "backward"])
def test_gradients_of_inputs_alone_leave_those_of_weights(recompute: str, by: str) -> None:
    """Adversarial examples and saliency maps need this, before the first backward and between two of a step."""
    model = build(Given)
    reference = Reference(model)
    engine = Engine(model, recompute=recompute)

    def loss(model: nn.Module, h: Tensor) -> Tensor:
        return cross_entropy(model(h), words())

    for step in range(2):
        norms = []
        for model, backward in ((engine.model, engine.backward), (reference.model, Tensor.backward)):
            h = torch.randn(4, 6, WIDTH, generator=torch.Generator().manual_seed(step)).to(own_device())
            for _ in range(2):
                x = h.clone().requires_grad_()
                if by == "grad":
                    (slope,) = torch.autograd.grad(loss(model, x), x)
                else:
                    loss(model, x).backward(inputs=[x])
                    slope = x.grad
                h = h + 0.1 * slope.sign()
                backward(loss(model, h))
                if model is reference.model:
                    reference.collect()
            norms.append(h.norm())
        assert norms[0] == norms[1]
        update_both(engine, reference, f"step {step}")


def test_a_gradient_of_a_gradient_is_refused() -> None:
    engine = Engine(build(Given))
    x = torch.randn(4, 6, WIDTH, device=own_device(), requires_grad=True)
    with pytest.raises(OffloadError, match="create_graph"):
        torch.autograd.grad(cross_entropy(engine.model(x), words()), x, create_graph=True)


def test_a_cache_that_a_call_fills_is_read_by_the_next() -> None:
    """A text in two segments, with gradients through the keys and values of the first."""
    engine, reference = pair(llama)
    takes_cache = "cache" in inspect.signature(engine.model.forward).parameters
    key = "cache" if takes_cache else "past_key_values"  # the name before transformers 5.24

    def loss_of(model: nn.Module, step: int) -> Tensor:
        first = model(**tokens(step), use_cache=True)
        second = model(**tokens(step + 2), use_cache=True, **{key: first[key]})
        assert second[key].get_seq_length() == 20
        return first.loss + second.loss

    for step in range(2):
        backward_both(engine, reference, loss_of, step)
        update_both(engine, reference, within=1e-5)


class Prompted(Stack):
    """Adds a prompt to the embeddings, in front of a frozen block."""

    def __init__(self) -> None:
        super().__init__()
        for module in (self.embedding, self.blocks[0]):
            module.requires_grad_(False)

    def forward(self, x: torch.Tensor, prompt: torch.Tensor | None = None) -> torch.Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h if prompt is None or block is not self.blocks[0] else h + prompt)
        return self.head(h)


def test_what_was_learned_without_a_gradient_does_not_hold_for_uses_with_one() -> None:
    """Nothing before the first trainable block gets a gradient in the step between two calls with a gradient."""
    model = build(Prompted)
    plain, engine = twin(model), Engine(model)
    prompt = nn.Parameter(torch.full((WIDTH,), 0.1, device=own_device()))

    def gradient(model: nn.Module, seed: int) -> torch.Tensor:
        prompt.grad = None
        batch = {key: value.to(own_device()) for key, value in words(seed).items()}
        cross_entropy(model(batch["x"], prompt), batch).backward()
        return cast("torch.Tensor", prompt.grad)

    for seed in range(2):
        plain.load_state_dict({name: value.clone() for name, value in engine.model.state_dict().items()})
        wanted = gradient(plain, seed)
        torch.testing.assert_close(gradient(engine.model, seed), wanted)
        engine.update()
        engine.step(words(seed + 2), cross_entropy)
    engine.close()


@pytest.mark.parametrize(
    ("settings", "text"), [({"micro_batch_size": 1, "passes": 2}, "micro_batch_size 1 and passes 2"), ({}, "")]
)
def test_settings_without_effect_in_a_loop_are_named_once(settings: dict[str, Any], text: str) -> None:
    engine = Engine(build(llama), **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.step(tokens())
        for seed in range(2):
            engine.backward(token_loss(engine.model, seed))
            engine.update()
    messages = [str(each.message) for each in caught if "cut the batch of engine.step" in str(each.message)]
    assert len(messages) == bool(text)
    assert not text or messages[0].startswith(text)
