"""Host overhead per unit beside plain PyTorch, as counts alone. benchmarks/overhead.py also measures time."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from benchmarks import overhead
from offload import AdamW, Engine
from tests.accelerator.control import Control
from tests.matrix import quick

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("sim")]

NUM_LAYERS = 6
"""Enough layers: one wait per layer would exceed the allowed waits."""
MOST = {  # kernels, copies; Python calls in compute threads and in lanes: all work late, and a sixth more
    "recompute": (13, 3, 640, 170),
    "kept graphs": (13, 3, 690, 170),
    "activations on the host": (13, 5, 730, 220),
    "two micro-batches": (16, 3, 950, 170),
}
counts_of = cache(overhead.counts_of)
"""Two tests look at one counted step of a deep engine, with the same jitter."""


@pytest.mark.parametrize("case", quick(overhead.CASES, ["recompute", "activations on the host"]))
def test_a_unit_adds_few_launches_and_few_calls(sim: Control, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr(overhead, "SHALLOW", 2)
    monkeypatch.setattr(overhead, "DEEP", NUM_LAYERS)
    monkeypatch.setattr(overhead, "counts_of", counts_of)
    sim.set_jitter(200, 1)
    found = overhead.added_counts(sim, case)
    launches, copies, calls, calls_of_lanes = MOST[case]
    assert (found["launches"], found["copies"]) == (launches, copies)
    assert 0 < found["Python calls in compute"] <= calls
    assert 0 < found["Python calls in lanes"] <= calls_of_lanes
    assert found["operation_waits"] == found["pageable_copies"] == 0


@pytest.mark.parametrize("case", quick(overhead.CASES, ["recompute", "activations on the host"]))
def test_a_caller_waits_for_the_norm_alone(sim: Control, case: str) -> None:
    sim.set_jitter(200, 1)
    _, calls = counts_of(sim, overhead.engine_steps, case, NUM_LAYERS)
    assert calls.c["compute", "Event.synchronize"] <= 1
    assert not calls.c["compute", "Stream.synchronize"]


def test_a_step_whose_states_are_on_the_device_waits_for_the_norm_alone(
    sim: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lane reads the updates' counts of non-finite weights. Before, the caller waited for the updates too."""
    on_device = {"parameters": "device", "optimizer": "device"}
    monkeypatch.setattr(overhead, "CASES", {"on the device": ({}, on_device)})
    sim.set_jitter(200, 1)
    _, calls = overhead.counts_of(sim, overhead.engine_steps, "on the device", NUM_LAYERS)
    assert calls.c["compute", "Event.synchronize"] <= 1
    assert sum(number for (thread, name), number in calls.c.items() if name == "Event.synchronize") <= 2


def test_recordings_compare_the_tensors_of_a_call_at_once(sim: Control) -> None:
    """Break: compare the sums of each tensor alone."""
    waits = []
    for depth in (2, 6):
        torch.accelerator.synchronize()
        before = sim.counters()["operation_waits"]
        with Engine(overhead.model_of(depth), AdamW(), precision="bf16") as engine:
            engine.step(overhead.batch())
        waits.append(sim.counters()["operation_waits"] - before)
    assert (waits[1] - waits[0]) / 4 <= 27  # by layer
