"""The committed table with plans against engines: generated from the committed figures, within the promised error."""

from __future__ import annotations

import json

from benchmarks import plan_memory, step_times
from benchmarks.harness import RESULTS
from benchmarks.plan_against_actual import beyond, document

FOUND = json.loads((RESULTS / "plan.json").read_text())


def test_the_table_is_made_from_the_figures() -> None:
    assert (RESULTS / "plan.md").read_text() == document(FOUND)


def test_every_configuration_is_in_it() -> None:
    assert [row["case"] for row in FOUND["memory"]] == [str(case) for case in plan_memory.CASES]
    assert [row["case"] for row in FOUND["step_times"]] == [case.name for case in step_times.CASES]
    assert all(row["without_throttle"]["seconds"] > 0 for row in FOUND["step_times"])


def test_nothing_is_told_worse_than_promised() -> None:
    assert not beyond(FOUND)


def test_what_is_told_worse_is_named() -> None:
    memory = {"case": "a", "worst_ratio": 1.03, "waiting_ratio": 0.95, "operations_ratio": 0.85}
    times = [{"case": name, "ratio": ratio} for name, ratio in (("b", 1.25), ("c", 0.88), ("d", 1.12))]
    assert beyond({"memory": [memory], "step_times": times}) == [
        "a: worst 1.030",
        "a: operations 0.850",
        "b: step 1.250",
        "the median step: 12.0%",
    ]
