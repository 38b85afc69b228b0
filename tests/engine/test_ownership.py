"""Model ownership: two engines never share weights, nobody saves NaN, and errors name changes made behind an engine."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import sys
import threading
import weakref
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import Engine, Placement
from offload.errors import ConfigError, OffloadError
from tests.cases.models import build, llama, tokens
from tests.engine.compare import assert_same, same_bits, weights
from tests.engine.device import own_device
from tests.engine.handmade import Block, Stack, cross_entropy, words
from tests.engine.inside import parts_of
from tests.matrix import matrix, quick

HELD = r"open engine.*close\(restore=True\)"
SPENT = r"closed without restore=True.*lost"
NO_NAN = r"engine\.export.*engine\.save_checkpoint.*close\(restore=True\)"


def step(engine: Engine, seed: int = 0) -> float:
    return engine.step(words(seed), loss_fn=cross_entropy).loss.item()


class Wrapper(nn.Module):
    """Wraps a model like an adapter library."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model
        self.extra = nn.Linear(4, 4)

    def forward(self, **inputs: Any) -> Any:
        return self.base_model(**inputs)


def sharing(module: str, name: str, value: Any) -> nn.Module:
    """Return a model with a part of another one."""
    other = build(Stack)
    setattr(other.get_submodule(module), name, value)
    return other


OVERLAPS: dict[str, Callable[[Any], nn.Module]] = {
    "the model": lambda model: model,
    "a part": lambda model: model.blocks[1],
    "a wrapper": Wrapper,
    "a shared module": lambda model: sharing("blocks", "1", model.blocks[0]),
    "a shared parameter": lambda model: sharing("head", "weight", model.head.weight),
    "a shared parameter on the device": lambda model: sharing("head", "bias", model.small.weight),
}


def with_a_small_unit() -> Stack:
    model = build(Stack)
    model.small = nn.LayerNorm(32, bias=False)
    return model


# -- two engines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", OVERLAPS)
def test_a_model_that_an_engine_holds_or_has_held_is_refused(what: str) -> None:
    make, model, plain = OVERLAPS[what], with_a_small_unit(), Engine(with_a_small_unit())
    engine = Engine(model)
    with pytest.raises(ConfigError, match=HELD):
        Engine(make(model))
    assert step(engine) == step(plain)
    assert all(same_bits(value, weights(plain)[name]) for name, value in engine.named_parameters())
    if what != "a shared parameter on the device":
        engine.close()
        gc.collect()
        with pytest.raises(ConfigError, match=SPENT):
            Engine(make(model))


def test_an_engine_that_was_dropped_is_named() -> None:
    """The weights are lost, as no reference remains for a `close` call."""
    model = build(Stack)
    step(Engine(model))
    gc.collect()
    with pytest.raises(ConfigError, match=HELD + ".*nothing refers to the engine.*new model"):
        Engine(model)


def test_a_part_that_outlived_its_model_is_named() -> None:
    model = with_a_small_unit()
    part = model.small
    engine = weakref.ref(Engine(model))
    del model
    gc.collect()
    assert engine() is None, "a part of the model kept the engine"
    with pytest.raises(ConfigError, match=HELD):
        Engine(part)


def test_no_code_of_python_runs_where_a_model_goes(tmp_path: Path) -> None:
    """Python loses a Ctrl-C inside a weak-reference callback, and every run ends with some callbacks."""
    engine = Engine(build(Stack), placement=Placement(parameters="nvme", optimizer="nvme", nvme_dir=str(tmp_path)))
    step(engine)
    engine.close()
    called = []

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code.co_name in ("remove", "_remove"):
            container = frame.f_locals["selfref"]()
            if container is not threading._dangling:  # type: ignore[attr-defined]  # Python's own set of ended threads
                called.append(container)

    gc.collect()
    sys.setprofile(note)
    try:
        del engine
        gc.collect()
    finally:
        sys.setprofile(None)
    assert not called, "a callback of one of weakref's containers"


@pytest.mark.parametrize("units_before", [0, 2])
def test_a_model_whose_engine_could_not_be_made_is_whole_or_says_that_it_is_not(units_before: int) -> None:
    model = build(Stack)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    seen: list[str] = []

    def fill(name: str, module: nn.Module) -> None:
        if len(seen) == units_before:
            raise OSError("the source is gone")
        seen.append(name)

    with pytest.raises(OSError, match="the source is gone"):
        Engine(model, fill=fill)
    if not units_before:
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        step(Engine(model))
        return
    for use in (lambda: Engine(model), lambda: model(words()["x"]), model.state_dict):
        with pytest.raises(ConfigError, match="failed.*new model"):
            use()


def test_an_engine_can_be_neither_copied_nor_pickled() -> None:
    engine = Engine(build(Stack))
    for use in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ConfigError, match=NO_NAN):
            use(engine)


# -- changes behind an engine -----------------------------------------------------------------------------------------


def with_an_adapter(model: nn.Module) -> None:
    class Adapter(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base_layer, self.down, self.up = base, nn.Linear(32, 2, bias=False), nn.Linear(2, 32, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base_layer(x) + self.up(self.down(x))

    attention = model.model.layers[0].self_attn
    attention.q_proj = Adapter(attention.q_proj)


REPLACED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a parameter": (
        lambda model: setattr(model.lm_head, "weight", nn.Parameter(torch.ones(64, 32))),
        r"lm_head\.weight was replaced",
    ),
    "a parameter that stays": (
        lambda model: setattr(model.model.norm, "weight", nn.Parameter(torch.ones(32))),
        r"model\.norm\.weight was replaced",
    ),
    "a parameter by another": (
        lambda model: setattr(model.model.layers[0].mlp.up_proj, "weight", model.model.layers[0].mlp.gate_proj.weight),
        r"mlp\.up_proj\.weight was replaced",
    ),
    "a parameter by none": (
        lambda model: model.model.layers[0].mlp.up_proj.register_parameter("weight", None),
        r"mlp\.up_proj\.weight was removed",
    ),
    "a module": (
        lambda model: setattr(model.model.layers[0].mlp, "up_proj", nn.Linear(32, 48, bias=False)),
        r"mlp\.up_proj became another Linear",
    ),
}
"""What leaves a weight of the engine without a place in the model."""
AT_THE_NEXT_CALL: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an adapter": (with_an_adapter, r"model\.layers\.0\.self_attn\.q_proj"),
    "a new parameter": (
        lambda model: setattr(model.model.layers[0].mlp, "gate", nn.Parameter(torch.ones(1))),
        r"model\.layers\.0\.mlp\.gate",
    ),
    "a layer less": (lambda model: model.model.layers.__delitem__(1), r"model\.layers\.1"),
    **REPLACED,
}
CALLS: dict[str, Callable[[Engine, Path], Any]] = {
    "step": lambda engine, path: engine.step(tokens()),
    "evaluate": lambda engine, path: engine.evaluate(tokens()),
    "model": lambda engine, path: engine.model(**tokens()),
    "model without a graph": lambda engine, path: torch.no_grad()(engine.model)(**tokens()),
    "backward": lambda engine, path: engine.backward(torch.zeros((), requires_grad=True)),
    "export": lambda engine, path: engine.export(path / "hf"),
}
ANEW = r"before Engine\(\).*close\(restore=True\)"


@matrix(strength=1, what=list(AT_THE_NEXT_CALL), late={"at once": False, "after a step": True})
def test_a_change_is_named_at_the_next_call(what: str, late: bool) -> None:
    change, name = AT_THE_NEXT_CALL[what]
    engine = Engine(build(llama))
    if late:
        engine.step(tokens())
    masters = weights(engine)
    change(engine.model)
    for call in (lambda: engine.step(tokens()), *[engine.model.state_dict] * (what in REPLACED)):
        with pytest.raises(ConfigError, match=name + r"\b.*" + ANEW):
            call()
    assert all(same_bits(value, masters[key]) for key, value in engine.named_parameters())


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_call_that_runs_the_model_names_a_change(call: Callable[[Engine, Path], Any], tmp_path: Path) -> None:
    engine = Engine(build(llama))
    with_an_adapter(engine.model)
    with pytest.raises(ConfigError, match=r"q_proj\b.*" + ANEW):
        call(engine, tmp_path)
    engine.save_checkpoint(tmp_path / "states")  # independent of the modules


def test_a_model_that_was_changed_and_given_back_trains_on_with_the_change() -> None:
    """Weights return to their source modules, even if these have moved."""
    changed, plain = build(llama), build(llama)
    engine = Engine(changed)
    torch.manual_seed(1)
    with_an_adapter(changed)
    with pytest.raises(ConfigError, match="q_proj"):
        engine.step(tokens())
    engine.close(restore=True)
    torch.manual_seed(1)
    with_an_adapter(plain)
    one, other = Engine(changed), Engine(plain)
    for seed in range(2):
        assert one.step(tokens(seed)).loss.item() == other.step(tokens(seed)).loss.item()


def test_what_was_frozen_behind_an_engine_is_given_back_frozen() -> None:
    engine = Engine(build(llama))
    engine.model.model.requires_grad_(False)
    engine.close(restore=True)
    assert [name for name, p in engine.model.named_parameters() if p.requires_grad] == ["lm_head.weight"]


def test_a_resident_weight_of_another_dtype_is_named() -> None:
    engine = Engine(build(llama))
    with pytest.raises(ConfigError, match=r"model\.norm\.weight cannot become .*float16.*" + ANEW):
        engine.model.model.norm.half()
    engine.step(tokens())


UNCHANGED: dict[str, Callable[[nn.Module], Any]] = {
    "to where it is": lambda model: model.to(own_device()),
    "to what it is": lambda model: model.float().to(torch.float32),
    "modes": lambda model: model.eval().train(),
    "trainable as before": lambda model: model.requires_grad_(True),
    "tied again": lambda model: model.tie_weights(),
    "a text": lambda model: model.generate(tokens()["input_ids"][:1], max_new_tokens=2, do_sample=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", UNCHANGED.values(), ids=UNCHANGED)
def test_what_changes_nothing_is_no_change(change: Callable[[nn.Module], Any]) -> None:
    plain, engine = Engine(build(llama)), Engine(build(llama))
    for seed in range(2):
        assert engine.step(tokens(seed)).loss.item() == plain.step(tokens(seed)).loss.item()
        change(engine.model)
    assert engine.step(tokens(2)).loss.item() == plain.step(tokens(2)).loss.item()


# -- closing ----------------------------------------------------------------------------------------------------------


def test_with_closes_on_an_exception_and_does_not_hide_it() -> None:
    engine = Engine(build(Stack))
    assert engine.allocations
    with pytest.raises(KeyError, match="mine"), engine:
        raise KeyError("mine")
    assert engine.allocations == []
    with pytest.raises(OffloadError, match="closed"), engine:
        pass


def test_a_failure_while_closing_does_not_hide_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(build(Stack))
    with pytest.raises(KeyError, match="mine") as caught, engine:  # noqa: PT012
        monkeypatch.setattr(parts_of(engine).store, "close", lambda: [][0])
        raise KeyError("mine")
    assert "IndexError" in "".join(caught.value.__notes__)


def test_blocks_are_found_by_name() -> None:
    block = build(Block)
    model = build(Stack)
    model.blocks[2] = block
    Engine(model)
    with pytest.raises(ConfigError, match=r"blocks\.2\b.*Block"):
        Engine(nn.ModuleDict({"blocks": nn.ModuleList([build(Block), build(Block), block])}))


ACTIVATION = nn.GELU()


class SharesAnActivation(Stack):
    """transformers models share activation modules from one table."""

    def __init__(self) -> None:
        super().__init__()
        self.activation = ACTIVATION

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.activation(torch.zeros((), device=x.device))


def test_modules_without_weights_may_be_shared_by_models() -> None:
    engine = Engine(build(SharesAnActivation))
    with Engine(build(SharesAnActivation)) as second:
        second.step(words(), cross_entropy)
    assert not ACTIVATION.state_dict()
    engine.step(words(), cross_entropy)
    engine.close()
    assert torch.isfinite(build(SharesAnActivation)(words()["x"].cpu())).all()


def test_a_weight_read_during_a_recording_is_a_tensor_as_its_placeholder_says() -> None:
    """torch's `weight_norm` takes over the strides: over an expanded element its kernel wrote past the end."""
    engine = Engine(build(Stack))
    ownership = parts_of(engine).ownership
    for watches in (False, True):
        with ownership.watched(lambda _: None) if watches else contextlib.nullcontext():
            for placeholder in ownership.placeholders:
                value: Tensor = placeholder.values()
                for tensor in (value, *(view.values() for view in placeholder.split(1))):
                    assert tensor.untyped_storage().nbytes() >= tensor.nbytes
                assert value.stride() == placeholder.stride()
                assert value.is_contiguous()
                assert placeholder.is_contiguous()
                assert (value.shape, value.dtype, value.device) == (
                    placeholder.shape,
                    placeholder.dtype,
                    placeholder.device,
                )


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_are_refused(kind: str) -> None:
    """The hooks belong to the model's own parameters, which the engine replaces."""
    model = build(Stack)
    getattr(model.blocks[1].up.weight, kind)(lambda gradient: None)
    with pytest.raises(ConfigError, match=r"blocks\.1\.up\.weight has a hook"):
        Engine(model)
    model.blocks[1].up.weight._backward_hooks = model.blocks[1].up.weight._post_accumulate_grad_hooks = None


def engine_step(engine: Engine, step: int) -> None:
    engine.step(tokens(step))


def own_step(engine: Engine, step: int) -> None:
    engine.model(**tokens(step)).loss.backward()
    engine.update()


def evaluation(engine: Engine, step: int) -> None:
    engine.evaluate(tokens(step))


Step = Callable[[Engine, int], None]


def write(engine: Engine) -> None:
    engine.model.model.norm.weight.data[:2] = 0


def write_before(then: Step) -> Step:
    return lambda engine, step: (write(engine), then(engine, step))[1]


def write_within(engine: Engine, step: int) -> None:
    """Write between the backward and the update."""
    engine.model(**tokens(step)).loss.backward()
    write(engine)
    engine.update()


WRITES: dict[str, tuple[Step, Step]] = {
    "step": (engine_step, write_before(engine_step)),
    "own loop": (own_step, write_before(own_step)),
    "own loop before update": (own_step, write_within),
    "evaluate": (engine_step, write_before(evaluation)),
    "step after own loop": (own_step, write_before(engine_step)),
}


@pytest.mark.parametrize(
    ("name", "before"),
    quick(product(WRITES, (0, 4)), [("step", 4), ("own loop", 0), ("own loop before update", 4)]),
)
def test_a_write_to_a_weight_that_stays_on_the_device_is_refused(name: str, before: int) -> None:
    """Before the first step and after many, in each kind of loop; the next step has the engine's weights."""
    (run, refused), found = WRITES[name], []
    for writes in (False, True):
        with Engine(build(llama)) as engine:
            for step in range(before):
                run(engine, step)
            if writes:
                with pytest.raises(ConfigError, match=r"model\.norm\.weight was changed .*engine\.edit\(\['model"):
                    refused(engine, before)
                engine.zero_grad()
            run(engine, before)
            found.append(weights(engine))
    assert_same(*found)


READS: dict[str, Callable[[Engine, Path], Any]] = {
    "state_dict": lambda engine, _: engine.model.state_dict(),
    "state_dict of the module": lambda engine, _: engine.model.model.norm.state_dict(),
    "save_pretrained": lambda engine, folder: engine.model.save_pretrained(folder),
    "named_parameters": lambda engine, _: [*engine.named_parameters()],
    "named_moments": lambda engine, _: [*engine.named_moments()],
    "weights_mark": lambda engine, _: engine.weights_mark(),
    "edit": lambda engine, _: [*engine.edit()],
    "export": lambda engine, folder: engine.export(folder),
    "save_checkpoint": lambda engine, folder: engine.save_checkpoint(folder),
    "begin_checkpoint": lambda engine, folder: engine.begin_checkpoint(folder),
    "close": lambda engine, _: engine.close(restore=True),
}


def test_a_read_after_a_write_on_the_device_is_refused(tmp_path: Path) -> None:
    """The states would be without the change. A forward has it, as in plain PyTorch."""
    with Engine(build(llama)) as engine:
        engine.stay()
        own_step(engine, 0)
        before, batch = weights(engine), tokens(1)
        with torch.no_grad():
            old = engine.model(**batch).loss
        for name, read in READS.items():
            write(engine)
            with torch.no_grad():
                assert engine.model(**batch).loss != old, name
            with pytest.raises(ConfigError, match=r"model\.norm\.weight was changed .*engine\.edit\(\['model"):
                read(engine, tmp_path / "out")
            assert not (tmp_path / "out" / "model.safetensors").exists(), name
            assert_same(weights(engine), before, when=name)
            with torch.no_grad():
                assert engine.model(**batch).loss == old, name


def test_a_read_of_one_weight_accepts_no_write_to_another() -> None:
    """The read looks at an edited weight alone."""
    large = [nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16)) for _ in range(4)]
    with Engine(nn.Sequential(nn.LayerNorm(16), *large, nn.LayerNorm(16))) as engine:
        for _, value in engine.edit(["0.weight"]):
            value.mul_(0.5)
        engine.model[5].weight.data[:2] = 0
        engine.model[0].state_dict()
        with pytest.raises(ConfigError, match=r"5\.weight was changed"):
            engine.model[5].state_dict()
