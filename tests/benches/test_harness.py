"""`benchmarks.harness`: the command of a benchmark, runs in turns, ratios, and rows in a result file."""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import harness
from offload.extras.tools.benches.report import Result, spread


def benchmark(results: list[Result]) -> Any:
    """Return a benchmark with these results; the option --size is the value of a first result."""

    def run(arguments: Any) -> list[Result]:
        os.write(1, b"not a result")
        return [Result("size", arguments.size, "ms"), *results]

    def add_arguments(parser: ArgumentParser) -> None:
        parser.add_argument("--size", type=float, default=100.0)

    own = {"SUMMARY": "simulated", "QUICK": {"size": 1.0}, "add_arguments": add_arguments, "run": run}
    return SimpleNamespace(__file__="benchmarks/played.py", **own)


def test_a_result_file_says_which_command_made_it_and_keeps_other_rows(tmp_path: Path, capfd: Any) -> None:
    out = tmp_path / "more" / "out.json"
    first, second = (Result(name, value, "ms", details={"threads": 2}) for name, value in (("a", 1.0), ("b", 2.0)))
    assert harness.command_of(benchmark([first, second]))(["--out", str(out), "--size", "7"]) == 0
    assert "not a result" not in capfd.readouterr().out
    found = json.loads(out.read_text())
    assert found["command"] == f"python -m benchmarks.played --out {out} --size 7"
    assert set(found) == {"command", "commit", "date", "machine", "versions", "results"}
    again = Result("a", 3.0, "ms", details={"threads": 2})
    other = Result("a", 4.0, "ms", details={"threads": 1})
    harness.command_of(benchmark([again, other]))(["--out", str(out), "--quick"])
    rows = json.loads(out.read_text())["results"]
    assert [(row["name"], row.get("threads"), row["value"]) for row in rows] == [
        ("size", None, 1.0),
        ("a", 2, 3.0),
        ("b", 2, 2.0),
        ("a", 1, 4.0),
    ]
    assert {row["commit"] for row in rows} == {found["commit"]}
    assert list(out.parent.iterdir()) == [out]


def test_json_has_the_same_document(capfd: Any) -> None:
    harness.command_of(benchmark([]))(["--json"])
    found = json.loads(capfd.readouterr().out)
    assert found["command"] == "python -m benchmarks.played --json"
    assert [row["value"] for row in found["results"]] == [100.0]


def test_contenders_take_turns() -> None:
    assert list(harness.turns("abc", 2)) == [(0, "a"), (0, "b"), (0, "c"), (1, "b"), (1, "c"), (1, "a")]


@pytest.mark.parametrize(("unit", "ratio", "best"), [("s", 2.0, 1.0), ("GB/s", 0.5, 4.0)])
def test_a_ratio_is_above_1_where_the_contender_is_better_in_the_same_rounds(
    unit: str, ratio: float, best: float
) -> None:
    """The machine slows down from round to round, equally for both."""
    found = harness.summary("ours", [1.0, 2.0, 4.0], unit, ("theirs", [2.0, 4.0, 8.0]), load=3)
    assert (found.value, found.reference, found.ratio) == (2.0, "theirs", ratio)
    assert found.details["best"] == best
    assert found.details["ratio_spread"] == 0
    assert found.details["load"] == 3


def test_spread() -> None:
    assert spread([3.0]) == spread([]) == spread([2.0, 2.0]) == 0.0
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)
