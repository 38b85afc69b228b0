"""Units whose backward reads no weights: no weights are fetched for the backward.

All other reads get the weights, and every gradient equals plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offload import Engine
from tests.cases.models import build
from tests.engine.compare import train_both
from tests.engine.handmade import WIDTH, WORDS, Stack, cross_entropy, words
from tests.engine.inside import parts_of


class _KeepsWeights(torch.autograd.Function):
    """Keeps the weight outside autograd's saved tensors."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return h + weight.mean(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        of_mean = gradient.flatten(0, -2).sum(0) / len(ctx.weight)
        return gradient, of_mean.expand_as(ctx.weight) + 0.01 * ctx.weight


class _ReadsPastTorch(torch.autograd.Function):
    """Reads the saved weight by NumPy, invisible to a dispatch mode."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor) -> Tensor:
        ctx.numbers = weight.cpu().numpy()
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * float(ctx.numbers.sum()), None


class Table(nn.Embedding):
    """An embedding with a vector. `after(table, x)` replaces the forward."""

    def __init__(self, after: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(WORDS, WIDTH)
        self.after, self.vector = after, nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("scale", torch.tensor(WIDTH**0.5))

    def found(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self, x)


def hooked_later(table: Table, x: Tensor) -> Tensor:
    """A hook reads the weights, but in none of the trial batches. A hook that always reads is refused."""
    weight, h = table.weight, table.found(x)
    if h.requires_grad:
        reads = bool(x[0, 0] < 0)
        h.register_hook(lambda gradient: gradient * weight.detach().abs().mean() if reads else gradient)
    return h


def sometimes(table: Table, x: Tensor) -> Tensor:
    """The path depends on the batch values."""
    h = table.found(x)
    return h * table.vector if int(x[0, 0]) % 2 else h + table.vector


class Tied(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class Twice(Stack):
    """Uses the table twice in a pass, the second time after the first block."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](self.embedding(x)) + self.embedding(x.flip(1))
        for block in self.blocks[1:]:
            h = block(h)
        return self.head(h)


class Without(Stack):
    """A stack with a `Table`."""

    def __init__(self, after: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding = Table(after)


TABLES: Mapping[str, tuple[Callable[[Any, Tensor], Tensor], bool]] = {
    "scaled, as in Gemma": (lambda table, x: table.found(x) * table.scale.to(table.weight.dtype), False),
    "added": (lambda table, x: table.found(x) + table.vector, False),
    "rescaled": (lambda table, x: table.found(x) * table.vector, True),  # the graph saves the vector, not the table
    "own function": (lambda table, x: _KeepsWeights.apply(table.found(x), table.weight), True),
    "own function, past torch": (
        lambda table, x: _ReadsPastTorch.apply(table.found(x), table.weight.detach().float()),
        True,
    ),
    "hook": (hooked_later, True),
    # The engine does not see the tensors saved for the second run.
    "checkpoint": (lambda table, x: checkpoint(lambda x: table.found(x) * table.vector, x, use_reentrant=False), True),
    # The graph grows with the batch, so the unit is recomputed from the weights.
    "recomputed": (lambda table, x: torch.tanh(table.found(x)), True),
}
MODELS: Mapping[str, tuple[Callable[[], nn.Module], bool]] = {
    "embedding": (Stack, False),
    "tied": (Tied, False),
    "twice": (Twice, False),
    **{name: (partial(Without, after), reads) for name, (after, reads) in TABLES.items()},
}
"""Model, and True if the embedding backward reads the table."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "recompute"), list(zip(MODELS, cycle(["always", "never"]), strict=False)))
def test_what_is_not_read_is_not_fetched(name: str, recompute: str) -> None:
    """Each step is bit-equal to plain PyTorch, and each use with reads moves the bytes of one fetch.

    Break: remove one of the three checks (saved tensors, functions and hooks, trial backward); or skip the fetch for a
    recomputed unit.
    """
    make, reads = MODELS[name]
    settings = {"prefetch": 0, "max_grad_norm": None, "debug": True, "recompute": recompute}
    engine, _ = train_both(build(make), [words(s) for s in range(5)], loss_fn=cross_entropy, **settings)
    assert_fetched(engine, reads, num_uses=2 if name == "twice" else 1)


def assert_fetched(engine: Engine, reads: bool, num_uses: int = 1) -> None:
    """Check the H2D bytes of a step with device memory for one unit, and the head still in the slot for backward.

    Resident units are copied once. On an accelerator free memory keeps units on the device, and nothing is checked.
    """
    if parts_of(engine).plan.device_bytes is not None:
        return
    sizes = {unit.name: sum(r.weight_bytes for r in unit.regions) for unit in parts_of(engine).units}
    staying = {unit.name for unit in parts_of(engine).units if unit.resident}
    streaming = sum(size for name, size in sizes.items() if name not in staying)
    table, stays = sizes["embedding"], sum(sizes[name] for name in staying)
    wanted = 2 * (streaming + (num_uses - 1) * table) - sizes["head"] - (not reads) * num_uses * table + stays
    assert engine.counters.h2d_bytes == wanted


@pytest.mark.slow
def test_a_use_that_saves_weights_against_all_that_was_recorded_has_them() -> None:
    batches = [words(s) for s in range(6)]
    for number, batch in enumerate(batches):
        batch["x"][:, 0] = number % 2
    engine, _ = train_both(
        build(lambda: Without(sometimes)), batches, loss_fn=cross_entropy, prefetch=0, max_grad_norm=None, debug=True
    )
    assert_fetched(engine, reads=True)
    for _ in range(2):  # the recorded order of the previous pass still has the fetch
        engine.step(batches[0], loss_fn=cross_entropy)
    assert_fetched(engine, reads=False)
