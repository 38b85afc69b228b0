"""A training step on throttled lanes, against an ideal schedule on equal lanes and against serial execution.

Throttles make h2d, d2h and update each take a given share of the step's compute. An engine without throttle and
prefetch measures the compute, in turns with the throttled engine, so a busy machine slows both. The ideal knows the
throttles, the sizes and the measured seconds of every use, and nothing of the engine. Times are those of step blocks
with no pending work at the start and end (`offload/extras/tools/benches/blocks.py`).

    python -m benchmarks.overlap --json > benchmarks/results/overlap.json     # about twelve minutes
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.alone import main_of
from benchmarks.ideal import Ideal, Unit, Use, Work, ideal, serial_seconds
from offload.app.config.command_line import run_command
from offload.extras.tools.benches import step
from offload.extras.tools.benches.report import Result

SUMMARY = "a training step whose lanes are throttled, on one thread, against an ideal schedule"
SIZES = {"hidden": 256, "layers": 16, "vocabulary": 512, "sequence": 128, "batch": 4}
PAIRS = 3  # rounds: a few baseline steps, and a block of the throttled engine
RATIOS = (0.25, 0.5, 1.0, 2.0)
MAX_OVER_IDEAL = 1.08
MAX_OVER_LARGEST_LANE = 1.10

LEARNING_RATE = 1e-8  # small, so that the gradient norm and the corrections stay constant
STATE_BYTES = 24  # per parameter: master and two moments, read and written; half is copied each way
WEIGHT_BYTES = {"fp32": 4, "bf16": 2}  # per parameter: the weight copied to the device, and the gradient copied back
NUM_GRADIENT_BUFFERS = 2
RESIDENT_SHARE = 16  # a unit below the largest unit divided by this stays on the device
UNTHROTTLED = dict.fromkeys(("h2d", "d2h", "update"), 10**15)  # bytes per second: lanes on threads, without waits

NUM_BASELINE_STEPS = 2  # in a round, after one dropped step
NUM_WARM_STEPS = 3  # steps of the throttled engine before the first block
NUM_SERIAL_STEPS = 2  # after one dropped step
MAX_SERIAL_S = 10.0  # a longer serial step is not measured, but summed from its parts

Make = Callable[..., Any]  # keyword arguments of Engine -> an engine
Clock = Callable[[], float]


@dataclass(frozen=True)
class Case:
    """One row: lane load (lane seconds over compute seconds), and the clipping mode.

    max_grad_norm: as a share of the baseline norm; None for no clipping, inf for clipping that never applies.
    """

    ratio: float
    name: str
    mode: str
    max_grad_norm: float | None

    def settings(self, norm: float) -> dict[str, Any]:
        """Return the engine arguments for gradients with this norm."""
        if self.max_grad_norm is None:
            return {"max_grad_norm": None}
        return {"clip": self.mode, "max_grad_norm": min(self.max_grad_norm * norm, 1e9)}


def cases(ratios: Iterable[float]) -> list[Case]:
    """Return the rows: gradients clipped to a half, as early in training, and gradients that are never clipped."""
    kinds = (
        ("no clipping", "none", None),
        ("deferred", "deferred", 0.5),
        ("speculative, corrected", "speculative", 0.5),
        ("speculative, nothing to correct", "speculative", math.inf),
    )
    return [Case(ratio, *kind) for ratio in ratios for kind in kinds]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the step options (the first --precision counts), and those of this benchmark."""
    step.add_arguments(parser)
    parser.set_defaults(**SIZES, pairs=PAIRS, threads=1)
    parser.add_argument(
        "--ratios",
        type=float,
        nargs="+",
        default=RATIOS,
        help="seconds that each throttled lane takes in a step over those of its compute (default 0.25 0.5 1 2)",
    )
    parser.add_argument(
        "--update", choices=("cpu", "device"), default="cpu", help="where states are updated (default %(default)s)"
    )
    parser.add_argument("--prefetch", type=int, default=3, help="units ahead; one slot more (default %(default)s)")


def run(arguments: argparse.Namespace) -> list[Result]:
    """Measure, and return one result for each ratio and clipping mode."""
    from offload.engine.engine import Engine
    from offload.optim.adamw import AdamW
    from offload.tiers.placement import Placement

    precision = arguments.precision[0]
    threads, batches = step.begin(arguments)

    def make(**settings: Any) -> Any:
        return Engine(
            step.llama(arguments),
            optimizer=AdamW(lr=LEARNING_RATE),
            placement=Placement(parameters="cpu", optimizer="cpu"),
            precision=precision,
            update=arguments.update,
            recompute="always",
            head_chunk_bytes=None,
            **settings,
        )

    steps = [{"input_ids": ids, "labels": ids} for ids in batches]
    bench = Bench(make, steps, arguments.prefetch, precision, arguments.steps, arguments.pairs, arguments.update)
    try:
        return [_shown(bench.row(case, threads)) for case in cases(arguments.ratios)]
    finally:
        bench.close()


def _shown(result: Result) -> Result:
    more = result.details
    print(
        f"{result.name}: {result.value:.0f} ms, {more['over_ideal']:.3f} of the ideal, "
        f"{more['over_largest_lane']:.3f} of the largest lane, {result.ratio or 0:.2f} times as fast as serial",
        file=sys.stderr,
    )
    return result


# -- what is measured ----------------------------------------------------------------------------------------


@dataclass
class Steps:
    """Results of consecutive steps of one engine. `seconds`: of a step, one number for each block."""

    seconds: list[float] = field(default_factory=list)
    uses: list[list[Use]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    corrected: list[int] = field(default_factory=list)
    busy: list[dict[str, float]] = field(default_factory=list)
    exposed: list[dict[str, float]] = field(default_factory=list)


class Bench:
    """Alternating engines: the baseline (serial, no throttle), which stays open, and one engine for each row.

    `make(**settings)` makes an engine; `batches` are used in a cycle.
    """

    def __init__(
        self,
        make: Make,
        batches: Sequence[Any],
        prefetch: int,
        precision: str,
        num_steps: int,
        num_pairs: int,
        update: str = "cpu",
        clock: Clock = time.perf_counter,
    ) -> None:
        self._make, self._prefetch, self._precision, self._clock = make, prefetch, precision, clock
        self._streams = update == "device"
        self._batches = itertools.cycle(batches)
        self._num_steps, self._num_pairs = num_steps, num_pairs
        probe = make(prefetch=prefetch, throttle=UNTHROTTLED, max_grad_norm=None)
        try:
            self._steps(probe, Steps(), 1, dropped=1)
            self._moved = {"h2d": probe.counters.h2d_bytes, "d2h": probe.counters.d2h_bytes}
        finally:
            probe.close()
        self._baseline = make(prefetch=0, throttle=None, max_grad_norm=None)
        self._steps(self._baseline, Steps(), 1, dropped=0)
        self._num_parameters = num_parameters(self._baseline.model, self._baseline.spans)
        self._moved["update"] = self._update_bytes(sum(self._num_parameters.values()))

    def close(self) -> None:
        """Close the open engine."""
        self._baseline.close()

    def row(self, case: Case, threads: int = 1) -> Result:
        """Measure one row."""
        before = self._compute(Steps())
        compute_s = sum(use.seconds for use in median_uses(before.uses))
        throttle = bandwidths(self._moved, case.ratio * compute_s)
        settings = {"throttle": throttle, **case.settings(statistics.median(before.norms))}
        engine = self._make(prefetch=self._prefetch, **settings)
        compute, measured = Steps(), Steps()
        try:
            for number in range(self._num_pairs):
                self._compute(compute)
                self._steps(engine, measured, self._num_steps, dropped=0 if number else NUM_WARM_STEPS)
            self._compute(compute)
            h2d_bytes = engine.counters.h2d_bytes
        finally:
            engine.close()

        uses = median_uses(compute.uses)
        num_corrected = round(statistics.median(measured.corrected))
        work = self._work(uses, throttle, case.mode, num_corrected)
        plain_sum_s = serial_seconds(work)
        serial_s = self._serial(settings) if plain_sum_s <= MAX_SERIAL_S else None
        result = assemble(case, measured, work, serial_s, self._num_steps)
        result.details |= {
            "threads": threads,
            "precision": self._precision,
            "steps_in_a_block": self._num_steps,
            "pairs": self._num_pairs,
            "prefetch": self._prefetch,
            "update": "device" if self._streams else "cpu",
            "max_grad_norm": settings["max_grad_norm"],
            "throttle": throttle,
            "h2d_bytes": h2d_bytes,
            "d2h_bytes": self._moved["d2h"],
            "update_bytes": self._moved["update"],
        }
        return result

    def _compute(self, into: Steps) -> Steps:
        return self._steps(self._baseline, into, NUM_BASELINE_STEPS, dropped=1, traced=True)

    def _serial(self, settings: Mapping[str, Any]) -> float:
        engine = self._make(prefetch=0, **settings)
        try:
            return statistics.median(self._steps(engine, Steps(), NUM_SERIAL_STEPS, dropped=1).seconds)
        finally:
            engine.close()

    def _steps(self, engine: Any, into: Steps, count: int, dropped: int, traced: bool = False) -> Steps:
        for _ in range(dropped):
            engine.step(next(self._batches))
        engine.finish()
        begin = self._clock()
        for _ in range(count):
            result = engine.step(next(self._batches))
            into.norms.append(result.grad_norm)
            into.corrected.append(getattr(result, "corrected", 0))
            into.busy.append({lane: taken.busy_seconds for lane, taken in result.lanes.items()})
            into.exposed.append({lane: taken.exposed_seconds for lane, taken in result.lanes.items()})
            if traced:
                into.uses.append(compute_uses(engine.spans, self._num_parameters))
        engine.finish()
        into.seconds.append((self._clock() - begin) / count)
        return into

    def _update_bytes(self, number: int) -> int:
        """Return the bytes that an update of `number` parameters reads and writes, gradients included."""
        return (STATE_BYTES + WEIGHT_BYTES[self._precision]) * number

    def _work(self, uses: Sequence[Use], throttle: Mapping[str, float], mode: str, num_corrected: int) -> Work:
        sizes = {name: WEIGHT_BYTES[self._precision] * number for name, number in self._num_parameters.items()}
        units = {
            name: Unit(
                size=sizes[name],
                fetch_s=sizes[name] / throttle["h2d"],
                land_s=sizes[name] / throttle["d2h"],
                update_s=self._update_bytes(number) / throttle["update"],
                correct_s=self._update_bytes(number) / throttle["update"],
                up_s=(STATE_BYTES // 2 * number + sizes[name]) / throttle["h2d"] if self._streams else 0.0,
                down_s=STATE_BYTES // 2 * number / throttle["d2h"] if self._streams else 0.0,
            )
            for name, number in self._num_parameters.items()
        }
        order = list(dict.fromkeys(use.unit for use in uses if use.unit is not None))
        capacity = capacity_bytes([sizes[name] for name in order], self._prefetch + 1)
        return Work(uses, units, capacity, mode, NUM_GRADIENT_BUFFERS, num_corrected)


# -- from measurements to a row, pure --------------------------------------------------------------------------


def num_parameters(model: Any, spans: Iterable[Any]) -> dict[str, int]:
    """Return the parameter count of each streamed unit, by its name in the step's spans; small units stay on the
    device.
    """
    names = dict.fromkeys(span.name.partition(" ")[2] for span in spans if span.lane == "compute")
    modules = dict(model.named_modules())
    sizes = {name: sum(p.numel() for p in modules[name].parameters()) for name in names if name in modules}
    return {name: size for name, size in sizes.items() if size * RESIDENT_SHARE >= max(sizes.values())}


def compute_uses(spans: Iterable[Any], streamed: Iterable[str]) -> list[Use]:
    """Return the compute of a serial step as uses: each forward and backward, and the code between them (the model's
    own code, the loss).

    Inline work of other lanes on the compute thread is not compute. Host work before the first use and after the last
    use does not count either.
    """
    spans, known = sorted(spans, key=lambda span: span.begin), set(streamed)
    others = [span for span in spans if span.lane != "compute"]

    def own_seconds(begin: float, end: float) -> float:
        return max(0.0, end - begin - sum(max(0.0, min(end, o.end) - max(begin, o.begin)) for o in others))

    uses: list[Use] = []
    end: float | None = None
    for span in spans:
        if span.lane != "compute":
            continue
        if end is not None:
            uses.append(Use(own_seconds(end, span.begin)))
        action, _, name = span.name.partition(" ")
        unit = name if name in known else None
        uses.append(Use(own_seconds(span.begin, span.end), unit, action == "backward" and unit is not None))
        end = span.end if end is None else max(end, span.end)
    return uses


def median_uses(steps: Sequence[Sequence[Use]]) -> list[Use]:
    """Return the uses of a step, each with the median seconds over the steps."""
    return [
        Use(statistics.median(use.seconds for use in same), same[0].unit, same[0].is_backward)
        for same in zip(*steps, strict=True)
    ]


def bandwidths(moved: Mapping[str, int], seconds: float) -> dict[str, int]:
    """Return the bandwidth at which each lane takes `seconds` for the bytes of a step."""
    return {lane: max(1, round(num_bytes / seconds)) for lane, num_bytes in moved.items()}


def capacity_bytes(sizes: Sequence[int], num_slots: int) -> int:
    """Return the device capacity for streaming: the largest sum of `num_slots` consecutive units."""
    return max(sum(sizes[i : i + num_slots]) for i in range(max(1, len(sizes) - num_slots + 1)))


def assemble(case: Case, measured: Steps, work: Work, serial_s: float | None, num_steps: int) -> Result:
    """Make a row from blocks of `num_steps` steps. `serial_s` is the measured time of a serial step; None uses the sum
    of the parts.
    """
    best: Ideal = ideal(work, num_steps, as_block=True)
    seconds = statistics.median(measured.seconds)
    plain_sum_s = serial_seconds(work)
    serial = plain_sum_s if serial_s is None else serial_s
    largest = max(best.busy_s, key=lambda lane: best.busy_s[lane])
    largest_s = best.busy_s[largest]
    details = {
        "lane_ratio": case.ratio,
        "mode": case.mode,
        "corrected": work.num_corrected,
        "measured_seconds": seconds,
        "compute_seconds": sum(use.seconds for use in work.uses),
        "ideal_seconds": best.seconds,
        "largest_lane": largest,
        "largest_lane_seconds": largest_s,
        "serial_seconds": serial,
        "serial_is_measured": serial_s is not None,
        "serial_sum_seconds": plain_sum_s,
        "over_ideal": seconds / best.seconds,
        "over_largest_lane": seconds / largest_s,
        "within_ideal": seconds <= MAX_OVER_IDEAL * best.seconds,
        "within_largest_lane": None,
        "busy_seconds": _median_by_lane(measured.busy),
        "exposed_seconds": _median_by_lane(measured.exposed),
        "ideal_busy_seconds": best.busy_s,
        "best": min(measured.seconds) * 1e3,
    }
    if best.seconds <= MAX_OVER_LARGEST_LANE * largest_s:
        details["within_largest_lane"] = seconds <= MAX_OVER_LARGEST_LANE * largest_s
    name = f"ratio {case.ratio:g}, {case.name}"
    return Result(name, seconds * 1e3, "ms", "serial execution", serial / seconds, details)


def _median_by_lane(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    lanes = dict.fromkeys(lane for step in steps for lane in step)
    return {lane: statistics.median(step.get(lane, 0.0) for step in steps) for lane in lanes}


if __name__ == "__main__":
    run_command(main_of(sys.modules[__name__]))
