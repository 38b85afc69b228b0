"""Placement search: choose the tiers and options for the fastest step with enough room on every tier.

Follows AMSP (arXiv:2311.00257), a search over the sharding degree of each kind of model state, extended here to tiers.
Following arXiv:2310.05350, sharding goes no further than needed: among equally fast placements, the one with the least
traffic is chosen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from offload.engine.prepare import EnginePlan
from offload.errors import ConfigError, DoesNotFitError
from offload.extras.plan.memory import footprint
from offload.extras.plan.simulated_ranks import SimulatedRanks
from offload.extras.plan.simulated_step import without_garbage_collector
from offload.extras.plan.timing import PlannedStep, Timing, compute_seconds, link_seconds
from offload.extras.plan.workload import Workload
from offload.layout.codecs import EXACT
from offload.layout.regions import Region
from offload.layout.residence import DEVICE, DISK, FILES, HOST, Residence
from offload.machine.hardware import Hardware
from offload.planning.device_updates import host_update_bytes, streamed_bytes, update_bytes
from offload.planning.machines import Machine
from offload.planning.plan import Plan, make_plan, sharding_of
from offload.planning.settings import Settings
from offload.tiers.placement import OFFLOADED

STATES = (
    (DEVICE, DEVICE),
    (DEVICE, "auto"),
    (DEVICE, HOST),
    (HOST, HOST),
    (DEVICE, DISK),
    (HOST, "auto"),
    (HOST, DISK),
    ("auto", "auto"),
    (DISK, DISK),
)
"""(parameter tier, optimizer tier) candidates, fastest tier first.

Optimizer "auto" splits the states: device (updated there) plus host, or host plus disk.
"""
_FILES = tuple((FILES, states) for states in (HOST, "auto", DISK))
_RECOMPUTE = ("auto", "never", "always")
MIN_GAIN = 0.01
"""Relative gain needed to justify more traffic. Smaller differences are below forecast accuracy."""
_NUM_STEPS = 3
"""Simulated steps per candidate."""
_NOT_SIMULATED = ("placement", "update", "recompute", "prefetch")
"""Fields of `Settings` that a simulation finds in the calls and in the table of residence."""


def search(candidates: Sequence[PlacementCandidate]) -> PlacementCandidate | None:
    """Return the fastest estimate among those with enough room; None: none fits.

    Estimates are ordered from least to most traffic. The result is the first within `MIN_GAIN` of the fastest.
    """
    # Branch and bound: refine the candidate with the lowest bound until that bound is a simulated step time.
    bounds = {number: (estimate.least_seconds, False) for number, estimate in enumerate(candidates)}
    step_times: dict[int, float] = {}
    while True:
        limit = (1 + MIN_GAIN) * min(step_times.values(), default=math.inf)
        chosen = min((number for number, seconds in step_times.items() if seconds <= limit), default=len(candidates))
        best = step_times.get(chosen, math.inf)
        # Earlier candidates can replace the chosen one; later candidates can only prove it too slow.
        open_ones = [
            (bound, number, is_planned)
            for number, (bound, is_planned) in bounds.items()
            if (number < chosen and bound <= limit) or (number > chosen and (1 + MIN_GAIN) * bound < best)
        ]
        if not open_ones:
            return candidates[chosen] if step_times else None
        bound, number, is_planned = min(open_ones)
        estimate = candidates[number]
        del bounds[number]
        if is_planned:
            step_times[number] = estimate.step_seconds
        elif estimate.fits:
            bounds[number] = max(bound, estimate.bound_seconds), True


def placements(settings: Settings, *, num_ranks: int = 1, num_machines: int = 1) -> Iterator[Settings]:
    """Yield every concrete choice for options set to "auto", from least to most traffic.

    Covers tiers for parameters, optimizer states, gradients and activations, plus update place and recompute. With
    several ranks, also every ZeRO stage up to the configured one; with several machines, one replica per machine or one
    over all. Clipping changes the numerical result, so `clip` is left to the engine.
    """
    placement, has_disk = settings.placement, settings.placement.nvme_dir is not None
    activation_tiers = ("auto", HOST, DISK) if has_disk else ("auto", HOST)  # auto is the device
    replica_counts: list[int | str] = [settings.replicas]
    if settings.replicas == "auto" and num_machines > 1:
        replica_counts = [num_machines]
        # Shared states need several replicas, and quantized gradients none that spans machines.
        if settings.link_gradients == EXACT.name and settings.replica_states == "whole":
            replica_counts.append(1)
    shapes: list[tuple[int | str, int]] = []
    for replicas in replica_counts:
        first = settings.zero_stage if num_ranks in (1, replicas) else 0  # one rank a replica shards nothing
        shapes += [(replicas, stage) for stage in range(first, settings.zero_stage + 1)]
    states_tiers = _FILES if placement.parameters == "files" else STATES
    seen: set[str] = set()
    for (replicas, stage), (parameters, states) in itertools.product(shapes, states_tiers):
        if placement.parameters not in ("auto", parameters) or placement.optimizer not in ("auto", states):
            continue
        gradient_tiers: Sequence[str] = (placement.gradients,)
        if has_disk and states == DISK:  # gradients can follow optimizer states to disk
            gradient_tiers = _choices(placement.gradients, HOST, DISK)
        for gradients, activations, update, recompute in itertools.product(
            gradient_tiers,
            _choices(placement.activations, *activation_tiers),
            _updates(settings, parameters, states),
            _choices(settings.recompute, *_RECOMPUTE),
        ):
            tiers = {"parameters": parameters, "optimizer": states, "gradients": gradients, "activations": activations}
            options = {"update": update, "recompute": recompute, "zero_stage": stage, "replicas": replicas}
            try:
                candidate = replace(settings, placement=replace(placement, **tiers), **options)  # type: ignore[arg-type]
            except ConfigError:  # invalid combination
                continue
            if repr(candidate) not in seen:  # several choices may give the same settings
                seen.add(repr(candidate))
                yield candidate


def _choices(value: str, *choices: str) -> Sequence[str]:
    """Return the choices for an option set to "auto", or its own value alone."""
    return choices if value == "auto" else (value,)


def _updates(settings: Settings, parameters: str, states: str) -> Sequence[str]:
    """Return the update places to try.

    States split between device and host need updates on the device. States split between host and disk need a disk.
    """
    if states == "device":
        return _choices(settings.update, "cpu")
    places = [update for update in ("cpu", "both", "device") if settings.update in ("auto", update)]
    if states != "auto":
        places = [update for update in places if update != "both"]
    if settings.host_bound:
        places = [update for update in places if update == "cpu"]
    if states == "auto" and settings.placement.nvme_dir is None:
        places = [update for update in places if update != "cpu"]
    if parameters == "auto" and settings.placement.nvme_dir is None:
        return ()
    return places


class Simulations:
    """Simulated steps of one model. Each is simulated once, however many placements and machines have it."""

    def __init__(self) -> None:
        self._timings: dict[Hashable, Timing] = {}

    def timing(self, step: PlannedStep, num_steps: int) -> Timing:
        """Return the timing of a step, from a simulation of `num_steps` steps."""
        key = num_steps, _simulated(step)
        if key not in self._timings:
            self._timings[key] = step.simulate(num_steps)
        return self._timings[key]


def _simulated(step: PlannedStep) -> Hashable:
    """Return all that the timing of a step depends on."""
    plan, hardware = step.simulated_plan(), step.hardware
    placement = plan.settings.placement
    settings = {name: value for name, value in vars(plan.settings).items() if name not in _NOT_SIMULATED}
    indices: dict[int, list[int]] = {}
    for index, row in plan.residence.rows.items():
        indices.setdefault(id(row), []).append(index)
    rows = tuple((repr(plan.residence.rows[of_row[0]]), tuple(of_row)) for of_row in indices.values())
    calls = tuple((replace(call, regions=(), others=()), len(call.regions), len(call.others)) for call in step.calls)
    # Long parts apart: the regions follow from the structure and the workload, the settings are those above.
    rest = replace(plan, regions=(), settings=Settings(), residence=replace(plan.residence, rows={}))
    machine = repr((hardware.rates, hardware.device, hardware.num_machines))
    tiers = [
        placement.activations if any(call.saved_bytes for call in step.calls) else "",
        placement.graphs if any(call.graph_bytes for call in step.calls) else "",
    ]
    return tuple(step.regions), step.workload, step.clips, machine, repr((settings, tiers)), rows, calls, repr(rest)


def bound_seconds(step: PlannedStep) -> float:
    """Return a lower bound for the step time, without a simulation.

    The maximum over busy times of single lanes and over sequential dependencies: gradients arrive after the last
    forward and before the next one.
    """
    calls, seconds = step.calls, step.seconds()
    residence = step.plan.residence
    forward = sum(max(call.forward_s, call.forward_host_s) for call in calls)
    backward = sum(max(call.backward_s, call.backward_host_s) for call in calls)
    sharding, trainable = residence.sharding, [region for region in step.regions if region.trainable]
    if residence.common == DEVICE:
        return forward + backward + seconds["here"](update_bytes(trainable, sharding))
    weights = gradients = 0
    on_disk = step.waiting_bytes(DISK)
    for region, count in residence.alike(trainable):
        weights += count * sharding.plane_bytes(region, region.travelling)
        gradients += count * region.plane("gradients").num_bytes(region.numel)
        on_disk += count * residence.record_bytes(region, region.numel // sharding.num_ranges)
    gradients //= sharding.num_ranges
    # Inputs and graphs go down in the forward, and come up again in the backward.
    waiting, streamed = step.waiting_bytes(*OFFLOADED), streamed_bytes(trainable, residence)
    up, down = weights + waiting + streamed[0], gradients + waiting + streamed[1]
    return max(
        forward + backward,
        forward + _rate(seconds["d2h"], gradients),
        _rate(seconds["h2d"], up),
        _rate(seconds["d2h"], down),
        _rate(seconds["nvme_read"], on_disk),
        _rate(seconds["nvme_write"], on_disk),
        _update_bound(step.settings, step.hardware, step.regions, residence, backward),
    )


def _update_bound(
    settings: Settings, hardware: Hardware, regions: Sequence[Region], residence: Residence, backward_s: float = 0.0
) -> float:
    """Return the lower bound for host updates, in seconds.

    Updates waiting for the gradient norm cannot overlap the next backward, so `backward_s` is added.
    """
    num_bytes = host_update_bytes(regions, residence)
    waits = settings.needs_all_gradients and settings.resolved_clip != "speculative" and not settings.delay
    seconds = _rate(link_seconds(settings, hardware, residence.sharding)["update"], num_bytes)
    if waits and num_bytes:
        seconds += backward_s
    return seconds


class PlacementCandidate:
    """Estimates for one candidate, from cheap bounds to a full simulation."""

    def __init__(self, settings: Settings, search: PlacementSearch) -> None:
        self.settings = settings
        self._search = search
        self._hardware = search.hardware
        self._regions = search.prepared.structure.regions
        self._sharding = sharding_of(settings, search.ranks)

    @property
    def least_seconds(self) -> float:
        """Lower bound for the step time, from settings alone."""
        settings = self.settings
        if settings.update != "cpu" or settings.placement.optimizer == "device":
            return self._search.compute_s
        residence = Residence(sharding=self._sharding)
        return max(self._search.compute_s, _update_bound(settings, self._hardware, self._regions, residence))

    @cached_property
    def step(self) -> PlannedStep | None:
        """Planned step; None: planning fails."""
        plan = self._search.plan(self.settings)
        if plan is None:
            return None
        prepared = replace(self._search.prepared, settings=self.settings, plan=plan)
        return PlannedStep(prepared, self._search.workload, self._hardware)

    @cached_property
    def fits(self) -> bool:
        """True if every tier has enough room."""
        if self.step is None:
            return False
        memory = footprint(self.step.prepared, self.step.workload, self._hardware, step=self.step.memory)
        return not memory.shortfalls and (self._hardware.rates.has_disk or not memory.total(DISK))

    @cached_property
    def bound_seconds(self) -> float:
        """Lower bound for the step time, from the plan."""
        assert self.step is not None  # `fits` comes first
        return bound_seconds(self.step)

    @cached_property
    def timing(self) -> Timing:
        """Simulated timing. Valid only if the candidate fits."""
        assert self.step is not None
        return self._search.simulations.timing(self.step, _NUM_STEPS)

    @property
    def step_seconds(self) -> float:
        """Simulated step time in seconds."""
        return self.timing.step_seconds


@dataclass
class PlacementSearch:
    """Evaluates candidate settings for a model on a machine, each once in all searches."""

    prepared: EnginePlan
    """Model structure and parameter layout. Of the settings, only precision and compile are read."""
    workload: Workload
    """Model compute."""
    hardware: Hardware
    """Hardware available to each rank."""
    machine: Machine
    """Machine for planning."""
    num_ranks: int = 1
    """Ranks sharing the memory and disk of a machine."""
    simulations: Simulations = field(default_factory=Simulations)
    """Simulated steps so far."""

    _plans: dict[str, Plan | None] = field(default_factory=dict, init=False)
    _candidates: dict[str, PlacementCandidate] = field(default_factory=dict, init=False)

    @property
    def ranks(self) -> SimulatedRanks:
        """Simulated ranks on all machines."""
        num_machines = self.hardware.num_machines
        return SimulatedRanks(self.num_ranks * num_machines, num_machines)

    def choose(self, settings: Settings, *, cuts: bool = False, times: bool = True) -> Settings:
        """Return settings with every "auto" replaced by the search result.

        Returns `settings` unchanged if nothing fits, so that planning reports every shortage, and for forward-only
        optimizers, which have no bounds here. `cuts`: the ZeRO stage is open. `times` False: return the first candidate
        with enough room.
        """
        if not settings.optimizer.has_gradients:
            return settings
        ranks = self.ranks
        num_ranks = ranks.size if cuts else 1  # one rank has no stage to choose
        choices = placements(settings, num_ranks=num_ranks, num_machines=ranks.num_machines)
        if self.hardware.device == "cpu" and settings.update == "auto":  # one lane makes all updates
            choices = (each for each in choices if each.update != "both")
        candidates = map(self._candidate, choices)
        with without_garbage_collector():
            chosen = search(list(candidates)) if times else next((each for each in candidates if each.fits), None)
        return settings if chosen is None else chosen.settings

    def _candidate(self, settings: Settings) -> PlacementCandidate:
        key = repr(settings)
        if key not in self._candidates:
            self._candidates[key] = PlacementCandidate(settings, self)
        return self._candidates[key]

    @cached_property
    def compute_s(self) -> float:
        """Lower bound for forward and backward compute in seconds, independent of placement: the device's, or the
        launches on the host.
        """
        work, settings = self.workload, self.prepared.settings
        seconds = [
            compute_seconds(call, [call.forward, call.backward], work.num_micro_batches, settings, self.hardware)
            for call in work.calls
        ]
        return max(map(sum, zip(*seconds, strict=True)))

    def plan(self, settings: Settings) -> Plan | None:
        """Return the plan for settings; None: planning fails."""
        # Recomputation does not change the plan.
        key = repr(replace(settings, recompute="always"))
        if key not in self._plans:
            units, regions = self.prepared.structure.units, self.prepared.structure.regions
            try:
                self._plans[key] = make_plan(settings, units, regions, self.ranks, self.machine)
            except (DoesNotFitError, ConfigError):
                self._plans[key] = None
        return self._plans[key]


def _rate(seconds: Callable[[int], float], num_bytes: int) -> float:
    """Return the transfer time without per-transfer latency, because the number of transfers is unknown here."""
    return seconds(num_bytes) - seconds(0)
