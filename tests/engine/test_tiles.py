"""Modules over tiles of the sequence: what they give is what they give whole, up to the order of sums."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from offload import AdamW, Engine, Placement
from offload.engine.gradients.flow import GradientFlow
from offload.errors import ConfigError
from tests.engine.compare import PROPORTIONAL, train_both
from tests.engine.families import batches, build, gemma2, gpt2, gpt_neox, llama, mamba, mixtral, qwen3, t5, tokens
from tests.engine.handmade import WIDTH, Stack, cross_entropy, words
from tests.engine.reference import Reference
from tests.matrix import quick

LENGTH = 24
"""Longer than what is recorded."""


def long(count: int, rows: int = 2) -> list[dict[str, Tensor]]:
    return [tokens(seed, rows, LENGTH) for seed in range(count)]


def modules(engine: Engine) -> dict[str, list[str]]:
    """Return the modules that run over tiles, by unit."""
    found = {unit.name: unit.traits.tiles for unit in engine._state.units}
    return {name: [rows.name for rows in tiles.modules] for name, tiles in found.items() if tiles and tiles.modules}


class Part(nn.Module):
    """Has a hidden layer, and so something to save."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return self.down(functional.silu(self.up(h)) * 2.0)


class BlockOf(nn.Module):
    """Attention over all rows before, of no weights, and a part."""

    def __init__(self, part: type[nn.Module]) -> None:
        super().__init__()
        self.mix, self.part = nn.Linear(WIDTH, WIDTH), part()

    def forward(self, h: Tensor) -> Tensor:
        q = self.mix(h)
        h = h + functional.scaled_dot_product_attention(q, q, h, is_causal=True)
        return h + self.part(h)


def stack(part: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return Stack(lambda: BlockOf(part), depth=2).train()


# -- which modules may run over tiles ------------------------------------------------------------------------


class ShiftsRows(Part):
    """As RWKV: a row sees the one before it."""

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h) + functional.pad(h, (0, 0, 1, 0))[:, :-1]


class LooksFarBack(Part):
    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h) + functional.pad(h, (0, 0, 20, 0))[:, : h.shape[1]]


class Convolves(Part):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(self.kernel(h.transpose(1, 2)).transpose(1, 2))


class NormalisesTheBatch(Part):
    def forward(self, h: Tensor) -> Tensor:
        return super().forward((h - h.mean((0, 1))) / (h.std((0, 1)) + 1e-5))


class ScalesByTheLargest(Part):
    """What most rows hold has no part in the result of others."""

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h / h.abs().amax())


class ActsOnTheMean(Part):
    """Nothing shows but where the sign changes."""

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h if h.mean() > 0 else 2 * h)


class HasPlaces(Part):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(64, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h + self.places[: h.shape[1]])


class HasRoomForSome(Part):
    """A mixture whose experts take so many rows, and drop the others."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)

    def forward(self, h: Tensor) -> Tensor:
        chosen = functional.one_hot(self.gate(h).argmax(-1).flatten(), 4)
        room = 2 * len(chosen) // 4
        kept = ((chosen.cumsum(0) <= room) & (chosen > 0)).any(-1).view(h.shape[:2])
        return super().forward(h) * kept[..., None]


class DropsOut(Part):
    def forward(self, h: Tensor) -> Tensor:
        return functional.dropout(super().forward(h), 0.1)


class CountsRows(Part):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        self.seen += h.shape[1]
        return super().forward(h)


class KeepsItsInput(Part):
    def forward(self, h: Tensor) -> Tensor:
        self.last = float(h.detach().sum())
        return super().forward(h)


class ChangesItsInput(Part):
    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h) + h.detach().mul_(0.5)


class SumsGradientsOfRows(Part):
    """The result is a function of rows, and the gradient is none."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, h: Tensor) -> Tensor:
            return h.clone()

        @staticmethod
        def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0] - gradients[0].mean(1, keepdim=True)

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(self.Function.apply(h))


OTHERS = {
    ShiftsRows: "depends on other rows",
    LooksFarBack: "depends on other rows",
    Convolves: "depends on other rows",
    NormalisesTheBatch: "depends on other rows",
    ScalesByTheLargest: "depends on other rows",
    ActsOnTheMean: "depends on other rows",
    HasPlaces: "depends on other rows, or on where it stands",
    HasRoomForSome: "treats rows that are alike in different ways",
    DropsOut: "draws random numbers",
    CountsRows: "keeps notes",
    KeepsItsInput: "keeps notes",
    ChangesItsInput: "changes its inputs in place",
    SumsGradientsOfRows: "gradients over tiles are others",
}


@pytest.mark.parametrize("part", OTHERS)
def test_a_module_that_is_no_function_of_rows_is_left_whole_and_named(part: type[nn.Module]) -> None:
    with (
        Engine(stack(part), sequence_tile=5) as engine,
        pytest.raises(ConfigError, match=rf"sequence_tile is 5.*part \(.*{OTHERS[part]}"),
    ):
        engine.step(words(rows=3, length=LENGTH), loss_fn=cross_entropy)


def test_a_function_of_rows_is_found() -> None:
    with Engine(stack(Part), sequence_tile=5) as engine:
        engine.step(words(rows=3, length=LENGTH), loss_fn=cross_entropy)
        assert modules(engine) == {"blocks.0": ["part"], "blocks.1": ["part"]}
        assert "over tiles of 5 tokens" in engine.told_tiles


FAMILIES: dict[Callable[[], nn.Module], set[str]] = {
    llama: {"mlp", "input_layernorm", "post_attention_layernorm"},
    qwen3: {"mlp", "input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"},
    gemma2: {
        *("mlp", "input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    },
    mixtral: {"mlp", "input_layernorm", "post_attention_layernorm"},
    gpt2: {"mlp.act"},  # dropout is in its MLP
    gpt_neox: {"mlp"},
    mamba: {"norm"},
}
"""By the modules that run over tiles."""


@pytest.mark.parametrize("make", quick(FAMILIES, (llama, gemma2, mixtral)))
def test_losses_have_the_bits_of_whole_sequences_and_gradients_all_but_the_order_of_sums(
    make: Callable[[], nn.Module],
) -> None:
    losses = []
    for tile in ("none", 8):
        with Engine(build(make), sequence_tile=tile, optimizer=PROPORTIONAL) as engine:
            torch.manual_seed(0)
            results = [engine.step(batch) for batch in long(2)]
            losses.append([results[0].loss.item(), results[0].grad_norm, results[1].loss.item()])
            if tile != "none":
                assert (
                    set(modules(engine)["model.layers.0" if make is llama else next(iter(modules(engine)))])
                    == FAMILIES[make]
                )
    assert losses[0][0] == losses[1][0]
    assert losses[1][1:] == pytest.approx(losses[0][1:], rel=1e-6)
