"""Forecast step times against an engine, on throttled lanes and without throttle: a part of
benchmarks/plan_against_actual.py.

With a throttle, each configuration runs in two engines. The first has no throttle and measures the compute of each unit
use, at its fastest. The second has throttled links, each busy for the configured seconds in a step. The forecast
receives the compute, the throttle and the plan. Without a throttle, the forecast uses the shapes and the rates from
`offload.extras.plan.probe`, like `plan`. The fastest block of steps counts, because other load only adds time.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch

from benchmarks.ideal import Use
from benchmarks.lanes import fastest_uses
from offload import LOMO, SGD, AdamW, Engine, Lion, Placement
from offload.engine.units.stages import STAGES, Stage
from offload.extras.plan.measure import BatchSpec, measure
from offload.extras.plan.timing import PlannedStep, Timing
from offload.extras.plan.workload import UnitWork, Workload
from offload.layout.sharding import Sharding
from offload.machine.hardware import Hardware, Rates
from offload.planning.device_updates import update_bytes
from offload.planning.settings import Settings
from tests.cases.stages import Twice
from tests.forecast.planned import LENGTH, ROWS, Stack, batches, loss_of, planned, work

WARM_STEPS = 5  # an engine distributes leftover device memory after the third step
LINKS = ("h2d", "d2h", "update", "nvme_read", "nvme_write")
FREE = 1e15
RATES = Rates(FREE, FREE, 2 * FREE, {"fp32": 1.0, "bf16": 1.0}, FREE, FREE, 0.0, FREE, FREE, FREE)
"""A machine with one floating point operation a second, so that work is in seconds, and with unlimited links below the
throttle.
"""
MACHINE = Hardware("throttled", "cpu", 1, None, 1 << 40, None, None, False, RATES)


@dataclass(frozen=True)
class Case:
    """A configuration: engine settings and placement, minimum busy seconds of each link in a step, clipping, width and
    depth of the model, whether block matrices are frozen, and stages of one's own, by name.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    placement: Mapping[str, Any] = field(default_factory=dict)
    lane_s: float = 0.15
    clips: bool = True
    width: int = 96
    depth: int = 6
    is_frozen: bool = False
    stages: Mapping[str, type[Stage]] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def model(self) -> Stack:
        """Return the model, always with equal weights."""
        torch.manual_seed(0)
        return self.prepared(Stack(self.width, self.depth))

    def prepared(self, model: Stack) -> Stack:
        """Freeze the frozen parameters."""
        for parameter in model.blocks.parameters():
            parameter.requires_grad_(not self.is_frozen or parameter.dim() < 2)
        return model

    def engine_settings(self, throttle: Mapping[str, float] | None, **more: Any) -> Settings:
        """Return the engine settings."""
        its = {"optimizer": AdamW(lr=1e-8), "clip": "deferred", **self.settings, **more}
        return Settings(throttle=throttle, placement=Placement(**self.placement), **its)

    def throttle(self) -> dict[str, float]:
        """Return the bandwidths at which each link is busy for `lane_s`."""
        regions = planned(self.model(), self.engine_settings(dict.fromkeys(LINKS, FREE))).structure.regions
        weights = sum(region.weight_bytes for region in regions)
        states = sum(region.update_bytes(region.numel) for region in regions)
        moved = (2 * weights, weights, update_bytes(regions, Sharding()), states // 2, states // 2)
        return {link: num_bytes / self.lane_s for link, num_bytes in zip(LINKS, moved, strict=True)}


NVME, DISK_WEIGHTS = {"optimizer": "nvme"}, {"optimizer": "nvme", "parameters": "nvme"}
CASES = (
    Case("deferred"),
    Case("clip auto", {"clip": "auto"}),
    Case("no clipping", {"max_grad_norm": None}),
    Case("speculative, corrected", {"clip": "speculative", "max_grad_norm": 1e-3}),
    Case("speculative, nothing to correct", {"clip": "speculative", "max_grad_norm": 1e6}, clips=False),
    Case("a step late", {"delay": 1}),
    Case("bf16", {"precision": "bf16"}),
    Case("bf16, no clipping", {"precision": "bf16", "max_grad_norm": None}),
    Case("2 micro-batches", {"micro_batch_size": ROWS // 2}),
    Case("4 micro-batches, bf16", {"micro_batch_size": ROWS // 4, "precision": "bf16"}),
    Case("kept graphs", {"recompute": "never"}),
    Case("kept graphs, 2 micro-batches", {"recompute": "never", "micro_batch_size": ROWS // 2}),
    Case("inputs on cpu", {}, {"activations": "cpu"}),
    Case("inputs on cpu, 2 micro-batches", {"micro_batch_size": ROWS // 2}, {"activations": "cpu"}),
    Case("inputs on nvme", {}, {"activations": "nvme"}),
    Case("optimizer on nvme", {}, NVME),
    Case("optimizer on nvme, no clipping", {"max_grad_norm": None}, NVME),
    Case("all on nvme", {}, DISK_WEIGHTS),
    Case("all on nvme, bf16", {"precision": "bf16"}, DISK_WEIGHTS),
    Case("all and gradients on nvme", {}, {**DISK_WEIGHTS, "gradients": "nvme"}),
    Case("weights on the device", {}, {"parameters": "device"}),
    Case("update on the device", {"update": "device"}),
    Case("update on the device, speculative", {"update": "device", "clip": "speculative", "max_grad_norm": 1e-3}),
    Case("one ahead", {"prefetch": 1}),
    Case("none ahead", {"prefetch": 0}),
    Case("a device of 3 MiB", {}, {"device_memory": "3MiB"}, width=128),
    Case("Lion", {"optimizer": Lion(lr=1e-8)}),
    Case("SGD", {"optimizer": SGD(lr=1e-8)}),
    Case("AdamW in int8", {"optimizer": AdamW(lr=1e-8, states="int8")}),
    Case("LOMO", {"optimizer": LOMO(lr=1e-8)}),
    Case("a tiny model", width=16, depth=4),
    Case("24 blocks", width=64, depth=24, lane_s=0.4),
    Case("30 M parameters", width=720, depth=7, lane_s=1.0),
    Case("a frozen base", width=192, is_frozen=True),
    Case("a frozen base in int8", {"frozen_weights": "int8"}, width=192, is_frozen=True),
    Case("a frozen base in nf4", {"frozen_weights": "nf4"}, width=192, is_frozen=True),
    Case("compute and lanes alike", {"clip": "deferred"}, lane_s=0.06, width=192),
    Case("a stage of one's own", stages={"twice": Twice}),
)


class Told(Stack):
    """The model with the loss, for a forecast on `meta`."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return loss_of(super().forward(input_ids), {"x": labels})


def compare(case: Case, nvme_dir: str, hardware: Hardware, num_blocks: int = 3) -> dict[str, Any]:
    """Measure and forecast the steps of a case. `hardware`: this machine, for steps without throttle."""
    with mock.patch.dict(STAGES._objects):  # the stages of the case leave again
        for name, stage in case.stages.items():
            STAGES.register(name, stage)
        return _compare(case, nvme_dir, hardware, num_blocks)


def _compare(case: Case, nvme_dir: str, hardware: Hardware, num_blocks: int) -> dict[str, Any]:
    if "nvme" in case.placement.values():
        case = replace(case, placement={**case.placement, "nvme_dir": nvme_dir})
    uses, settings = compute_of(case), case.engine_settings(case.throttle())
    its = planned(case.model(), settings)
    timing = PlannedStep(its, work_of(case, uses), MACHINE, case.clips).simulate(12)
    return {
        "case": case.name,
        **_row(timing, _measured(case, settings, num_blocks)),
        "compute_seconds": sum(use.seconds for use in uses),
        "without_throttle": without_throttle(case, hardware, num_blocks),
        "load": os.getloadavg()[0],
    }


def without_throttle(case: Case, hardware: Hardware, num_blocks: int = 3) -> dict[str, Any]:
    """Measure the steps of a case without throttle, and forecast them from shapes and machine rates alone."""
    settings = case.engine_settings(None)
    with torch.device("meta"):
        model = case.prepared(Told(case.width, case.depth))
    its = planned(model, settings)
    work = measure(model, BatchSpec("causal", ROWS, LENGTH), its)
    timing = PlannedStep(its, work, hardware, case.clips).simulate(12)
    return _row(timing, _measured(case, settings, num_blocks, num_steps=10))


def _measured(case: Case, settings: Settings, num_blocks: int, num_steps: int = 3) -> float:
    """Return the seconds of an engine's step."""
    steps = itertools.cycle(batches(2))
    with closing(Engine(case.model(), settings=settings)) as engine:
        for _ in range(WARM_STEPS):
            engine.step(next(steps), loss_of)
        return min(block_seconds(engine, steps, num_steps) for _ in range(num_blocks))


def _row(timing: Timing, seconds: float) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "foretold_seconds": timing.step_seconds,
        "ratio": timing.step_seconds / seconds,
        "bound_by": timing.bound_by,
        "lane_seconds": dict(timing.lane_seconds),
    }


def block_seconds(engine: Engine, steps: Iterator[Any], num_steps: int) -> float:
    """Return the seconds of a step, averaged over consecutive steps."""
    begin = time.perf_counter()
    for _ in range(num_steps):
        engine.step(next(steps), loss_of)
    return (time.perf_counter() - begin) / num_steps


def compute_of(case: Case) -> list[Use]:
    """Return the uses of a step with the fastest compute time of each, from an engine without lanes."""
    plain = replace(case, placement={})
    steps, found = itertools.cycle(batches(2)), []
    none = {"max_grad_norm": None, "delay": 0, "clip": "auto", "update": "cpu", "optimizer": AdamW(lr=1e-8)}
    with closing(Engine(plain.model(), settings=plain.engine_settings(None, **none))) as engine:
        streamed = [name for name, _ in engine.model.named_modules()]
        for number in range(8):
            engine.step(next(steps), loss_of)
            if number > 1:
                found.append(compute_uses(engine.spans, streamed))
    return fastest_uses(found)


def compute_uses(spans: Iterable[Any], streamed: Iterable[str]) -> list[Use]:
    """Return the compute of a serial step as uses: each forward and backward, and the code between them (the model's
    own code, the loss).

    Inline work of other lanes on the compute thread is not compute. Host work before the first use and after the last
    use does not count either.
    """
    known = set(streamed)
    spans = sorted(spans, key=lambda span: span.begin)
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


def work_of(case: Case, uses: Sequence[Use]) -> Workload:
    """Return the work of a step: each unit use, and the compute between it and the previous use."""
    parts = ROWS // case.settings.get("micro_batch_size", ROWS)
    recomputes = case.settings.get("recompute", "always") == "always"
    input_bytes = ROWS // parts * LENGTH * case.width * (2 if case.settings.get("precision") == "bf16" else 4)
    taken: dict[tuple[str, bool], tuple[float, float]] = {}
    between = 0.0
    for use in uses:
        if use.unit is None:
            between += use.seconds
        else:
            taken[use.unit, use.is_backward] = between / parts, use.seconds / parts
            between = 0.0
    calls: list[UnitWork] = []
    for (name, is_backward), (before, forward) in taken.items():
        if is_backward:
            continue
        after, backward = taken[name, True]
        is_block = name.startswith("blocks")
        backward = max(0.0, backward - forward) if recomputes and is_block else backward
        calls += [
            work(None, before, 0.0),
            work(name, forward, backward, input_bytes, saved_bytes=int(is_block)),
            work(None, 0.0, after),
        ]
    return Workload(tuple(calls), parts, ROWS * LENGTH)
