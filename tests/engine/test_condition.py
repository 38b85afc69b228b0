"""Module state assigned by a forward, and module changes between a forward and the backward."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from offload import Engine
from offload.errors import ConfigError
from tests.cases.models import build, llama, tokens
from tests.engine.compare import assert_weights, own_step_of, same_bits, step_of
from tests.engine.handmade import WIDTH, Block, DropsOut, RunningStatistics, Stack, cross_entropy, words
from tests.engine.reference import Reference, count_labels
from tests.matrix import quick


class Assigning(Block):
    """Assign one buffer, write and assign another, and count uses. The result depends on all three."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("spread", torch.ones(WIDTH))
        self.num_uses = 0

    def forward(self, h: Tensor) -> Tensor:
        self.num_uses += 1
        self.spread.mul_(0.9)
        self.spread = self.spread + 0.1 * h.detach().std((0, 1))
        result = super().forward((h - self.mean) / (1.0 + self.spread)) * (1.0 + 0.1 * self.num_uses)
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean((0, 1))
        return result


class Assigned(Stack):
    """Also assign a buffer outside all units. `spoils` makes gradients non-finite."""

    def __init__(self) -> None:
        super().__init__(Assigning)
        self.register_buffer("scale", torch.ones(()))
        self.spoils = False

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x) * self.scale
        self.scale = self.scale + 0.1
        return result * float("nan") if self.spoils else result


def assert_like(engine: Engine, reference: Reference) -> None:
    assert_weights(engine, reference)
    for (name, found), (_, wanted) in zip(engine.model.named_buffers(), reference.model.named_buffers(), strict=True):
        assert same_bits(found, wanted), name
    assert [b.num_uses for b in engine.model.blocks] == [b.num_uses for b in reference.model.blocks]


@pytest.mark.parametrize(("recompute", "rows"), quick([("always", None), ("never", 2)], [("always", None)]))
def test_what_a_forward_assigns_moves_once(recompute: str, rows: int | None) -> None:
    """The recording pass and skipped steps leave this state unchanged. Evaluations move the state, as in plain
    PyTorch.
    """
    model = build(Assigned)
    reference = Reference(model)  # whole batches: parts would each move the state
    engine = Engine(model, recompute=recompute, micro_batch_size=rows, on_nonfinite="skip")
    for seed in range(4):
        if seed == 2:
            engine.model.spoils = True
            assert engine.step(words(9), cross_entropy).skipped
            engine.model.spoils = False
            assert_like(engine, reference)
            with torch.no_grad():
                wanted = sum(loss.item() for loss in reference.losses(words(8), cross_entropy, count_labels))
            loss = engine.evaluate(words(8), cross_entropy).item()
            assert loss == pytest.approx(wanted, abs=1e-6 if rows else 0)
        assert step_of(engine, words(seed), cross_entropy) == step_of(reference, words(seed), cross_entropy)
        assert_like(engine, reference)


class Hanging(Assigning):
    def forward(self, h: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * h.mean((0, 1))
        return Block.forward(self, h - self.mean)


def test_a_buffer_that_would_hold_a_graph_is_refused() -> None:
    engine = Engine(build(lambda: Stack(Hanging)))
    with pytest.raises(ConfigError, match=r"unit blocks\.0 assigns its buffer mean .* detached"):
        engine.step(words(), cross_entropy)
    assert not engine.model.blocks[0].mean.any()


def test_what_a_step_that_fails_has_assigned_is_put_back() -> None:
    model = build(Assigned)
    reference, engine = Reference(model), Engine(model)

    def fails(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        raise KeyError("told to")

    for seed in range(3):
        reference.step(words(seed), cross_entropy)
        engine.step(words(seed), cross_entropy)
        with pytest.raises(KeyError):
            engine.step(words(seed), fails)
        assert_like(engine, reference)


def test_an_own_loop_recomputes_from_what_each_forward_had() -> None:
    """Two forwards run before the backward. By then the module has lost the state seen by the first."""
    model = build(Assigned)
    reference, engine = Reference(model), Engine(model)
    for step in range(3):

        def both(model: nn.Module, step: int = step) -> Tensor:
            return sum(cross_entropy(model(words(seed)["x"]), words(seed)) for seed in (step, step + 1))

        assert own_step_of(engine, both) == own_step_of(reference, both)
        assert_like(engine, reference)


@pytest.mark.slow
@pytest.mark.parametrize("length", [10, 40])
def test_a_rotary_table_that_grows_grows_in_the_run(length: int) -> None:
    """In own loops the recording pass sees the full length. The rotary table is an assigned buffer, the cached length
    an attribute.
    """
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = build(lambda: llama(max_position_embeddings=16, rope_parameters=rope))
    reference, engine = Reference(model), Engine(model)
    for seed, columns in enumerate((length, 10, 48)):
        mean = partial(lambda batch, model: model(**batch).loss, tokens(seed, length=columns))
        assert own_step_of(engine, mean) == own_step_of(reference, mean), f"step {seed}"
        found, wanted = (each.model.model.rotary_emb for each in (engine, reference))
        assert same_bits(found.inv_freq, wanted.inv_freq)
        assert found.max_seq_len_cached == wanted.max_seq_len_cached
    assert found.max_seq_len_cached == 48


@pytest.mark.parametrize("was_training", [True, False])
def test_a_recompute_runs_in_the_mode_of_its_forward(was_training: bool) -> None:
    """The training mode and the dropout rate may change between a forward and the backward."""
    model = build(lambda: Stack(DropsOut))
    reference, engine = Reference(model), Engine(model)

    def loss_of(model: nn.Module) -> Tensor:
        model.train(was_training)
        torch.manual_seed(3)
        loss = cross_entropy(model(words()["x"]), words())
        model.train(not was_training)
        for block in model.blocks:
            block.dropout.p = 0.9
        return loss

    assert own_step_of(engine, loss_of) == own_step_of(reference, loss_of)
    assert not any(module.training is was_training for module in engine.model.modules())
    assert engine.model.blocks[0].dropout.p == 0.9
    assert_weights(engine, reference)


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("model", [Assigned, RunningStatistics])
def test_what_runs_in_inference_mode_leaves_nothing_of_it_behind(begins: bool, model: type[nn.Module]) -> None:
    """Covers evaluations and the user's own forwards, before the first step or between steps, and batches created in
    inference mode. Tensors assigned there stay inference tensors, as in plain PyTorch.
    """
    given = build(model)
    reference, engine = Reference(given), Engine(given)
    for step in range(3):
        batch = words(step)
        if begins or step:
            with torch.inference_mode():
                batch = {key: value.clone() for key, value in batch.items()}
                if model is not Assigned:
                    wanted = cross_entropy(reference.model(batch["x"]), batch)
                    assert cross_entropy(engine.model(batch["x"]), batch).item() == wanted.item()
                loss = engine.evaluate(batch, cross_entropy)
            reference.model.eval()
            with torch.no_grad():
                assert loss.item() == cross_entropy(reference.model(words(step)["x"]), words(step)).item()
            reference.model.train()
        assert step_of(engine, batch, cross_entropy) == step_of(reference, words(step), cross_entropy)
    assert_weights(engine, reference)
    with torch.inference_mode(), pytest.raises(ConfigError, match="inference_mode"):
        Engine(build(Stack))


class Collecting(Stack):
    """Hook the blocks in the first forward, set a flag, and return the collected outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.is_hooked, self.collected = False, []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks if not self.is_hooked else ():
            block.register_forward_hook(lambda _block, _args, h: self.collected.append(h))
        self.is_hooked = True
        self.collected.clear()
        return super().forward(x) * len(self.collected)


def test_hooks_of_a_forward_go_with_the_note_that_they_are_there() -> None:
    """transformers collects hidden states like this. Break: keep the hooks of the recording pass."""
    model = build(Collecting)
    reference, engine = Reference(model), Engine(model)
    for step in range(2):
        assert step_of(engine, words(step), cross_entropy) == step_of(reference, words(step), cross_entropy)
    engine.close()  # removes the hooks of the engine
    assert all(len(block._forward_hooks) == 1 for block in engine.model.blocks)
