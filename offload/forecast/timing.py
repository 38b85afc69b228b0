"""What a step takes: a plan and a step's compute on a machine's rates, played by `offload.forecast.played_step`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from offload.engine.assemble import EnginePlan
from offload.engine.spare_memory import shared_out
from offload.forecast.memory import StepMemory, device_budget
from offload.forecast.played_step import Call, PlayedPlan, Simulated
from offload.forecast.routed import RoutedExperts, routed_experts
from offload.forecast.shortened import simulate_few
from offload.forecast.workload import Cost, UnitWork, Workload
from offload.lanes.played import DECODING, Seconds
from offload.lanes.throttle import Throttle
from offload.layout.planes import PAGE_BYTES
from offload.layout.regions import DiskLayout, Region, Sharding
from offload.machine.hardware import Hardware
from offload.planning.device_updates import UPDATE_RING as DEVICE_UPDATE_RING
from offload.planning.estimates import host_update_bytes, streamed_bytes, update_bytes
from offload.planning.memory import (
    BUFFER,
    SHARDS,
    SLOT,
    STAGING,
    gradient_lasts,
    resident_regions,
    shard_bytes,
    staging_bytes,
)
from offload.planning.settings import Settings
from offload.tiers.nvme import ACTIVATION_RING, RING_TILES

_USE_HOST_S = 0.05e-3, 0.1e-3
_FUSED_SHARE = 0.43
"""Of the bytes that operations beside products move, those that are left where torch.compile fuses them: by the tokens
that torchtitan tells of an 8B Llama on H100s, 5,762 and 6,667 a second (its docs/performance.md, table 1), where 24 %
of an eager block are such operations.
"""
_PART_HOST_S = 0.15e-3, 0.35e-3
"""What a unit's use costs the thread of compute beyond plain PyTorch, in its forward and its backward: once, and for
each micro-batch; with one 0.65 ms a step (benchmarks/overhead.py).
"""
TILE_HOST_S = 0.2e-3
"""What a tile of an update costs it: `offload.planning.disk`."""
STEP_HOST_S = 1e-3
"""What a step costs it beside its units: a batch that goes up, a loss that comes down, the norm."""
_MOST_PARTS = 4
"""Micro-batches of a use that are played: of more, several as one. A step differs by less than a thousandth."""
_MOST_TILES = 4
"""Into which a region is cut here: more tiles change little in time, and much in what it takes to play them."""
_MOST_PIECES = 4
"""Into which a head is cut here that is made in chunks, for the same reason."""


@dataclass(frozen=True)
class Timing:
    """A step, forecast.

    step_seconds: its seconds, in the steady state.
    lane_seconds: how long each link, and compute, is busy in it.
    bound_by: which of them is busy longest.
    tokens_per_second: of all ranks.
    mfu: the model's own products (forward and backward, no recompute; or those of all forwards, where there are these
        alone) over what the device could have made meanwhile.
    nvme_written_bytes: by this rank, in a step.
    exposed: how long compute had nothing to do, by the link that it waited for.
    network_bytes: what this rank sends to other machines in a step.
    hides_from_tokens: with how many tokens of all ranks a step would compute for as long as its busiest link works;
        None where no number does, as what moves grows with them as fast, or compute itself sends over the network.
    """

    step_seconds: float
    lane_seconds: Mapping[str, float]
    bound_by: str
    tokens_per_second: float
    mfu: float
    nvme_written_bytes: int
    exposed: Mapping[str, float]
    network_bytes: int = 0
    hides_from_tokens: int | None = None


@dataclass
class PlannedStep:
    """A step of a plan, as the played engine wants it. Throttles of the settings stand for the links that they play."""

    prepared: EnginePlan
    """The engine, with its settings and plan."""
    workload: Workload
    """What the model computes."""
    hardware: Hardware
    """The machine."""
    clips: bool = True
    """True if gradients are longer than they may be, so that with speculative clipping what was updated before the norm
    was known is corrected.
    """

    def __post_init__(self) -> None:
        its, structure = self.prepared, self.prepared.structure
        self.settings, self.regions, self.units, self.plan = its.settings, structure.regions, structure.units, its.plan

    def play(self, num_steps: int = 6) -> Timing:
        """Return what it takes, by playing so many of it, of which the later half counts. Of many blocks that are alike
        a few are played.
        """
        return self._timing(simulate_few(self.calls, self.played(), self.seconds(), num_steps))

    # -- compute ---------------------------------------------------------------------------------------------

    @property
    def _in_stream(self) -> bool:
        return self.hardware.device != "cpu"

    @property
    def inline(self) -> bool:
        """True where compute itself makes copies and updates."""
        return not self.plan.overlap and not self._in_stream

    @cached_property
    def calls(self) -> list[Call]:
        """Return the uses of a step, in the order of the forward."""
        memory, parts = self._memory, self.workload.num_micro_batches
        in_graphs = memory.kept | memory.below
        its = {unit.name: unit.regions for unit in self.units if not unit.resident}
        if not self._has_backward:
            return list(self._forwards(its))
        found = []
        for number, (work, times) in enumerate(_in_few_pieces(self.workload)):
            regions = its.get(work.name or "", ())
            experts = self._experts.get(work.name or "")
            again = [work.forward] if regions and number not in in_graphs else []
            inputs, graph = memory.bytes_away(number)
            host = self._host_seconds(work) if regions else (0.0, 0.0)
            forward, backward = self._compute(work, [work.forward]), self._compute(work, [*again, work.backward])
            adds_s = self._adding_seconds(work, regions)
            alone = (0.0, 0.0) if experts is None else self._alone_seconds(experts)
            found.append(
                Call(
                    regions if experts is None else (*regions, *experts.hit),
                    forward[0] * times + alone[0],
                    (backward[0] + adds_s) * times + alone[1],
                    (forward[1] + host[0]) * times,
                    (backward[1] + host[1]) * times,
                    num_parts=min(parts, _MOST_PARTS),
                    saved_bytes=round(inputs * times),
                    graph_bytes=round(graph * times),
                    reads_weights=work.reads_weights,
                )
            )
        return found

    @cached_property
    def _experts(self) -> dict[str, RoutedExperts]:
        """The streamed experts of blocks, by the blocks' names."""
        return routed_experts(self.prepared.structure, self.workload)

    def _alone_seconds(self, experts: RoutedExperts) -> tuple[float, float]:
        """Return what compute waits for the experts of a layer at least, in its forward and its backward: for the first
        record, which nothing foretells, and for all of them in each micro-batch but one.
        """
        seconds, again = self.seconds(), self.workload.num_micro_batches - 1
        up = seconds["h2d"](experts.record_bytes) + again * seconds["h2d"](experts.travelling_bytes)
        return up, up + again * seconds["d2h"](experts.gradient_bytes())

    @cached_property
    def _played_regions(self) -> list[Region]:
        """All regions, with those of experts put together."""
        gone = {r.index for unit in self.units if unit.in_records for r in unit.regions}
        merged = [region for experts in self._experts.values() for region in (*experts.hit, *experts.missed)]
        return [*(region for region in self.regions if region.index not in gone), *merged]

    @property
    def _has_backward(self) -> bool:
        return self.settings.optimizer.has_gradients

    def _forwards(self, its: Mapping[str, tuple[Region, ...]]) -> Iterator[Call]:
        """Yield the uses of a step of forwards alone, each with all of its passes, and with what makes the weights of
        these: both sides are written, from weights that are read. (As if all took part, and without what random
        numbers and magnitudes take.)
        """
        directions = self.settings.optimizer.num_directions
        here = self.seconds()["here"]

        def perturb_s(regions: Iterable[Region]) -> float:
            return directions * here(3 * sum(region.weight_bytes for region in regions if region.trainable))

        if stay := [unit for unit in self.units if unit.resident]:
            yield Call((), sum(perturb_s(unit.regions) for unit in stay), 0.0)
        last = None
        for work in self.workload.calls:
            regions = its.get(work.name or "", ())
            device_s, host_s = self._compute(work, [work.forward] * (2 * directions))
            if regions and (directions > 1 or work.name != last):  # one use after the other has them still
                device_s += perturb_s(regions)
            last = work.name or last
            if regions:
                host_s += 2 * directions * self._host_seconds(work)[0]
            yield Call(regions, device_s, 0.0, host_s, 0.0)

    def _host_seconds(self, work: UnitWork) -> tuple[float, float]:
        """Return what a use costs the host beside its kernels, in its forward and its backward."""
        num_runs, once, each = work.num_runs(self.workload.num_micro_batches), _USE_HOST_S, _PART_HOST_S
        return once[0] + each[0] * num_runs, once[1] + each[1] * num_runs

    def _adding_seconds(self, work: UnitWork, regions: Iterable[Region]) -> float:
        """Return what it takes the device to add up the gradients of a use where those of several micro-batches, or
        pieces of a head, are one: each is read, and the sum in fp32 read and written.
        """
        num_runs = work.num_runs(self.workload.num_micro_batches)
        if num_runs == 1 and (work.is_cut or self.workload.num_chunks == 1):
            return 0.0
        moved = sum(region.weight_bytes + 8 * region.numel for region in regions if region.trainable)
        return num_runs * moved / self.hardware.rates.device_bytes_per_s

    def _compute(self, work: UnitWork, costs: Sequence[Cost]) -> tuple[float, float]:
        parts, settings = self.workload.num_micro_batches, self.settings
        fuses = settings.compile == "auto"
        return compute_seconds(work, costs, parts, settings.precision, self.hardware, fuses=fuses)

    # -- memory ----------------------------------------------------------------------------------------------

    @cached_property
    def _memory(self) -> StepMemory:
        return StepMemory(self.prepared, self.workload, self.hardware)

    @property
    def budget_bytes(self) -> int | None:
        """Bytes of the device that an engine may hold; None without end."""
        return device_budget(self.plan, self.hardware)

    def waiting_bytes(self, *tiers: str) -> int:
        """Return the bytes of unit inputs and of graphs that wait on some tiers, at most."""
        placement = self.settings.placement
        inputs = sum(call.saved_bytes for call in self.calls) if placement.activations in tiers else 0
        return inputs + (sum(call.graph_bytes for call in self.calls) if placement.graphs in tiers else 0)

    @property
    def device_bytes(self) -> int:
        """The most that the device holds at once, with the least for slots and the gradient buffer."""
        return self._memory.device_bytes

    def _room(self) -> tuple[int, int]:
        """Return the bytes of slots and of the gradient buffer once the rest was given away."""
        slots, buffer = self.plan.range(SLOT), self.plan.range(BUFFER)
        if self.budget_bytes is None:
            return slots[0], buffer[0]
        return shared_out(self.budget_bytes - (self.device_bytes - slots[0] - buffer[0]), slots, buffer)

    # -- the engine ------------------------------------------------------------------------------------------

    def played(self) -> PlayedPlan:
        """Return how the engine's lanes work."""
        settings, plan = self.settings, self.plan
        on_device, resident = plan.tiers[1] == "device", resident_regions(self.units)
        names = [work.name for work in self.workload.calls]
        often = {name for name in names if name is not None and names.count(name) > 1}
        used_often = {r.index for unit in self.units if unit.name in often for r in unit.regions}
        lasting = {r.index for r in self.regions if gradient_lasts(r, resident)} | used_often
        regions, experts, sharding = self._played_regions, list(self._experts.values()), plan.layout.sharding
        layout, factor = _coarse(plan.layout, regions)
        slots, buffer = self._room()
        staged = plan.of("device" if on_device else "cpu", STAGING).num_bytes
        shards = plan.of("device", SHARDS).num_bytes
        if experts:  # which are put together for the play, and are larger than a record so
            staged, shards = staging_bytes(regions, 2, sharding), shard_bytes(regions, 2, sharding)
        lookahead, most = plan.lookahead(settings.prefetch, len(self.regions))
        waiting = {key: getattr(settings.placement, key).replace("auto", "device") for key in ("activations", "graphs")}
        rings = {name: num_bytes * factor for name, num_bytes in plan.rings.items()}
        if ACTIVATION_RING in rings:
            rings[ACTIVATION_RING] = self._activation_ring(plan.rings[ACTIVATION_RING])
        return PlayedPlan(
            regions=tuple(regions),
            settings=replace(settings, clip=self._clip(on_device), placement=replace(settings.placement, **waiting)),
            layout=layout,
            rings=rings,
            buffer_bytes=buffer + 2 * max((each.gradient_bytes(settings.splits) for each in experts), default=0),
            capacity_bytes=slots + max((each.weight_bytes for each in experts), default=0),
            lookahead=lookahead,
            most=most,
            staging_bytes=staged,
            shard_bytes=shards,
            update_ring_bytes=plan.of("device", DEVICE_UPDATE_RING).num_bytes * factor,
            resident=frozenset(resident),
            lasting=frozenset(lasting),
            num_machines=self.hardware.num_machines,
            on_device=on_device,
            in_stream=self._in_stream,
            inline=self.inline,
            corrects=self.clips,
            wide=settings.splits and self.workload.num_micro_batches > 1,
            step_host_s=STEP_HOST_S,
            tile_host_s=TILE_HOST_S / factor,
        )

    def _activation_ring(self, num_bytes: int) -> int:
        """Return the bytes of the ring for activations, larger where these would have more tiles than regions may."""
        largest = max((max(call.saved_bytes, call.graph_bytes) // call.num_parts for call in self.calls), default=0)
        return max(num_bytes, RING_TILES * (largest // _MOST_TILES + 3 * PAGE_BYTES)) if num_bytes else 0

    def _clip(self, on_device: bool) -> str:
        """Return when updates are made: of `auto`, what the engine decides by the same comparison (`resolve_clip`), and
        by whether steps are clipped.
        """
        settings, plan = self.settings, self.plan
        waits = settings.judges_gradients and self._has_backward and not settings.delay
        if on_device or not waits:
            return "deferred"
        if settings.resolved_clip != "auto":
            return settings.resolved_clip
        if self.inline or not plan.corrects_cheaply or self.clips:
            return "deferred"
        seconds, sharding = self.seconds(), plan.layout.sharding
        on_host, (up, down) = host_update_bytes(self.regions, plan.layout), streamed_bytes(self.regions, plan.layout)
        of_each = {"update": on_host, "h2d": up, "d2h": down}
        of_each["update_on_device"] = update_bytes(self.regions, sharding) - on_host
        update_s = max(seconds[lane](num_bytes) for lane, num_bytes in of_each.items() if num_bytes)
        weights = sum(sharding.share(r.travelling, r.travelling_bytes) for r in self.regions)
        forward_s = max(sum(call.forward_s for call in self.calls), seconds["h2d"](weights))
        return "deferred" if update_s <= forward_s else "speculative"

    # -- links -----------------------------------------------------------------------------------------------

    def seconds(self) -> dict[str, Seconds]:
        """Return what bytes take on every link."""
        layout = self.plan.layout
        found = link_seconds(self.settings, self.hardware, layout.sharding)
        is_cached = layout.files and not layout.file_staging_bytes and not layout.planes
        if is_cached and "nvme_read" not in self.settings.throttles:
            # A read is a copy out of the page cache, whose bytes are read and written.
            found["nvme_read"] = Throttle(self.hardware.rates.host_bytes_per_s / 2).seconds
        return found

    def _timing(self, found: Simulated) -> Timing:
        """Return a simulated step as it is told."""
        rates, ranks, work = self.hardware.rates, self.plan.layout.sharding.num_ranks, self.workload
        seconds = max(found.seconds, self._both_ways(found))
        passes = 2 * self.settings.optimizer.num_directions
        flops = sum(
            each.num_runs(work.num_micro_batches)
            * (each.forward.flops + each.backward.flops if self._has_backward else passes * each.forward.flops)
            for each in work.calls
        )
        return Timing(
            step_seconds=seconds,
            lane_seconds={name: busy for name, busy in found.busy_s.items() if busy or name == "compute"},
            bound_by=max(found.busy_s, key=lambda name: found.busy_s[name]),
            tokens_per_second=work.num_tokens * ranks / seconds,
            mfu=flops / (seconds * rates.flops_per_s[self.settings.precision]),
            nvme_written_bytes=round(found.nvme_written_bytes),
            network_bytes=round(found.network_bytes),
            exposed={name: waited for name, waited in found.exposed_s.items() if waited},
            hides_from_tokens=self._hides_from(found),
        )

    def _hides_from(self, found: Simulated) -> int | None:
        """Return `Timing.hides_from_tokens`: what computes and what waits elsewhere grow with the tokens, and the rest
        of what moves does not.
        """
        if found.busy_s["network"] and (self.inline or self.plan.tiers[1] == "device"):
            return None  # compute sends by itself
        seconds, most = self.seconds(), 0.0
        computes = sum(call.forward_s + call.backward_s for call in self.calls)
        around = found.busy_s["compute"] - computes  # what the host does for each use
        for lane, busy in found.busy_s.items():
            tiers = {"h2d": ("cpu", "nvme"), "d2h": ("cpu", "nvme"), "nvme_read": ("nvme",), "nvme_write": ("nvme",)}
            waiting = self.waiting_bytes(*tiers.get(lane, ()))
            grows = seconds[lane](waiting) if waiting else 0.0
            if lane == "compute" or busy <= grows:
                continue
            if grows >= computes:
                return None
            most = max(most, (busy - grows - around) / (computes - grows))
        return ceil(most * self.workload.num_tokens * self.plan.layout.sharding.num_ranks)

    def _both_ways(self, found: Simulated) -> float:
        """Return what a step's traffic takes in both directions at once, which may share what a machine moves."""
        rates = self.hardware.rates
        if {"h2d", "d2h"} & self.settings.throttles.keys():
            return 0.0
        moved = found.busy_s["h2d"] * rates.h2d_bytes_per_s + found.busy_s["d2h"] * rates.d2h_bytes_per_s
        return moved / rates.both_ways_bytes_per_s


def _in_few_pieces(work: Workload) -> list[tuple[UnitWork, float]]:
    """Return the uses of a step, with the head in a few pieces, and how many of its own each of these stands for."""
    if work.num_chunks <= _MOST_PIECES:
        return [(use, 1.0) for use in work.calls]
    num_uses = 1 if work.calls[-1] == work.calls[-2] else 2  # of the head, and of the loss behind it
    first = len(work.calls) - num_uses * work.num_chunks
    pieces = work.calls[first : first + num_uses * _MOST_PIECES]
    times = work.num_chunks / _MOST_PIECES
    return [(use, 1.0) for use in work.calls[:first]] + [(use, times) for use in pieces]


def compute_seconds(
    work: UnitWork, costs: Sequence[Cost], num_micro_batches: int, precision: str, hardware: Hardware, *, fuses: bool
) -> tuple[float, float]:
    """Return the seconds of some costs of a use on the device, over all micro-batches, and those that the host takes to
    launch them. On a CPU, which does both, the larger of them and nothing. `fuses`: blocks are compiled.

    A product takes what it computes or what it reads and writes, whichever is longer; everything else comes beside the
    products in turn, each operation over memory, for as long as its bytes take.
    """
    rates = hardware.rates
    flops = rates.flops_per_s[precision]
    exchange = Throttle(rates.collective_bytes_per_s)
    num_runs, share = work.num_runs(num_micro_batches), _FUSED_SHARE if fuses and work.is_block else 1.0
    seconds = [
        max(cost.flops / flops, cost.num_bytes / rates.device_bytes_per_s)
        + share * cost.moved_bytes / rates.device_bytes_per_s
        + exchange.seconds(round(cost.exchanged_bytes))
        for cost in costs
    ]
    device = num_runs * sum(seconds)
    host = num_runs * sum(cost.num_operations for cost in costs) * rates.launch_s
    return (max(device, host), 0.0) if hardware.device == "cpu" else (device, host)


def link_seconds(settings: Settings, hardware: Hardware, sharding: Sharding) -> dict[str, Seconds]:
    """Return what bytes take on every link: as it is throttled, or as the machine has it."""
    rates, throttles = hardware.rates, settings.throttles
    own = {
        "h2d": rates.h2d_bytes_per_s,
        "d2h": rates.d2h_bytes_per_s,
        "update": rates.host_bytes_per_s,
        "nvme_read": rates.nvme_read_bytes_per_s,
        "nvme_write": rates.nvme_write_bytes_per_s,
    }
    found: dict[str, Seconds] = {
        link: throttles[link].seconds if link in throttles else Throttle(rate).seconds for link, rate in own.items()
    }
    exchanges = _exchanges(hardware, sharding)
    found |= {link: throttles.get(link, exchange).seconds for link, exchange in exchanges.items()}
    device = Throttle(rates.device_bytes_per_s)
    found["update_on_device"] = throttles.get("update", device).seconds
    found["here"] = found[DECODING] = device.seconds
    return found


def _exchanges(hardware: Hardware, sharding: Sharding) -> dict[str, Throttle]:
    """Return what exchanges within a replica take, by the bytes of each rank, of which every other one gets a copy; and
    those between replicas, by the bytes that a rank sends.
    """
    rates, here = hardware.rates, sharding.num_ranks // hardware.num_machines
    num_far = max(0, sharding.size - here)
    near, far = Throttle(rates.collective_bytes_per_s), Throttle(rates.network_bytes_per_s, rates.network_latency_s)
    links = [(near, sharding.size - 1 - num_far), (far, num_far)]
    rate = min((each.bytes_per_second / n for each, n in links if n and each.bytes_per_second), default=None)
    within = Throttle(rate, far.latency_s if num_far else 0.0)
    return {"collective": within, "network": far if hardware.num_machines > 1 else near}


def _coarse(layout: DiskLayout, regions: Sequence[Region]) -> tuple[DiskLayout, int]:
    """Return a layout whose regions are cut in a few tiles at most, and how many there are in one of these."""
    moving = [r for r in regions if layout.of(r) or r.index in layout.streamed]
    tiles = max((-(-r.numel // layout.sharding.num_ranges // layout.tile_numel) for r in moving), default=1)
    factor = max(1, -(-tiles // _MOST_TILES))
    return replace(layout, tile_numel=layout.tile_numel * factor), factor
