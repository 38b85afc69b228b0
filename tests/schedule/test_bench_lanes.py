"""Inputs for the ideal schedule, taken from observed accelerator steps."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks import lanes, step_times
from benchmarks.ideal import Unit, Use, ideal
from offload.lanes.timeline import Span
from tests import forks

SIZES = {"a": 10, "head": 20}
STEP = [
    Span("h2d", "a", 0.0, 1.0),
    Span("compute", "forward a", 1.0, 3.0),
    Span("h2d", "head", 1.0, 2.0),
    Span("compute", "forward head", 3.0, 4.0),
    Span("compute", "backward head", 4.0, 6.0),
    Span("compute", "forward head", 6.0, 7.0),
    Span("compute", "backward head", 7.0, 9.0),
    Span("d2h", "head", 9.0, 10.0),
    Span("compute", "backward a", 9.0, 13.0),
    Span("d2h", "a", 13.0, 15.0),
    Span("update", "update head", 10.0, 14.0),
    Span("update", "update a", 15.0, 16.0),
    Span("compute", "forward norm", 16.0, 17.0),
]


def later(spans: list[Span], slower: float) -> list[Span]:
    """Return the same step, shifted in time and slowed down."""
    return [Span(lane, name, 100 + slower * begin, 100 + slower * end) for lane, name, begin, end in spans]


def test_what_a_unit_does_at_a_stretch_is_one_use_and_what_does_not_stream_is_none_of_a_unit() -> None:
    assert lanes.seen_uses(STEP, SIZES) == [
        Use(2.0, "a"),
        Use(6.0, "head", is_backward=True),
        Use(4.0, "a", is_backward=True),
        Use(1.0),
    ]


def test_each_piece_takes_what_it_took_at_its_fastest() -> None:
    work = lanes.seen_work([later(STEP, 2.0), STEP, later(STEP, 1.5)], SIZES, 30, "none")
    assert work.units == {"a": Unit(10, 1.0, 2.0, 1.0, 1.0), "head": Unit(20, 1.0, 1.0, 4.0, 4.0)}
    assert [use.seconds for use in work.uses] == pytest.approx([2.0, 6.0, 4.0, 1.0])
    assert ideal(work).seconds == pytest.approx(16.0)  # "a": gradient copy, update and H2D copy before the next step


def test_a_step_that_recorded_is_left_out_and_uses_take_what_the_device_was_busy() -> None:
    work = lanes.seen_work([STEP[:4], STEP], SIZES, 30, "none", compute_s=6.5)
    assert [use.seconds for use in work.uses] == pytest.approx([1.0, 3.0, 2.0, 0.5])


def test_the_compute_of_a_serial_step_leaves_out_inline_work_of_other_lanes() -> None:
    spans = [
        Span("compute", "backward a", 7.0, 10.0),
        Span("compute", "forward a", 1.0, 3.0),
        Span("h2d", "fetch a", 0.0, 1.5),  # half a second inside the forward
        Span("compute", "forward norm", 5.0, 6.0),
        Span("update", "update a", 9.5, 12.0),
        Span("h2d", "fetch b", 3.25, 4.0),
    ]
    assert step_times.compute_uses(spans, ["a"]) == [
        Use(1.5, "a"),
        Use(1.25),
        Use(1.0),
        Use(1.0),
        Use(2.5, "a", is_backward=True),
    ]


@pytest.mark.slow
def test_a_played_device_gives_every_row_its_ideal() -> None:
    """Only speculative clipping, with the most lane work, is run: all modes build a row alike."""
    words = ["--layers", "6", "--rounds", "1", "--steps", "2", "--tokens", "4096", "--devices", "H200, PCIe 5"]
    words += ["--modes", "speculative", "--json"]
    command = [sys.executable, "-m", "benchmarks.played", *words]
    done = subprocess.run(command, cwd=forks.ROOT, capture_output=True, text=True, check=False)
    if "CannotBuildError" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["results"]
    assert len(rows) == 1
    for row in rows:
        assert 0 < row["compute_seconds"] <= row["ideal_seconds"]
        assert row["step_seconds"] >= row["largest_lane_seconds"]
        assert row["launches"] > 500
