"""Steps of an engine on an accelerator, and the ideal schedule for its measured lane times.

The ideal (`benchmarks/ideal.py`) receives the compute time of each unit use, the time of each copy and update, and the
device capacity. All times come from the accelerator's clock, the fastest over the steps, so delays caused by the engine
are not in the ideal.
"""

from __future__ import annotations

import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.ideal import Ideal, Unit, Use, Work, ideal
from tests.engine.inside import parts_of

NUM_GRADIENT_BUFFERS = 2


@dataclass
class Block:
    """Consecutive steps with no pending work at the start and end, as averages.

    seconds: of a step. host_seconds: busy time of the launching threads (the caller and autograd) in a step.
    device_seconds: compute time of the device, where known. spans: of each step.
    """

    seconds: float
    host_seconds: float
    device_seconds: float | None
    corrected: int
    exposed: Mapping[str, float]
    spans: list[list[Any]] = field(repr=False)


def run_block(
    engine: Any, batches: Iterable[Any], num_steps: int, device_seconds: Callable[[], float] | None = None
) -> Block:
    """Run `num_steps` steps on batches. `device_seconds` returns the device compute time so far."""
    taken = iter(batches)
    spans: list[list[Any]] = []
    results: list[Any] = []
    engine.finish()
    host, device, begin = launching_seconds(), device_seconds() if device_seconds else 0.0, time.perf_counter()
    for _ in range(num_steps):
        results.append(engine.step(next(taken)))
        spans.append([span for span in engine.spans if span.begin >= begin])  # only spans within the block
    engine.finish()
    seconds = (time.perf_counter() - begin) / num_steps
    exposed = {
        lane: statistics.mean(result.lanes[lane].exposed_seconds for result in results)
        for lane in results[0].lanes
        if lane != "compute"
    }
    return Block(
        seconds,
        (launching_seconds() - host) / num_steps,
        (device_seconds() - device) / num_steps if device_seconds else None,
        round(statistics.median(result.corrected for result in results)),
        exposed,
        spans,
    )


def launching_seconds() -> float:
    """Return the CPU time of the launching threads so far: the main thread and autograd's."""
    ticks = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            name, (user, system) = _times((task / "stat").read_text())
        except FileNotFoundError:  # the thread has ended
            continue
        if int(task.name) == threading.main_thread().native_id or name.startswith("pt_autograd"):
            ticks += user + system
    return ticks / os.sysconf("SC_CLK_TCK")


def _times(stat: str) -> tuple[str, tuple[int, int]]:
    name, _, rest = stat.partition("(")[2].rpartition(")")
    user, system = rest.split()[11:13]
    return name, (int(user), int(system))


def seen_work(
    steps: Sequence[Sequence[Any]],
    sizes: Mapping[str, int],
    capacity_bytes: float,
    mode: str,
    num_corrected: int = 0,
    compute_s: float | None = None,
) -> Work:
    """Return the input of the ideal from the spans of steps. `sizes`: bytes of the streamed units. `compute_s`: total
    compute, where known; less than the spans where the host was late.
    """
    fastest: dict[tuple[str, str], float] = {}
    for span in itertools.chain.from_iterable(steps):
        seconds, key = span.end - span.begin, (span.lane, span.name)
        fastest[key] = min(seconds, fastest.get(key, seconds))
    uses = [seen_uses(spans, sizes) for spans in steps]
    whole = [step for step in uses if len(step) == max(map(len, uses))]  # the first step records
    least = fastest_uses(whole)
    if compute_s is not None:
        scale = compute_s / sum(use.seconds for use in least)
        least = [Use(use.seconds * scale, use.unit, use.is_backward) for use in least]
    units = {
        name: Unit(
            size,
            fastest.get(("h2d", name), 0.0),
            fastest.get(("d2h", name), 0.0),
            fastest.get(("update", f"update {name}"), 0.0),
            fastest.get(("update", f"correct {name}"), fastest.get(("update", f"update {name}"), 0.0)),
        )
        for name, size in sizes.items()
    }
    return Work(least, units, max(capacity_bytes, *sizes.values()), mode, NUM_GRADIENT_BUFFERS, num_corrected)


def fastest_uses(steps: Sequence[Sequence[Use]]) -> list[Use]:
    """Return the uses of equal steps, each at its fastest."""
    return [
        Use(min(use.seconds for use in same), same[0].unit, same[0].is_backward) for same in zip(*steps, strict=True)
    ]


def seen_uses(spans: Sequence[Any], streamed: Container[str]) -> list[Use]:
    """Return the uses of a step in order. Consecutive operations on one unit are one use, such as a head in chunks."""
    compute = sorted((span for span in spans if span.lane == "compute"), key=lambda span: span.begin)
    uses = []
    for name, same in itertools.groupby(compute, key=lambda span: span.name.partition(" ")[2]):
        stretch = list(same)
        unit = name if name in streamed else None
        is_backward = any(span.name.startswith("backward ") for span in stretch)
        uses.append(Use(sum(span.end - span.begin for span in stretch), unit, unit is not None and is_backward))
    return uses


def streamed_sizes(engine: Any) -> dict[str, int]:
    """Return the weight bytes of each streamed unit."""
    return {
        unit.name: sum(r.weight_bytes for r in unit.regions) for unit in parts_of(engine).units if not unit.resident
    }


def best_schedule(engine: Any, blocks: Sequence[Block], compute_s: float | None = None) -> Ideal:
    """Return the ideal schedule for blocks with equal step counts."""
    steps = [spans for block in blocks for spans in block.spans]
    corrected = round(statistics.median(block.corrected for block in blocks))
    capacity = parts_of(engine).slots.capacity_bytes
    work = seen_work(steps, streamed_sizes(engine), capacity, mode_of(engine), corrected, compute_s)
    return ideal(work, len(blocks[0].spans), as_block=True)


def mode_of(engine: Any) -> str:
    """Return the engine's clipping mode in the terms of the ideal."""
    updates = parts_of(engine).updates
    return "deferred" if updates.needs_norm else "speculative" if updates.clip == "speculative" else "none"


def num_parameters(engine: Any) -> int:
    """Return the parameter count of an engine, without padding."""
    return sum(info.numel for info in parts_of(engine).infos)


def described(block: Block, best: Ideal) -> dict[str, Any]:
    """Return the results of a block and its ideal."""
    return {
        "step_seconds": block.seconds,
        "ideal_seconds": best.seconds,
        "over_ideal": block.seconds / best.seconds,
        "ideal_busy_seconds": best.busy_s,
        "launching_seconds": block.host_seconds,
        "exposed_seconds": dict(block.exposed),
        "corrected": block.corrected,
    }
