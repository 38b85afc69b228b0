"""Compute the figures of a run: curves, median and slowest step by lane, memory, and bottleneck."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload.app.telemetry.trace import FIRST_STEPS
from offload.extras.tools.reporting.run_record import RunRecord, TracedStep, number, value_at, whole_number

SERIES = ("loss", "eval_loss", "lr", "grad_norm", "tokens_per_second", "step_seconds")
COMPUTE = "compute"
_OF_WARM = ("tokens_per_second", "step_seconds")  # curves starting after warm-up
_PLANNED = ("step_seconds", "lane_seconds", "bound_by", "tokens_per_second", "mfu", "alternatives")
_ON_THE_THREAD = 0.999  # minimum exposed share of a lane running on the compute thread
_PEAKS = {"device": "peak_device_bytes", "cpu": "peak_host_bytes", "pinned": "peak_pinned_bytes"}


@dataclass(frozen=True)
class LaneShare:
    """Lane times for one step, or medians over steps."""

    name: str
    busy_s: float
    exposed_s: float
    """Seconds compute waited for the lane, including time the lane itself was held up."""

    @property
    def hidden_s(self) -> float:
        """Busy seconds while compute was not waiting."""
        return max(0.0, self.busy_s - self.exposed_s)


@dataclass(frozen=True)
class StepFigure:
    """A representative step."""

    step: int
    seconds: float
    lanes: tuple[LaneShare, ...]
    """Lanes with work, compute first."""
    shown: TracedStep | None
    """Traced step with the nearest duration; None: no trace."""


@dataclass(frozen=True)
class TierFigure:
    """Memory on one tier, in bytes."""

    name: str
    planned_bytes: int
    budget_bytes: int | None
    peak_bytes: int | None
    """Peak over the run; None: not measured (disk)."""
    allocations: tuple[tuple[str, int], ...]
    """Planned (name, bytes), largest first."""


@dataclass(frozen=True)
class Binding:
    """Bottleneck lane, from medians over steps. A step takes at least as long as its busiest lane."""

    lane: str
    limit_s: float
    """Busy seconds of the bottleneck lane per step."""
    step_s: float
    lanes: tuple[LaneShare, ...]
    outside_s: float
    """Seconds per step outside the engine, such as batch preparation and logging."""
    is_serial: bool
    """True if the compute thread ran all lanes one after the other."""

    @property
    def times_limit(self) -> float:
        """Step time relative to the limit. 1: everything else is hidden."""
        if not self.limit_s:
            return 1.0
        return self.step_s / self.limit_s


@dataclass(frozen=True)
class Figures:
    """All figures for the report on one run."""

    num_steps: int
    """Number of the last step."""
    num_asked: int | None
    """Value of `train.steps`."""
    num_tokens: int
    series: Mapping[str, tuple[tuple[int, float | None], ...]]
    """(step, value) points by metrics.jsonl field. None: not finite."""
    tokens_per_second: float | None
    """Median over the warm steps."""
    median: StepFigure | None
    slowest: StepFigure | None
    binding: Binding | None
    tiers: tuple[TierFigure, ...]
    planned: Mapping[str, Any]
    """Fields from plan.json, if present: step_seconds, lane_seconds, bound_by, tokens_per_second, mfu, alternatives."""
    first_warm: int
    """First step included in medians."""

    @classmethod
    def of(cls, run: RunRecord) -> Figures:
        """Compute the figures."""
        warm = warm_steps(run.steps)
        timed = [fields for fields in warm if (number(fields, "step_seconds") or 0) > 0]
        by_seconds = sorted(timed, key=lambda fields: float(fields["step_seconds"]))
        first_warm = warm[0]["step"] if warm else 1
        rates = [rate for fields in warm if (rate := number(fields, "tokens_per_second")) is not None]
        num_steps = run.steps[-1]["step"] if run.steps else 0
        rate = statistics.median(rates) if rates else None
        median = slowest = None
        if by_seconds:
            # The lower one of two: a real step, not a mean of two.
            median = _step_figure(by_seconds[(len(by_seconds) - 1) // 2], run.traced_steps)
            slowest = _step_figure(by_seconds[-1], run.traced_steps)
        return cls(
            num_steps=num_steps,
            num_asked=whole_number(run.config, "train", "steps"),
            num_tokens=int(sum(number(fields, "tokens") or 0 for fields in run.steps)),
            series={
                name: tuple(
                    (fields["step"], number(fields, name))
                    for fields in run.steps
                    if name in fields and (name not in _OF_WARM or fields["step"] >= first_warm)
                )
                for name in SERIES
            },
            tokens_per_second=rate,
            median=median,
            slowest=slowest,
            binding=_binding(timed),
            tiers=_tiers(run.plan, run.steps),
            planned={key: run.plan[key] for key in _PLANNED if run.plan.get(key) is not None},
            first_warm=first_warm,
        )


def warm_steps(steps: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the steps after the first three, or the last step of a shorter run.

    The first three are the recording pass, a step with fetches on demand, and the step distributing spare memory.
    """
    return steps[min(FIRST_STEPS, max(0, len(steps) - 1)) :]


def lane_shares(fields: Mapping[str, Any]) -> tuple[LaneShare, ...]:
    """Return the lanes with busy or exposed time in a metrics.jsonl line, compute first."""
    lanes = fields.get("lanes")
    if not isinstance(lanes, Mapping):  # a damaged line
        return ()
    shares = [
        LaneShare(name, number(each, "busy_seconds") or 0.0, number(each, "exposed_seconds") or 0.0)
        for name, each in lanes.items()
    ]
    return tuple(
        sorted((each for each in shares if each.busy_s or each.exposed_s), key=lambda each: each.name != COMPUTE)
    )


def _step_figure(fields: Mapping[str, Any], traced_steps: Mapping[int, TracedStep]) -> StepFigure:
    step, seconds = fields["step"], float(fields["step_seconds"])
    shown = traced_steps.get(step)
    if shown is None and traced_steps:  # a trace keeps few steps
        warm = [each for each in traced_steps.values() if each.number > FIRST_STEPS] or list(traced_steps.values())
        shown = min(warm, key=lambda each: (abs(each.seconds - seconds), abs(each.number - step)))
    return StepFigure(step, seconds, lane_shares(fields), shown)


def _binding(steps: Sequence[Mapping[str, Any]]) -> Binding | None:
    shares = [{each.name: each for each in lane_shares(fields)} for fields in steps]
    names = dict.fromkeys(name for each in shares for name in each)  # no set: the order stays equal between reports
    if not names:
        return None
    none = LaneShare("", 0.0, 0.0)
    lanes = tuple(
        LaneShare(
            name,
            statistics.median(each.get(name, none).busy_s for each in shares),
            statistics.median(each.get(name, none).exposed_s for each in shares),
        )
        for name in names
    )
    # Neither compute nor a wait for a lane.
    outside = [
        max(0.0, float(fields["step_seconds"]) - each[COMPUTE].busy_s - sum(lane.exposed_s for lane in each.values()))
        for fields, each in zip(steps, shares, strict=True)
        if COMPUTE in each
    ]
    busiest = max(lanes, key=lambda each: each.busy_s)
    others = [each for each in lanes if each.name != COMPUTE and each.busy_s]
    return Binding(
        busiest.name,
        busiest.busy_s,
        statistics.median_low(float(fields["step_seconds"]) for fields in steps),  # that of the median step
        lanes,
        statistics.median(outside) if outside else 0.0,
        bool(others) and all(each.exposed_s >= _ON_THE_THREAD * each.busy_s for each in others),
    )


def _tiers(plan: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> tuple[TierFigure, ...]:
    planned = plan.get("tiers")
    if not isinstance(planned, Mapping):
        planned = {}
    peaks = {
        tier: max(tier_peaks)
        for tier, key in _PEAKS.items()
        if (tier_peaks := [int(peak) for fields in steps if (peak := number(fields, key)) is not None])
    }
    names = dict.fromkeys([*planned, *(tier for tier, peak in peaks.items() if peak)])
    return tuple(_tier(name, planned.get(name, {}), peaks.get(name)) for name in names)


def _tier(name: str, plan: Any, peak: int | None) -> TierFigure:
    listed = value_at(plan, "allocations")
    if not isinstance(listed, list):
        listed = []
    allocations = [(str(each.get("name")), int(size)) for each in listed if (size := number(each, "bytes")) is not None]
    return TierFigure(
        name,
        int(number(plan, "bytes") or 0),
        whole_number(plan, "budget_bytes"),
        peak,
        tuple(sorted(allocations, key=lambda each: -each[1])),
    )
