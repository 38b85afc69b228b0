"""The figures of a run: its curves, its median and its slowest step by lane, its memory, and its bottleneck."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload.reporting.recorded import KeptStep, Recorded, number
from offload.telemetry.trace import FIRST_STEPS

SERIES = ("loss", "eval_loss", "lr", "grad_norm", "tokens_per_second", "step_seconds")
COMPUTE = "compute"
_OF_WARM = ("tokens_per_second", "step_seconds")  # curves that begin once a run is warm
_PLANNED = ("step_seconds", "lane_seconds", "bound_by", "tokens_per_second", "mfu", "alternatives")
_ON_THE_THREAD = 0.999  # of a lane's time is exposed, where compute's own thread does its work
_PEAKS = {"device": "peak_device_bytes", "cpu": "peak_host_bytes", "pinned": "peak_pinned_bytes"}


@dataclass(frozen=True)
class LaneShare:
    """What a lane did of a step, or of the median over steps: seconds."""

    name: str
    busy_s: float
    exposed_s: float
    """Compute waited for it so long, also for what held up its work."""

    @property
    def hidden_s(self) -> float:
        """It worked so long while compute did not wait for it."""
        return max(0.0, self.busy_s - self.exposed_s)


@dataclass(frozen=True)
class StepFigure:
    """One step that stands for others."""

    step: int
    seconds: float
    lanes: tuple[LaneShare, ...]
    """Compute first; those that did nothing are left out."""
    shown: KeptStep | None
    """The step of the trace whose time is nearest, None without a trace."""


@dataclass(frozen=True)
class TierFigure:
    """A tier's memory, in bytes."""

    name: str
    planned_bytes: int
    budget_bytes: int | None
    peak_bytes: int | None
    """The highest of the run, None where it is not measured (files)."""
    allocations: tuple[tuple[str, int], ...]
    """Of the plan: name and bytes, the largest first."""


@dataclass(frozen=True)
class Binding:
    """Which lane is the bottleneck, over the medians of the steps: a step takes no less than its busiest lane."""

    lane: str
    limit_s: float
    """Seconds of a step in which that lane works."""
    step_s: float
    lanes: tuple[LaneShare, ...]
    outside_s: float
    """Of a step, outside the engine: batches, records."""
    is_serial: bool
    """Compute's own thread did the work of the lanes, one after the other."""

    @property
    def times_limit(self) -> float:
        """How often the limit goes into a step: 1 is a step that all else hides behind."""
        return self.step_s / self.limit_s if self.limit_s else 1.0


@dataclass(frozen=True)
class Figures:
    """All figures of a run's page. Seconds, bytes, tokens."""

    num_steps: int
    """The number of the last step."""
    num_asked: int | None
    """`train.steps`."""
    num_tokens: int
    series: Mapping[str, tuple[tuple[int, float | None], ...]]
    """By name of a field of metrics.jsonl: step and value, None where it was not finite."""
    tokens_per_second: float | None
    """The median over the warm steps."""
    median: StepFigure | None
    slowest: StepFigure | None
    binding: Binding | None
    tiers: tuple[TierFigure, ...]
    planned: Mapping[str, Any]
    """Of plan.json: step_seconds, lane_seconds, bound_by, tokens_per_second, mfu, alternatives, where it has them."""
    first_warm: int
    """The first step that medians count."""

    @classmethod
    def of(cls, run: Recorded) -> Figures:
        """Work them out."""
        warm = warm_steps(run.steps)
        timed = [fields for fields in warm if (number(fields, "step_seconds") or 0) > 0]
        by_seconds = sorted(timed, key=lambda fields: float(fields["step_seconds"]))
        asked = number(run.config, "train", "steps")
        first_warm = warm[0]["step"] if warm else 1
        rates = [rate for fields in warm if (rate := number(fields, "tokens_per_second")) is not None]
        return cls(
            num_steps=run.steps[-1]["step"] if run.steps else 0,
            num_asked=None if asked is None else int(asked),
            num_tokens=int(sum(number(fields, "tokens") or 0 for fields in run.steps)),
            series={name: _series(name, run.steps, first_warm) for name in SERIES},
            tokens_per_second=statistics.median(rates) if rates else None,
            median=_step_figure(by_seconds[(len(by_seconds) - 1) // 2], run.kept) if by_seconds else None,
            slowest=_step_figure(by_seconds[-1], run.kept) if by_seconds else None,
            binding=_binding(timed),
            tiers=_tiers(run.plan, run.steps),
            planned={key: run.plan[key] for key in _PLANNED if run.plan.get(key) is not None},
            first_warm=first_warm,
        )


def warm_steps(steps: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the steps after the first three (recording pass; fetches on demand; memory given out), or as many of the
    last as there are of such.
    """
    return steps[min(FIRST_STEPS, max(0, len(steps) - 1)) :]


def _series(name: str, steps: Sequence[Mapping[str, Any]], first_warm: int) -> tuple[tuple[int, float | None], ...]:
    begin = first_warm if name in _OF_WARM else 0
    return tuple(
        (fields["step"], number(fields, name)) for fields in steps if name in fields and fields["step"] >= begin
    )


def lane_shares(fields: Mapping[str, Any]) -> tuple[LaneShare, ...]:
    """Return the lanes of a line of metrics.jsonl that did or delayed something, compute first."""
    lanes = fields.get("lanes")
    shares = [
        LaneShare(name, number(each, "busy_seconds") or 0.0, number(each, "exposed_seconds") or 0.0)
        for name, each in (lanes.items() if isinstance(lanes, Mapping) else ())
    ]
    return tuple(
        sorted((each for each in shares if each.busy_s or each.exposed_s), key=lambda each: each.name != COMPUTE)
    )


def _step_figure(fields: Mapping[str, Any], kept: Mapping[int, KeptStep]) -> StepFigure:
    step, seconds = fields["step"], float(fields["step_seconds"])
    shown = kept.get(step)
    if shown is None and kept:
        warm = [each for each in kept.values() if each.number > FIRST_STEPS] or list(kept.values())
        shown = min(warm, key=lambda each: (abs(each.seconds - seconds), abs(each.number - step)))
    return StepFigure(step, seconds, lane_shares(fields), shown)


def _binding(steps: Sequence[Mapping[str, Any]]) -> Binding | None:
    shares = [{each.name: each for each in lane_shares(fields)} for fields in steps]
    names = dict.fromkeys(name for each in shares for name in each)
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
        statistics.median(float(fields["step_seconds"]) for fields in steps),
        lanes,
        statistics.median(outside) if outside else 0.0,
        bool(others) and all(each.exposed_s >= _ON_THE_THREAD * each.busy_s for each in others),
    )


def _tiers(plan: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> tuple[TierFigure, ...]:
    planned = plan.get("tiers")
    planned = planned if isinstance(planned, Mapping) else {}
    peaks = {
        tier: max(found)
        for tier, key in _PEAKS.items()
        if (found := [int(peak) for fields in steps if (peak := number(fields, key)) is not None])
    }
    names = dict.fromkeys([*planned, *(tier for tier, peak in peaks.items() if peak)])
    return tuple(_tier(name, planned.get(name, {}), peaks.get(name)) for name in names)


def _tier(name: str, held: Any, peak: int | None) -> TierFigure:
    budget = number(held, "budget_bytes")
    listed = held.get("allocations") if isinstance(held, Mapping) else None
    allocations = [
        (str(each.get("name")), int(size))
        for each in (listed if isinstance(listed, list) else ())
        if (size := number(each, "bytes")) is not None
    ]
    return TierFigure(
        name,
        int(number(held, "bytes") or 0),
        None if budget is None else int(budget),
        peak,
        tuple(sorted(allocations, key=lambda each: -each[1])),
    )
