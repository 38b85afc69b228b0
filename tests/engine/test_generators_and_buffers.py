"""State that training leaves alone: random generators, buffers, module modes. Evaluation changes nothing at all."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from offload import Engine, MeZO, Placement
from offload.engine.units.runner import generator_seed
from offload.engine.units.snapshots import RngState
from tests.cases.models import build, gpt2, llama
from tests.engine.compare import assert_same, assert_weights, step_of, train_both, weights
from tests.engine.device import cpu_only
from tests.engine.handmade import WIDTH, Block, DropsOut, Noisy, RunningStatistics, Stack, cross_entropy, words
from tests.engine.reference import Reference
from tests.engine.zeroth_order import PlainMeZO


def test_construction_leaves_generators_and_modes_alone() -> None:
    model = build(gpt2)
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    engine = Engine(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in model.modules()] == modes
    list(engine.named_parameters())
    assert torch.equal(torch.get_rng_state(), before)


class NoisyUntilItFails(Noisy):
    """`is_failing` raises after all draws."""

    is_failing = False

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.is_failing:
            raise KeyError("told to")
        return out


@cpu_only("it looks at the generator of the host")
def test_a_step_draws_as_many_random_numbers_as_plain_training_and_none_if_it_fails() -> None:
    model = build(NoisyUntilItFails)
    reference = Reference(model)
    engine = Engine(model)
    for seed in range(3):  # no new seed between steps
        before = torch.get_rng_state()
        reference.step(words(seed), cross_entropy)
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        engine.model.is_failing = True
        with pytest.raises(KeyError):
            engine.step(words(seed), cross_entropy)
        engine.model.is_failing = False
        assert torch.equal(torch.get_rng_state(), before)
        engine.step(words(seed), loss_fn=cross_entropy)
        assert torch.equal(torch.get_rng_state(), after)
    assert_weights(engine, reference)


class Spectral(Block):
    """Spectral norm takes a power-iteration step per forward, so the effective weight depends on a buffer."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.up)


@pytest.mark.parametrize("model", [RunningStatistics, lambda: Stack(Spectral)], ids=["statistics", "spectral"])
def test_buffers_move_once_a_step_and_a_recompute_begins_from_those_of_its_forward(
    model: Callable[[], nn.Module],
) -> None:
    """Neither the recording pass, nor a recomputation, nor an evaluation may update them again."""
    engine, reference = train_both(build(model), [words(s) for s in range(3)], loss_fn=cross_entropy)
    engine.evaluate(words(), loss_fn=cross_entropy)
    assert_same(dict(engine.model.named_buffers()), dict(reference.model.named_buffers()))


def test_named_parameters_are_copies() -> None:
    engine = Engine(build(llama), placement=Placement())
    for _, tensor in engine.named_parameters():
        assert tensor.dtype == torch.float32
        assert tensor.device.type == "cpu"
        assert not tensor.requires_grad
        tensor.fill_(7)
    assert not any((value == 7).any() for value in weights(engine).values())


def test_the_seeds_of_micro_batches_are_the_same_everywhere() -> None:
    """Python's own tuple hash may change between versions."""
    assert generator_seed(0, 1, 2, 3, 4, 0) == 5149148885015360200
    assert (
        len({generator_seed(0, step, unit, 1, part, 0) for step in range(9) for unit in range(9) for part in range(9)})
        == 729
    )


def test_dropout_may_begin_after_the_recording_pass() -> None:
    """Recomputation draws the same masks, although the recording pass drew none."""
    model = build(lambda: Stack(DropsOut))
    reference, engine = Reference(model), Engine(model)
    for step, probability in enumerate((0.0, 0.5)):
        for block in (*engine.model.blocks, *reference.model.blocks):
            block.dropout.p = probability
        assert step_of(engine, words(step), cross_entropy, seed=step) == step_of(
            reference, words(step), cross_entropy, seed=step
        )
    assert_weights(engine, reference)


class Draws(Block):
    """Drop hidden values by a mask from a generator outside torch."""

    def draw(self) -> Tensor:
        raise NotImplementedError

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h * self.draw().to(h.device))


class DrawsFromPython(Draws):
    def draw(self) -> Tensor:
        return torch.tensor([float(random.random() < 0.5) for _ in range(WIDTH)])


class DrawsFromNumpy(Draws):
    def draw(self) -> Tensor:
        return torch.from_numpy(np.random.normal(size=WIDTH)).float()


class DrawsOneNormal(Draws):
    """numpy draws normals in pairs and keeps the second for the next call."""

    def draw(self) -> Tensor:
        return torch.full((WIDTH,), np.random.normal())


class DrawsFromItsOwn(Draws):
    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(0)

    def draw(self) -> Tensor:
        return torch.rand(WIDTH, generator=self.own)


@pytest.mark.slow
@pytest.mark.parametrize(("block", "recompute"), [(DrawsFromPython, "always"), (DrawsFromNumpy, "never")])
def test_a_recompute_draws_again_from_the_generators_of_python_and_numpy(block: type[Draws], recompute: str) -> None:
    """The recording pass and failed steps leave both generators alone. A step moves them as plain PyTorch does."""
    model = build(lambda: Stack(block))
    reference, engine = Reference(model), Engine(model, recompute=recompute)

    def fails(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        raise KeyError("told to")

    def seed() -> None:
        random.seed(7), np.random.seed(7)

    found = []
    for each in (engine, reference):
        seed()
        for step in range(3):
            if step == 1 and each is engine:
                with pytest.raises(KeyError):
                    engine.step(words(step), fails)
            found.append(step_of(each, words(step), cross_entropy))
        found.append((random.random(), np.random.random()))
    assert found[:4] == found[4:]
    assert_weights(engine, reference)


@pytest.mark.slow
@pytest.mark.parametrize(("block", "num_before"), [(DrawsFromPython, 0), (DrawsFromNumpy, 0), (DrawsOneNormal, 1)])
def test_passes_side_by_side_draw_alike_from_the_generators_of_python_and_numpy(
    block: type[Draws], num_before: int
) -> None:
    """Each pass draws as if alone; afterwards the generators have moved by one pass."""
    model = build(lambda: Stack(block))
    plain, engine = PlainMeZO(model, MeZO(lr=1e-3)), Engine(model, MeZO(lr=1e-3))

    def seed() -> None:
        random.seed(7), np.random.seed(7)
        np.random.normal(size=num_before)

    def draw_alike() -> list[float]:
        return [random.random(), np.random.normal(), np.random.normal()]

    for step in range(3):
        seed()
        result = engine.step(words(step), cross_entropy)
        after = draw_alike()

        def loss(batch: dict[str, Tensor]) -> float:
            seed()
            return float(cross_entropy(plain.model(x=batch["x"]), batch))

        losses = plain.measure(partial(loss, words(step)))
        assert draw_alike() == after
        assert result.measured is not None
        assert list(result.measured.losses) == losses
        plain.move(result.measured.slopes)
    assert_same(weights(engine), plain.masters)
    engine.close()


def draws_of_python_and_numpy() -> tuple[float, ...]:
    return random.random(), random.gauss(0, 1), np.random.normal(), np.random.random()


def test_how_far_generators_are_drawn_is_told_by_every_draw() -> None:
    """Without a draw in between, `capture(before)` returns `before`. `put_back` undoes any draw or seed."""
    draws = [
        random.random,
        lambda: random.gauss(0, 1),
        np.random.random,
        np.random.normal,
        np.random.normal,  # the second of a pair
        lambda: np.random.bytes(4),
        lambda: np.random.seed(3),
        lambda: random.seed(3),
        lambda: np.random.shuffle([1, 2, 3]),
    ]
    for draw in [*draws, *draws]:
        before = RngState.capture()
        assert RngState.capture(before) is before
        wanted = draws_of_python_and_numpy()
        before.put_back()
        draw()
        after = RngState.capture(before)
        assert after != before
        before.put_back()
        assert RngState.capture() == before
        assert draws_of_python_and_numpy() == wanted
        after.put_back()


def test_another_generator_of_numpys_is_put_back_too() -> None:
    own = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(0))
    try:
        before = RngState.capture()
        assert RngState.capture(before) is before
        wanted = draws_of_python_and_numpy()
        before.put_back()
        assert draws_of_python_and_numpy() == wanted
    finally:
        np.random.set_bit_generator(own)


@pytest.mark.parametrize("recompute", ["always", "never"])
def test_a_unit_may_draw_from_a_generator_of_its_own(recompute: str) -> None:
    """The generator is part of the module state: recomputation starts from this state. In plain PyTorch too, the second
    of two passes continues the draws of the first.
    """
    model, some = build(lambda: Stack(DrawsFromItsOwn)), [words(seed) for seed in range(3)]
    train_both(model, some, loss_fn=cross_entropy, recompute=recompute)
    with Engine(build(lambda: Stack(DrawsFromItsOwn)), MeZO()) as engine:
        engine.step(words(), cross_entropy)
