"""What a unit costs the host beside plain PyTorch, by counts alone: see benchmarks/overhead.py, which has times too."""

from __future__ import annotations

import pytest

from benchmarks import overhead
from tests.accelerator.control import Control

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("sim")]

MOST = {  # kernels, copies; calls of Python functions in the threads of compute, and in the lanes, where all is late
    "recompute": (13, 3, 520, 200),
    "kept graphs": (13, 3, 640, 200),
    "activations on the host": (13, 5, 620, 260),
}


@pytest.mark.parametrize("case", overhead.CASES)
def test_a_unit_adds_few_launches_and_few_calls(sim: Control, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr(overhead, "SHALLOW", 2)
    monkeypatch.setattr(overhead, "DEEP", 6)
    found = overhead.added_counts(sim, case)
    launches, copies, calls, calls_of_lanes = MOST[case]
    assert (found["launches"], found["copies"]) == (launches, copies)
    assert 0 < found["Python calls in compute"] <= calls
    assert 0 < found["Python calls in lanes"] <= calls_of_lanes
    assert found["operation_waits"] == found["pageable_copies"] == 0


@pytest.mark.parametrize("num_layers", [2, 6])
@pytest.mark.parametrize("case", overhead.CASES)
def test_a_caller_waits_no_oftener_for_more_units(sim: Control, case: str, num_layers: int) -> None:
    """For the norm and the loss; and where a step begins and ends, for a device that has nothing else to do."""
    sim.set_jitter(200, 1)
    _, calls = overhead.counts_of(sim, overhead.engine_steps, case, num_layers)
    assert calls.c["compute", "Event.synchronize"] <= 4
    assert not calls.c["compute", "Stream.synchronize"]


@pytest.mark.parametrize("num_layers", [2, 6])
def test_a_step_whose_states_are_on_the_device_waits_for_it_five_times(
    sim: Control, monkeypatch: pytest.MonkeyPatch, num_layers: int
) -> None:
    """By its own counter, as no lane of the host takes part: for the count of weights that are not finite, too."""
    on_device = {"parameters": "device", "optimizer": "device"}
    monkeypatch.setattr(overhead, "CASES", {"on the device": ({}, on_device)})
    sim.set_jitter(200, 1)
    found, _ = overhead.counts_of(sim, overhead.engine_steps, "on the device", num_layers)
    assert 2 < found["waits"] <= 2 + 5, "two are of the benchmark, at the step's end"
