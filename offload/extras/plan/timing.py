"""Forecast step time: simulate the plan and workload at the rates of a machine (`simulated_step`)."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from offload.engine.prepare import EnginePlan
from offload.extras.plan.memory import StepMemory
from offload.extras.plan.noise import noise_costs
from offload.extras.plan.routed import RoutedExperts, routed_experts
from offload.extras.plan.simulated_lanes import DECODING, Seconds
from offload.extras.plan.simulated_step import SimulatedCall, SimulatedPlan, SimulatedStep, simulate_passes
from offload.extras.plan.workload import NO_COST, NO_WORK, Cost, UnitWork, Workload
from offload.lanes.timeline import Throttle
from offload.layout.planes import PAGE_BYTES
from offload.layout.regions import Region
from offload.layout.residence import DEVICE, DISK, FILES, Residence
from offload.layout.sharding import Sharding
from offload.machine.hardware import Hardware, Rates
from offload.planning.device_updates import UPDATE_RING as DEVICE_UPDATE_RING
from offload.planning.memory import (
    SHARDS,
    STAGING,
    gradient_lasts,
    resident_regions,
    shard_bytes,
    staging_bytes,
)
from offload.planning.settings import Settings
from offload.tiers.nvme import ACTIVATION_RING, RING_TILES
from offload.tiers.placement import OFFLOADED

_USE_HOST_S = 0.05e-3, 0.1e-3
_FUSED_SHARE = 0.22
"""Share of the memory traffic of an eager block, beside products, that is left in a compiled block.

A profiled compiled step of a 3B on an H200: at most 51 ms in such kernels, at 2.63 TB/s 135 of 623 GB.
"""
_EFFICIENT_MORE = 2.7
"""Further time that the memory-efficient kernel takes for the same FLOPs, relative to the fused one.

With a mask on an H200: 65 and 62 TFLOP/s in causal FLOPs, forward and backward; it computes twice
those. Without a mask cuDNN has 473.
"""
_GAP_S = 2.7e-6
"""Idle device time for each operation in eager blocks: 3 % beside the kernels when a 3B runs on an H200 for long."""
_COMPILED_GAP_S = 7.5e-6
"""Idle device time for each operation with compiled blocks: 8.3 us in a profiled 3B step on an H200.

Eager kernels have 8.1 us under a profiler, but long runs leave no room for such gaps: the 3B would be 7 % slower.
"""
_PART_HOST_S = 0.15e-3, 0.35e-3
"""Host seconds (forward, backward) for a unit use beyond plain PyTorch, per micro-batch; `_USE_HOST_S`: per use.

Together 0.65 ms per use and step with one micro-batch (benchmarks/overhead.py).
"""
_WATCHED_HOST_S = 25e-6
"""Host time for one operation under a dispatch mode (kept outputs of products), views included.

Measured on one slow core: 1.1 ms for a Llama block of 45 operations and 28 views.
"""
TILE_HOST_S = 0.2e-3
"""Host time for one update tile, see `offload.planning.disk`."""
STEP_HOST_S = 1e-3
"""Host time per step outside units: batch H2D copy, loss D2H copy, gradient norm."""
_MOST_PARTS = 4
"""Maximum number of simulated micro-batches per use. More are grouped; the step time changes by less than 0.1 %."""
_MOST_TILES = 4
"""Maximum number of simulated tiles per region. More tiles hardly change the step time but slow the simulation."""
_MOST_PIECES = 4
"""Maximum number of simulated head chunks, for the same reason."""


@dataclass(frozen=True)
class Timing:
    """Step time forecast.

    step_seconds: step time in the steady state.
    lane_seconds: busy seconds per link, and for compute.
    bound_by: the busiest lane.
    tokens_per_second: throughput over all ranks.
    mfu: model FLOPs (forward and backward without recomputation; all forwards for forward-only training) divided by the
        FLOPs possible at device peak.
    moved_bytes: bytes of this rank per step, by link: h2d, d2h, nvme_read, nvme_write, and network (to other machines).
    exposed: seconds compute was idle, by the link that caused the wait.
    compute_parts: device seconds of the computation by part, see `PlannedStep.compute_parts`.
    hides_from_tokens: token count over all ranks at which compute takes as long as the busiest link. None: no such
        count, because the traffic grows as fast as compute, or compute itself sends over the network.
    """

    step_seconds: float
    lane_seconds: Mapping[str, float]
    bound_by: str
    tokens_per_second: float
    mfu: float
    moved_bytes: Mapping[str, int]
    exposed: Mapping[str, float]
    compute_parts: Mapping[str, float]
    hides_from_tokens: int | None = None

    def __post_init__(self) -> None:
        longest = max(self.lane_seconds.values(), default=0.0)
        assert self.step_seconds >= longest, f"a step of {self.step_seconds} s has a lane busy for {longest} s"


@dataclass
class PlannedStep:
    """A planned step, in the form the simulated engine takes.

    Throttles in the settings replace the link rates they limit.
    """

    prepared: EnginePlan
    """Engine plan with settings."""
    workload: Workload
    """Model compute."""
    hardware: Hardware
    """Target machine."""
    clips: bool = True
    """True if the gradient norm exceeds the clip threshold.

    Speculative clipping then corrects the updates made before the norm was known.
    """

    def __post_init__(self) -> None:
        self.settings, self.plan = self.prepared.settings, self.prepared.plan
        self.regions, self.units = self.prepared.structure.regions, self.prepared.structure.units
        self.memory = StepMemory(self.prepared, self.workload, self.hardware)
        self._has_backward, self._in_stream = self.settings.optimizer.has_gradients, self.hardware.device != "cpu"
        self._inline = not self.plan.overlap and not self._in_stream  # compute itself makes the copies and updates

    @cached_property
    def _experts(self) -> dict[str, RoutedExperts]:
        return routed_experts(self.prepared.structure, self.workload)

    def simulate(self, num_steps: int = 6) -> Timing:
        """Simulate `num_steps` steps and return the timing after warm-up."""
        step = simulate_passes(self.calls, self.simulated_plan(), self.seconds(), num_steps)
        rates, ranks, work = self.hardware.rates, self.plan.residence.sharding.num_ranks, self.workload
        # In few steps, work may end in the step after: a long run takes no less than its busiest lane.
        seconds = max(step.seconds, *step.busy_s.values())
        if not {"h2d", "d2h"} & self.settings.throttles.keys():  # H2D and D2H copies may share bandwidth
            moved = step.moved_bytes["h2d"] + step.moved_bytes["d2h"]
            seconds = max(seconds, moved / rates.both_ways_bytes_per_s)
        passes = 2 * self.settings.optimizer.num_directions
        flops = sum(
            each.num_runs(work.num_micro_batches)
            * (each.forward.flops + each.backward.flops if self._has_backward else passes * each.forward.flops)
            for each in work.calls
        )
        num_tokens, flops = work.num_passes * work.num_tokens, work.num_passes * flops
        return Timing(
            step_seconds=seconds,
            lane_seconds={name: busy for name, busy in step.busy_s.items() if busy or name == "compute"},
            bound_by=max(step.busy_s, key=lambda name: step.busy_s[name]),
            tokens_per_second=num_tokens * ranks / seconds,
            mfu=flops / (seconds * rates.flops(self.settings.precision)),
            moved_bytes={name: round(num_bytes) for name, num_bytes in step.moved_bytes.items()},
            exposed={name: waited for name, waited in step.exposed_s.items() if waited},
            compute_parts=self.compute_parts,
            hides_from_tokens=self._hiding_tokens(step),
        )

    def lane_bytes(self) -> dict[str, int]:
        """Return the bytes of a step by link, as the engine counts them: all blocks are simulated, with all tiles."""
        step = simulate_passes(self.calls, self.simulated_plan(sys.maxsize), self.seconds())
        return {name: round(num_bytes) for name, num_bytes in step.moved_bytes.items() if num_bytes}

    # -- compute ---------------------------------------------------------------------------------------------

    @cached_property
    def calls(self) -> list[SimulatedCall]:
        """Unit uses in a step, in forward order."""
        memory, parts = self.memory, self.workload.num_micro_batches
        if not self._has_backward:
            return list(self._forward_only_calls())
        calls = []
        for number, (work, times) in enumerate(_limit_chunks(self.workload)):
            regions = self._regions_of(work)
            experts = self._experts.get(work.name or "")
            inputs, graph = memory.offloaded_bytes(number)
            is_watched = memory.products(number) is not None
            host = self._host_seconds(work, watched=is_watched) if regions else (0.0, 0.0)
            forward = self._compute(work, [work.forward])
            backward = self._compute(work, [*self._recomputation(number, work), work.backward])
            gradients = self._gradient_seconds(number)
            exposed = (0.0, 0.0) if experts is None else self._exposed_expert_seconds(experts)
            calls.append(
                SimulatedCall(
                    regions if experts is None else (*regions, *experts.hit),
                    forward[0] * times + exposed[0],
                    backward[0] * times + gradients[0] + exposed[1],
                    (forward[1] + host[0]) * times,
                    (backward[1] + host[1]) * times + gradients[1],
                    num_parts=min(parts, _MOST_PARTS),
                    saved_bytes=round(inputs * times),
                    graph_bytes=round(graph * times),
                    reads_weights=work.reads_weights,
                )
            )
        return memory.dispatched.computed(memory.workload, calls, self.hardware)

    def _recomputation(self, number: int, work: UnitWork) -> list[Cost]:
        """Return the cost of the repeated forward of a use, if there is one."""
        in_graphs = self.memory.kept.graphs | self.memory.offloaded.graphs
        if number in in_graphs or not self._regions_of(work):
            return []
        products = self.memory.products(number)
        return [work.forward if products is None else products.recomputation]

    @cached_property
    def compute_parts(self) -> dict[str, float]:
        """Device seconds of a step by part, without waits and launches.

        As in `device_parts`, of forwards and backwards; "recomputed": repeated forwards; "gradients": copies and sums
        of gradients in their buffers. Without a backward: forwards, and "noise": random directions added to weights.
        """
        if not self._has_backward:
            return self._forward_only_parts()
        parts: defaultdict[str, float] = defaultdict(float)
        arguments = self.workload.num_micro_batches, self.settings, self.hardware
        for number, (work, times) in enumerate(_limit_chunks(self.workload)):
            for name, seconds in device_parts(work, [work.forward, work.backward], *arguments).items():
                parts[name] += times * seconds
            parts["recomputed"] += times * self._compute(work, self._recomputation(number, work))[0]
            parts["gradients"] += self._gradient_seconds(number)[0]
        return {name: self.workload.num_passes * seconds for name, seconds in parts.items() if seconds}

    def _forward_only_parts(self) -> dict[str, float]:
        parts: defaultdict[str, float] = defaultdict(float)
        count = self.settings.optimizer.num_directions
        for work in self.workload.calls:
            costs = [work.forward] * (2 * count)
            found = device_parts(work, costs, self.workload.num_micro_batches, self.settings, self.hardware)
            for name, seconds in found.items():
                parts[name] += seconds
        parts["noise"] = count * sum(self._perturbing_seconds(regions)[0] for regions in self._perturbed())
        return {name: self.workload.num_passes * seconds for name, seconds in parts.items() if seconds}

    def _perturbed(self) -> Iterator[Sequence[Region]]:
        """Yield the regions of each perturbation along one direction: resident ones, then those of each use."""
        yield [region for unit in self.units if unit.resident for region in unit.regions]
        last = None
        for work in self.workload.calls:
            regions = self._regions_of(work)
            is_kept = self.settings.optimizer.num_directions == 1 and work.name == last
            yield () if is_kept else regions  # a repeated use keeps the weights
            last = work.name or last

    def _gradient_seconds(self, number: int) -> tuple[float, float]:
        return compute_seconds(NO_WORK, [self.gradient_costs[number]], 1, self.settings, self.hardware)

    def _exposed_expert_seconds(self, experts: RoutedExperts) -> tuple[float, float]:
        """Return the minimum (forward, backward) wait for the experts of a layer, in seconds.

        The first record cannot be predicted, so its fetch is exposed. From the second micro-batch on, all records are
        exposed.
        """
        seconds, num_repeats = self.seconds(), self.workload.num_micro_batches - 1
        up = seconds["h2d"](experts.record_bytes) + num_repeats * seconds["h2d"](experts.travelling_bytes)
        return up, up + num_repeats * seconds["d2h"](experts.gradient_bytes())

    def _forward_only_calls(self) -> Iterator[SimulatedCall]:
        """Yield the uses of a forward-only step (MeZO), each with all passes and the weight perturbation.

        The estimate assumes every unit participates, and omits magnitudes.
        """
        count = self.settings.optimizer.num_directions
        perturbed = self._perturbed()
        if stay := next(perturbed):
            device_s, host_s = self._perturbing_seconds(stay)
            yield SimulatedCall((), count * device_s, 0.0, count * host_s, 0.0)
        for work, moved in zip(self.workload.calls, perturbed, strict=True):
            regions = self._regions_of(work)
            device_s, host_s = self._compute(work, [work.forward] * (2 * count))
            if moved:
                perturbing_s = self._perturbing_seconds(moved)
                device_s += count * perturbing_s[0]
                host_s += count * perturbing_s[1]
            if regions:
                host_s += 2 * count * self._host_seconds(work)[0]
            yield SimulatedCall(regions, device_s, 0.0, host_s, 0.0)

    def _perturbing_seconds(self, regions: Iterable[Region]) -> tuple[float, float]:
        """Return (device seconds, host launch seconds) to perturb weights along one direction.

        A CPU reads the weights and writes both sides in one pass.
        """
        trained = [region for region in regions if region.trainable]
        cost = replace(NO_COST, moved_bytes=3 * sum(region.weight_bytes for region in trained))
        if self._in_stream:
            cost = noise_costs()[0].of(sum(region.numel for region in trained))
        return compute_seconds(NO_WORK, [cost], 1, self.settings, self.hardware)

    def _host_seconds(self, work: UnitWork, watched: bool = False) -> tuple[float, float]:
        """Return the host seconds per use beyond kernel launches, (forward, backward).

        `watched`: a dispatch mode sees each operation of the forward and of the recomputation.
        """
        num_runs, once, each = work.num_runs(self.workload.num_micro_batches), _USE_HOST_S, _PART_HOST_S
        mode = _WATCHED_HOST_S * work.forward.num_operations if watched else 0.0
        return once[0] + (each[0] + mode) * num_runs, once[1] + (each[1] + mode) * num_runs

    @cached_property
    def gradient_costs(self) -> list[Cost]:
        """Work in each use, over all its runs, to take the gradients into the buffers of their regions."""
        uses = [(self._regions_of(work), work, times) for work, times in _limit_chunks(self.workload)]
        first_backward = {region: number for number, (regions, _, _) in enumerate(uses) for region in regions}
        costs = []
        for number, (regions, work, times) in enumerate(uses):
            num_gradients = work.num_runs(self.workload.num_micro_batches) * times
            is_repeated = num_gradients > 1 or (not work.is_cut and self.workload.num_chunks > 1)
            cost = NO_COST
            for region in regions:
                if region.trainable:
                    num_first = 1 / self.workload.num_passes if first_backward[region] == number else 0.0
                    cost += self._gradient_cost(region, num_gradients, num_first, is_repeated)
            costs.append(cost)
        return costs

    def _gradient_cost(self, region: Region, num_gradients: float, num_first: float, is_repeated: bool) -> Cost:
        """Return the work to take gradients of a region into its buffer.

        The first gradient of a step is copied. Each further one, of a micro-batch, a head chunk, another use or a pass,
        is read and added, so the sum is read and written.
        """
        is_short = region.is_short and not is_repeated and region.index not in self._lasting
        buffer_bytes = region.numel * (2 if is_short else 4)
        first_bytes = num_first * (region.weight_bytes + buffer_bytes)
        moved_bytes = (num_gradients - num_first) * (region.weight_bytes + 2 * buffer_bytes)
        if self._is_summed(region) and region.index not in self._lasting:  # the sum of a pass starts at 0
            moved_bytes += buffer_bytes
        converts = buffer_bytes != region.weight_bytes
        return replace(
            NO_COST,
            num_operations=round(num_gradients) * len(region.pieces),
            moved_bytes=moved_bytes + (first_bytes if converts else 0.0),
            copied_bytes=0.0 if converts else first_bytes,
        )

    def _regions_of(self, work: UnitWork) -> tuple[Region, ...]:
        """Return the regions of a use, none for a stretch or for weights that stay on the device."""
        return self._unit_regions.get(work.name or "", ())

    @cached_property
    def _unit_regions(self) -> dict[str, tuple[Region, ...]]:
        return {unit.name: unit.regions for unit in self.units if not unit.resident}

    @cached_property
    def _lasting(self) -> set[int]:
        """Indices of regions whose gradients leave the device only after the backward."""
        uses = Counter(work.name for work in self.workload.calls)
        often = {name for name, count in uses.items() if name is not None and count > 1}
        used_often = {r.index for unit in self.units if unit.name in often for r in unit.regions}
        resident = resident_regions(self.units)
        return {r.index for r in self.regions if gradient_lasts(r, resident)} | used_often

    def _compute(self, work: UnitWork, costs: Sequence[Cost]) -> tuple[float, float]:
        return compute_seconds(work, costs, self.workload.num_micro_batches, self.settings, self.hardware)

    # -- memory ----------------------------------------------------------------------------------------------

    def waiting_bytes(self, *tiers: str) -> int:
        """Return the peak bytes of offloaded unit inputs and graphs on some tiers."""
        placement = self.settings.placement
        inputs = sum(call.saved_bytes for call in self.calls) if placement.activations in tiers else 0
        return inputs + (sum(call.graph_bytes for call in self.calls) if placement.graphs in tiers else 0)

    # -- the engine ------------------------------------------------------------------------------------------

    def simulated_plan(self, most_tiles: int = _MOST_TILES) -> SimulatedPlan:
        """Return the description of the engine lanes for the simulation, with at most `most_tiles` tiles per region."""
        settings, plan = self.settings, self.plan
        resident = resident_regions(self.units)
        experts, sharding = list(self._experts.values()), plan.residence.sharding
        expert_regions = {r.index for unit in self.units if unit.in_records for r in unit.regions}
        regions = [region for region in self.regions if region.index not in expert_regions]
        regions += [region for each in experts for region in (*each.hit, *each.missed)]
        residence, factor = _coarsen(plan.residence, regions, most_tiles)
        slots, buffer = self.memory.lent
        staging = plan.of(residence.common, STAGING).num_bytes
        shards = plan.of("device", SHARDS).num_bytes
        if experts:  # merged experts are larger than one record
            staging, shards = staging_bytes(regions, 2, sharding), shard_bytes(regions, 2, sharding)
        lookahead, max_cargoes = plan.lookahead(settings.prefetch, len(self.regions))
        waiting = {key: getattr(settings.placement, key).replace("auto", "device") for key in ("activations", "graphs")}
        rings = {name: num_bytes * factor for name, num_bytes in plan.rings.items()}
        if ring_bytes := plan.rings.get(ACTIVATION_RING):  # enlarged where activations would exceed the tile limit
            largest = max((max(call.saved_bytes, call.graph_bytes) // call.num_parts for call in self.calls), default=0)
            rings[ACTIVATION_RING] = max(ring_bytes, RING_TILES * (largest // most_tiles + 3 * PAGE_BYTES))
        return SimulatedPlan(
            regions=tuple(regions),
            settings=replace(settings, clip=self._clip(), placement=replace(settings.placement, **waiting)),
            residence=residence,
            rings=rings,
            buffer_bytes=buffer + 2 * max((each.gradient_bytes(settings.splits) for each in experts), default=0),
            capacity_bytes=slots + max((each.weight_bytes for each in experts), default=0),
            lookahead=lookahead,
            max_cargoes=max_cargoes,
            staging_bytes=staging,
            shard_bytes=shards,
            update_ring_bytes=plan.of("device", DEVICE_UPDATE_RING).num_bytes * factor,
            resident=frozenset(resident),
            lasting=frozenset(self._lasting),
            num_machines=self.hardware.num_machines,
            in_stream=self._in_stream,
            inline=self._inline,
            corrects=self.clips,
            wide=settings.splits and (self.workload.num_micro_batches > 1 or sharding.dispatches),
            passes=self.workload.num_passes,
            summed=frozenset(region.index for region in regions if region.trainable and self._is_summed(region)),
            step_host_s=STEP_HOST_S,
            tile_host_s=TILE_HOST_S / factor,
            shared=self._shared(),
        )

    def _shared(self) -> tuple[Mapping[str, float], ...]:
        """Return the devices behind several links: the disk, and the host's memory behind a link to an accelerator.

        A throttle replaces the rates of such a device.
        """
        rates = self.hardware.rates
        devices = [rates.disk_shares, rates.host_shares if self._in_stream else {}]
        return tuple(each for each in devices if each and not each.keys() & self.settings.throttles.keys())

    def _is_summed(self, region: Region) -> bool:
        return self.workload.num_passes > 1 or region.index in self.plan.summed

    def _clip(self) -> str:
        """Return the time of updates, "deferred" or "speculative". With "auto", a run whose gradients are clipped
        defers them.
        """
        settings = self.settings
        waits = settings.needs_all_gradients and self._has_backward and not settings.delay
        speculates = waits and settings.resolved_clip == "speculative" and self.plan.residence.common != DEVICE
        return "speculative" if speculates else "deferred"

    # -- links -----------------------------------------------------------------------------------------------

    def seconds(self) -> dict[str, Seconds]:
        """Return the transfer time function for every link."""
        residence = self.plan.residence
        functions = link_seconds(self.settings, self.hardware, residence.sharding)
        if "collective" not in self.settings.throttles:
            functions["collective"] = self.memory.dispatched.exchanged(functions["collective"], self.hardware)
        is_read = residence.indices_on(FILES) and not residence.indices_on(DISK)
        is_cached = is_read and not residence.file_staging_bytes
        if is_cached and "nvme_read" not in self.settings.throttles:
            # A read from the page cache is a memory copy: every byte is read and written once.
            functions["nvme_read"] = Throttle(self.hardware.rates.host_bytes_per_s / 2).seconds
        if self._in_stream and not self._has_backward:  # an update on the device draws its noise there
            functions["here"] = self._descending_seconds
        return functions

    def _descending_seconds(self, num_bytes: int) -> float:
        """Return the seconds of MeZO's update on the device. `num_bytes`: read and written in states."""
        trained = [region for region in self.regions if region.trainable]
        state_bytes = sum(region.update_bytes(region.numel) for region in trained)
        cost = noise_costs()[1].of(num_bytes * sum(region.numel for region in trained) // state_bytes)
        return max(compute_seconds(NO_WORK, [cost], 1, self.settings, self.hardware))

    def _hiding_tokens(self, step: SimulatedStep) -> int | None:
        """Return `Timing.hides_from_tokens`.

        Compute and offloaded activations grow with the token count; all other traffic is constant.
        """
        if step.busy_s["network"] and (self._inline or self.plan.residence.common == DEVICE):
            return None  # compute itself sends
        seconds, share = self.seconds(), 0.0
        work = self.workload
        compute_s = work.num_passes * sum(call.forward_s + call.backward_s for call in self.calls)
        host_s = step.busy_s["compute"] - compute_s  # host time per use
        for lane, busy in step.busy_s.items():
            tiers = {"h2d": OFFLOADED, "d2h": OFFLOADED, "nvme_read": (DISK,), "nvme_write": (DISK,)}
            waiting = self.waiting_bytes(*tiers.get(lane, ()))
            growing_s = work.num_passes * seconds[lane](waiting) if waiting else 0.0
            if lane == "compute" or busy <= growing_s:
                continue
            if growing_s >= compute_s:
                return None
            share = max(share, (busy - growing_s - host_s) / (compute_s - growing_s))
        return ceil(share * work.num_passes * work.num_tokens * self.plan.residence.sharding.num_ranks)


def _limit_chunks(work: Workload) -> list[tuple[UnitWork, float]]:
    """Return the uses in a step as (use, multiplier), with the head cut into at most `_MOST_PIECES` chunks."""
    if work.num_chunks <= _MOST_PIECES:
        return [(use, 1.0) for use in work.calls]
    num_uses = work.chunk_uses
    first = len(work.calls) - num_uses * work.num_chunks
    pieces = work.calls[first : first + num_uses * _MOST_PIECES]
    times = work.num_chunks / _MOST_PIECES
    return [(use, 1.0) for use in work.calls[:first]] + [(use, times) for use in pieces]


def compute_seconds(
    work: UnitWork, costs: Sequence[Cost], num_micro_batches: int, settings: Settings, hardware: Hardware
) -> tuple[float, float]:
    """Return (device seconds, host launch seconds) for the costs of a use, over all micro-batches.

    A CPU does both jobs, so there the result is (the larger, 0).
    """
    device = sum(device_parts(work, costs, num_micro_batches, settings, hardware).values())
    num_runs, launch_s = work.num_runs(num_micro_batches), hardware.rates.launch_s
    host = num_runs * sum(cost.num_operations for cost in costs) * launch_s
    return (max(device, host), 0.0) if hardware.device == "cpu" else (device, host)


def device_parts(
    work: UnitWork, costs: Sequence[Cost], num_micro_batches: int, settings: Settings, hardware: Hardware
) -> dict[str, float]:
    """Return the device seconds for the costs of a use by part, over all micro-batches.

    Products take the longer of compute time and memory time. All other operations run one after the other at the rate
    of elementwise kernels. An accelerator idles between kernels ("gaps"). "new memory": a CPU's
    system fills it with zeros. "casts": once in a use. "exchange": with ranks of the sequence-parallel group.
    """
    rates, is_cpu = hardware.rates, hardware.device == "cpu"
    is_compiled = settings.compile == "always" and work.is_block
    num_runs, share = work.num_runs(num_micro_batches), _FUSED_SHARE if is_compiled else 1.0
    seconds = [kernel_seconds(cost, settings, rates, share) for cost in costs]
    kernels = [num_runs * sum(kind) for kind in zip(*seconds, strict=True)]
    parts = dict(zip(("products", "attention", "other kernels"), kernels, strict=False))
    if rates.fresh_bytes_per_s is not None:
        parts["new memory"] = num_runs * sum(cost.fresh_bytes for cost in costs) / rates.fresh_bytes_per_s
    if not is_cpu:
        gap_s = _COMPILED_GAP_S if settings.compile == "always" else _GAP_S
        parts["gaps"] = num_runs * sum(cost.num_operations for cost in costs) * gap_s
    parts["casts"] = sum(cost.once_bytes for cost in costs) / rates.elementwise
    exchange = Throttle(rates.collective_bytes_per_s)
    parts["exchange"] = num_runs * sum(exchange.seconds(round(cost.exchanged_bytes)) for cost in costs)
    return parts


def kernel_seconds(cost: Cost, settings: Settings, rates: Rates, share: float = 1.0) -> tuple[float, float, float]:
    """Return the seconds for (products, attention, all other kernels). `share`: part of the other bytes to count.

    Products and attention read and write their operands meanwhile, and together take no less than these bytes.
    """
    precision = settings.precision
    attention = (cost.attention_flops + _EFFICIENT_MORE * cost.efficient_flops) / rates.attention(precision)
    products = (cost.flops - cost.attention_flops - cost.fp8_flops) / rates.flops(precision)
    products += cost.fp8_flops / rates.fp8_flops(settings.matmul, precision)
    products = max(products, cost.num_bytes / rates.device_bytes_per_s - attention)
    moved_s = share * cost.moved_bytes / rates.elementwise
    return products, attention, moved_s + cost.copied_bytes / rates.device_bytes_per_s


def link_seconds(settings: Settings, hardware: Hardware, sharding: Sharding) -> dict[str, Seconds]:
    """Return the transfer time function for every link: from its throttle, or from the machine rate."""
    rates, throttles, num_machines = hardware.rates, settings.throttles, hardware.num_machines
    device = Throttle(rates.elementwise)
    # Collective bytes count the shard of one rank, copied to every other rank of the replica. Network bytes count the
    # data one rank sends.
    num_far = max(0, sharding.size - sharding.num_ranks // num_machines)
    near, far = Throttle(rates.collective_bytes_per_s), Throttle(rates.network_bytes_per_s, rates.network_latency_s)
    exchanges = [(near, sharding.size - 1 - num_far), (far, num_far)]
    rate = min((each.bytes_per_second / n for each, n in exchanges if n and each.bytes_per_second), default=None)
    links = {
        "h2d": Throttle(rates.h2d_bytes_per_s),
        "d2h": Throttle(rates.d2h_bytes_per_s),
        "update": Throttle(rates.host_bytes_per_s),
        "nvme_read": Throttle(rates.nvme_read_bytes_per_s),
        "nvme_write": Throttle(rates.nvme_write_bytes_per_s),
        "collective": Throttle(rate, far.latency_s if num_far else 0.0),
        "network": far if num_machines > 1 else near,
        **throttles,
        "update_on_device": throttles.get("update", device),
        "here": device,
        DECODING: device,
    }
    return {link: each.seconds for link, each in links.items()}


def _coarsen(residence: Residence, regions: Sequence[Region], most_tiles: int) -> tuple[Residence, int]:
    """Return a table with at most `most_tiles` tiles per region, and the number of real tiles per simulated tile."""
    num_ranges, in_files = residence.sharding.num_ranges, residence.indices_on(FILES)
    rows = [(region, residence.row(region).tile_numel) for region in regions if region.index not in in_files]
    tiles = max((-(-region.numel // num_ranges // tile) for region, tile in rows if tile), default=1)
    factor = max(1, -(-tiles // most_tiles))
    return residence.enlarge_tiles(factor), factor
