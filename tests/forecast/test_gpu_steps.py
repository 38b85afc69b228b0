"""Forecasts for an H200 beside steps measured there (benchmarks/results/gpu-nvidia-h200.json).

Two eager steps and a compiled one were profiled, and five kinds timed in a long run. Products and attention are
described as in the compiled step. Eager steps are not met exactly: the GPU is at its power limit where no other kernels
lie between products.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_parts import MICRO_ROWS, MODELS, SEQUENCE
from benchmarks.harness import RESULTS
from offload.app.config.config import Config
from offload.extras.plan.forecast import Forecaster
from offload.extras.plan.machine_files import read_machine
from offload.extras.plan.simulated_step import SimulatedEngine
from offload.extras.plan.timing import PlannedStep, kernel_seconds
from offload.extras.plan.workload import Cost
from offload.machine.hardware import Hardware
from offload.planning.device_updates import update_bytes
from tests.matrix import quick

HOST_BYTES = 125 << 30
STEPS: dict[str, dict[str, Any]] = {
    "3b": {"train.batch_size": 4, "train.compile": "never"},
    "8b": {"train.batch_size": 8, "train.compile": "never", "offload.device_memory": "24GiB"},
}
STEADY: dict[str, dict[str, Any]] = {
    "8b, compile never, 32768 tokens a step": {"train.batch_size": 8, "train.compile": "never"},
    "8b, compile never, 131072 tokens a step": {"train.batch_size": 32, "train.compile": "never"},
    "8b, compile auto, 32768 tokens a step": {"train.batch_size": 8, "train.compile": "auto"},
    "3b, compile never, 16384 tokens a step": {"train.batch_size": 4, "train.compile": "never"},
    "3b, compile auto, 16384 tokens a step": {"train.batch_size": 4, "train.compile": "auto"},
}
"""Steps in a long run by name, with settings. The 8B keeps the states on the host, the 3B on the device."""
QUICK = "8b, compile never, 32768 tokens a step", "3b, compile auto, 16384 tokens a step"
"""Steps in the quick run: states on the host and on the device."""


def results() -> dict[str, dict[str, Any]]:
    """Return the measured results by name."""
    stored = json.loads((RESULTS / "gpu-nvidia-h200.json").read_text())
    return {result["name"]: result for result in stored["results"]}


def measured() -> dict[str, dict[str, float]]:
    """Return the measured seconds for each step: by kind, of all kernels ("compute"), and from rest to rest."""
    values = results()
    small = {
        kind: values[f"3b, a step's {kind}"]["value"] / 1e3 for kind in ("products", "attention", "others", "updates")
    }
    steps = {"3b": values["3b, a profiled step"], "8b": values["8b in 24 GiB, a profiled step of 32768 tokens"]}
    kinds = {"3b": small, "8b": steps["8b"]["seconds_by_kind"]}
    return {
        name: {
            "products": kinds[name]["products"],
            "attention": kinds[name]["attention"],
            "elementwise": kinds[name]["others"] + kinds[name]["updates"],
            "compute": step["computing_s"],
            "alone": step["value"] / 1e3,
        }
        for name, step in steps.items()
    }


def configured(name: str, folder: Path, settings: Mapping[str, Any]) -> tuple[Forecaster, Hardware]:
    """Return the forecaster for a model of the check, and the described H200 with the measured host memory."""
    shape = MODELS[name] | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    path = folder / "config.json"
    path.write_text(json.dumps(shape | {"max_position_embeddings": SEQUENCE}))
    sizes = {"model.path": str(path), "data.sequence_length": SEQUENCE, "train.micro_batch_size": MICRO_ROWS}
    return Forecaster(Config.load(None, sizes | settings), 1), read_machine("h200").with_(host_bytes=HOST_BYTES)


ON_THE_HOST = {f"offload.{key}": "cpu" for key in ("parameters", "optimizer", "update")}


def planned_step(name: str, folder: Path) -> PlannedStep:
    """Return the planned step with the settings of the profiled one."""
    forecaster, hardware = configured(name, folder, ON_THE_HOST | STEPS[name])
    found = forecaster.predict(forecaster.config, hardware, times=False)
    assert found.fits
    workload = forecaster._workload(found.config, found.prepared, 1, hardware.capability)
    assert not isinstance(workload, str)
    return PlannedStep(found.prepared, workload, hardware)


def by_kind(step: PlannedStep) -> dict[str, float]:
    """Return the kernel seconds by kind, as in `measured`."""
    kept, units = step.memory.kept.graphs, {unit.name: unit.regions for unit in step.units if not unit.resident}
    totals = {"products": 0.0, "attention": 0.0, "elementwise": 0.0}

    def add(cost: Cost, num_runs: int) -> None:
        cost = replace(cost, copied_bytes=0.0)  # the profiler counts these as copies, beside those of the links
        for kind, seconds in zip(totals, kernel_seconds(cost, step.settings, step.hardware.rates), strict=True):
            totals[kind] += num_runs * seconds

    for number, work in enumerate(step.workload.calls):
        recomputation = [work.forward] if units.get(work.name or "") and number not in kept else []
        for cost in (work.forward, work.backward, *recomputation):
            add(cost, work.num_runs(step.workload.num_micro_batches))
    for cost in step.gradient_costs:
        add(cost, 1)
    return totals


def alone_seconds(step: PlannedStep) -> float:
    """Return the seconds from idle lanes to idle lanes, without a step before or after."""
    with closing(SimulatedEngine(step.calls, step.simulated_plan(), step.seconds())) as engine:
        engine.step()
        engine.lanes.finish()
        begin = engine.lanes.now_s
        engine.step()
        engine.lanes.finish()
        return engine.lanes.now_s - begin


@pytest.mark.parametrize("name", quick(STEPS, ["8b"]))
def test_a_step_takes_as_long_as_on_the_gpu(name: str, tmp_path: Path) -> None:
    step, wanted = planned_step(name, tmp_path), measured()[name]
    found = by_kind(step)
    for kind, seconds in found.items():
        assert seconds == pytest.approx(wanted[kind], rel=0.1), kind
    # Products are described as in compiled steps. The eager 3b step was 7 % faster.
    assert sum(found.values()) == pytest.approx(wanted["compute"], rel=0.04 if name == "8b" else 0.06)
    compute_s = sum(call.forward_s + call.backward_s for call in step.calls)
    assert compute_s - step.compute_parts["gaps"] == pytest.approx(sum(found.values()), rel=0.005)
    # The host's update in the 3b step ran at 130 GB/s, of unknown cause, so that the whole step took longer.
    assert alone_seconds(step) == pytest.approx(wanted["alone"], rel=0.08 if name == "8b" else 0.12)


@pytest.mark.parametrize("name", quick(STEADY, QUICK))
def test_steps_of_a_long_run_take_as_long_as_on_the_gpu(name: str, tmp_path: Path) -> None:
    size = name.partition(",")[0]
    forecaster, hardware = configured(size, tmp_path, (ON_THE_HOST if size == "8b" else {}) | STEADY[name])
    found = forecaster.predict(forecaster.config, hardware)
    assert found.timing is not None
    # When the 8B was measured, compiled blocks had larger graphs, so fewer blocks were kept whole, and the loss was
    # not compiled.
    allowed = 0.1 if name == "8b, compile auto, 32768 tokens a step" else 0.05
    measured_rate, planned_rate = results()[name]["value"], found.timing.tokens_per_second
    assert planned_rate == pytest.approx(measured_rate, rel=allowed)
    page = (RESULTS.parent / "figures.md").read_text()
    assert f"| {measured_rate:,.0f} | {planned_rate:,.0f} |\n" in page, "the page has another plan"


def test_an_update_counts_the_gradient(tmp_path: Path) -> None:
    step = planned_step("3b", tmp_path)
    trained = sum(region.numel for region in step.regions)
    assert update_bytes(step.regions, step.plan.residence.sharding) == 26 * trained
    # Copies on slow links leave the host's memory to the update.
    slower = replace(step.hardware.rates, host_bytes_per_s=26.0 * trained, h2d_bytes_per_s=1e3, d2h_bytes_per_s=1e3)
    again = PlannedStep(step.prepared, step.workload, step.hardware.with_(rates=slower))
    assert again.simulate(2).lane_seconds["update"] == pytest.approx(1.0)
