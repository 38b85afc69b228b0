"""Modules over sequence tiles: results equal the whole-sequence results, except for summation order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from offload import Engine, Placement
from offload.engine.gradients.flow import GradientFlow
from offload.engine.units.arguments import Arguments
from offload.engine.units.trial import Trial
from offload.errors import ConfigError
from offload.extras.large import compiled_forwards as forwards
from offload.extras.large.row_trials import RowTrials
from offload.extras.large.tiles import RowModule, TiledForward
from offload.extras.plan.unit_use import _StandIn
from offload.layout.regions import Piece
from tests.cases.models import build, gemma2, gpt2, gpt_neox, llama, mamba, mixtral, qwen3, tokens
from tests.engine.compare import PROPORTIONAL, train_both
from tests.engine.handmade import WIDTH, Stack, cross_entropy, words
from tests.engine.inside import parts_of
from tests.matrix import quick

Run = Callable[[Any, Tensor], Tensor]
LENGTH = 24
"""Longer than a recorded sequence."""


def long(count: int, rows: int = 2) -> list[dict[str, Tensor]]:
    return [tokens(seed, rows, LENGTH) for seed in range(count)]


def modules(engine: Engine) -> dict[str, list[str]]:
    """Return the tiled modules by unit."""
    found = {unit.name: unit.traits.learned.get("tiles") for unit in parts_of(engine).units}
    return {name: [rows.name for rows in tiles.modules] for name, tiles in found.items() if tiles and tiles.modules}


class Part(nn.Module):
    """An MLP with a hidden layer, so autograd saves tensors. `run(part, h)` replaces the forward."""

    def __init__(self, run: Run | None = None) -> None:
        super().__init__()
        self.run, self.up, self.down = run, nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def mlp(self, h: Tensor) -> Tensor:
        return self.down(functional.silu(self.up(h)) * 2.0)

    def forward(self, h: Tensor) -> Tensor:
        return self.run(self, h) if self.run else self.mlp(h)


class BlockOf(nn.Module):
    """Causal attention over all previous rows, and a part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.mix, self.part = nn.Linear(WIDTH, WIDTH), part

    def forward(self, h: Tensor) -> Tensor:
        q = self.mix(h)
        h = h + functional.scaled_dot_product_attention(q, q, h, is_causal=True)
        return h + self.apply_part(h)

    def apply_part(self, h: Tensor) -> Tensor:
        return self.part(h)


class FlatBlockOf(BlockOf):
    """Flattens the rows of a batch for its part, as the blocks of some models do for their MLP."""

    def apply_part(self, h: Tensor) -> Tensor:
        return self.part(h.flatten(0, 1)).view_as(h)


def stack(part: Callable[[], nn.Module] = Part, seed: int = 0, block: Callable[..., nn.Module] = BlockOf) -> nn.Module:
    torch.manual_seed(seed)
    return Stack(lambda: block(part()), depth=2).train()


# -- modules that may run over tiles -------------------------------------------------------------------------


class Odd(Part):
    """Has parts for the functions in `OTHERS`."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.gate, self.kernel = nn.Linear(WIDTH, 4), nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.places = nn.Parameter(torch.randn(64, WIDTH))
        self.register_buffer("seen", torch.zeros(()))


def later(h: Tensor, num_rows: int) -> Tensor:
    """Shift rows."""
    return functional.pad(h, (0, 0, num_rows, 0))[:, : h.shape[1]]


def with_room_for_some(part: Any, h: Tensor) -> Tensor:
    """A mixture with limited expert capacity. Rows above the capacity are dropped."""
    chosen = functional.one_hot(part.gate(h).argmax(-1).flatten(), 4)
    room = 2 * len(chosen) // 4
    kept = ((chosen.cumsum(0) <= room) & (chosen > 0)).any(-1).view(h.shape[:2])
    return part.mlp(h) * kept[..., None]


def counted(part: Any, h: Tensor) -> Tensor:
    part.seen += h.shape[1]
    return part.mlp(h)


def kept(part: Any, h: Tensor) -> Tensor:
    part.last = float(h.detach().sum())
    return part.mlp(h)


class SumsGradientsOfRows(torch.autograd.Function):
    """The forward is a function of rows, the gradient is not."""

    @staticmethod
    def forward(_ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] - gradients[0].mean(1, keepdim=True)


ON_ROWS = "depends on other rows"
OTHERS: dict[str, tuple[Run, str]] = {
    "the previous row, as in RWKV": (lambda part, h: part.mlp(h) + later(h, 1), ON_ROWS),
    "a row far back": (lambda part, h: part.mlp(h) + later(h, 20), ON_ROWS),
    "a convolution": (lambda part, h: part.mlp(part.kernel(h.transpose(1, 2)).transpose(1, 2)), ON_ROWS),
    "norm over the batch": (lambda part, h: part.mlp((h - h.mean((0, 1))) / (h.std((0, 1)) + 1e-5)), ON_ROWS),
    "scale by the largest": (lambda part, h: part.mlp(h / h.abs().amax()), ON_ROWS),
    "sign of the mean": (lambda part, h: part.mlp(h if h.mean() > 0 else 2 * h), ON_ROWS),
    "scale by an outlier": (lambda part, h: part.mlp(h / (h.abs().amax() / 20).clamp_min(1.0)), ON_ROWS),
    "places": (lambda part, h: part.mlp(h + part.places[: h.shape[1]]), f"{ON_ROWS}, or on the position of the row"),
    "room for some": (with_room_for_some, "gives different results for equal rows"),
    "dropout": (lambda part, h: functional.dropout(part.mlp(h), 0.1), "draws random numbers"),
    "a count of rows": (counted, "changes state"),
    "a kept input": (kept, "changes state"),
    "a changed input": (lambda part, h: part.mlp(h) + h.detach().mul_(0.5), "changes its inputs in place"),
    "sums of gradients": (
        lambda part, h: part.mlp(SumsGradientsOfRows.apply(h)),
        "gradients differ over tiles",
    ),
}


@pytest.mark.parametrize("part", OTHERS)
def test_a_module_that_is_no_function_of_rows_is_left_whole_and_named(part: str) -> None:
    run, why = OTHERS[part]
    with (
        Engine(stack(lambda: Odd(run), seed=3), sequence_tile=5) as engine,  # its first gate sends few rows too many
        pytest.raises(ConfigError, match=rf"sequence_tile is 5.*part \(.*{why}"),
    ):
        engine.step(words(rows=3, length=LENGTH), loss_fn=cross_entropy)


@pytest.mark.parametrize("block", [BlockOf, FlatBlockOf])
def test_a_function_of_rows_is_found(block: Callable[..., nn.Module]) -> None:
    with Engine(stack(block=block), sequence_tile=5) as engine:
        engine.step(words(rows=3, length=LENGTH), loss_fn=cross_entropy)
        assert modules(engine) == {"blocks.0": ["part"], "blocks.1": ["part"]}
        assert "over tiles of 5 tokens" in engine.told_tiles


SHORT: dict[str, Run] = {
    "reaches far": lambda part, h: part.mlp(h + later(h, 64)),
    "centres long rows": lambda part, h: part.mlp(h - h.mean(1, keepdim=True) if h.shape[1] > 64 else h),
}
"""Functions of rows only up to the length of a recorded sequence."""


@pytest.mark.parametrize("part", SHORT)
def test_a_module_that_is_a_function_of_rows_in_short_sequences_alone_runs_whole_in_long_ones(part: str) -> None:
    batches = [words(0, rows=2, length=72), words(1, rows=2, length=140)]
    losses = []
    for tile in ("none", 5):
        model, tiled = stack(lambda: Part(SHORT[part])), tile == 5
        with Engine(model, sequence_tile=tile, optimizer=PROPORTIONAL, max_grad_norm=None) as engine:
            engine.step(words(0, rows=2, length=40), loss_fn=cross_entropy)
            assert modules(engine) == ({"blocks.0": ["part"], "blocks.1": ["part"]} if tiled else {})
            message = "part of unit blocks.0 runs on the whole sequence.*over 72 rows"
            with pytest.warns(UserWarning, match=message) if tiled else nullcontext():
                engine.step(batches[0], loss_fn=cross_entropy)
            assert modules(engine) == {}
            losses.append(engine.step(batches[1], loss_fn=cross_entropy).loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


class Reaches(Part):
    """Adds the row `reach` rows before."""

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach = reach

    def forward(self, h: Tensor) -> Tensor:
        return self.mlp(h + later(h, self.reach) if self.reach else h)


def test_equal_blocks_share_a_trial_and_each_is_tried_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [Reaches(reach) for reach in (0, 0, 1, 0)]
    given, examined = iter(parts), []
    refusal = RowTrials._refusal

    def counted(self: RowTrials, module: nn.Module, call: Any) -> tuple[str, bool]:
        examined.extend(i for i, part in enumerate(parts) if part is module)
        return refusal(self, module, call)

    monkeypatch.setattr(RowTrials, "_refusal", counted)
    with Engine(Stack(lambda: BlockOf(next(given)), depth=4).train(), sequence_tile=5) as engine:
        engine.step(words(rows=3, length=LENGTH), loss_fn=cross_entropy)
        assert modules(engine) == {f"blocks.{i}": ["part"] for i in (0, 1, 3)}
        assert "part (a row of its result depends on other rows" in engine.told_tiles
    assert examined == [0, 2]


FAMILIES: dict[Callable[[], nn.Module], set[str]] = {
    llama: {"mlp", "input_layernorm", "post_attention_layernorm"},
    qwen3: {"mlp", "input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"},
    gemma2: {
        *("mlp", "input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    },
    mixtral: {"mlp", "input_layernorm", "post_attention_layernorm"},
    gpt2: {"mlp.act"},  # the MLP contains dropout
    gpt_neox: {"mlp"},
    mamba: {"norm"},
}
"""Models with the expected tiled modules."""


@pytest.mark.slow
@pytest.mark.parametrize("make", FAMILIES)
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
                assert set(next(iter(modules(engine).values()))) == FAMILIES[make]
    assert losses[0][0] == losses[1][0]
    assert losses[1][1:] == pytest.approx(losses[0][1:], rel=1e-6)


WAYS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"parameters": "cpu"}, {"recompute": "always", "micro_batch_size": 1}),
    ({"parameters": "nvme", "optimizer": "nvme", "activations": "cpu"}, {"recompute": "auto", "prefetch": 0}),
    ({"parameters": "cpu", "graphs": "cpu"}, {"recompute": "never"}),
    ({"parameters": "device", "optimizer": "cpu"}, {"recompute": "never", "micro_batch_size": 1}),
]


@pytest.mark.parametrize(("placement", "settings"), quick(WAYS, WAYS[:2]))
def test_steps_are_those_of_plain_torch(placement: dict[str, Any], settings: dict[str, Any], tmp_path: Path) -> None:
    where = Placement(**placement, nvme_dir=tmp_path)
    engine, _ = train_both(build(qwen3), long(3), within=2e-6, placement=where, sequence_tile=7, **settings)
    assert len(modules(engine)) == 2
    engine.close()


@pytest.mark.slow
def test_a_gradient_is_taken_once_whatever_the_number_of_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    take = GradientFlow.take

    def counted(self: GradientFlow, piece: Piece, parameter: nn.Parameter) -> None:
        if self._observer is None:
            taken.append(piece.parameter)
        take(self, piece, parameter)

    monkeypatch.setattr(GradientFlow, "take", counted)
    model = build(llama)
    with Engine(model, sequence_tile=5) as engine:
        engine.step(long(1)[0])
    assert sorted(taken) == list(range(len(list(model.parameters()))))


@pytest.mark.slow
def test_in_bf16_a_gradient_over_many_tiles_is_as_near_as_a_whole_one() -> None:
    """Tile gradients are summed in fp32. A bf16 sum over 1,024 tiles would lose most of the value."""
    part = Part().bfloat16()
    h = torch.randn(1, 1024, WIDTH).bfloat16()
    exact = copy.deepcopy(part).float()
    exact(h.float()).sum().backward()
    rows = RowModule("part", part, Arguments(((h,), {})).structure, (0,), 1)
    holder = nn.Sequential(part)
    TiledForward(holder.forward, [rows], 1, "cpu")(h).sum().backward()
    for mine, theirs in zip(part.parameters(), exact.parameters(), strict=True):
        assert mine.grad.dtype == torch.bfloat16
        assert (mine.grad.float() - theirs.grad).norm() <= 2**-7 * theirs.grad.norm()


class ScalesSome(nn.Module):
    """Scales the rows that begin with a positive value. As with experts, a call without such rows reads no scale."""

    def forward(self, h: Tensor, scale: Tensor) -> Tensor:
        is_scaled = h[..., :1] > 0
        return torch.where(is_scaled, h * scale, h) if is_scaled.any() else h.clone()


def test_the_gradient_of_an_input_is_zero_over_a_tile_that_does_not_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty_like", lambda t: torch.full_like(t, torch.nan))  # memory may hold zeros already
    part = ScalesSome()
    h = torch.ones(1, 6, WIDTH)
    h[:, 2:5] = -1  # a tile without scaled rows, and a tile with one
    rows = RowModule("part", part, Arguments(((h, h.clone()), {})).structure, (0, 1), 1)
    gradients = []
    for run in (part, TiledForward(part, [rows], 2, "cpu")):
        scale = torch.full_like(h, 3.0).requires_grad_()
        run(h, scale).sum().backward()
        gradients.append(scale.grad)
    assert torch.equal(*gradients)


@pytest.mark.slow
def test_an_own_loop_records_and_trains_over_tiles() -> None:
    losses = []
    for tile in ("none", 32):
        model = build(llama)
        with Engine(model, sequence_tile=tile, optimizer=PROPORTIONAL) as engine:
            for seed in range(2):
                for half in range(2):
                    engine.backward(model(**tokens(2 * seed + half, 2, 80)).loss)
                losses.append(float(engine.update().loss))
            assert bool(modules(engine)) == (tile != "none")
            assert bool(engine.told_tiles) == (tile != "none")
            if tile != "none":  # a few recorded tokens are enough
                found = parts_of(engine).units[1].traits.learned["tiles"]
                assert {rows.name: rows.is_idle for rows in found.modules}["mlp"]
    assert losses[2:] == pytest.approx(losses[:2], rel=1e-6)
    assert losses[2] == losses[0]


@pytest.mark.parametrize("tile", [0, -3, "all", True, 2.5])
def test_a_tile_that_is_no_number_of_tokens_is_refused(tile: Any) -> None:
    with pytest.raises(ConfigError, match=r"train\.sequence_tile"):
        Engine(build(llama), sequence_tile=tile)


@pytest.mark.slow
def test_auto_tiles_where_a_unit_would_not_fit_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.extras.large.tiles._FEWEST_ROWS", 32)
    batch, sizes = tokens(0, 1, 512), []
    for memory in (8 << 20, 1400 << 10):
        placement = Placement(parameters="cpu", device_memory=memory)
        with Engine(build(llama), sequence_tile="auto", placement=placement, prefetch=0) as engine:
            engine.step(batch)
            sizes.append("over tiles of 32 tokens" in engine.told_tiles)
    assert sizes == [False, True]


@pytest.mark.slow
def test_a_recompute_makes_no_results_that_no_backward_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """An MLP at the end of a block runs as often as without tiles: in the forward and in the backward."""
    rows = []
    model = build(llama)
    forward = type(model.model.layers[0].mlp).forward

    def counted(self: nn.Module, h: Tensor) -> Tensor:
        rows.append(h.shape[1])
        return forward(self, h)

    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", counted)
    with Engine(model, sequence_tile=8, recompute="always") as engine:
        engine.step(long(1)[0])
        rows.clear()
        engine.step(long(1)[0])
    assert sum(rows) == 2 * (2 * LENGTH + 8)  # two blocks; the first tile shows the result layout


@pytest.mark.slow
def test_compiled_blocks_and_tiles_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiled modules are not compiled. Sequences up to one tile are."""
    monkeypatch.setattr(forwards, "BACKEND", "eager")
    with Engine(build(llama), sequence_tile=LENGTH, compile="always") as engine:
        engine.step(long(1)[0])
        assert (engine.compiled_graphs > 0, engine.told_tiles) == (True, "")
        engine.step(tokens(0, 2, LENGTH + 8))
        assert f"over tiles of {LENGTH} tokens" in engine.told_tiles


def test_a_trial_restores_statistics_that_torch_writes_without_a_new_version() -> None:
    block: Any = _StandIn(nn.BatchNorm1d(WIDTH))
    before, rows = [buffer.clone() for buffer in block.module.buffers()], torch.randn(4, WIDTH)
    evidence = Trial(block, block, Arguments(((rows,), {}))).run(block.module.forward, [rows])
    assert evidence.changed == "its buffers"
    assert all(map(torch.equal, block.module.buffers(), before))
