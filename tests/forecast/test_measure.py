"""Measurements from shapes alone match real engine steps: waiting inputs, graph sizes, FLOPs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as t
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from offload import Engine, Placement
from offload.app.config.presets import PRESETS
from offload.distributed.comm import Comm
from offload.engine.prepare import EnginePlan, prepare
from offload.extras.plan import op_counter
from offload.extras.plan.machine_files import read_machine
from offload.extras.plan.measure import BatchSpec, CannotMeasureError, measure
from offload.extras.plan.timing import kernel_seconds
from offload.extras.plan.unit_use import FoundUses
from offload.extras.plan.workload import REPEATED_SHARE, Cost, UnitWork, Workload
from offload.fused_attention import Capability
from offload.planning.machines import SpecifiedMachine
from offload.planning.settings import Settings
from offload.tiers.counters import Ledger
from tests.cases.models import VOCABULARY, bert, build, gemma2, gpt2, gpt_neox, llama, opt, t5
from tests.engine.documents import by_document
from tests.engine.inside import parts_of

ROWS, LENGTH = 4, 32


def told(
    model: nn.Module,
    settings: Settings,
    kind: str = "causal",
    capability: Capability | None = None,
    **batch: Any,
) -> tuple[EnginePlan, Workload]:
    twin = copy.deepcopy(model).to("meta")
    prepared = prepare(twin, settings, Comm())
    return prepared, measure(twin, BatchSpec(kind, ROWS, LENGTH, **batch), prepared, capability=capability)


def waiting_bytes(work: Workload) -> int:
    """Return the bytes of simultaneously waiting inputs. A chunked head counts one chunk."""
    most = len(work.calls) - sum(not call.is_cut and call.name is not None for call in work.calls) * 2 + 2
    calls = work.calls if work.num_chunks == 1 else work.calls[:most]
    once = sum(call.shared_bytes for call in calls)
    return sum(call.input_bytes for call in calls) * work.num_micro_batches - once * (work.num_micro_batches - 1)


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Collect the peak bytes per allocation name over all ledgers."""
    found: dict[str, int] = {}
    reserve = Ledger.reserve

    def noted(self: Ledger, name: str, num_bytes: int, fix: str = "") -> None:
        reserve(self, name, num_bytes, fix)
        for key, held in self.allocations.items():
            found[key] = max(found.get(key, 0), held)

    monkeypatch.setattr(Ledger, "reserve", noted)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "micro", "chunks", "precision"),
    [(llama, None, 4, "fp32"), (llama, 2, 1, "bf16"), (gpt2, None, 4, "bf16"), (gpt_neox, 2, 1, "fp32")],
)
def test_what_waits_and_what_graphs_hold_is_as_in_a_step(
    make: Callable[[], nn.Module], micro: int | None, chunks: int, precision: str, peaks: dict[str, int]
) -> None:
    model = build(make)
    settings = Settings(
        precision=precision,
        micro_batch_size=micro,
        placement=Placement("cpu", "cpu", device_memory="64MiB"),
        recompute="auto",
        head_chunk_bytes=ROWS * LENGTH * VOCABULARY * 4 // chunks,
    )
    _, work = told(model, settings)
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    peaks.clear()
    with Engine(model, settings=settings) as engine:
        engine.step({"input_ids": tokens, "labels": tokens})
        saved = {key[0]: size for key, size in parts_of(engine).runner.saved.policy._sizes.items()}
    assert work.num_chunks == chunks
    assert waiting_bytes(work) == pytest.approx(peaks["unit inputs"] + peaks.get("kept tensors", 0), rel=0.01)
    graphs = {call.name: call.saved_bytes * work.num_micro_batches for call in work.calls if call.name in saved}
    assert graphs == pytest.approx(saved, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "kind"), [(bert, "masked"), (t5, "seq2seq")])
def test_other_kinds_of_models_wait_as_in_a_step(
    make: Callable[[], nn.Module], kind: str, peaks: dict[str, int]
) -> None:
    model = build(make)
    settings = Settings(placement=Placement("cpu", "cpu", device_memory="64MiB"))
    _, work = told(model, settings, kind)
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    half = LENGTH // 2 if kind == "seq2seq" else 0
    batch = {"input_ids": tokens[:, : half or LENGTH].contiguous(), "labels": tokens[:, half:].contiguous()}
    peaks.clear()
    with Engine(model, settings=settings) as engine:
        engine.step(batch)
    assert waiting_bytes(work) == pytest.approx(peaks["unit inputs"] + peaks.get("kept tensors", 0), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("make", [llama, gpt2, opt])
def test_flops_are_those_that_torch_counts(make: Callable[[], nn.Module]) -> None:
    model = build(make)
    model.config._attn_implementation = "eager"
    _, work = told(model, Settings(micro_batch_size=1, head_chunk_bytes=None))
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    with FlopCounterMode(display=False) as forward:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert sum(c.forward.flops * c.num_runs(ROWS) for c in work.calls) == forward.get_total_flops()
    assert sum(c.backward.flops * c.num_runs(ROWS) for c in work.calls) == backward.get_total_flops()


@pytest.mark.slow
@pytest.mark.parametrize("make", [llama, gemma2, gpt2, t5])
def test_whose_backward_reads_no_weights_is_as_an_engine_finds_it(make: Callable[[], nn.Module]) -> None:
    """Gemma scales the embedding table, and T5 uses the table twice."""
    model, kind = build(make), "seq2seq" if make is t5 else "causal"
    _, work = told(model, Settings(), kind)
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    with Engine(model) as engine:
        engine.step({"input_ids": tokens, "labels": tokens})
        found = {
            unit.name: graph.reads_weights
            for unit in parts_of(engine).units
            for variant in unit.variants.values()
            for graph in variant.graphs.values()
            if not unit.resident
        }
    assert {call.name: call.reads_weights for call in work.calls if call.name is not None} == found
    assert sorted(set(found.values())) == [False, True]


@pytest.mark.slow
def test_a_head_in_chunks_costs_the_same_whatever_the_micro_batches() -> None:
    """The head runs once over all rows and reads the weights once per chunk."""

    def head(rows: int) -> list[Cost]:
        _, work = told(build(llama), Settings(micro_batch_size=rows, head_chunk_bytes=4 * ROWS * VOCABULARY * 4))
        assert work.num_chunks > 1
        return [cost for call in work.calls if not call.is_cut for cost in (call.forward, call.backward)]

    assert head(2) == head(3) == head(ROWS)
    for one, all_rows in zip(head(1), head(ROWS), strict=True):  # a single row is contiguous, several rows may not be
        assert one.flops == all_rows.flops
        assert one.num_bytes == pytest.approx(all_rows.num_bytes, rel=0.15)


def test_chunks_of_a_head_are_one_object() -> None:
    """A 14B plans 65,000 chunks. Break: scale each anew: twice the CPU time and memory."""
    chunk_bytes = 4 * ROWS * VOCABULARY * 4
    _, work = told(build(llama), Settings(micro_batch_size=2, head_chunk_bytes=chunk_bytes))
    assert work.num_chunks > 2
    assert len({id(call) for call in work.calls}) == len(work.calls) - (work.num_chunks - 1) * work.chunk_uses


@pytest.mark.parametrize("device_memory", ["64MiB", 4 * 4096 * 32 // 4], ids=["whole", "row blocks"])
def test_products_and_bytes_of_a_head_in_chunks(device_memory: int | str) -> None:
    """A head in chunks costs three products, and the plan adds a recomputation to a head in row blocks: four."""
    model = build(lambda: llama(vocab_size=4096))
    place = Placement("cpu", "cpu", device_memory=device_memory)
    logits = 64 * 4096
    _, work = told(model, Settings(precision="bf16", placement=place, head_chunk_bytes=4 * logits))
    heads = [call for call in work.calls if call.name is not None and not call.is_cut]
    has_recomputation = not any(call.keeps_graph for call in heads)
    products = sum((1 + has_recomputation) * call.forward.flops + call.backward.flops for call in heads)
    assert products == (4 if has_recomputation else 3) * 2 * ROWS * LENGTH * 4096 * 32
    assert has_recomputation == (device_memory != "64MiB")
    if not has_recomputation:
        loss = work.calls[-1]
        assert loss.forward.moved_bytes <= 36 * logits
        assert loss.forward_temporary_bytes <= 9 * logits, "logits, gradient, and in so small a chunk all rows in fp32"


def test_a_fused_attention_holds_no_scores_and_skips_half() -> None:
    model = build(llama)
    _, fused = told(model, Settings())
    model.config._attn_implementation = "eager"
    _, eager = told(model, Settings())
    scores = ROWS * 4 * LENGTH * LENGTH
    block = [[c for c in work.calls if c.name and "layers.0" in c.name][0] for work in (fused, eager)]  # noqa: RUF015
    assert block[1].saved_bytes - block[0].saved_bytes > 4 * scores
    products = 2 * 2 * scores * 8
    assert block[1].forward.flops - block[0].forward.flops == products / 2


def test_a_compiled_block_holds_outputs_of_products_and_repeats_the_rest() -> None:
    works = (told(build(llama), Settings(**how))[1] for how in ({}, {"recompute": "products"}, {"compile": "always"}))
    eager, kept, compiled = ([call for call in work.calls if call.is_block][0] for work in works)  # noqa: RUF015
    products = kept.products
    assert products is not None
    assert compiled.saved_bytes == compiled.leaving_bytes == products.kept_bytes < eager.saved_bytes
    assert compiled.backward_temporary_bytes == products.kept_bytes + products.backward_temporary_bytes
    assert compiled.unsaved_bytes == 0, "the first norm is computed again from the input"
    assert compiled.forward == eager.forward
    assert compiled.backward.flops == eager.backward.flops
    moved = compiled.backward.moved_bytes - eager.backward.moved_bytes
    assert moved == pytest.approx(REPEATED_SHARE * products.recomputation.moved_bytes)
    assert compiled.products is None


class Forgets(nn.Module):
    """A module that drops a part of the graph, as DoRA drops the gradient of norms."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            (x.exp() * 2).sin()
        return self.inner(x)


def test_dropped_parts_of_a_graph_are_not_kept() -> None:
    """Break: keep the sizes of freed tensors, whose places other tensors take: each forecast had other bytes."""
    settings, model = Settings(placement=Placement("cpu", "cpu")), build(llama)
    _, wanted = told(model, settings)
    for layer in model.model.layers:
        layer.mlp = Forgets(layer.mlp)
    _, found = told(model, settings)
    assert [call.saved_bytes for call in found.calls] == [call.saved_bytes for call in wanted.calls]


def test_padding_takes_a_mask() -> None:
    (_, plain), (_, padded) = told(build(llama), Settings()), told(build(llama), Settings(), is_padded=True)
    assert waiting_bytes(padded) - waiting_bytes(plain) == pytest.approx(ROWS * LENGTH * LENGTH, rel=0.1)


def test_attention_is_that_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused kernel keeps no scores. Break: count FlashAttention on every card."""
    model, scores = build(llama), 4 * ROWS * 4 * LENGTH * LENGTH

    def block(capability: Capability | None, **batch: Any) -> UnitWork:
        calls = told(model, Settings(), capability=capability, **batch)[1].calls
        return next(call for call in calls if call.is_block)

    known = block(None)
    expanded = block((7, 5))  # fp32: keys and values of two heads are repeated for four
    assert 0 < expanded.saved_bytes - known.saved_bytes <= 2 * 4 * ROWS * LENGTH * 32
    assert expanded.forward.attention_flops == known.forward.attention_flops
    masked = [block(capability, is_padded=True) for capability in (None, (9, 0), (8, 9))]
    flops = masked[0].forward.attention_flops
    assert [work.forward.efficient_flops for work in masked] == [0, flops, 0]
    monkeypatch.setattr(op_counter, "kernel_of", lambda *_: "")
    none = block((3, 5))
    assert none.saved_bytes - known.saved_bytes > scores
    assert none.forward.attention_flops == 0


def test_masked_attention_is_slower_where_it_has_an_older_kernel() -> None:
    rates = read_machine("h200").rates
    fast, slow = (Cost(1e15, 0.0, 1, attention_flops=1e15, efficient_flops=share * 1e15) for share in (0, 1))
    seconds = [kernel_seconds(cost, Settings(precision="bf16"), rates)[1] for cost in (fast, slow)]
    assert seconds[1] / seconds[0] == pytest.approx(473 / (2 * 63), rel=0.05)


def test_isolated_documents_take_positions_and_a_mask(peaks: dict[str, int]) -> None:
    """Break: leave the positions out of the forecast's batch; rotary tables then have one row for the whole batch."""
    model = build(llama)
    settings = Settings(placement=Placement("cpu", "cpu", device_memory="64MiB"))
    _, work = told(model, settings, is_isolated=True)
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    positions = torch.arange(LENGTH // 2).repeat(2).expand(ROWS, -1).contiguous()
    peaks.clear()
    with Engine(model, settings=settings) as engine:
        engine.step({"input_ids": tokens, "labels": tokens, "position_ids": positions})
    assert waiting_bytes(work) == peaks["unit inputs"] + peaks.get("kept tensors", 0)


@pytest.mark.slow
def test_documents_one_by_one_take_no_mask_and_the_squares_of_their_lengths(peaks: dict[str, int]) -> None:
    """Break: open the attention of whole rows in `measure`; the forecast then has a mask."""
    model = build(llama)
    settings = Settings(placement=Placement("cpu", "cpu", device_memory="64MiB"))
    _, masked = told(model, settings, is_isolated=True)
    works = {length: told(model, settings, document_length=length)[1] for length in (LENGTH // 4, LENGTH - 1)}
    short, long = works.values()
    assert waiting_bytes(masked) - waiting_bytes(short) == ROWS * LENGTH * LENGTH
    block = {length: next(c for c in work.calls if c.name and "layers.0" in c.name) for length, work in works.items()}
    for cost in ("forward", "backward"):
        ratio = getattr(block[LENGTH // 4], cost).attention_flops / getattr(block[LENGTH - 1], cost).attention_flops
        assert ratio == pytest.approx(4 * (LENGTH // 4) ** 2 / LENGTH**2, rel=0.1)
    _, known = told(model, settings, document_length=LENGTH - 1, document_share=0.25)
    for one, other in zip(known.calls, long.calls, strict=True):
        for cost, whole in ((one.forward, other.forward), (one.backward, other.backward)):
            assert cost.attention_flops == pytest.approx(whole.attention_flops / 4, rel=0.01)
            assert cost.flops - cost.attention_flops == whole.flops - whole.attention_flops
            assert (cost.num_operations, cost.num_bytes) == (whole.num_operations, whole.num_bytes)
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    positions = torch.arange(LENGTH // 4).repeat(4).expand(ROWS, -1).contiguous()
    peaks.clear()
    with Engine(by_document(model), settings=settings) as engine:
        engine.step({"input_ids": tokens, "labels": tokens, "position_ids": positions})
    starts = 4 * ROWS * LENGTH  # int32, on the host: on a CPU the ledger counts it too
    assert waiting_bytes(long) == waiting_bytes(short)
    assert waiting_bytes(short) + starts == peaks["unit inputs"] + peaks.get("kept tensors", 0)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_size", [None, 1])
def test_uses_measured_before_are_those_measured_now(micro_batch_size: int | None) -> None:
    model = build(llama).to("meta")
    prepared = prepare(model, Settings(precision="bf16", micro_batch_size=micro_batch_size), Comm())
    found: FoundUses = {}
    for rows in (1, 2, 3, 2):
        batch = BatchSpec("causal", rows, LENGTH)
        assert measure(model, batch, prepared, {}, found) == measure(model, batch, prepared)
    num_found = len(found)
    measure(model, BatchSpec("causal", 3, LENGTH), prepared, {}, found)
    assert len(found) == num_found


def test_a_model_stays_as_it_was() -> None:
    model = build(llama).eval().to("meta")
    before = {name: (id(parameter), parameter.dtype) for name, parameter in model.named_parameters()}
    prepared = prepare(model, Settings(precision="bf16"), Comm())
    first = measure(model, BatchSpec("causal", ROWS, LENGTH), prepared)
    assert measure(model, BatchSpec("causal", ROWS, LENGTH), prepared) == first
    assert {name: (id(parameter), parameter.dtype) for name, parameter in model.named_parameters()} == before
    assert not model.training
    assert model.config.use_cache
    assert not any("forward" in vars(module) for module in model.modules())


class Asks(nn.Module):
    """Branch on values computed from the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = input_ids[:, :8].float()
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.sum() * (labels.sum() + int(hidden.sum()))


def test_a_model_that_asks_for_values_is_named() -> None:
    with pytest.raises(CannotMeasureError, match="Asks reads a value"):
        told(Asks(), Settings())


@pytest.mark.slow
def test_flops_of_a_model_of_70_g_parameters_are_those_of_the_formula() -> None:
    shape = dict(PRESETS["70b"])
    with torch.device("meta"):
        model = t.AutoModelForCausalLM.from_config(t.AutoConfig.for_model(shape.pop("model_type"), **shape))
    machine = SpecifiedMachine(read_machine("h100").with_(host_bytes=1 << 41))
    prepared = prepare(model, Settings(precision="bf16", micro_batch_size=1), Comm(), machine)
    work = measure(model, BatchSpec("causal", 8, 4096), prepared)
    flops = sum(call.forward.flops * call.num_runs(work.num_micro_batches) for call in work.calls)
    num_parameters = sum(p.numel() for p in model.parameters()) - model.config.vocab_size * model.config.hidden_size
    attention = 80 * 2 * 2 * 4096 / 2 * 8192
    assert flops == pytest.approx((2 * num_parameters + attention) * work.num_tokens, rel=0.01)
