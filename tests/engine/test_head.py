"""The head in token chunks: the same loss, norm and weights, without the whole logits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from offload import Engine, Placement
from offload.distributed.comm import Comm
from offload.engine.loss.batch import next_labels
from offload.engine.loss.chunked_head import HeadInputs, build_chunks, find_chunked_head
from offload.engine.prepare import prepare
from offload.extras.plan.measure import BatchSpec, measure
from offload.planning import settings as planning_settings
from offload.planning.machines import FreeMemory, ThisMachine
from offload.planning.settings import Settings
from tests.cases.models import (
    GROUPED,
    SPECIAL,
    VOCABULARY,
    batches,
    build,
    gemma2,
    gpt_neox,
    llama,
    mamba,
    mixtral,
    tokens,
)
from tests.engine.compare import PROPORTIONAL, assert_same, step_of, train_both, weights
from tests.engine.device import cpu_only
from tests.matrix import quick

Maker = Callable[[], nn.Module]
ROUNDING = 1e-6
ROWS, LENGTH = 4, 10
SIZE = 3 * ROWS
CHUNK = SIZE * VOCABULARY * 4
"""Logit bytes for `SIZE` tokens, a third of the tokens with a target."""


def granite() -> nn.Module:
    """Divide the logits."""
    return t.GraniteForCausalLM(t.GraniteConfig(**GROUPED | SPECIAL, logits_scaling=3.0, embedding_multiplier=2.0))


def cohere() -> nn.Module:
    """Multiply the logits; tied weights."""
    return t.CohereForCausalLM(t.CohereConfig(**GROUPED | SPECIAL, logit_scale=0.3))


DECODER = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}


def bart() -> nn.Module:
    return t.BartForCausalLM(t.BartConfig(**DECODER, vocab_size=VOCABULARY, max_position_embeddings=32, dropout=0.0))


def xlnet() -> nn.Module:
    sizes = {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "vocab_size": VOCABULARY, "dropout": 0.0}
    return t.XLNetLMHeadModel(t.XLNetConfig(**sizes))


class Deaf(t.LlamaForCausalLM):
    """Divide by `num_items_in_batch`, and ignore `shift_labels`."""

    def forward(self, *args: Any, shift_labels: Tensor | None = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def deaf() -> nn.Module:
    return Deaf(t.LlamaConfig(**GROUPED | SPECIAL))


class Smoothed(t.LlamaForCausalLM):
    """Another loss of the same logits: labels are smoothed."""

    def forward(self, *args: Any, labels: Tensor | None = None, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        if labels is not None:
            pairs = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            loss = nn.functional.cross_entropy(*pairs, reduction="sum", label_smoothing=0.1)
            outputs.loss = loss / ((labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch)
        return outputs


def smoothed() -> nn.Module:
    return Smoothed(t.LlamaConfig(**GROUPED | SPECIAL))


@contextmanager
def calls_of(module: nn.Module) -> Iterator[list[tuple[int, ...]]]:
    """Collect a streamed module's input shapes. A hook of the module alone would begin a new recording."""
    shapes: list[tuple[int, ...]] = []

    def note(called: nn.Module, args: Any) -> None:
        if called is module:
            shapes.append(tuple(args[0].shape))

    hook = register_module_forward_pre_hook(note)
    try:
        yield shapes
    finally:
        hook.remove()


def calm(make: Maker) -> nn.Module:
    """Return a model without dropout, since micro-batches draw separate masks."""
    model = build(make)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.parametrize(
    ("make", "micro"),
    quick(
        [(llama, None), (gemma2, 1), (mamba, 3), (granite, None), (cohere, 3), (mixtral, None), (deaf, 2)],
        [(llama, None)],
    ),
)
def test_chunks_equal_the_whole_and_plain_pytorch(make: Maker, micro: int | None) -> None:
    settings = {"micro_batch_size": micro, "within": 2 * ROUNDING}
    engine, _ = train_both(calm(make), batches(3), head_chunk_bytes=CHUNK, **settings)
    with calls_of(engine.model.get_output_embeddings()) as shapes:
        engine.step(tokens(3))
    assert [shape[:2] for shape in shapes] == [(1, SIZE)] * 3, "the last column has no target"
    whole = Engine(calm(make), PROPORTIONAL)
    for batch in (*batches(3), tokens(3)):
        whole.step(batch)
    assert_same(weights(engine), weights(whole), 2 * ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize("make", [bart, xlnet, smoothed])
def test_a_family_with_another_loss_is_not_chunked(make: Maker) -> None:
    """Only a comparison between chunks and the whole shows the other labels, or the other terms."""
    engine, whole = Engine(build(make), head_chunk_bytes=CHUNK), Engine(build(make))
    for seed in range(2):
        assert step_of(engine, tokens(seed)) == step_of(whole, tokens(seed))
    with calls_of(engine.model.get_output_embeddings()) as shapes:
        engine.step(tokens(2))
    assert [shape[0] * shape[1] for shape in shapes] == [ROWS * LENGTH]


@pytest.mark.slow
def test_the_head_is_fetched_once() -> None:
    moved = []
    for chunk, micro in ((None, None), (CHUNK, None), (1, None), (1, 1)):
        engine = Engine(build(llama), head_chunk_bytes=chunk, micro_batch_size=micro)
        for seed in range(2):
            engine.step(tokens(seed))
        moved.append((engine.counters.h2d_bytes, engine.counters.d2h_bytes))
    assert len(set(moved)) == 1, moved


GIB = 1 << 30


@pytest.mark.parametrize(
    ("given", "budget", "bytes_"),
    [
        ("auto", None, 256 << 20),
        ("auto", 4 * GIB, 256 << 20),
        ("Auto", 30 * GIB, GIB),
        ("32MiB", 30 * GIB, 32 << 20),
        (None, 30 * GIB, None),
        ("none", None, None),
    ],
)
def test_the_budget_says_how_large_a_chunk_is_unless_somebody_does(
    given: Any, budget: int | None, bytes_: int | None
) -> None:
    assert Settings(head_chunk_bytes=given).chunk_bytes(budget) == bytes_


def test_memory_that_others_use_changes_no_chunk() -> None:
    """The number of chunks changes the summation order: the same command has the same bits on a busy device."""
    memories = [FreeMemory(size, 8 * GIB, "", False, total_device_bytes=120 * GIB) for size in (60 * GIB, 119 * GIB)]
    twin = build(llama).to("meta")
    plans = [prepare(twin, Settings(), Comm(), ThisMachine(None, agreed_memory=each)) for each in memories]
    assert [plan.chunk_bytes for plan in plans] == [int(120 * GIB * 0.9) // 30] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "budget", ["300KiB", "600KiB", pytest.param(None, marks=cpu_only("an accelerator's free memory is a budget"))]
)
def test_an_engine_and_a_forecast_cut_the_head_by_the_budget(
    budget: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a budget, the smallest chunk size applies."""
    monkeypatch.setattr(planning_settings, "LEAST_CHUNK_BYTES", ROWS * VOCABULARY * 4)
    settings = Settings(placement=Placement("cpu", "cpu", device_memory=budget))
    length = 4 * LENGTH
    wanted = {"300KiB": 4, "600KiB": 2, None: length - 1}[budget]
    model = build(llama)
    twin = copy.deepcopy(model).to("meta")
    told = measure(twin, BatchSpec("causal", ROWS, length), prepare(twin, settings, Comm()))
    engine = Engine(model, settings=settings)
    engine.step(tokens(0, rows=ROWS, length=length))
    assert (engine.head_chunks, told.num_chunks) == (wanted, wanted)


@pytest.mark.slow
def test_a_run_goes_on_with_the_chunks_that_it_has_whatever_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of chunks changes the summation order. An explicit size is kept."""
    monkeypatch.setattr(planning_settings, "LEAST_CHUNK_BYTES", ROWS * VOCABULARY * 4)
    small, large = (Placement("cpu", "cpu", device_memory=size) for size in ("300KiB", "600KiB"))
    engine, resumed = Engine(build(llama), placement=small), Engine(build(llama), placement=large)
    told = Engine(build(llama), placement=large, head_chunk_bytes=None)
    assert engine.head_chunk_bytes == 300 * 1024 // 30 < resumed.head_chunk_bytes
    engine.step(tokens(0, rows=ROWS, length=4 * LENGTH))
    engine.save_checkpoint(tmp_path / "saved")
    for other in (resumed, told):
        other.load_checkpoint(tmp_path / "saved")
    assert (resumed.head_chunk_bytes, told.head_chunk_bytes) == (engine.head_chunk_bytes, None)
    batch = tokens(1, rows=ROWS, length=4 * LENGTH)
    assert engine.step(batch).loss == resumed.step(batch).loss
    assert resumed.head_chunks == engine.head_chunks > 1
    assert_same(weights(resumed), weights(engine))


@pytest.mark.slow
@pytest.mark.parametrize(("make", "share"), [(gemma2, 0.0), (mamba, 0.3), (gpt_neox, 0.9)])
def test_only_tokens_with_targets_go_through_the_head(make: Maker, share: float) -> None:
    """Tokens with targets are gathered from any position; a row or a column may have none."""
    found = batches(3)
    for seed, batch in enumerate(found):
        drawn = torch.rand(ROWS, LENGTH, generator=torch.Generator().manual_seed(seed))
        kept = (drawn < share).to(batch["labels"].device)
        kept[2], kept[:, 4], kept[0, 1] = False, False, True
        batch["labels"] = batch["labels"].masked_fill(~kept, -100)
    settings = {"head_chunk_bytes": CHUNK, "micro_batch_size": 2 if share == 0.3 else None}
    engine, _ = train_both(calm(make), found, within=2 * ROUNDING, **settings)
    count = int((found[0]["labels"][:, 1:] != -100).sum())
    with calls_of(engine.model.get_output_embeddings()) as shapes:
        engine.step(found[0])
    assert sum(shape[1] for shape in shapes) == -(-count // SIZE) * SIZE, "the last chunk is filled up"


@cpu_only("without an engine, the model stays where it was made")
@pytest.mark.parametrize("rows", [1, 3])
def test_chunks_that_count_for_nothing_take_none_away(rows: int) -> None:
    """All ranks run as many chunks as the rank with the most targets. The extra first chunks are empty."""
    model, batch = build(llama), {key: value[:rows] for key, value in tokens().items()}
    head = find_chunked_head(model, batch, lambda given: model(**given))
    assert head is not None
    output, count = head.base_output(lambda: model(**batch)), int((batch["labels"][:, 1:] != -100).sum())
    wanted = float(model(**batch).loss)
    for num_chunks in (3, LENGTH + 3):
        chunks = build_chunks(next_labels(batch), -(-count // 3), num_chunks, torch.clone)
        sums = [float(part.values.sum()) for part in head.parts(HeadInputs(output, batch, chunks))]
        assert len(sums) == num_chunks
        assert -sum(sums) / count == pytest.approx(wanted, rel=1e-5)


def test_other_inputs_go_to_the_base_model() -> None:
    """Only ids and labels are cut; a mask and positions cover the whole batch."""
    found = batches(2)
    for batch in found:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][:, -2:] = 0
        batch["labels"][:, -2:] = -100
        batch["position_ids"] = torch.arange(LENGTH).expand(ROWS, LENGTH) + 3
    train_both(build(llama), found, head_chunk_bytes=CHUNK, within=2 * ROUNDING)


@pytest.mark.slow
def test_own_loops_and_loss_functions_get_real_logits() -> None:
    engine = Engine(build(llama), head_chunk_bytes=CHUNK)
    engine.step(tokens())
    assert engine.model(**tokens()).logits.shape == (ROWS, LENGTH, VOCABULARY)
    seen = []

    def loss_fn(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        seen.append(outputs.logits.shape)
        return outputs.loss

    engine.step(tokens(), loss_fn=loss_fn)
    assert seen[-1] == (ROWS, LENGTH, VOCABULARY)
    assert {shape[1:] for shape in seen} == {(LENGTH, VOCABULARY)}, "whole rows, in the passes before the step as well"
