"""Layers larger than the device budget train in row blocks, with the results of whole layers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from offload import Adafactor, AdamW, Engine, MeZO, Placement
from offload.errors import ConfigError, DoesNotFitError
from offload.extras.large.row_block_head import RowBlockHead
from offload.extras.large.row_blocks import RowBlock, RowBlocks
from offload.planning import memory
from tests.cases.models import LARGE, TABLE_BYTES, build, gpt2, llama, table, table_tokens, tied_table
from tests.engine.compare import PROPORTIONAL, assert_same, same_bits, train_both, weights
from tests.engine.device import own_device
from tests.engine.inside import head_of, memory_of, planned_bytes, unit_names
from tests.engine.test_group_loss import Pairs

HIDDEN = 32
CHUNK_BYTES = TABLE_BYTES // 16
ROUNDING = 2e-6


def untrained() -> nn.Module:
    """Return a model with frozen vocabulary weights."""
    model = tied_table()
    model.lm_head.weight.requires_grad_(False)
    return model


def batches(number: int, rows: int = 2, length: int = 8) -> list[dict[str, torch.Tensor]]:
    """Return tokens from the whole vocabulary, with repeated tokens and ignored labels."""
    made = [table_tokens(seed, rows, length, device="cpu") for seed in range(number)]
    for batch in made:
        for values in batch.values():
            values[:, 1] = batch["input_ids"][:, 0]
        batch["labels"][0, 3:5] = -100
    return made


def small(**places: Any) -> Placement:
    """Return a placement with device memory for a quarter of the largest layer."""
    return Placement(**{"parameters": "cpu", "optimizer": "cpu", "device_memory": TABLE_BYTES // 4} | places)


def rows_of(*sizes: int) -> list[int]:
    return [sum(sizes[:number]) for number in range(len(sizes) + 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_compute_what_the_whole_weight_does(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    borders = rows_of(128, 256, 100)
    weight, bias = (nn.Parameter(torch.randn(borders[-1], *rest, dtype=dtype)) for rest in ((24,), ()))
    parts = [
        RowBlock(nn.Parameter(weight[begin:end].detach().clone()), nn.Parameter(bias[begin:end].detach().clone()))
        for begin, end in pairwise(borders)
    ]
    cut = RowBlocks("weight", {"weight": 0, "bias": 1}, parts, borders)
    given = torch.randn(3, 5, 24, dtype=dtype)
    ids = torch.randint(0, borders[-1], (3, 50))
    ids[:, ::3] = borders[1]

    def compare(whole: torch.Tensor, blocks: torch.Tensor, exact: bool = True) -> None:
        gradient = torch.randn_like(whole)
        whole.backward(gradient)
        blocks.backward(gradient)
        assert same_bits(whole, blocks)
        assert same_bits(weight.grad, torch.cat([part.weight.grad for part in parts]))
        weight.grad = None
        for part in parts:
            part.weight.grad = None

    one, other = (given.clone().requires_grad_() for _ in range(2))
    compare(functional.linear(one, weight), cut.linear(other))
    apart = (one.grad.double() - other.grad.double()).abs().max() / one.grad.abs().max()
    assert apart < (1e-6 if dtype == torch.float32 else 1e-2)
    for padding in (None, -1, 130):
        compare(functional.embedding(ids, weight, padding), cut.embedding(ids, padding))
    for wrong in (-1, borders[-1]):
        with pytest.raises(IndexError):
            cut.embedding(torch.tensor([wrong]))
    foreign = torch.randn(borders[-1], dtype=dtype)  # of a layer that shares the weight alone
    one_block = functional.linear(given, weight[128:384])
    with cut.only(1):
        assert same_bits(cut.linear(given), one_block)
        assert same_bits(cut.linear(given, foreign), one_block + foreign[128:384])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "parameters", "activations", "settings"),
    [
        (table, "cpu", "device", {"clip": "speculative", "max_grad_norm": 1e6, "micro_batch_size": 1}),
        (table, "nvme", "device", {"max_grad_norm": None, "precision": "bf16", "recompute": "always"}),
        (untrained, "nvme", "cpu", {"clip": "deferred", "max_grad_norm": 0.1, "micro_batch_size": 1}),
        (untrained, "cpu", "device", {"max_grad_norm": None, "precision": "bf16", "recompute": "always"}),
    ],
)
def test_a_vocabulary_larger_than_the_device(
    make: Callable[[], nn.Module], parameters: str, activations: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = {"nvme_dir": tmp_path} if parameters == "nvme" else {}
    place = small(parameters=parameters, optimizer=parameters, activations=activations, **folder)
    within = 2e-2 if "precision" in settings else ROUNDING
    engine, _ = train_both(
        build(make), batches(2), placement=place, within=within, head_chunk_bytes=CHUNK_BYTES, **settings
    )
    assert isinstance(head_of(engine), RowBlockHead)
    assert sum("embed_tokens[" in name for name in unit_names(engine)) in (8, 16)
    assert "model.embed_tokens.weight in " in engine.told_tiles
    if own_device().type == "cpu":
        assert engine.counters.peak_device_bytes <= TABLE_BYTES // 4
    planned = planned_bytes(engine)
    for tier, name, num_bytes in engine.allocations:
        assert tier == "device" or num_bytes == planned.get((tier, name), num_bytes), name
    engine.close()


@pytest.mark.slow
def test_a_loss_of_log_probabilities_over_blocks() -> None:
    found, losses = [], []
    (batch,) = batches(1, rows=4)
    batch["labels"][:, :2] = -100
    for place in (Placement(), small()):
        with Engine(build(tied_table), PROPORTIONAL, place, head_chunk_bytes=CHUNK_BYTES) as engine:
            losses.append([engine.step(batch, loss_fn=Pairs()).loss.item() for _ in range(2)])
            found.append(weights(engine))
            assert isinstance(head_of(engine), RowBlockHead) == bool(engine.told_tiles)
    assert_same(*found, within=ROUNDING)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5), "the small difference of two sums of log-probabilities"


def wide() -> nn.Module:
    """Return a model with an MLP larger than the device, few rows in the last layer, and small attention."""
    return llama(intermediate_size=LARGE, num_hidden_layers=1)


class Biased(nn.Module):
    """Computes the scores by a linear layer with bias, in a block with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, HIDDEN)
        self.layers = nn.ModuleList([nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, LARGE))])

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        scores = self.layers[0](self.table(input_ids))
        return SimpleNamespace(loss=functional.cross_entropy(scores.flatten(0, 1), labels.flatten()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "settings", "places", "names"),
    [
        (wide, {}, {"device_memory": TABLE_BYTES}, ["up_proj[", "down_proj[", "q_proj"]),
        (Biased, {"clip": "speculative"}, {"parameters": "nvme", "optimizer": "nvme"}, ["0.1[128:256]", "0.0"]),
    ],
    ids=["on a device of one of its layers", "states on disk, speculative clipping"],
)
def test_a_linear_layer_in_a_block_that_is_larger_than_the_device(
    make: Callable[[], nn.Module], settings: dict[str, Any], places: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    """The engine splits the block into modules."""
    folder = tmp_path if "parameters" in places else None
    placement = small(nvme_dir=folder, **places)
    texts = [{key: value % 64 for key, value in batch.items()} for batch in batches(2, 1, 3)]
    engine, _ = train_both(
        build(make),
        texts,
        placement=placement,
        within=ROUNDING,
        count=lambda batch: batch["labels"].numel(),
        **settings,
    )
    found = unit_names(engine)
    assert all(any(wanted in name for name in found) for wanted in names), found
    engine.close()


@pytest.mark.slow
def test_a_checkpoint_an_export_and_a_loop_know_of_no_cut(tmp_path: Path) -> None:
    one, *rest = batches(3)
    whole = Engine(build(tied_table), PROPORTIONAL)
    model = build(tied_table)
    cut = Engine(model, PROPORTIONAL, small())
    for engine in (cut, whole):
        engine.step(one)
    cut.save_checkpoint(tmp_path / "checkpoint")
    whole.load_checkpoint(tmp_path / "checkpoint")
    assert all(map(same_bits, weights(cut).values(), weights(whole).values()))
    assert cut.evaluate(one).item() == pytest.approx(whole.evaluate(one).item(), rel=1e-6)
    cut.export(tmp_path / "model")
    with torch.no_grad():
        given = {"input_ids": one["input_ids"].to(own_device())}
        assert same_bits(model(**given).logits, whole.model(**given).logits)
        made = model.generate(**given, max_new_tokens=3, do_sample=False)
        assert torch.equal(made[:, :8], given["input_ids"])
    for engine in (cut, whole):
        for batch in rest:
            engine.backward(engine.model(**{key: value.to(own_device()) for key, value in batch.items()}).loss)
        engine.update()
    scale = max(value.abs().max() for value in weights(whole).values())
    assert all(
        (a - b).abs().max() <= ROUNDING * scale
        for a, b in zip(weights(cut).values(), weights(whole).values(), strict=True)
    )
    back = type(model).from_pretrained(tmp_path / "model")
    for engine in (cut, whole):
        engine.close(restore=True)
    assert back.lm_head.weight is back.model.embed_tokens.weight
    assert same_bits(model.lm_head.weight, model.model.embed_tokens.weight)


class ByProduct(nn.Module):
    """Computes the scores by a matrix product with the embedding table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(LARGE, HIDDEN)
        self.layers = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)])

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = self.table(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        scores = hidden @ self.table.weight.T
        return {"loss": functional.cross_entropy(scores.flatten(0, 1), labels.flatten())}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:gradients with several contributions")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_only_gradients_of_shared_blocks_are_summed_on_the_host(
    precision: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The others wait on disk, in the weight dtype. A sum made in parts has the bits of one made at once."""
    weights_of = []
    for part in (1 << 23, 1000):
        monkeypatch.setattr(memory, "_SUMMED_PART", part)
        places: dict[str, Any] = dict.fromkeys(("parameters", "optimizer", "gradients"), "nvme")
        placement = Placement(device_memory=TABLE_BYTES // 4, nvme_dir=tmp_path, **places)
        torch.manual_seed(0)
        with Engine(tied_table(), AdamW(lr=1e-2), placement, precision=precision) as engine:
            for batch in batches(2):
                engine.step(batch)
            host = memory_of(engine).host.allocations
            assert host["gradients"] == TABLE_BYTES
            assert host["gradient staging"] <= 2 * min(4 * part, TABLE_BYTES // 2)
            weights_of.append(weights(engine))
    assert_same(*weights_of)


def test_a_weight_that_is_read_otherwise_is_refused() -> None:
    with Engine(ByProduct(), placement=small()) as engine, pytest.raises(ConfigError, match=r"unit table|of table is"):
        engine.step(batches(1)[0])


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"max_norm": 1.0}, r"max_norm \(its forward writes to the weight\)"),
        ({"scale_grad_by_freq": True}, r"scale_grad_by_freq \(it would count the rows of other blocks too\)"),
        ({"sparse": True}, r"sparse \(its gradients are not dense\)"),
    ],
    ids=["max_norm", "scale_grad_by_freq", "sparse"],
)
def test_options_that_row_blocks_do_not_support_are_refused_with_a_reason(option: dict[str, Any], reason: str) -> None:
    weight = nn.Parameter(torch.zeros(4, 2))
    blocks = RowBlocks("table.weight", {"weight": 0}, [RowBlock(weight, None)], [0, 4])
    with pytest.raises(ConfigError, match=reason):
        blocks.embedding(torch.tensor([1]), **option)


class Recurrent(nn.Module):
    """A module whose `bias` is a bool."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.LSTM(4 * HIDDEN, 4 * HIDDEN)])


@pytest.mark.parametrize(
    ("rule", "model", "share", "why"),
    [
        (Adafactor(), table, 4, "Adafactor updates it as a whole"),
        (MeZO(), table, 4, "MeZO samples its random direction as a whole"),
        (AdamW(), lambda: gpt2(n_inner=8192), 4, "Conv1D is neither a linear layer nor an embedding"),
        (AdamW(), Recurrent, 8, "LSTM is neither a linear layer nor an embedding"),
        (AdamW(), table, 256, "it would need more than 256 blocks"),
    ],
    ids=["Adafactor", "MeZO", "Conv1D", "LSTM", "many"],
)
def test_what_cannot_be_cut_is_told(rule: Any, model: Callable[[], nn.Module], share: int, why: str) -> None:
    with pytest.raises(DoesNotFitError, match=why):
        Engine(build(model), rule, small(device_memory=TABLE_BYTES // share))
