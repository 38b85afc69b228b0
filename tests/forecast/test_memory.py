"""Planned memory equals engine memory, for a few configurations from benchmarks/plan_memory.py."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from benchmarks import plan_memory
from benchmarks.plan_memory import NUM_STEPS, Case, actual, compare, planned
from offload import Engine, plan
from offload.app.config.config import Config
from offload.app.hf.models import load_model_config
from offload.checkpoint.manifest import CHUNK_BYTES
from offload.engine.units.activation_offload import CHECKPOINTS, GRAPHS
from offload.errors import format_bytes
from offload.extras.plan import run_forecast
from offload.extras.plan.alternatives import apply_change, place
from offload.extras.plan.forecast import Forecaster
from offload.extras.plan.machine_files import read_machine
from offload.extras.plan.memory import Footprint, Kept, StepMemory
from offload.extras.plan.run_forecast import describe_forecast, note_slow_precision
from offload.extras.plan.timing import PlannedStep, kernel_seconds
from offload.extras.plan.workload import Workload
from offload.machine.hardware import Hardware
from offload.planning.machines import FreeMemory, ThisMachine
from offload.planning.memory import Allocation
from tests.matrix import quick

SMALL = Case(rows=2, length=32)
COPY = "copy for a checkpoint"


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        SMALL,
        replace(SMALL, precision="bf16", micro_batch_size=1, recompute="never", states="int8"),
        replace(SMALL, activations="cpu", optimizer="nvme", head_chunk_bytes=1 << 16),
        replace(SMALL, family="gpt2", recompute="auto", device_memory="24MiB"),
        replace(SMALL, graphs="cpu", precision="bf16", micro_batch_size=1),
        replace(SMALL, length=512, sequence_tile=64),
        replace(SMALL, parameters="device", optimizer="device", rule="lion"),
        replace(SMALL, head_chunk_bytes=1 << 16, rule="mezo"),
    ],
    ids=str,
)
def test_what_is_told_is_held(case: Case) -> None:
    found = compare(case)
    assert found["worst_ratio"] == pytest.approx(1, abs=0.02), found["worst_allocation"]
    assert found["waiting_ratio"] == pytest.approx(1, abs=0.1)
    assert found["operations_ratio"] == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    "case",
    quick(
        [
            replace(SMALL, device_memory="4MiB"),
            replace(SMALL, device_memory="4MiB", precision="bf16", micro_batch_size=1),
            replace(SMALL, device_memory="5MiB", precision="bf16", states="int8", parameters="nvme", optimizer="nvme"),
            replace(SMALL, device_memory="64MiB", host_memory="24MiB"),
            replace(SMALL, device_memory="24MiB", rule="adafactor", host_memory=None),
            replace(SMALL, device_memory="4MiB", rule="mezo"),
            replace(SMALL, device_memory="4MiB", family="gpt2", activations="cpu"),
        ],
        [replace(SMALL, device_memory="4MiB")],
    ),
    ids=str,
)
def test_what_a_lasting_run_and_a_checkpoint_hold_is_told(case: Case, tmp_path: Path) -> None:
    """Spare device memory goes to the slots and the gradient buffer, and spare host memory to a copy of the states."""
    told = plan_memory.forecast(case, str(tmp_path))
    with Engine(case.model(), settings=case.settings(str(tmp_path))) as engine:
        engine.step(case.batch(0))
        assert engine.counters.peak_device_bytes == told.total("device")
        for _ in range(NUM_STEPS):
            engine.step(case.batch(0))
        assert engine.counters.peak_device_bytes == told.total("device") + told.lent_bytes > told.total("device")
        with engine.begin_checkpoint(tmp_path / "saved"):
            copied = [size for tier, name, size in engine.allocations if (tier, name) == ("cpu", COPY)]
    assert copied == [told.copy_bytes]
    host = told.budgets["cpu"]
    assert (host == told.named_host_bytes + told.copy_bytes) == (case.host_memory == "24MiB"), (
        "all the rest of a budget"
    )


def test_a_plan_says_what_is_lent_and_what_a_checkpoint_copies(capsys: pytest.CaptureFixture[str]) -> None:
    where = {"offload.parameters": "cpu", "offload.optimizer": "cpu", "offload.device_memory": "1GiB"}
    forecaster = Forecaster(config(**where), 1)
    found = forecaster.predict(config(**where), GPU, times=False)
    memory = found.memory
    assert memory.total("device") < memory.total("device") + memory.lent_bytes <= 1 << 30
    states = sum(a.num_bytes for a in memory.allocations if a.tier != "device" and a.name != "gradients")
    assert memory.copy_bytes == pytest.approx(states + CHUNK_BYTES, rel=0.01)
    text = describe_forecast(found)
    assert f"device {format_bytes(memory.total('device') + memory.lent_bytes)} of 1 GiB" in text
    assert f"{format_bytes(memory.copy_bytes)} more on the host at checkpoints" in text
    plan._show(found)
    table = re.sub(" +", " ", capsys.readouterr().out)
    assert f"after the third step, device {format_bytes(memory.lent_bytes)}" in table
    assert f"at checkpoints, host {format_bytes(memory.copy_bytes)}" in table
    small = GPU.with_(host_bytes=memory.named_host_bytes + (64 << 20))
    assert forecaster.predict(config(**where), small, times=False).memory.copy_bytes == 32 << 20, "half of what is free"
    never = config(**where, **{"checkpoint.every": None})
    assert forecaster.predict(never, GPU, times=False).memory.copy_bytes == 0
    best = config(**where, **{"checkpoint.every": None, "checkpoint.keep_best": True})
    assert forecaster.predict(best, GPU, times=False).memory.copy_bytes == memory.copy_bytes


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["always", "auto"])
def test_memory_for_inputs_of_a_first_step_stays_where_later_ones_keep_graphs(recompute: str, tmp_path: Path) -> None:
    case = replace(SMALL, graphs="cpu", activations="cpu", recompute=recompute, device_memory="24MiB")
    told, was = (tell(case, str(tmp_path)).waiting for tell in (planned, actual))
    assert told[CHECKPOINTS] == was[CHECKPOINTS] > 0
    assert told.get(GRAPHS, 0) == pytest.approx(was.get(GRAPHS, 0), rel=0.02)


def test_graphs_on_the_host_take_the_share_of_a_rank_alone() -> None:
    """Two ranks and a host without room for all graphs. Break: let each rank fill the whole host."""
    where = {"model.preset": "small", "data.sequence_length": 512, "train.batch_size": 32, "train.micro_batch_size": 4}
    where |= {"train.precision": "bf16", "train.compile": "never", "offload.graphs": "cpu", "offload.parameters": "cpu"}

    def predicted(host_bytes: int) -> Footprint:
        machine = GPU.with_(host_bytes=host_bytes, device_bytes=3 << 29)
        return Forecaster(config(**where), 2).predict(config(**where), machine, times=False).memory

    plenty = predicted(1 << 40)
    short = predicted(2 * (plenty.named_host_bytes - (64 << 20)))
    assert not short.shortfalls
    graphs = [sum(a.num_bytes for a in memory.allocations if a.name == GRAPHS) for memory in (plenty, short)]
    assert 0 < graphs[1] <= graphs[0] - (64 << 20)


def test_loading_ends_before_graphs_wait_on_the_host() -> None:
    """Break: add the fp32 copy of a unit to the buffers of the graphs."""
    states, graphs = Allocation("cpu", "exp avg", 70), Allocation("pinned", GRAPHS, 30)
    memory = Footprint((states, graphs), {}, 100, is_one_memory=False, loading_bytes=30, kept=Kept())
    assert not memory.shortfalls
    assert replace(memory, loading_bytes=31).shortfalls == {"cpu": 1}


def test_frozen_weights_of_a_preset_are_planned_as_bf16_files() -> None:
    """A preset represents a model to be downloaded, on a machine from a specification."""
    where = config(**{"model.preset": "tiny", "lora.rank": 8, "train.precision": "bf16", "offload.parameters": "cpu"})
    downloaded, made = (
        Forecaster(where, 1, plans_downloads=plans_downloads).predict(where, GPU, times=False).memory
        for plans_downloads in (True, False)
    )
    num_bytes = [sum(a.num_bytes for a in memory.allocations if "low" in a.name) for memory in (downloaded, made)]
    assert (num_bytes[0], num_bytes[1] > 1 << 20) == (0, True)
    trained = sum(a.num_bytes for a in downloaded.allocations if a.name in ("exp avg", "exp avg sq", "gradients"))
    assert downloaded.copy_bytes == trained + CHUNK_BYTES, "weights and moments of the adapter, in fp32"


def test_a_machine_with_fewer_devices_than_ranks_is_noted() -> None:
    """Ranks share a CPU."""
    where = config(**{"model.preset": "tiny", "data.sequence_length": 32, "offload.zero_stage": 3})
    forecaster, on_cpu = Forecaster(where, 2), {"device": "cpu", "device_bytes": None}
    for machine, is_noted in (
        (GPU, False),
        (GPU.with_(num_devices=2), False),
        (GPU.with_(num_devices=1), True),
        (GPU.with_(num_devices=1, **on_cpu), False),
    ):
        notes = forecaster.predict(where, machine, times=False).notes
        assert any("has 1 device, and the plan is for --gpus 2" in note for note in notes) is is_noted


def test_a_plan_has_the_notes_of_its_machine() -> None:
    where = config(**{"model.preset": "tiny", "data.sequence_length": 32})
    machine = GPU.with_(notes=("this process has 96 cores, a quota of 7.65 (...).",))
    assert Forecaster(where, 1).predict(where, machine, times=False).notes[:1] == machine.notes


def config(**values: object) -> Config:
    return Config.load(None, {"model.preset": "small", "data.sequence_length": 256, **values})


GPU = read_machine("rtx-4090")


def names(allocations: tuple[Allocation, ...], tier: str) -> set[str]:
    return {a.name.split(" (")[0] for a in allocations if a.tier == tier}


def test_what_travels_is_pinned_where_there_is_a_gpu() -> None:
    where = {"offload.parameters": "cpu", "offload.optimizer": "cpu", "offload.activations": "cpu"}
    where["train.recompute"] = "always"
    forecaster = Forecaster(config(), 1)
    on_gpu = forecaster.predict(config(**where), GPU, times=False).memory.allocations
    cpu = GPU.with_(device="cpu", device_bytes=None)
    on_cpu = forecaster.predict(config(**where), cpu, times=False).memory.allocations
    states = {"weights", "exp avg", "exp avg sq", "gradients", "activation checkpoints"}
    travel = {"weights", "gradients", "activation checkpoints"}
    assert names(on_gpu, "pinned") == travel
    assert names(on_gpu, "cpu") == states - travel | {"low"}
    assert names(on_cpu, "pinned") == set()
    assert names(on_cpu, "cpu") == states | {"operations"}
    assert "operations" in names(on_gpu, "device")


@pytest.mark.slow
def test_packed_documents_have_no_mask_in_a_plan_unless_it_is_asked_for() -> None:
    tiny, works = {"model.preset": "tiny", "data.packing_isolated": True}, list[Workload]()
    forecaster = Forecaster(config(**tiny), 1)
    for attention in ("sdpa", "auto", "documents"):
        where = config(**tiny, **{"model.attention": attention})
        prepared = forecaster.predict(where, GPU, times=False).prepared
        work = forecaster._workload(where, prepared, 1)
        assert isinstance(work, Workload)
        works.append(work)
    with_mask, by_default, without = works
    assert by_default == without
    flops = [sum(call.forward.attention_flops for call in work.calls) for work in (with_mask, without)]
    assert flops[1] == pytest.approx(flops[0] / 2, rel=0.02)  # a causal kernel over one document of almost a row
    rows = without.num_tokens // 256
    squares = 255**2 + 1
    for share, expected in ((squares / 256**2, 1.0), (0.25, 0.25 * 256**2 / squares)):
        known = Forecaster(config(**tiny), 1, document_share=share)._workload(where, prepared, 1)
        assert isinstance(known, Workload)
        assert sum(call.forward.attention_flops for call in known.calls) == pytest.approx(expected * flops[1], rel=1e-4)
    mask_bytes = [max(call.input_bytes for call in work.calls) for work in (with_mask, without)]
    assert mask_bytes[0] - mask_bytes[1] == rows * 256 * 256


@pytest.mark.slow
@pytest.mark.parametrize(("activations", "graphs"), [("device", "device"), ("cpu", "device"), ("device", "cpu")])
def test_a_step_is_played_with_the_memory_that_is_told(activations: str, graphs: str) -> None:
    where: dict[str, object] = {"offload.device_memory": "300MiB", "offload.parameters": "cpu"}
    where |= {"offload.optimizer": "cpu", "offload.activations": activations, "offload.graphs": graphs}
    where |= {"train.recompute": "auto", "train.micro_batch_size": 2, "train.compile": "never"}
    forecaster = Forecaster(config(**where), 1)
    found = forecaster.predict(config(**where), GPU)
    its, work = found.prepared, forecaster._workload(found.config, found.prepared, 1)
    assert isinstance(work, Workload)
    step = PlannedStep(its, work, GPU)
    assert step.memory.device_bytes == found.memory.total("device")
    away = [a.num_bytes for a in found.memory.allocations if a.name in (CHECKPOINTS, GRAPHS)]
    kept = [step.memory._first_offloaded_bytes(work.calls[number]) for number in step.memory.kept.graphs]
    assert step.waiting_bytes("cpu", "nvme") == sum(away) - sum(kept), "these wait in the first step alone"
    assert bool(away) == ("cpu" in (activations, graphs))
    adds_s = [sum(kernel_seconds(cost, its.settings, GPU.rates)) for cost in step.gradient_costs]
    again = [
        call.backward_s - s > 2.5 * call.forward_s for call, s in zip(step.calls, adds_s, strict=True) if call.regions
    ]
    assert any(again[1:]) == (graphs == "device"), "the first is an embedding, whose forward takes next to nothing"
    assert not all(again), "some graphs are kept"


def test_as_many_graphs_are_kept_as_the_budget_holds() -> None:
    where = {"offload.device_memory": "300MiB", "offload.parameters": "cpu", "offload.optimizer": "cpu"}
    where |= {"train.recompute": "auto"}
    forecaster = Forecaster(config(**where), 1)
    found = forecaster.predict(config(**where), GPU, times=False)
    its, work = found.prepared, forecaster._workload(found.config, found.prepared, 1)
    assert isinstance(work, Workload)
    step = StepMemory(its, work, GPU)
    missing = [n for n in range(len(work.calls)) if n not in step.kept.graphs]
    assert missing
    planned = step.device_bytes - step._on_device(step.kept)
    assert step.device_bytes <= 300 << 20 < planned + step._on_device(Kept(step.kept.graphs | {missing[-1]}))


def test_a_kept_graph_is_not_counted_again_in_its_own_backward() -> None:
    """The memory of a backward is measured with a graph made again. The peak here is in the last block."""
    device_bytes = []
    for recompute in ("always", "never"):
        where = config(**{"train.recompute": recompute})
        forecaster = Forecaster(where, 1)
        found = forecaster.predict(where, GPU, times=False)
        work = forecaster._workload(found.config, found.prepared, 1)
        assert isinstance(work, Workload)
        blocks = [call for call in work.calls if call.is_block]
        graph_bytes = blocks[0].saved_bytes
        calls = [
            replace(call, saved_bytes=graph_bytes, backward_temporary_bytes=2 * graph_bytes, result_bytes=0)
            for call in blocks
        ]
        device_bytes.append(StepMemory(found.prepared, replace(work, calls=tuple(calls)), GPU).device_bytes)
    assert device_bytes[1] - device_bytes[0] == (len(blocks) - 1) * graph_bytes * work.num_micro_batches > 0


def test_more_ranks_share_the_host() -> None:
    where = config(**{"offload.parameters": "cpu", "offload.optimizer": "cpu"})
    one, two = (Forecaster(where, n).predict(where, GPU, times=False).memory for n in (1, 2))
    assert two.host_bytes == one.host_bytes // 2
    assert two.total("cpu", "pinned") == pytest.approx(one.total("cpu", "pinned") / 2, rel=0.01)


def test_a_run_with_all_on_the_device_needs_no_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator: Any = SimpleNamespace(
        device=torch.device("xpu"), free_bytes=24 << 30, is_integrated=False, capability=None
    )
    machine = ThisMachine(accelerator, agreed_memory=FreeMemory(24 << 30, 1 << 36, "all", False, 0, 24 << 30))
    measured = []

    def has_no_rates(*_given: object, measures: bool = True) -> Hardware:
        measured.append(measures)
        raise LookupError("no rates")

    monkeypatch.setattr(run_forecast, "this_hardware", has_no_rates)
    said: list[str] = []
    where = config()
    architecture = load_model_config(where.model)
    found = run_forecast.forecast_run(where, architecture, 1, machine, said.append)
    assert found.document["fits"]
    assert (said, measured) == ([], [False])


def test_a_step_that_surely_takes_too_long_is_not_simulated() -> None:
    where = config()
    forecaster = Forecaster(where, 1)
    assert forecaster.predict(where, GPU, worth_s=1e-9).timing is None
    found = forecaster.predict(where, GPU)
    assert found.timing is not None
    assert forecaster.num_made == 1, "with a time or without"
    assert Forecaster(where, 1).predict(where, GPU, worth_s=found.timing.step_seconds).timing == found.timing
    small = GPU.with_(host_bytes=1 << 20)
    assert forecaster.predict(where, small, worth_s=math.inf).timing is None
    assert forecaster.predict(where, small).timing is not None


def test_a_precision_that_a_machine_computes_slowly_is_said() -> None:
    where = config(**{"train.precision": "bf16"})
    for flops, is_said in (({"fp32": 1e12, "bf16": 1e10}, True), ({"fp32": 1e12, "bf16": 8e11}, False)):
        cpu = GPU.with_(device="cpu", device_bytes=None, rates=replace(GPU.rates, flops_per_s=flops))
        forecaster = Forecaster(where, 1)
        found = forecaster.predict(where, cpu)
        assert found.timing is not None
        said = " ".join(note_slow_precision(forecaster, found))
        assert (f"{found.timing.step_seconds:.3g} s a step" in said and "--train.precision fp32" in said) == is_said


def test_operations_stand_beside_the_budget_of_the_host() -> None:
    where = config(**{"offload.parameters": "cpu", "offload.optimizer": "cpu"})
    found = Forecaster(where, 1).predict(where, GPU.with_(device="cpu", device_bytes=None), times=False)
    operations, held = found.memory.operations_bytes, found.tiers["cpu"]
    assert operations > 0
    assert held["bytes"] == found.memory.total("cpu") - operations == sum(each["bytes"] for each in held["allocations"])


def test_an_unknown_step_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(*_: object) -> object:
        from offload.extras.plan.measure import CannotMeasureError

        raise CannotMeasureError("X asks for a value")

    monkeypatch.setattr("offload.extras.plan.forecast.measure", fails)
    found = Forecaster(config(), 1).predict(config(), GPU)
    assert found.timing is None
    assert found.to_dict()["step_seconds"] is None
    assert "X asks for a value" in found.notes[0]
    assert "unit inputs" not in names(found.memory.allocations, "device")


@pytest.mark.slow
def test_graphs_wait_on_the_host_where_that_is_faster_and_nobody_says_otherwise() -> None:
    where: dict[str, object] = {"model.preset": "1b", "data.sequence_length": 4096, "train.batch_size": 8}
    where |= {"train.precision": "bf16", "train.recompute": "always", "train.compile": "never"}
    where |= {"offload.parameters": "cpu", "offload.optimizer": "cpu", "offload.update": "cpu"}
    large = GPU.with_(host_bytes=256 << 30)
    forecaster = Forecaster(config(**where), 1)
    given, left = (config(**where, **{"offload.graphs": tier}) for tier in ("auto", "device"))
    found, other = (place(forecaster, forecaster.predict(each, large)) for each in (given, left))
    assert found.config.offload.graphs == "cpu"
    assert found.timing is not None
    assert other.timing is not None
    assert found.timing.step_seconds < 0.98 * other.timing.step_seconds
    assert found.memory.total("pinned") > other.memory.total("pinned")
    assert "--offload.graphs cpu --offload.graphs_memory" in found.placement_flags
    slow = large.with_(rates=replace(large.rates, d2h_bytes_per_s=1e9, h2d_bytes_per_s=1e9, both_ways_bytes_per_s=2e9))
    assert place(forecaster, forecaster.predict(given, slow)).config.offload.graphs == "auto", "a link that has no time"
    assert place(forecaster, forecaster.predict(given, GPU.with_(host_bytes=20 << 30))).config.offload.graphs == "auto"


@pytest.mark.slow
def test_outputs_of_products_are_kept_where_a_step_is_faster_and_nobody_says_otherwise() -> None:
    where: dict[str, object] = {"model.preset": "8b", "data.sequence_length": 4096, "train.batch_size": 8}
    where |= {"train.micro_batch_size": 1, "offload.parameters": "cpu", "offload.optimizer": "cpu"}
    where["train.compile"] = "never"
    gpu = read_machine("h200").with_(host_bytes=256 << 30)
    forecaster = Forecaster(config(**where), 1)
    found = place(forecaster, forecaster.predict(config(**where), gpu))
    assert "--train.recompute products" in found.placement_flags
    assert found.memory.kept.products
    assert found.memory.total("device") <= 0.9 * gpu.device_bytes  # type: ignore[operator]
    assert found.timing is not None
    assert found.seconds_without_search is not None
    assert found.timing.step_seconds < 0.98 * found.seconds_without_search, "whole graphs, as many as fit"
    compiled = config(**where | {"train.compile": "auto"})
    assert "products" not in place(forecaster, forecaster.predict(compiled, gpu)).placement_flags
    small = gpu.with_(device_bytes=24 << 30)
    told = forecaster.predict(config(**where, **{"train.recompute": "products"}), small, times=False).memory
    assert 0 < len(told.kept.products) < len(found.memory.kept.products)
    assert told.total("device") <= 0.9 * (24 << 30)


@pytest.mark.slow
def test_no_single_setting_is_faster_than_the_search() -> None:
    """Updates on the host pay here only beside graphs on the host, and the search decides both."""
    where = {"model.preset": "8b", "data.sequence_length": 4096, "train.batch_size": 8, "train.micro_batch_size": 4}
    gpu, forecaster = read_machine("rtx-5090").with_(host_bytes=256 << 30), Forecaster(config(**where), 1)

    def seconds(**change: object) -> float:
        found = place(forecaster, forecaster.predict(config(**where, **change), gpu))
        assert found.fits
        assert found.timing is not None
        return found.timing.step_seconds

    searched = seconds()
    for change in ({"offload.update": "cpu"}, {"offload.update": "device"}, {"offload.graphs": "cpu"}):
        assert searched <= seconds(**change) / 0.98, change  # the search ignores gains below 2 %


@pytest.mark.slow
def test_states_are_updated_in_both_places_where_that_is_faster_and_nobody_says_otherwise() -> None:
    """Covers a short step with a slow host and spare device memory."""
    where: dict[str, object] = {"model.preset": "1b", "data.sequence_length": 1024, "train.batch_size": 1}
    where |= {"train.precision": "bf16", "train.recompute": "always", "offload.graphs": "device"}
    gpu = GPU.with_(host_bytes=256 << 30, device_bytes=10 << 30)
    gpu = gpu.with_(rates=replace(gpu.rates, host_bytes_per_s=40e9, h2d_bytes_per_s=25e9, d2h_bytes_per_s=25e9))
    forecaster = Forecaster(config(**where), 1)
    given, left = (config(**where, **{"offload.update": update}) for update in ("auto", "cpu"))
    found, other = (place(forecaster, forecaster.predict(each, gpu)) for each in (given, left))
    assert found.prepared.plan.update == "both"
    told = found.to_dict()
    assert 0 < told["regions_updated_on_device"] < told["regions"]
    assert "--offload.optimizer_memory" in found.placement_flags
    assert found.timing is not None
    assert other.timing is not None
    assert found.timing.step_seconds < 0.9 * other.timing.step_seconds
    fixed = config(**where, **{"offload.optimizer": "cpu"})
    assert place(forecaster, forecaster.predict(fixed, gpu)).prepared.plan.update != "both", (
        "which says where they rest"
    )


def test_states_take_the_room_that_weights_on_the_device_would_take() -> None:
    """Covers a slow disk. Without states on the device, another placement is faster, but leaves less room for them."""
    layers = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 4}
    where: dict[str, object] = {"data.sequence_length": 64, "train.batch_size": 1, "train.precision": "bf16"}
    where |= {"train.recompute": "always", "offload.graphs": "device", "offload.activations": "device"}
    where |= {"train.compile": "never"}
    given = config(**where, **{"offload.nvme_dir": ["/nvme"]})
    gpu = read_machine("h100").with_(device_bytes=133 << 20, host_bytes=100 << 20)
    forecaster = Forecaster(given, 1, LlamaConfig(vocab_size=256, **layers))
    states = {"offload.optimizer": "auto", "offload.update": "both", "offload.optimizer_memory": "102MiB"}
    found = place(forecaster, forecaster.predict(given, gpu))
    other = forecaster.predict(apply_change(given, states), gpu)
    assert other.fits
    assert other.timing is not None
    assert found.timing.step_seconds <= other.timing.step_seconds
