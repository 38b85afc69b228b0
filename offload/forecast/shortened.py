"""Models of many blocks that are alike, played with a few of them.

What a further block costs is the same from some number of blocks on: a step is played twice, with fewer and with fewer
still, and the line through both is followed up to the number that there is. What of the device's memory for weights
goes beyond the window of those that come early is kept in proportion.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from offload.forecast.played_step import Call, PlayedPlan, Simulated, simulate
from offload.lanes.played import Seconds

FEW, FEWER = 16, 10
"""Blocks that are played of the longest row of them. Over thirteen placements of a model of 80 layers the step was
within 3 % of that of all, in the median 0.0 %; what is worst, from disk, has rings that are large beside a few blocks.
"""
_WINDOW = 3
"""Blocks that are on the device at once where it has little room: one computes, two come."""


def simulate_few(calls: Sequence[Call], plan: PlayedPlan, seconds: Mapping[str, Seconds], num_steps: int) -> Simulated:
    """Return what `simulate` does, from steps with a few blocks of each row of those that are alike."""
    rows = _rows(calls, plan)
    longest = max(map(len, rows), default=0)
    with without_collector():
        if longest <= FEW:
            return simulate(calls, plan, seconds, num_steps)
        few, fewer = (
            simulate(*_shortened(calls, plan, rows, count / longest), seconds, num_steps) for count in (FEW, FEWER)
        )
    sizes = [_left(rows, count / longest) for count in (FEW, FEWER)]
    beyond = (sum(map(len, rows)) - sizes[0]) / (sizes[0] - sizes[1])

    def line(of: Callable[[Simulated], float]) -> float:
        return max(of(few), of(few) + beyond * (of(few) - of(fewer)))

    return Simulated(
        line(lambda found: found.seconds),
        {name: line(lambda found, name=name: found.busy_s[name]) for name in few.busy_s},  # type: ignore[misc]
        {name: line(lambda found, name=name: found.exposed_s[name]) for name in few.exposed_s},  # type: ignore[misc]
        line(lambda found: found.nvme_written_bytes),
        line(lambda found: found.network_bytes),
    )


def _rows(calls: Sequence[Call], plan: PlayedPlan) -> list[list[int]]:
    """Return the numbers of the calls of units that are alike, and lie alike, row by row. Pieces of a head are many
    calls of one unit, of which a step with fewer blocks has as many.
    """
    num_uses = Counter(region.index for call in calls for region in call.regions)
    rows: dict[tuple[object, ...], list[int]] = {}
    for number, call in enumerate(calls):
        key = [(r.numel, r.compute, plan.layout.of(r), r.index in plan.layout.staying) for r in call.regions]
        is_block = bool(key) and all(num_uses[region.index] == 1 for region in call.regions)
        rows.setdefault(
            (*key, call.backward_s, call.saved_bytes, call.graph_bytes) if is_block else (number,), []
        ).append(number)
    return [row for row in rows.values() if len(row) > FEW // 2]


def _left(rows: Sequence[Sequence[int]], share: float) -> int:
    return sum(len(_spread(row, share)) for row in rows)


def _spread(row: Sequence[int], share: float) -> list[int]:
    """Choose a share of a row, spread evenly over it: what is kept, or on disk, of some of them stays in proportion."""
    count = max(2, round(share * len(row)))
    return [row[round(place * (len(row) - 1) / (count - 1))] for place in range(count)]


def _shortened(
    calls: Sequence[Call], plan: PlayedPlan, rows: Sequence[Sequence[int]], share: float
) -> tuple[list[Call], PlayedPlan]:
    """Return a model with a share of each row."""
    left = {number for row in rows for number in _spread(row, share)}
    in_rows = {number for row in rows for number in row}
    chosen = [call for number, call in enumerate(calls) if number not in in_rows or number in left]
    used = {region.index for call in chosen for region in call.regions}
    gone = {region.index for call in calls for region in call.regions} - used
    regions = tuple(region for region in plan.regions if region.index not in gone)

    def streaming(its: Sequence[Call]) -> int:
        return sum({r.index: r.weight_bytes for c in its for r in c.regions if r.index not in plan.resident}.values())

    before, after, size = streaming(calls), streaming(chosen), plan.capacity_bytes
    largest = max(sum(r.weight_bytes for r in call.regions) for call in calls)
    window = min(size, _WINDOW * largest, after)
    if size < before and before > window:
        size = window + (size - window) * (after - window) // (before - window)
    return chosen, replace(plan, regions=regions, capacity_bytes=max(size, largest))


@contextmanager
def without_collector() -> Iterator[None]:
    """Within, Python does not look for cycles, of which a simulation leaves none: in a process that has imported torch
    it takes four fifths of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
