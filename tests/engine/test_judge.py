"""The equivalence check detects model habits once their special handling is disabled, and detects a broken engine."""

from __future__ import annotations

import contextvars
import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import SGD, Engine, MeZO
from offload.engine.comparison import (
    OTHER_ORDER,
    Sketch,
    are_near,
    gradient_deviations,
    largest_excess,
    same_bits,
    tolerance,
)
from offload.engine.gradients.flow import GradientFlow
from offload.engine.loss.chunked_head import ChunkedHead
from offload.engine.units import arguments, traits, unit
from offload.engine.units.call import UnitFunction
from offload.engine.units.keep import Inputs
from offload.engine.units.runner import UnitRunner
from offload.engine.units.snapshots import Snapshot, ThreadState
from offload.engine.units.traits import UnitTraits
from offload.errors import ConfigError
from offload.extras.zeroth import interleaved
from tests.cases.models import build, llama, tokens
from tests.engine.compare import step_of
from tests.engine.device import own_device
from tests.engine.handmade import WIDTH, Block, DropsOut, RunningStatistics, Stack, cross_entropy, words
from tests.engine.reference import Reference
from tests.fuzz.habits import Keeping


def of(block: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Stack(block)


def verdict(model: nn.Module, loss_fn: Any = cross_entropy, batch: Any = None, **settings: Any) -> str:
    """Return the engine's message about a model in the first step. "": the model streams unchanged."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Engine(model, **{"optimizer": SGD(lr=0.1), "max_grad_norm": None, **settings}) as engine:
            try:
                engine.step(batch or words(), loss_fn=loss_fn)
            except ConfigError as error:
                assert "the engine and plain PyTorch give different results" in str(error)  # noqa: PT017
                return str(error)
    return "".join(str(each.message) for each in caught if "give different results" in str(each.message))


# -- model habits --------------------------------------------------------------------------------------------


class Keeps(Keeping):
    """Keep a count in a dictionary, or a running value in a tensor outside the buffers."""

    def __init__(self, where: str) -> None:
        super().__init__(WIDTH, where)
        if where == "tensor":
            self.kept = self.kept.to(own_device())


IN_A_DICT, IN_A_TENSOR = partial(Keeps, "dict"), partial(Keeps, "tensor")


class CountsLater(Block):
    """Create the count in the second step; the first step shows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: dict[str, int] | None = None
        self.num_calls = 0

    def forward(self, h: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls > 1:
            self.notes = self.notes or {"uses": 0}
            self.notes["uses"] += 1
        return super().forward(h) / (1 + (self.notes or {}).get("uses", 0))


class MovesLater(Block):
    """Write a buffer from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.num_calls = 0

    def forward(self, h: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls > 1:
            self.mean.add_(h.detach().mean((0, 1)), alpha=0.1)
        return super().forward(h - self.mean)


class Draws(Block):
    """Draw from a generator inside a plain object."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = SimpleNamespace(generator=torch.Generator().manual_seed(3))

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h) + 1e-3 * torch.rand(h.shape[-1], generator=self.memory.generator).to(h)


@dataclass(slots=True)
class Slots:
    """Object without a `__dict__`."""

    mean: Tensor
    uses: int = 0


class CountsInSlots(Block):
    def __init__(self) -> None:
        super().__init__()
        self.notes = Slots(torch.zeros(WIDTH, device=own_device()))

    def forward(self, h: Tensor) -> Tensor:
        self.notes.uses += 1
        self.notes.mean.add_(h.detach().mean((0, 1)), alpha=0.1)
        return super().forward(h - self.notes.mean) / self.notes.uses


class MixesRows(Block):
    """Mix rows by less than a thousandth."""

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h) + 1e-3 * h.mean(0, keepdim=True)


class Collects(Stack):
    """Collect norms in an attribute above the units."""

    def forward(self, x: Tensor) -> Tensor:
        self.norms: list[Tensor] = []
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
            self.norms.append(h.square().mean())
        return self.head(h) * sum(self.norms)


class Appends(Block):
    """Append an auxiliary loss to a list argument."""

    def forward(self, h: Tensor, losses: list[Tensor]) -> Tensor:  # type: ignore[override]
        h = super().forward(h)
        losses.append(h.square().mean())
        return h


class AppendsToItsArgument(Stack):
    block = Appends

    def forward(self, x: Tensor) -> Tensor:
        h, losses = self.embedding(x), list[Tensor]()
        for block in self.blocks:
            h = block(h, losses)
        return self.head(h) * (1.0 + 0.01 * sum(losses))


class Normalises(Block):
    """Recompute the weight in a hook, as in torch's older spectral_norm."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.spectral_norm(self.up)


@pytest.mark.parametrize("block", [IN_A_DICT, CountsInSlots, IN_A_TENSOR, Draws, CountsLater, Normalises])
def test_what_modules_keep_is_that_of_plain_pytorch(block: Callable[[], nn.Module]) -> None:
    model = build(of(block))
    reference = Reference(model, SGD(lr=0.1), max_grad_norm=None)
    engine = Engine(model, SGD(lr=0.1), max_grad_norm=None)
    for seed in range(3):
        assert step_of(engine, words(seed), cross_entropy) == step_of(reference, words(seed), cross_entropy)


@pytest.mark.parametrize("block", [IN_A_DICT, CountsInSlots, IN_A_TENSOR, Draws])
def test_what_a_recompute_would_change_is_found(
    block: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit, "find_mutable_attributes", lambda modules: set())
    assert "graphs are saved" in verdict(build(of(block)))


def test_a_buffer_that_begins_to_move_is_refused() -> None:
    with Engine(build(of(MovesLater))) as engine:
        engine.step(words(), cross_entropy)
        with pytest.raises(ConfigError, match=r"unit blocks\.0 changes its buffer mean in place"):
            engine.step(words(), cross_entropy)


@pytest.mark.slow
def test_what_micro_batches_would_change_is_found() -> None:
    assert "batches are not split" in verdict(build(of(MixesRows)), micro_batch_size=1)
    assert not verdict(build(of(MixesRows)))


def test_notes_that_passes_would_share_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not verdict(build(Collects), optimizer=MeZO(lr=1e-3))
    monkeypatch.setattr(interleaved.DictSnapshots, "pairs", lambda self: iter(()))
    assert "one after the other" in verdict(build(Collects), optimizer=MeZO(lr=1e-3))


def test_what_units_put_into_lists_and_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not verdict(build(AppendsToItsArgument))
    monkeypatch.setattr(arguments, "_find_changes", lambda *_: [])
    assert re.search(r"give different results: (the loss is|result)", verdict(build(AppendsToItsArgument)))


class Doubts(Block):
    """Give another result in each run, from state that nothing can restore."""

    shown = [0.0]  # noqa: RUF012 (of the class, on purpose)

    def forward(self, h: Tensor) -> Tensor:
        self.shown[0] += 0.25
        return super().forward(h) * (1.0 + self.shown[0])


def test_a_model_that_differs_from_itself_is_not_recomputed() -> None:
    assert "gives other results in each run" in verdict(build(of(Doubts)), recompute="never")
    found = verdict(build(of(Doubts)))
    assert "gives other results in each run" in found
    assert "graphs are saved" in found


@pytest.mark.parametrize("is_mended", [True, False])
def test_loss_functions_and_what_requires_a_gradient_outside_are_left_as_they_were(
    is_mended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trial backward passes leave tensors outside the model alone. Otherwise the engine restores these tensors and all
    their gradients.
    """
    if not is_mended:
        monkeypatch.setattr(GradientFlow, "discards_gradients", False)
    temperature, seen = nn.Parameter(torch.ones(())), []

    def loss_fn(outputs: Any, batch: Any) -> Tensor:
        seen.append(1)
        return cross_entropy(outputs * temperature, batch)

    model = build(Stack)
    plain = Reference(model, SGD(lr=0.1), max_grad_norm=None)
    plain.step(words(), loss_fn)
    wanted, temperature.grad = temperature.grad, None
    seen.clear()
    with Engine(model, SGD(lr=0.1), max_grad_norm=None) as engine:
        engine.step(words(), loss_fn)
    assert torch.equal(temperature.grad, wanted)
    assert len(seen) == 1


# -- a broken engine -----------------------------------------------------------------------------------------


SCALE = contextvars.ContextVar("SCALE", default=1.0)


class Scales(Block):
    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h) * SCALE.get()


class Scaled(Stack):
    """Run the blocks in a context absent from the caller's backward."""

    block = Scales

    def forward(self, x: Tensor) -> Tensor:
        before = SCALE.set(0.5)
        result = super().forward(x)
        SCALE.reset(before)
        return result


Patch = Callable[[pytest.MonkeyPatch], None]


def around(owner: Any, name: str, change: Callable[..., Any]) -> Patch:
    """Return a patch that calls `change(original, *args)` in place of a method."""
    original = getattr(owner, name)
    return lambda patch: patch.setattr(owner, name, lambda *args, **kwargs: change(original, *args, **kwargs))


def lose_a_gradient(original: Any, use: Inputs, number: int) -> Any:
    first = next(iter(use.unit.live().values())).requires_grad_(False)
    try:
        return original(use, number)
    finally:
        first.requires_grad_(True)


def lose_what_comes_from_chunks(original: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
    for part in original(*args, **kwargs):
        yield replace(part, leaf=part.leaf.detach())


def cut_a_wrong_row(original: Any, tensor: Tensor, axis: int, rows: Any) -> Tensor:
    begin, end, total = rows
    return original(tensor, axis, (max(0, begin - 1), max(1, end - 1), total))


def sum_gradients_twice(original: Any, context: Any, *gradients: Tensor) -> Any:
    return tuple(None if g is None else 1.001 * g for g in original(context, *gradients))


@contextmanager
def leave_values(_original: Any, *_: Any) -> Iterator[None]:
    yield


BROKEN: dict[str, tuple[Callable[[], nn.Module], Patch, dict[str, Any]]] = {
    "a gradient is lost": (Stack, around(Inputs, "_recompute", lose_a_gradient), {}),
    "gradients between units are too large": (Stack, around(UnitFunction, "backward", sum_gradients_twice), {}),
    "a recompute draws anew": (
        of(DropsOut),
        around(
            UnitRunner, "snapshot", lambda original, *args: (original(*args), torch.rand((), device=own_device()))[0]
        ),
        {},
    ),
    "a buffer moves twice": (RunningStatistics, around(Snapshot, "values_restored", leave_values), {}),
    "a wrong row is cut": (Stack, around(traits, "_cut", cut_a_wrong_row), {"micro_batch_size": 1}),
    "a micro-batch counts twice": (
        Stack,
        around(UnitTraits, "cut_outputs", lambda original, *args: [g if g is None else 2 * g for g in original(*args)]),
        {"micro_batch_size": 1},
    ),
    "what comes from chunks is lost": (
        llama,
        around(ChunkedHead, "parts", lose_what_comes_from_chunks),
        {"batch": tokens(), "loss_fn": None, "head_chunk_bytes": 4096},
    ),
    "a recompute has other surroundings": (
        Scaled,
        around(ThreadState, "run", lambda original, self, function, *args: function(*args)),
        {},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(BROKEN))
def test_a_broken_engine_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, break_it, settings = BROKEN[name]
    assert not verdict(build(make), **settings), "it is taken as it is where nothing is broken"
    break_it(monkeypatch)
    assert verdict(build(make), **settings)


# -- the comparison ------------------------------------------------------------------------------------------


def test_same_bits_and_sketches_tell_nan_from_zero() -> None:
    zeros, nan = torch.zeros(3), torch.full((3,), math.nan)
    for tensors in ((zeros, nan), (nan, zeros)):
        assert not same_bits(*tensors)
        assert not Sketch.of(tensors[0]).equals(Sketch.of(tensors[1]))
    assert same_bits(nan, nan.clone())
    assert Sketch.of(nan).equals(Sketch.of(nan))
    assert same_bits(nan * 1j, nan * 1j)
    assert not same_bits(zeros, zeros.double())
    assert same_bits(None, None)
    assert not same_bits(None, zeros)


def test_distances_are_relative() -> None:
    one = torch.ones(1000)
    other = one.clone()
    other[0] += 1e-3
    assert not are_near(one, other)
    assert are_near(one.bfloat16(), other.bfloat16())
    assert are_near(one, one + 1e-6)
    found = largest_excess([Sketch.of(one)], [Sketch.of(other)], 0.0, 0.0)
    assert 0.5 < found / (1e-3 / math.sqrt(1000)) < 2
    assert largest_excess([Sketch.of(one)], [Sketch.of(other[:3])], 1.0, 0.0) == math.inf


def test_a_small_tensor_is_compared_with_itself() -> None:
    """Break: one distance for all tensors."""
    large, small = torch.full((100,), 1e3), torch.full((100,), 1.0)
    ones, others = [Sketch.of(large), Sketch.of(small), None], [Sketch.of(large), Sketch.of(small * 1.34), None]
    assert largest_excess(ones, others, 0.1, 1e-6) == pytest.approx(0.34, rel=0.01)
    assert not largest_excess(ones, others, 0.4, 0.0)
    assert not largest_excess(ones, others, 0.1, 1e-3), "the rounding error of the large one"
    assert largest_excess(ones, [*others[:2], Sketch.of(small)], 0.4, 0.0) == math.inf
    assert largest_excess(ones, [Sketch.of(large * math.nan), *others[1:]], 0.4, 0.0) == math.inf


def test_a_gradient_may_be_the_rounding_error_of_the_others() -> None:
    allowed = tolerance(OTHER_ORDER)
    large, small = Sketch.of(torch.full((100,), 1e3)), Sketch.of(torch.full((1,), 1e-3))
    assert all(deviation <= 1 for deviation in gradient_deviations([large, small], [large, None], allowed))
    assert gradient_deviations([small], [None], allowed)[0] > 1
    assert gradient_deviations([None], [None], allowed) == [0]
    assert tolerance(OTHER_ORDER, [torch.ones(1).half()]) == tolerance(OTHER_ORDER, is_half=True) != allowed
