"""Plans against engines: forecast and measured memory and step times, for the table in benchmarks/results/plan.md.

python -m benchmarks.plan_against_actual --out benchmarks/results/plan.json > benchmarks/results/plan.md   # 15 minutes

benchmarks/plan_memory.py compares bytes, benchmarks/step_times.py compares step times, all on one thread.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from benchmarks import harness, plan_memory, step_times
from offload.app.config.command_line import say
from offload.extras.plan.probe import probe
from offload.native import kernels

SUMMARY = "plans against engines: memory and step times"
QUICK = {"only": ["llama 1M rule=lomo", "no clipping"]}
MOST_ALLOCATED, MOST_HELD, MOST_TIME, MOST_MEDIAN_TIME = 0.02, 0.1, 0.2, 0.1
"""Bounds for the relative error: of an allocation, of memory that waits or is held by operations, of a step on
throttled links, and of the median step.
"""
_OF_MEMORY = {"worst_ratio": MOST_ALLOCATED, "waiting_ratio": MOST_HELD, "operations_ratio": MOST_HELD}
_Row = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--only", nargs="+", metavar="PART", help="configurations in whose names one of these is")


def run(arguments: argparse.Namespace) -> harness.Page:
    """Compare all configurations, or the chosen ones, on one thread."""
    torch.set_num_threads(1)
    kernels.set_threads(1)

    def rows(cases: Sequence[Any], compare: Callable[[Any], dict[str, Any]]) -> list[_Row]:
        found: list[_Row] = []
        for case in cases:
            if arguments.only is None or any(part in str(case) for part in arguments.only):
                found.append(compare(case))
                say(str(case))
        return found

    with tempfile.TemporaryDirectory() as folder:
        hardware = probe("cpu", (folder,), refresh=True, cache_dir=Path(folder) / "rates")
        memory = rows(plan_memory.CASES, plan_memory.compare)
        times = rows(step_times.CASES, lambda case: step_times.compare(case, folder, hardware))
    found = {"rates": asdict(hardware.rates), "memory": memory, "step_times": times}
    return harness.Page(document(found), found)


def document(found: _Row) -> str:
    """Return the results as Markdown."""
    return "\n".join(
        [
            "# Plans against engines",
            "",
            "Made by `python -m benchmarks.plan_against_actual`; what is compared, and how, is in",
            "[the page of figures](../figures.md#plans-against-engines). What was told stands over what was",
            "held, or taken: above 1 is too much.",
            "",
            *_summary(found),
            "",
            "## Memory",
            "",
            _of_memory(found["memory"]),
            "",
            "## Step times",
            "",
            _of_times(found["step_times"]),
            "",
        ]
    )


def beyond(found: _Row) -> list[str]:
    """Return the forecasts beyond the bounds."""
    told = [
        f"{row['case']}: {key.removesuffix('_ratio')} {row[key]:.3f}"
        for row in found["memory"]
        for key, most in _OF_MEMORY.items()
        if abs(row[key] - 1) > most
    ]
    told += [f"{row['case']}: step {row['ratio']:.3f}" for row in found["step_times"] if _off(row) > MOST_TIME]
    median = statistics.median(map(_off, found["step_times"])) if found["step_times"] else 0.0
    return told + ([f"the median step: {median:.1%}"] if median > MOST_MEDIAN_TIME else [])


def _off(row: _Row) -> float:
    return abs(float(row["ratio"]) - 1)


def _summary(found: _Row) -> Iterator[str]:
    memory, times = found["memory"], found["step_times"]
    if memory:
        worst = [max(abs(row[key] - 1) for row in memory) for key in _OF_MEMORY]
        yield (
            f"- Memory of {len(memory)} configurations, at worst: an allocation {worst[0]:.1%} off, what waits "
            f"{worst[1]:.1%}, operations {worst[2]:.1%}."
        )
    if times:
        yield f"- Steps of {len(times)} configurations on throttled links: {_spread(times)}."
        free = [row["without_throttle"] for row in times]
        yield f"- The same without throttle, by the machine's rates as probed, which promises nothing: {_spread(free)}."
        load = max(row["load"] for row in times)
        yield f"- Load of the machine meanwhile, with the benchmark's own: up to {load:.1f}."
    yield f"- Beyond what is promised: {'; '.join(beyond(found)) or 'nothing'}."


def _spread(rows: Sequence[_Row]) -> str:
    off = [_off(row) for row in rows]
    return f"{statistics.median(off):.1%} off in the median, {max(off):.1%} at worst"


def _of_memory(rows: Sequence[_Row]) -> str:
    ratio = "told / held"
    titles = ["configuration", "allocated", ratio, "worst name", "waiting", ratio, "operations", ratio]
    return harness.table(titles, *map(_memory, rows))


def _memory(row: _Row) -> list[str]:
    def size(name: str) -> str:
        return f"{row[f'{name}_bytes'] / 2**20:.3g} MiB"

    return [
        row["case"],
        size("allocated"),
        f"{row['allocated_ratio']:.4f}",
        f"{row['worst_ratio']:.3f}" + ("" if row["worst_ratio"] == 1 else f" ({row['worst_allocation']})"),
        size("waiting"),
        f"{row['waiting_ratio']:.3f}",
        size("operations"),
        f"{row['operations_ratio']:.3f}",
    ]


def _of_times(rows: Sequence[_Row]) -> str:
    more = ["told / taken", "bound by"]
    return harness.table(
        ["configuration", "throttled", *more, "without throttle", *more],
        *([row["case"], *_time(row), *_time(row["without_throttle"])] for row in rows),
    )


def _time(row: _Row) -> list[str]:
    return [f"{1e3 * row['seconds']:.3g} ms", f"{row['ratio']:.3f}", row["bound_by"]]


if __name__ == "__main__":
    harness.begin(sys.modules[__name__])
