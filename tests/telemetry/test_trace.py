"""The trace file: format, size limits, and no overlapping work on a track."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.app.telemetry.trace import FIRST_STEPS, LAST_STEPS, Trace
from offload.lanes.timeline import Span
from tests.telemetry.reader import Work, check_trace, read_trace

LANES = ("compute", "h2d", "d2h", "update")
START = 86_400.0  # perf_counter can count from the machine start


def trace_of(spans: list[tuple[str, str, float, float]], path: Path = Path("unused"), is_serial: bool = False) -> Trace:
    """Return a trace with one ten-second step."""
    trace = Trace(path, LANES, is_serial=is_serial)
    trace.step(1, START, START + 10, [Span(lane, name, START + begin, START + end) for lane, name, begin, end in spans])
    return trace


def tracks(trace: Trace) -> dict[str, list[Work]]:
    return check_trace({"displayTimeUnit": "ms", "traceEvents": json.loads(json.dumps(trace.events()))})


def seconds(works: list[Work]) -> list[tuple[str, float, float]]:
    return [(work.name, round(work.begin / 1e9, 6), round(work.end / 1e9, 6)) for work in works]


def test_a_file_shows_each_lane_on_a_track_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    spans = [("h2d", "a", -0.5, 1.0), ("compute", "forward a", 1.0, 2.0), ("h2d", "b", 1.0, 3.0), ("update", "", 4, 5)]
    trace_of(spans, path).write()
    shown = read_trace(path)
    assert list(shown) == [*LANES, "steps"]  # compute first, and a track for an idle lane
    assert seconds(shown["h2d"]) == [("a", 0.0, 1.5), ("b", 1.5, 3.5)]  # time 0 is the begin of the first work
    assert seconds(shown["compute"]) == [("forward a", 1.5, 2.5)]
    assert seconds(shown["update"]) == [("update", 4.5, 5.5)]  # every event has a name
    assert seconds(shown["steps"]) == [("step 1", 0.5, 10.5)]
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json.gz"]


def test_work_within_work_is_cut_out_of_it() -> None:
    spans = [("compute", "backward a", 1, 6), ("compute", "update a", 2, 3), ("compute", "update b", 5, 6)]
    assert seconds(tracks(trace_of(spans))["compute"]) == [
        ("backward a", 1, 2),
        ("update a", 2, 3),
        ("backward a", 3, 5),
        ("update b", 5, 6),
    ]


def test_where_one_thread_does_everything_nothing_is_shown_side_by_side() -> None:
    spans = [("compute", "backward a", 1, 6), ("d2h", "a", 4, 5)]
    beside, serial = (tracks(trace_of(spans, is_serial=value)) for value in (False, True))
    assert seconds(beside["compute"]) == [("backward a", 1, 6)]
    assert seconds(serial["compute"]) == [("backward a", 1, 4), ("backward a", 5, 6)]
    assert seconds(beside["d2h"]) == seconds(serial["d2h"]) == [("a", 4, 5)]


times = st.floats(0, 10).map(lambda time_s: round(time_s, 6))  # trace resolution: microseconds


@given(st.lists(st.tuples(st.sampled_from(LANES), st.sampled_from("abc"), times, times), max_size=12), st.booleans())
def test_any_spans_come_out_apart_with_all_their_time(spans: list[Any], is_serial: bool) -> None:
    spans = [(lane, name, min(one, other), max(one, other)) for lane, name, one, other in spans]
    shown = tracks(trace_of(spans, is_serial=is_serial))
    shown.pop("steps")
    groups = [list(shown)] if is_serial else [[lane] for lane in LANES]
    for lanes in groups:
        works = sorted((work for lane in lanes for work in shown[lane]), key=lambda work: work.begin)
        assert all(one.end <= other.begin for one, other in itertools.pairwise(works))
        edges = sorted({time for lane, _, *ends in spans if lane in lanes for time in ends})
        union = sum(
            end - begin
            for begin, end in itertools.pairwise(edges)
            if any(lane in lanes and first <= begin and end <= last for lane, _, first, last in spans)
        )
        assert sum(work.end - work.begin for work in works) / 1e9 == pytest.approx(union, abs=1e-6)


def run_of(num_steps: int, seconds: float = 1.0, slowest: int = 0) -> Trace:
    """Return a trace with fetches before each step, updates into the next step, and one slower step."""
    trace = Trace(Path("unused"), LANES, is_serial=False)
    for step in range(num_steps):
        begin = START + 1.5 * seconds * step
        if step:
            trace.mark("evaluation", begin - 0.5 * seconds, begin - 0.3 * seconds)
        spans = [("h2d", -0.2, 0.1), ("compute", 0.1, 0.9), ("update", -0.1, 0.2)]
        moved = [Span(lane, f"{lane} {step + 1}", begin + a * seconds, begin + b * seconds) for lane, a, b in spans]
        trace.step(step + 1, begin, begin + seconds * (1.1 if step + 1 == slowest else 1.0), moved)
    return trace


def steps_of(shown: dict[str, list[Work]]) -> list[int]:
    return [
        int(work.name[5:]) for work in shown["steps"] if work.name.startswith("step ") and work.name[5:].isdecimal()
    ]


@pytest.mark.parametrize("num_steps", [1, FIRST_STEPS, FIRST_STEPS + 1, FIRST_STEPS + LAST_STEPS])
def test_a_short_run_is_kept_whole_and_as_it_was(num_steps: int) -> None:
    shown = tracks(run_of(num_steps))
    assert steps_of(shown) == list(range(1, num_steps + 1))
    assert not [work for work in shown["steps"] if "left out" in work.name]
    assert (shown["steps"][-1].end - shown["steps"][0].begin) / 1e9 == pytest.approx(1.5 * num_steps - 0.5)


def test_a_long_run_keeps_its_first_and_last_steps_close_together() -> None:
    shown = tracks(run_of(1000, slowest=500))
    assert steps_of(shown) == [1, 2, 3, 500, *range(991, 1001)], "and the slowest of the others"
    gaps = [work for work in shown["steps"] if "left out" in work.name]
    assert [gap.name for gap in gaps] == [  # up to the evaluations before steps 500 and 991
        "steps 4 to 499 left out (744.000 s)",
        "steps 501 to 990 left out (734.900 s)",
    ]
    assert all(0 < gap.end - gap.begin < 0.5e9 for gap in gaps)
    assert shown["steps"][-1].end < (FIRST_STEPS + LAST_STEPS + 2) * 1.5e9
    # related work moves together: the fetch for a step still begins 0.2 seconds earlier
    for step, fetch in zip(steps_of(shown), shown["h2d"], strict=True):
        (mark,) = (work for work in shown["steps"] if work.name == f"step {step}")
        assert fetch.name == f"h2d {step}"
        assert mark.begin - fetch.begin == pytest.approx(0.2e9, abs=2)
    sizes = [len(gzip.compress(json.dumps(run_of(n).events()).encode())) for n in (100, 10_000)]
    assert sizes[1] < 1.1 * sizes[0]


def test_one_step_left_out_takes_nothing_away_that_is_shown() -> None:
    shown = tracks(run_of(FIRST_STEPS + LAST_STEPS + 2, slowest=FIRST_STEPS + 1))
    assert steps_of(shown) == [1, 2, 3, 4, *range(6, 16)]
    assert [work.name for work in shown["steps"] if "left out" in work.name] == ["step 5 left out (1.400 s)"]


def test_a_file_that_cannot_be_written_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_text("before")

    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        trace_of([], path).write()
    assert path.read_text() == "before"
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json.gz"]
