"""Forecasts for streamed experts, compared with random router draws and with an engine's allocations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig

from offload import AdamW, Engine, Placement
from offload.app.config.config import Config
from offload.distributed.comm import Comm
from offload.engine.prepare import Structure
from offload.extras.large import cut_experts
from offload.extras.plan.forecast import Forecast, Forecaster
from offload.extras.plan.machine_files import read_machine
from offload.extras.plan.memory import OPERATIONS
from offload.extras.plan.routed import routed_experts
from offload.extras.plan.workload import Workload
from offload.layout.regions import align
from offload.layout.sharding import Sharding
from offload.planning.plan import describe_links
from offload.planning.settings import Settings

NUM_EXPERTS, CHOICES = 8, 2
MIXTURE = MixtralConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=NUM_EXPERTS,
    num_experts_per_tok=CHOICES,
    pad_token_id=0,
)
EXPERT_BYTES = 3 * 64 * 256 * 4


@pytest.fixture(autouse=True)
def one_expert_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_experts, "RECORD_BYTES", 1)


def plan(folder: Path, experts: str, device_memory: int | None = None, **more: Any) -> Forecast:
    MIXTURE.save_pretrained(folder)
    values = {"model__path": str(folder), "model__init": "random", "train__precision": "fp32", "train__batch_size": 1}
    config = Config().with_resolved(**values, train__head_chunk_bytes=1 << 16, data__sequence_length=16)
    places = {f"offload__{kind}": "cpu" for kind in ("parameters", "optimizer", "gradients")}
    config = config.with_resolved(offload__experts=experts, offload__device_memory=device_memory, **places, **more)
    return Forecaster(config, 1).predict(config, read_machine("rtx-4090"))


def held(found: Forecast) -> dict[str, int]:
    return {each.name: each.num_bytes for each in found.prepared.plan.allocations if each.tier == "device"}


@pytest.mark.parametrize(
    ("codec", "block", "record", "blocks"),
    [("int8", 128, 132, 2880 * 2880 * 3 // 128), ("nf4", 16384, 8456, 1013 + 507)],  # nf4: half a block for each matrix
)
def test_experts_of_gpt_oss_are_planned_in_codes_and_their_biases_exact(
    codec: str, block: int, record: int, blocks: int
) -> None:
    """Break: quantize the biases; leave the matrices exact."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(GptOssConfig(num_hidden_layers=1, num_local_experts=NUM_EXPERTS))
    model.requires_grad_(False).lm_head.requires_grad_(True)
    settings = Settings(placement=Placement(experts="streamed"), frozen_weights=codec, precision="bf16")
    structure = Structure.of(model.bfloat16(), settings, Comm(), {})
    (experts,) = (unit for unit in structure.units if unit.in_records)
    for coded, exact in experts.records:
        assert (coded.codec.name, coded.travelling_bytes) == (codec, blocks * record)
        assert exact.travelling_bytes == 2 * align(3 * 2880 + 64 + 64, 2048)
        assert coded.weight_bytes == 2 * blocks * block


@pytest.mark.parametrize(("tokens", "link", "width"), [(1, "exact", 4), (4, "int8", 132 / 128), (40, "exact", 4)])
def test_as_many_experts_come_up_as_a_router_that_draws_evenly_hits(tokens: int, link: str, width: float) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(MIXTURE)
    settings = Settings(placement=Placement(experts="streamed"), link_weights=link)
    structure = Structure.of(model, settings, Comm(), {})
    said = f"approximate: 10 of {len(structure.infos)} trainable parameters are copied in int8"
    assert describe_links(structure.regions, Sharding()).startswith(said if link == "int8" else "")
    found = routed_experts(structure, Workload((), 1, tokens))
    torch.manual_seed(0)
    draws = [torch.rand(tokens, NUM_EXPERTS).topk(CHOICES).indices.unique().numel() for _ in range(300)]
    assert found.keys() == {"model.layers.0", "model.layers.1"}
    for each in found.values():
        assert each.record_bytes == EXPERT_BYTES * width / 4
        assert each.travelling_bytes == each.weight_bytes * width / 4
        assert each.weight_bytes / EXPERT_BYTES == pytest.approx(sum(draws) / len(draws), abs=1)  # rounded up
        assert sum(region.weight_bytes for region in (*each.hit, *each.missed)) == NUM_EXPERTS * EXPERT_BYTES


@pytest.mark.slow
def test_a_plan_lists_what_an_engine_holds_and_says_what_streaming_buys(tmp_path: Path) -> None:
    whole, streamed = (plan(tmp_path, experts) for experts in ("whole", "streamed"))
    names = ("expert slot", "expert gradient buffer", "unit slot")
    assert [held(streamed).get(name) for name in names[:2]] == [2 * EXPERT_BYTES] * 2
    assert held(whole).keys().isdisjoint(names[:2])
    assert whole.timing is not None
    assert streamed.timing is not None
    assert streamed.timing.step_seconds > 0
    assert not [note for note in whole.notes if "experts" in note]
    (note,) = (note for note in streamed.notes if "experts" in note)
    assert (
        "For 16 tokens in a micro-batch about 8 of 8 are copied to the device, so 1% of their bytes are saved" in note
    )
    model = AutoModelForCausalLM.from_config(MIXTURE)
    with Engine(model, AdamW(), Placement("cpu", "cpu", "cpu", experts="streamed")) as engine:
        mine = {name: size for tier, name, size in engine.allocations if tier == "device"}
        places = 2 if engine.overlaps else 1
        assert [mine[name] // places for name in names[:2]] == [EXPERT_BYTES] * 2


@pytest.mark.slow
def test_auto_streams_where_the_device_does_not_hold_a_layer(tmp_path: Path) -> None:
    layer = NUM_EXPERTS * EXPERT_BYTES
    whole, auto = (plan(tmp_path, experts, device_memory=layer) for experts in ("whole", "auto"))
    assert "unit slot" in whole.refusal
    assert (auto.refusal, "expert slot" in held(auto)) == ("", True)
    assert "expert slot" not in held(plan(tmp_path, "auto"))


@pytest.mark.slow
def test_whole_experts_under_an_adapter_are_changed_at_once_and_streamed_ones_one_by_one(tmp_path: Path) -> None:
    """Break: leave out the copy of the changed stack; leave out the work of its gradient."""
    pytest.importorskip("peft", reason="peft is not installed: pip install '.[peft]'")
    stacks = ("experts.gate_up_proj", "experts.down_proj")
    lora = {"lora__rank": 2, "lora__target_modules": ("q_proj",)}
    whole, streamed, without = (
        plan(tmp_path, experts, **lora, **({"lora__target_parameters": stacks} if is_adapted else {}))
        for experts, is_adapted in (("whole", True), ("streamed", True), ("streamed", False))
    )
    timings = [each.timing for each in (whole, streamed, without)]
    assert None not in timings
    operations = [
        sum(line.num_bytes for line in each.memory.allocations if line.name == OPERATIONS)
        for each in (whole, streamed, without)
    ]
    stack_bytes = NUM_EXPERTS * EXPERT_BYTES
    assert operations[0] > operations[1] + stack_bytes / 2
    assert operations[1] < operations[2] + stack_bytes / 2
    assert timings[1].step_seconds > timings[2].step_seconds  # type: ignore[union-attr]
