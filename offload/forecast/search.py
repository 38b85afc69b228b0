"""Placement by search: what of a step rests where, and what it does for that, so that it is the fastest that fits.

After "AMSP: Super-Scaling LLM Training via Advanced Model States Partitioning" (arXiv:2311.00257), which searches how
far each kind of state is sharded, here over tiers; and "Rethinking Memory and Communication Cost for Efficient Large
Language Model Training" (arXiv:2310.05350), which shards no further than pays: of what is equally fast the one that
moves the least is taken.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Generic, Protocol, TypeVar

from offload.errors import ConfigError, DoesNotFitError
from offload.forecast.shortened import without_collector
from offload.forecast.timing import PlannedStep, Timing, compute_seconds, link_seconds
from offload.forecast.workload import Workload
from offload.layout.regions import Region, Sharding
from offload.machine.hardware import Hardware
from offload.planning.memory import UnitPlan, bytes_on
from offload.planning.plan import Plan, budget_bytes
from offload.planning.settings import Settings
from offload.tiers.placement import Placement

STATES = (
    ("device", "device"),
    ("device", "auto"),
    ("device", "cpu"),
    ("cpu", "cpu"),
    ("device", "nvme"),
    ("cpu", "auto"),
    ("cpu", "nvme"),
    ("auto", "auto"),
    ("nvme", "nvme"),
)
"""Tiers of parameters and of optimizer states, the highest first. With auto a part of them is on the device, where they
are updated there, or in memory, with the rest on disk."""
_RECOMPUTE = ("auto", "never", "always")
WORTH = 0.01
"""By which part of its step something has to be faster for more to be moved: less is more than a forecast can tell."""
_NUM_STEPS = 3
"""Played of each candidate."""
_PREFETCH: tuple[str | int, ...] = ("auto", 1, 4)
"""Where the device has no budget. With one, auto looks as far ahead as what is left of it reaches."""


class Estimate(Protocol):
    """What is known of a candidate, at rising prices."""

    @property
    def least_seconds(self) -> float:
        """No step of it is faster, by its settings."""

    @property
    def fits(self) -> bool:
        """True where every budget holds what it needs."""

    @property
    def bound_seconds(self) -> float:
        """No step of it is faster, by its plan. For one that fits."""

    @property
    def step_seconds(self) -> float:
        """What a step takes, by simulation. For one that fits."""


_E = TypeVar("_E", bound=Estimate)


@dataclass(frozen=True)
class Found(Generic[_E]):
    """A candidate that fits."""

    settings: Settings
    """The settings."""
    estimate: _E
    """What is known of them."""


def search(candidates: Iterable[Settings], evaluate: Callable[[Settings], _E]) -> Found[_E] | None:
    """Return the candidate that fits and is the fastest; None where none fits. Candidates are to come from the one that
    moves least to the one that moves most: the first that is no slower than any other by more than `WORTH` is chosen.
    """
    estimates = [(settings, evaluate(settings)) for settings in candidates]
    # Branch and bound: whatever has the lowest bound is looked at more closely, until that is a step that was played.
    bounds = {number: (estimate.least_seconds, False) for number, (_, estimate) in enumerate(estimates)}
    found: dict[int, float] = {}
    while True:
        limit = (1 + WORTH) * min(found.values(), default=math.inf)
        chosen = min((number for number, seconds in found.items() if seconds <= limit), default=len(estimates))
        best = found.get(chosen, math.inf)
        # What comes before the chosen one may be chosen instead; what comes behind it may show that it is too slow.
        open_ones = [
            (bound, number, is_planned)
            for number, (bound, is_planned) in bounds.items()
            if (bound <= limit if number < chosen else (1 + WORTH) * bound < best)
        ]
        if not open_ones:
            return Found(*estimates[chosen]) if found else None
        bound, number, is_planned = min(open_ones)
        estimate = estimates[number][1]
        del bounds[number]
        if is_planned:
            found[number] = estimate.step_seconds
        elif estimate.fits:
            bounds[number] = max(bound, estimate.bound_seconds), True


def placements(settings: Settings, *, limited: bool, num_ranks: int = 1) -> Iterator[Settings]:
    """Return what settings may mean where they say `auto`, from the one that moves least to the one that moves most: of
    parameters, optimizer states, gradients and activations, of updates, lookahead and recompute; with several ranks
    also with every ZeRO stage up to theirs. How gradients are clipped changes bits: of that the engine decides.
    `limited`: the device has a budget, or is an accelerator.
    """
    placement = settings.placement
    stages = range(settings.zero_stage + 1) if num_ranks > 1 else (settings.zero_stage,)
    seen: set[str] = set()
    for stage, (parameters, states) in itertools.product(stages, STATES):
        if placement.parameters not in ("auto", parameters) or placement.optimizer not in ("auto", states):
            continue
        for gradients, activations, update, recompute, prefetch in itertools.product(
            _gradients(placement, states),
            _activations(placement),
            _updates(settings, parameters, states),
            _RECOMPUTE if settings.recompute == "auto" else (settings.recompute,),
            _PREFETCH if settings.prefetch == "auto" and not limited and states != "device" else (settings.prefetch,),
        ):
            try:
                its = replace(
                    placement, parameters=parameters, optimizer=states, gradients=gradients, activations=activations
                )
                made = replace(
                    settings,
                    placement=its,
                    update=update,
                    recompute=recompute,
                    prefetch=prefetch,
                    zero_stage=stage,
                )
            except ConfigError:  # no such combination
                continue
            if repr(made) not in seen:
                seen.add(repr(made))
                yield made


def _gradients(placement: Placement, states: str) -> Sequence[str]:
    """Return where gradients may wait: beside the states, or on disk where these are."""
    on_disk = states == "nvme" and placement.gradients == "auto" and placement.nvme_dir is not None
    return ("cpu", "nvme") if on_disk else (placement.gradients,)


def _activations(placement: Placement) -> Sequence[str]:
    """Return where activations may wait. With auto that is the device."""
    if placement.activations != "auto":
        return (placement.activations,)
    return ("auto", "cpu", "nvme") if placement.nvme_dir is not None else ("auto", "cpu")


def _updates(settings: Settings, parameters: str, states: str) -> Sequence[str]:
    """Return where updates may run. A part of the states on the device is for updates there; a part in memory for a
    disk."""
    if states == "device":
        return ("cpu" if settings.update == "auto" else settings.update,)
    wanted = [update for update in ("cpu", "device") if settings.update in ("auto", update)]
    if settings.host_bound:
        wanted = [update for update in wanted if update == "cpu"]
    if states == "auto" and settings.placement.nvme_dir is None:
        wanted = [update for update in wanted if update == "device"]
    return wanted if parameters != "auto" or settings.placement.nvme_dir is not None else ()


@dataclass(frozen=True)
class Placed:
    """An `Estimate` of a model's step on a machine."""

    settings: Settings
    """The settings."""
    workload: Workload
    """What the model computes."""
    hardware: Hardware
    """The machine."""
    regions: Sequence[Region]
    """How the parameters lie."""
    units: Sequence[UnitPlan]
    """What the plan knows of each unit."""
    num_ranks: int
    """How many ranks share the machine's memory and disk."""
    compute_s: float
    """The seconds of the model's own forward and backward, whatever the settings."""
    plans: Callable[[Settings], Plan | None]
    """Returns the plan for settings; None where there is none."""
    played: Callable[[PlannedStep], Timing]
    """Returns the step of a plan."""
    clips: bool
    """True if gradients are clipped."""

    @property
    def least_seconds(self) -> float:
        return max(self.compute_s, self._update_bound(0.0))

    @property
    def _sharding(self) -> Sharding:
        return Sharding(0, self.num_ranks, self.settings.zero_stage)

    def _update_bound(self, backward_s: float) -> float:
        """Return the least for updates on the host. Where they wait for the norm they are made before the next
        backward, of so many seconds, begins.
        """
        settings = self.settings
        if settings.update == "device" or settings.placement.optimizer == "device":
            return 0.0
        waits = settings.judges_gradients and settings.resolved_clip == "deferred" and not settings.delay
        sharding = self._sharding
        trained = (r.update_bytes(r.numel // sharding.num_ranges) for r in self.regions if r.trainable)
        update = _rate(link_seconds(settings, self.hardware, sharding)["update"], sum(trained))
        return update + (backward_s if waits else 0.0)

    @cached_property
    def step(self) -> PlannedStep | None:
        """The step of the plan, where there is one."""
        plan = self.plans(self.settings)
        if plan is None:
            return None
        return PlannedStep(self.settings, self.regions, self.units, plan, self.workload, self.hardware, self.clips)

    @cached_property
    def fits(self) -> bool:
        step, placement = self.step, self.settings.placement
        if step is None:
            return False
        needs = {tier: bytes_on(tier, step.plan.allocations) for tier in ("cpu", "nvme")}
        if placement.activations in needs:
            needs[placement.activations] += step.waiting_bytes
        if needs["nvme"] and None in (
            self.hardware.rates.nvme_read_bytes_per_s,
            self.hardware.rates.nvme_write_bytes_per_s,
        ):
            return False  # there is no disk
        has = {
            "cpu": (placement.host_memory, self.hardware.host_bytes),
            "nvme": (placement.nvme_memory, self.hardware.disk_bytes),
        }
        for tier, (budget, there) in has.items():
            room = budget_bytes(budget)
            if room is None and there is not None:
                room = there // self.num_ranks
            if room is not None and needs[tier] > room:
                return False
        if (
            self.hardware.shares_memory
            and step.device_bytes + needs["cpu"] > self.hardware.host_bytes // self.num_ranks
        ):
            return False
        return step.budget_bytes is None or step.device_bytes <= step.budget_bytes

    @cached_property
    def bound_seconds(self) -> float:
        """The longest of what one thing has to do, or of what cannot begin before another thing is done: all gradients
        land after the last forward and before the next one.
        """
        assert self.step is not None
        calls, seconds, layout = self.step.calls, self.step.seconds(), self.step.plan.layout
        forward = sum(max(call.forward_s, call.forward_host_s) for call in calls)
        backward = sum(max(call.backward_s, call.backward_host_s) for call in calls)
        sharding, trained = self._sharding, [region for region in self.regions if region.trainable]
        ranges = sharding.num_ranges
        if self.step.plan.tiers[1] == "device":
            return forward + backward + seconds["here"](sum(r.update_bytes(r.numel // ranges) for r in trained))
        weights = sum(sharding.share(r.plane("weights"), r.weight_bytes) for r in trained)
        gradients = sum(r.plane("gradients").num_bytes(r.numel) for r in trained) // ranges
        waiting = self.step.waiting_bytes if self.settings.placement.activations in ("cpu", "nvme") else 0
        up, down = weights + waiting, gradients + waiting
        if self.step.plan.update == "device":
            moved = sum(
                plane.num_bytes(r.numel // ranges) for r in trained for plane in r.states if not layout.stays(r, plane)
            )
            up, down = up + moved + gradients, down + moved
        on_disk = sum(
            region.plane(name).num_bytes(region.numel // ranges) for region in trained for name in layout.of(region)
        )
        on_disk += waiting if self.settings.placement.activations == "nvme" else 0
        return max(
            forward + backward,
            forward + _rate(seconds["d2h"], gradients),
            _rate(seconds["h2d"], up),
            _rate(seconds["d2h"], down),
            _rate(seconds["nvme_read"], on_disk),
            _rate(seconds["nvme_write"], on_disk),
            self._update_bound(backward),
        )

    @cached_property
    def timing(self) -> Timing:
        """What a step takes."""
        assert self.step is not None
        return self.played(self.step)

    @property
    def step_seconds(self) -> float:
        return self.timing.step_seconds


class Placer:
    """Estimates of a model's step on a machine: what several candidates have in common is planned, and played, once.

    `plan_with` plans for settings; a DoesNotFitError, or a ConfigError, says that it cannot. `num_ranks`: of the
    machine, which share its memory and disk. `clips`: as of `step_time`.
    """

    def __init__(
        self,
        regions: Sequence[Region],
        units: Sequence[UnitPlan],
        workload: Workload,
        hardware: Hardware,
        plan_with: Callable[[Settings], Plan],
        *,
        num_ranks: int = 1,
        clips: bool = True,
    ) -> None:
        self._plan_with, self._workload, self._hardware = plan_with, workload, hardware
        self._placed = partial(
            Placed,
            workload=workload,
            hardware=hardware,
            regions=regions,
            units=units,
            num_ranks=num_ranks,
            plans=self._plan,
            played=self._played,
            clips=clips,
        )
        self._compute_s: dict[str, float] = {}
        self._plans: dict[str, Plan | None] = {}
        self._timings: dict[str, Timing] = {}

    def evaluate(self, settings: Settings) -> Placed:
        """Return what is known of a candidate."""
        precision, work = settings.precision, self._workload
        if precision not in self._compute_s:
            self._compute_s[precision] = sum(
                max(compute_seconds(call, costs, work.num_micro_batches, precision, self._hardware))
                for call in work.calls
                for costs in ([call.forward], [call.backward])
            )
        return self._placed(settings, compute_s=self._compute_s[precision])

    def choose(self, settings: Settings, *, limited: bool, num_ranks: int = 1, times: bool = True) -> Settings:
        """Return settings without `auto`: what `search` finds among `placements`, or without the `times` the first of
        them that fits. As they were where none fits, so that planning refuses them with all that is missing, and with a
        rule without gradients, for which no bounds are known.
        """
        if not settings.optimizer.has_gradients:
            return settings
        candidates = placements(settings, limited=limited, num_ranks=num_ranks)
        with without_collector():
            if not times:
                return next((each for each in candidates if self.evaluate(each).fits), settings)
            found = search(candidates, self.evaluate)
        return settings if found is None else found.settings

    def _plan(self, settings: Settings) -> Plan | None:
        # Whatever is recomputed, the plan is the same.
        key = repr(replace(settings, recompute="always"))
        if key not in self._plans:
            try:
                self._plans[key] = self._plan_with(settings)
            except (DoesNotFitError, ConfigError):
                self._plans[key] = None
        return self._plans[key]

    def _played(self, step: PlannedStep) -> Timing:
        calls = [(len(c.regions), c.forward_s, c.backward_s, c.saved_bytes, c.num_parts) for c in step.calls]
        plan = step.played()
        settings = replace(plan.settings, recompute="always", prefetch="auto")  # the calls and the plan have these
        key = repr((replace(plan, regions=(), settings=settings), calls))
        if key not in self._timings:
            self._timings[key] = step.play(_NUM_STEPS)
        return self._timings[key]


def _rate(seconds: Callable[[int], float], num_bytes: int) -> float:
    """Return what bytes take without the latency of a piece, of which nobody knows here how many there are."""
    return seconds(num_bytes) - seconds(0)
