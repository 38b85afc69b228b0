"""An independent trace reader, based only on the format rules."""

from __future__ import annotations

import gzip
import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Work:
    """One piece of work on a track, in whole nanoseconds."""

    name: str
    begin: int
    end: int


def read_trace(path: Path) -> dict[str, list[Work]]:
    """Return the work on each track, sorted by begin. The tracks have the viewer order."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return check_trace(json.load(file))


def check_trace(trace: dict[str, Any]) -> dict[str, list[Work]]:
    """Check a trace against the Trace Event Format (object form), and return the work on each track.

    The format permits nested complete events. Our traces must not nest.
    """
    assert trace["displayTimeUnit"] in ("ms", "ns")
    names: dict[int, str] = {}
    order: dict[int, int] = {}
    works: dict[int, list[Work]] = {}
    for event in trace["traceEvents"]:
        assert event["pid"] == 1
        assert type(event["tid"]) is int
        track, args = event["tid"], event.get("args", {})
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                assert track not in names
                names[track] = args["name"]
            elif event["name"] == "thread_sort_index":
                order[track] = args["sort_index"]
            else:
                assert event["name"] == "process_name"
                assert args["name"]
            continue
        assert event["ph"] == "X"
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["cat"], str)
        begin, length = event["ts"], event["dur"]
        assert math.isfinite(begin)
        assert math.isfinite(length)
        assert begin >= 0
        assert length >= 0
        begin, length = round(begin * 1000), round(length * 1000)  # from microseconds
        works.setdefault(track, []).append(Work(event["name"], begin, begin + length))
    assert set(works) <= set(names) == set(order)
    assert len(set(order.values())) == len(order)
    for track in works.values():
        track.sort(key=lambda work: work.begin)
        assert all(one.end <= other.begin for one, other in itertools.pairwise(track))
    assert not works or min(track[0].begin for track in works.values()) == 0
    return {names[track]: works.get(track, []) for track in sorted(names, key=order.__getitem__)}
