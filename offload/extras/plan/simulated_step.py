"""Simulate training steps: real engine components on simulated lanes with a virtual clock.

`Executor`, `Slots`, `Store`, `Nvme`, `GradientFlow`, `Updates`, `SlotUpdates` and `ActivationOffload` are the engine
classes, with all fences and rings. Simulated lanes do no work; each job takes the time its bytes take on the link.
Memory is mapped but never touched, except for padding. This module adds only the call order in each training method.

Not simulated: random delays, evaluation, checkpoint writes, and custom loops with several backwards per step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch

from offload.engine.gradients.device_updates import DeviceUpdates
from offload.engine.gradients.flow import GradientFlow
from offload.engine.gradients.norms import CopySquares, Measures
from offload.engine.gradients.tile_updates import InPlaceUpdates, RegionUpdate, TileUpdate, TileUpdates, UpdatePlace
from offload.engine.gradients.updates import Updates
from offload.engine.units.activation_offload import ActivationOffload, DiskActivationOffload, HostActivationOffload
from offload.extras.large.dispatch import pass_over, receive_gradients
from offload.extras.plan.simulated_lanes import Seconds, SimulatedLanes
from offload.extras.plan.simulated_ranks import SimulatedRanks
from offload.extras.zeroth.slot_updates import SlotUpdates
from offload.lanes.ticket import Fence, Ticket
from offload.layout.regions import Region
from offload.layout.residence import DISK, HOST, Residence
from offload.planning.disk import read_ring
from offload.planning.memory import BUFFER, SCRATCH, SHARDS
from offload.planning.settings import Settings
from offload.schedule.execute import Executor
from offload.tiers.accelerator_device import AcceleratorDevice
from offload.tiers.counters import Counters, Ledger
from offload.tiers.device import CpuDevice
from offload.tiers.host import Arena
from offload.tiers.model_files import ModelFiles
from offload.tiers.nvme import Nvme, Stripes
from offload.tiers.slots import Slots
from offload.tiers.store import Store
from offload.tiers.tile import DeferredUpdates, Tile

_NUM_STEPS, _NUM_WARM = 6, 3
"""Simulated steps, and warm-up steps among them.

The first step fetches on demand. After it, device residency can still change from step to step for a while.
"""
_FEW_PASSES = 3, 2
"""Simulated passes of a step, for the two simulations: the third one is like all that follow."""
_GRAPH_PIECES = 8
"""Pieces of an offloaded graph in a micro-batch.

The engine copies each saved tensor for itself: as soon as the forward has saved it, and back until the backward needs
it. Pieces of equal size stand for these tensors.
"""


@dataclass(frozen=True)
class SimulatedCall:
    """A unit use over all micro-batches in a step: forward, and later backward.

    Without `regions`, a stretch between units.

    regions: unit regions.
    forward_s, backward_s: compute seconds. The backward includes activation recomputation.
    forward_host_s, backward_host_s: launch time on the host; if the host itself computes, time for other work.
    num_parts: micro-batch count. Seconds are divided evenly.
    saved_bytes: offloaded input bytes; 0 if inputs stay on the device or the graph is offloaded.
    graph_bytes: offloaded graph bytes. The graph replaces the inputs. Or those of product outputs, beside inputs.
    reads_weights: True if the backward reads weights.
    others: regions by unit, for units that other ranks compute meanwhile. Their gradients arrive after the backward.
    """

    regions: tuple[Region, ...]
    forward_s: float
    backward_s: float
    forward_host_s: float = 0.0
    backward_host_s: float = 0.0
    num_parts: int = 1
    saved_bytes: int = 0
    graph_bytes: int = 0
    reads_weights: bool = True
    others: tuple[tuple[Region, ...], ...] = ()

    @property
    def units(self) -> tuple[tuple[Region, ...], ...]:
        """Regions by unit, for this unit and those of other ranks."""
        return (self.regions, *self.others)


@dataclass(frozen=True)
class _SavedTensors:
    """The inputs or the graph of a call, away from the device."""

    pool: ActivationOffload
    parts: Sequence[Sequence[torch.Tensor]]
    """Stand-ins by micro-batch, in the order of the forward."""

    def get(self, part: int) -> list[Sequence[Ticket]]:
        """Start the copies of a micro-batch to the device, in the order of the backward."""
        return [self.pool.get(piece).tickets for piece in reversed(self.parts[part])]

    def free(self) -> None:
        for pieces in self.parts:
            for piece in pieces:
                self.pool.free(piece.untyped_storage().data_ptr())


@dataclass(frozen=True)
class SimulatedPlan:
    """The engine plan, reduced to values needed to simulate the lanes.

    regions: all regions, by index.
    settings: update timing, activation tiers and update rule are read; the rest is ignored.
    residence: tiers of planes, tile sizes, and the range for this rank.
    rings: disk ring sizes in bytes, by name.
    buffer_bytes: gradient buffer size on the device.
    capacity_bytes: device memory for streamed weights.
    lookahead, max_cargoes: cargoes fetched ahead, and maximum held at the same time (None: as many as fit).
    staging_bytes, shard_bytes: device buffers for gradients consumed immediately, and for reduced shards.
    update_ring_bytes: device ring for host states updated on the device.
    resident: indices of regions always on the device.
    lasting: indices of regions whose gradients leave the device only after the backward.
    num_machines: machines the ranks are spread over.
    in_stream: True if compute is an accelerator stream and the host runs ahead.
    inline: True if compute itself makes copies and updates.
    corrects: True if speculative clipping has to correct updates.
    wide: True if the gradient buffer sums in fp32.
    passes: passes of a step.
    summed: indices of regions whose gradients add up on the host: over several passes, or over layers with one weight.
    step_host_s: host seconds per step.
    tile_host_s: host seconds per submitted update tile.
    shared: devices behind several links, as in `SimulatedLanes`.
    """

    regions: tuple[Region, ...]
    settings: Settings
    residence: Residence
    buffer_bytes: int
    capacity_bytes: int
    lookahead: int
    max_cargoes: int | None
    rings: Mapping[str, int] = field(default_factory=dict)
    staging_bytes: int = 0
    shard_bytes: int = 0
    update_ring_bytes: int = 0
    resident: frozenset[int] = frozenset()
    lasting: frozenset[int] = frozenset()
    num_machines: int = 1
    in_stream: bool = False
    inline: bool = False
    corrects: bool = False
    wide: bool = False
    passes: int = 1
    summed: frozenset[int] = frozenset()
    step_host_s: float = 0.0
    tile_host_s: float = 0.0
    shared: tuple[Mapping[str, float], ...] = ()


@dataclass(frozen=True)
class SimulatedStep:
    """Averages for a simulated steady-state step."""

    seconds: float
    """Step time in seconds."""
    busy_s: Mapping[str, float]
    """Busy seconds per link, and for compute."""
    exposed_s: Mapping[str, float]
    """Seconds compute waits, per link."""
    moved_bytes: Mapping[str, float]
    """Bytes by link: h2d, d2h, nvme_read, nvme_write, and network (sent to other machines)."""


def simulate(
    calls: Sequence[SimulatedCall], plan: SimulatedPlan, seconds: Mapping[str, Seconds], num_steps: int = _NUM_STEPS
) -> SimulatedStep:
    """Simulate steps and return the mean over the steps after warm-up.

    seconds: transfer time functions, see `SimulatedLanes`. "collective" receives the bytes this rank contributes.
    """
    warm = min(_NUM_WARM, num_steps - 1)
    with closing(SimulatedEngine(calls, plan, seconds)) as engine:
        for _ in range(warm):
            engine.step()
        before = engine.totals()
        for _ in range(num_steps - warm):
            engine.step()
        after, count = engine.totals(), num_steps - warm
    mean = [{name: (b[name] - a.get(name, 0.0)) / count for name in b} for a, b in zip(before, after, strict=True)]
    return SimulatedStep(mean[0].pop("now"), mean[1], mean[2], mean[0])


class _SimulatedFile(Stripes):
    """A size counter in place of a file."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def reserve(self, num_bytes: int) -> int:
        self.num_bytes += num_bytes
        return self.num_bytes - num_bytes


class _SimulatedNvme(Nvme):
    """NVMe tier with rings but no files."""

    def __init__(self, rings: Mapping[str, int], lanes: SimulatedLanes, counters: Counters) -> None:
        self._ledger = Ledger(DISK, None, "")
        self._states, self._activations = _SimulatedFile(), _SimulatedFile()
        self._arena = Arena(sum(rings.values()))
        memory = {name: self._arena.take(size, torch.uint8) for name, size in rings.items()}
        self._open_channels(memory, lanes, counters)

    def close(self) -> None:
        self._arena.close()


class _SimulatedDevice(CpuDevice):
    """A device without storage."""

    def allocate(self, name: str, num_bytes: int, fix: str = "") -> torch.Tensor:
        self.ledger.reserve(name, num_bytes, fix)
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")


class _SimulatedAccelerator(_SimulatedDevice):
    """An accelerator without storage, with the same decoding."""

    decodes_at_once = AcceleratorDevice.decodes_at_once


class _SimulatedMeasures(Measures):
    """Every parameter has a gradient. With `corrects`, gradients are large enough to be clipped."""

    def __init__(self, regions: Sequence[Region], square: float) -> None:
        self.touched = {region.index: [True] * len(region.pieces) for region in regions}
        self.squares = {piece: square * region.trainable for region in regions for piece in region.pieces}

    def begin_step(self) -> None:
        """Do nothing: all steps are equal."""

    def measure(self, region: Region, flat: torch.Tensor) -> CopySquares | None:  # noqa: ARG002
        return None

    def measure_shard(self, region: Region, shard: torch.Tensor, agrees: bool) -> None:
        """Do nothing: the squares are given."""

    def finish(self) -> None:
        """Do nothing: the simulated ranks exchange only a few numbers."""


class _TimedUpdatePlace(UpdatePlace):
    """Wraps an update place and adds host time per tile."""

    def __init__(self, place: UpdatePlace, lanes: SimulatedLanes, tile_host_s: float) -> None:
        self._place, self._lanes, self._tile_host_s = place, lanes, tile_host_s

    def submit(self, tile: TileUpdate) -> Ticket:
        ticket = self._place.submit(tile)
        self._lanes.spend(self._tile_host_s)
        return ticket

    def begin_step(self) -> None:
        """Start a step. There is no computation to check at the end."""
        self._place.begin_step()


class _SimulatedUpdate(RegionUpdate):
    """An update without gradients, with simulated compute time if compute itself runs updates."""

    def __init__(self, tiles: TileUpdates, region: Region, lanes: SimulatedLanes, seconds: Seconds) -> None:
        super().__init__(tiles, region, torch.empty(0, device="cpu"), Fence("no gradients"), ())
        self._lanes, self._seconds = lanes, seconds

    def update_tile(self, tile: Tile, planes: Mapping[str, torch.Tensor]) -> int:  # noqa: ARG002
        self._lanes.compute(self._seconds(self.region.update_bytes(tile.end - tile.begin)))
        return 0


class SimulatedEngine:
    """An engine on simulated lanes. `step` calls the components like the real training methods."""

    def __init__(self, calls: Sequence[SimulatedCall], plan: SimulatedPlan, seconds: Mapping[str, Seconds]) -> None:
        self._calls, self._plan, settings = calls, plan, plan.settings
        self._device_seconds, self._counters = seconds.get("here", lambda _: 0.0), Counters()
        self.lanes = lanes = SimulatedLanes(seconds, in_stream=plan.in_stream, inline=plan.inline, shared=plan.shared)
        device_class = _SimulatedAccelerator if plan.in_stream else _SimulatedDevice
        device, host = device_class(Ledger("device", None, ""), copies_aside=False), Ledger("cpu", None, "")
        nvme = _SimulatedNvme(plan.rings, lanes, self._counters) if plan.rings else None
        ring_bytes = read_ring(plan.residence, plan.regions)
        files = ModelFiles(ring_bytes, host, lanes, self._counters, None) if ring_bytes else None
        self._store = Store(
            plan.regions,
            (),
            device=device,
            host=host,
            lanes=lanes,
            residence=plan.residence,
            nvme=nvme,
            files=files,
            comm=SimulatedRanks(plan.residence.sharding.num_ranks, plan.num_machines),
            counters=self._counters,
        )
        summed = [region.index for region in plan.regions if region.index in plan.summed]
        if settings.keeps_gradients or summed:
            self._store.hold_gradients(summed)
        deferred = DeferredUpdates()
        self._slots = Slots(self._store, deferred, slot_bytes=plan.capacity_bytes, slot_name="slots")
        limit = settings.max_grad_norm or 1.0
        staging = device.allocate("staging", plan.staging_bytes)
        flow = self._flow = GradientFlow(
            self._store,
            settings,
            staging,
            {BUFFER: plan.buffer_bytes, SHARDS: plan.shard_bytes, SCRATCH: 0},
            _SimulatedMeasures(plan.regions, (2.0 * limit) ** 2 if plan.corrects else 0.0),
        )
        if summed:
            flow.accumulate(summed, staging)
        for region in plan.regions:
            if region.index in plan.lasting:
                flow.make_lasting(region)
        self._executor = Executor(self._slots, plan.lookahead, plan.max_cargoes, updates_at_end=flow.lasts)
        update_place: UpdatePlace = InPlaceUpdates(self._store.update_lane, lanes.update, device, nullcontext)
        if plan.update_ring_bytes:
            ring = device.allocate("update ring", plan.update_ring_bytes)
            streamed = plan.residence.updated_on_device
            update_place = DeviceUpdates(update_place, streamed, ring, self._store)
        timed_place = _TimedUpdatePlace(update_place, lanes, plan.tile_host_s)
        self._updates = Updates(self._store, flow, self._slots, deferred, settings, timed_place)
        self._pending = SlotUpdates(self._store, self._slots, deferred, lanes, device)

        def pool(tier: str) -> ActivationOffload | None:
            if tier == DISK:
                assert nvme is not None
                return DiskActivationOffload(device, lanes, self._counters, nvme)
            return HostActivationOffload(device, lanes, self._counters, host) if tier == HOST else None

        self._inputs, self._graphs = pool(settings.placement.activations), pool(settings.placement.graphs)
        largest = max((max(call.saved_bytes, call.graph_bytes) for call in calls), default=0)
        self._sample_inputs = device.allocate("unit inputs", largest)
        self._offloaded: dict[int, list[_SavedTensors]] = {}
        self._copies: dict[tuple[int, int], list[Sequence[Ticket]]] = {}
        self._slots.keep([region for region in plan.regions if region.index in plan.resident])
        self._users: dict[int, list[tuple[Region, ...]]] = {region.index: [] for region in plan.regions}
        for unit in (unit for call in calls for unit in call.units):
            for region in unit:
                self._users[region.index].append(unit)
        self._number = settings.delay_after

    def totals(self) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        """Return totals so far: (time, and bytes by link; busy seconds; exposed seconds)."""
        counters = self._counters
        counts = {
            "now": self.lanes.now_s,
            "h2d": float(counters.h2d_bytes + counters.next_h2d_bytes),
            "d2h": float(counters.d2h_bytes),
            "nvme_read": float(counters.nvme_read_bytes + counters.next_nvme_read_bytes),
            "nvme_write": float(counters.nvme_write_bytes),
            "network": float(counters.network_bytes + counters.next_network_bytes),
        }
        return counts, self.lanes.busy_s, dict(self.lanes.exposed_s)

    def close(self) -> None:
        self._store.close()

    def step(self) -> None:
        self._slots.compute_after_resident()
        if self._plan.settings.optimizer.has_gradients:
            self._step_of_backward()
        else:
            self._step_of_forwards()
        self._number += 1
        self.lanes.compute(0.0, self._plan.step_host_s)
        self._slots.compute_after_resident()

    # -- methods of training ---------------------------------------------------------------------------------

    def _step_of_backward(self) -> None:
        """Same call order as `offload.engine.methods.method.Backward`."""
        updates, norm = self._updates, None
        if updates.measures_first:
            self._begin_pass(for_norm=True)
            self._passes()
            norm = updates.measure_norm()
            self._executor.end()
        self._begin_pass(norm=norm)
        for _ in range(self._plan.passes):
            self._passes()
        first_use, loss = self._first_use(), self.lanes.mark()
        self._flow.send_rest()
        if not updates.is_immediate:
            updates.clip_gradients(first_use)
        updates.update_resident()
        self._expect_next(fetches_next=updates.is_immediate and not updates.measures_first)
        if updates.is_immediate:
            updates.clip_gradients(first_use)
        updates.start_rest()
        self.lanes.wait(loss)

    def _begin_pass(self, for_norm: bool = False, norm: float | None = None) -> None:
        self._flow.begin_step()
        self._flow.sums_in_fp32 = self._plan.wide
        self._updates.begin_step(0.0, self._flow.has_sums, self._number, for_norm=for_norm, norm=norm)
        self._executor.begin("step", fetches_next=self._updates.is_immediate)

    def _step_of_forwards(self) -> None:
        """Same call order as `offload.extras.zeroth.forwards`. The forward of each call includes all passes."""
        self._updates.begin_step(0.0, True, self._number)
        self._executor.begin("step")
        for number, call in enumerate(self._calls):
            self._forward(number, call)
        self.lanes.wait(self.lanes.mark())  # for the losses
        trainable = sorted((region for region in self._plan.regions if region.trainable), key=self._first_use())
        tiles, seconds = self._updates.tiles, self._device_seconds
        updates = {region: _SimulatedUpdate(tiles, region, self.lanes, seconds) for region in trainable}
        self._updates.flush()
        self._pending.defer({region: updates.pop(region) for region in trainable if self._pending.can_defer(region)})
        self._updates.defer(updates)
        self._updates.update_resident()
        self._expect_next(fetches_next=False)
        self._updates.start_rest()

    def _first_use(self) -> Callable[[Region], float]:
        return self._executor.first_use(lambda region: self._users[region.index])

    def _expect_next(self, fetches_next: bool) -> None:
        """Same call order as `Method._start_fetches`."""
        self._executor.end()
        self._executor.begin_fetches("step", fetches_next)

    # -- passes ----------------------------------------------------------------------------------------------

    def _passes(self) -> None:
        for number, call in enumerate(self._calls):
            self._put_inputs(number, call)
            self._forward(number, call)
        for number in reversed(range(len(self._calls))):
            self._backward(number, self._calls[number])

    def _forward(self, number: int, call: SimulatedCall) -> None:
        if call.regions:
            self._executor.enter(call.regions, False)
            self._pending.run(call.regions)
        if call.graph_bytes:
            self._compute_with_graph(number, call)
        else:
            self.lanes.compute(call.forward_s, call.forward_host_s)
        if call.regions:
            self._executor.leave(call.regions, self.lanes.mark())
        for regions in call.others:
            pass_over(self._executor, regions, backward=False)

    def _backward(self, number: int, call: SimulatedCall) -> None:
        for regions in reversed(call.others):
            pass_over(self._executor, regions, backward=True)
        if call.regions:
            self._executor.enter(call.regions, True, call.reads_weights)
        self._flow.open(call.regions)
        for part in range(call.num_parts):
            copies = self._take_copies(number, part)
            share = 1 / (call.num_parts * len(copies))
            for tickets in copies:
                self.lanes.compute_after(tickets)
                self.lanes.compute(share * call.backward_s, share * call.backward_host_s)
        for saved in self._offloaded.pop(number, ()):
            saved.free()
        self._prefetch_previous(number, 1)
        for regions in reversed(call.others):
            receive_gradients(self._flow, regions)
        self._flow.close(call.regions)
        if call.regions:
            self._executor.leave(call.regions, self.lanes.mark())

    # -- inputs and graphs away from the device --------------------------------------------------------------

    def _put_inputs(self, number: int, call: SimulatedCall) -> None:
        if call.saved_bytes:
            assert self._inputs is not None
            whole = self._inputs.put(self._sample_inputs[: call.saved_bytes])
            parts = [[part] for part in whole.tensor_split(call.num_parts)]
            self._offloaded[number] = [_SavedTensors(self._inputs, parts)]

    def _compute_with_graph(self, number: int, call: SimulatedCall) -> None:
        """Compute the forward of a call, and put each piece of the graph away once it is saved."""
        assert self._graphs is not None
        pieces = self._sample_inputs[: call.graph_bytes].tensor_split(call.num_parts * _GRAPH_PIECES)
        stand_ins = []
        for piece in pieces:
            self.lanes.compute(call.forward_s / len(pieces), call.forward_host_s / len(pieces))
            stand_ins.append(self._graphs.put(piece))
        parts = [stand_ins[begin : begin + _GRAPH_PIECES] for begin in range(0, len(pieces), _GRAPH_PIECES)]
        self._offloaded.setdefault(number, []).append(_SavedTensors(self._graphs, parts))

    def _take_copies(self, number: int, part: int) -> Sequence[Sequence[Ticket]]:
        """Return the copies that the backward of a micro-batch waits for, one after the other; start the next ones.

        Like `Inputs.backward` and `SavedInputs.prefetch_previous`.
        """
        call = self._calls[number]
        self._prefetch(number, part)
        if part + 1 == call.num_parts:
            self._prefetch_previous(number, 0)
        elif call.regions and self.lanes.overlap:
            self._prefetch(number, part + 1)
        return self._copies.pop((number, part), [()])

    def _prefetch_previous(self, number: int, part: int) -> None:
        regions = self._calls[number].regions
        if regions and self.lanes.overlap:  # skip other chunks of the same head: each ends before the next begins
            before = (n for n in reversed(range(number)) if self._calls[n].regions not in ((), regions))
            self._prefetch(next(before, -1), part)

    def _prefetch(self, number: int, part: int) -> None:
        saved = [each for each in self._offloaded.get(number, ()) if part < len(each.parts)]
        if saved and (number, part) not in self._copies:
            self._copies[number, part] = [tickets for each in saved for tickets in each.get(part)]


def simulate_passes(
    calls: Sequence[SimulatedCall], plan: SimulatedPlan, seconds: Mapping[str, Seconds], num_steps: int = _NUM_STEPS
) -> SimulatedStep:
    """Like `simulate`, extrapolated from steps with fewer passes. All blocks are simulated: a link that falls behind
    compute may do so only after many of them.
    """
    few, fewer = (replace(plan, passes=min(plan.passes, count)) for count in _FEW_PASSES)
    with without_garbage_collector():
        found = simulate(calls, few, seconds, num_steps)
        if plan.passes == few.passes:
            return found
        return _extended(found, simulate(calls, fewer, seconds, num_steps), plan.passes - few.passes)


def _extended(few: SimulatedStep, fewer: SimulatedStep, beyond: float) -> SimulatedStep:
    """Return `few` with `beyond` times the difference to `fewer` added."""

    def line(metric: Callable[[SimulatedStep], float]) -> float:
        return max(metric(few), metric(few) + beyond * (metric(few) - metric(fewer)))

    return SimulatedStep(
        line(lambda step: step.seconds),
        {name: line(lambda step, name=name: step.busy_s[name]) for name in few.busy_s},  # type: ignore[misc]
        {name: line(lambda step, name=name: step.exposed_s[name]) for name in few.exposed_s},  # type: ignore[misc]
        {name: line(lambda step, name=name: step.moved_bytes[name]) for name in few.moved_bytes},  # type: ignore[misc]
    )


@contextmanager
def without_garbage_collector() -> Iterator[None]:
    """Disable the garbage collector in this context.

    A simulation creates no reference cycles, and with torch imported the collector takes four fifths of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
