"""Build what an engine runs on: units, plan, tiers, weights taken from the model one unit at a time."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from offload.checkpoint.hf_source import Fill, Source
from offload.checkpoint.tensor_file import reader
from offload.engine.checkpoints import Checkpoints, OnDisk, OnHost
from offload.engine.discover import Candidate, describe_parameters, find_units
from offload.engine.gradients import GradientFlow
from offload.engine.hold import Hold, Snapshot
from offload.engine.keeping import Keeping
from offload.engine.leftover import Leftover
from offload.engine.moved import MovedBuffers
from offload.engine.plan import Plan, Settings, budget_bytes, make_plan
from offload.engine.stream import Stream
from offload.engine.unit import Unit, put_parameter
from offload.engine.updates import Updates
from offload.errors import format_bytes
from offload.lanes.lane import ThreadLane
from offload.lanes.lanes import open_lanes
from offload.lanes.throttle import Throttle
from offload.partition.comm import Comm
from offload.partition.layout import ParameterInfo, Region, build_regions
from offload.planning.memory import (
    SCRATCH,
    SHARDS,
    SLOT,
    UnitPlan,
    staging_bytes,
)
from offload.planning.rates import flops_per_second, update_bytes_per_second
from offload.schedule.execute import Executor
from offload.telemetry.counters import Counters
from offload.tiers.device import open_device
from offload.tiers.host import Arena, trim_heap
from offload.tiers.ledger import Ledger
from offload.tiers.nvme import Nvme
from offload.tiers.placement import Placement
from offload.tiers.slots import Slots
from offload.tiers.store import Store

_DISPATCH_S = 3e-4
"""What Python takes to dispatch a block's forward, however few its tokens."""


class Assembly:
    """A model whose parameters stream."""

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        infos: list[ParameterInfo],
        candidates: Sequence[Candidate],
        regions: Sequence[Region],
        plan: Plan,
        counters: Counters,
        comm: Comm,
    ) -> None:
        self.model, self.infos, self.regions, self.plan, self.comm = model, infos, regions, plan, comm
        self._throttle = settings.throttle
        self.closed = False
        placement, keeps_gradients, debug = settings.placement, settings.keeps_gradients, bool(settings.debug)
        self._has_room_for_sums: bool | None = False  # None: an interrupt came while that changed
        self._staged = [] if keeps_gradients else [r for r in regions if "gradients" not in plan.layout.of(r)]
        self._keeps_gradients = keeps_gradients
        device_ledger = Ledger("device", budget_bytes(placement.device_memory), "offload.device_memory")
        self.host = Ledger("cpu", budget_bytes(placement.host_memory), "offload.host_memory")
        self.nvme_ledger = Ledger("nvme", budget_bytes(placement.nvme_memory), "offload.nvme_memory")
        self.device = open_device(device_ledger, copies_aside=plan.overlap)
        delay_seed = None if settings.delay_seed is None else settings.delay_seed * comm.size + comm.rank
        self.lanes = open_lanes(settings.throttle, delay_seed, plan.overlap, has_peers=comm.size > 1)
        self._dropped = weakref.finalize(self, self.lanes.abandon)  # without close(): its threads end as well
        if isinstance(self.lanes.collective, ThreadLane):  # the others would wait for an exchange that never comes
            self.lanes.collective.on_failure = comm.close
        counters.peaks = lambda: (self.device.peak_bytes, self.host.peak_bytes, self.store.pinned_bytes)
        self.dtypes = [parameter.dtype for _, parameter in model.named_parameters()]  # in which it was built
        self._configs: list[tuple[Any, bool]] = []
        _put_buffers(model, self.device.torch_device)
        self.moved = MovedBuffers(model)

        self._nvme = self._open_nvme(placement, counters) if plan.rings else None
        self.store = Store(
            regions,
            infos,
            tier=plan.tiers[1],
            device=self.device,
            host=self.host,
            lanes=self.lanes,
            layout=plan.layout,
            nvme=self._nvme,
            comm=comm,
            counters=counters,
        )
        if keeps_gradients:
            self.store.hold_gradients(accumulates=False)
        slot, buffer = plan.of("device", SLOT), plan.of("device", "gradient buffer")
        self.slots = Slots(
            self.store,
            infos,
            self.device,
            self.lanes,
            counters,
            slot_bytes=slot.num_bytes,
            slot_name=slot.name,
            debug=debug,
        )
        self.gradients = GradientFlow(
            self.store,
            infos,
            regions,
            self.device,
            self.lanes,
            counters,
            buffer_bytes=buffer.num_bytes,
            shards_bytes=plan.of("device", SHARDS).num_bytes,
            scratch_bytes=plan.of("device", SCRATCH).num_bytes,
            staging=self._stage(self._staged),
            has_wide_buffer=settings.splits,
            debug=debug,
        )
        # Without a budget the device holds what the lookahead needs; with one, room that is left keeps units.
        stays = plan.tiers[0] == "device" or plan.limited
        self.executor = Executor(
            self.slots,
            len(regions) if settings.prefetch == "auto" and self.lanes.overlap else plan.ahead,
            None if stays else 1 + plan.ahead,
            lands_late=self.gradients.lasts,
        )
        self.updates = Updates(
            self.store,
            infos,
            self.gradients,
            self.slots,
            self.lanes,
            settings.optimizer,
            max_grad_norm=settings.max_grad_norm,
            skips=settings.skips,
            clip=settings.clip,
            debug=debug,
        )
        self.leftover = Leftover(
            comm,
            self.device,
            self.slots,
            self.gradients,
            slots_bytes=plan.range(SLOT),
            buffer_bytes=plan.range("gradient buffer"),
            moved=self._forget_places,
        )
        self.stream = Stream(
            self.device,
            self.lanes,
            self.slots,
            self.executor,
            self.gradients,
            Keeping(settings.recompute, device_ledger, self._is_weight),
            self._checkpoints(placement.activations, counters),
            seed=settings.seed,
            comm=comm,
        )
        self.units: list[Unit] = []
        for number, candidate in enumerate(candidates):
            mine = [region for region in regions if candidate.name in region.units]
            self.units.append(Unit(number, candidate, mine, self.stream))
        self.users = [[unit for unit in self.units if region in unit.regions] for region in regions]
        self.hold = Hold(model, infos, self.units, self.device.torch_device)
        self.snapshot = Snapshot(model, infos, self.units, self.hold)

    def begin(self, fill: Fill | None) -> None:
        """Take the weights over, and reroute the units."""
        self._configs = _freeze_cache(self.model)
        try:
            self._take(fill)
            self.hold.guard()
            self.lanes.drain_updates()  # a disk that fails is found out here
            self.lanes.timeline.discount("nvme_read", "nvme_write")
            trim_heap()
            for unit in self.units:
                if unit.resident:
                    self._settle(unit)
                else:
                    unit.route()
            for region in self.regions:
                if len(region.units) > 1:
                    self.gradients.make_lasting(region)
        except BaseException:
            if any(unit.resting for unit in self.units):
                self.hold.spend(failed=True)
            self._restore_configs()
            self._end_lanes()
            self.store.close()
            raise

    def _checkpoints(self, tier: str, counters: Counters) -> Checkpoints[Any] | None:
        """Return where unit inputs wait for their backward; None for the device."""
        if tier == "nvme":
            assert self._nvme is not None
            return Checkpoints(OnDisk(self.device, self.lanes, self._nvme), self.device, counters)
        if tier == "cpu":
            return Checkpoints(OnHost(self.device, self.lanes, self.host), self.device, counters)
        return None

    def _open_nvme(self, placement: Placement, counters: Counters) -> Nvme:
        """Make the files of what is on disk, and the rings through which it moves. The ranks take turns, so that each
        sees what room the others have left.
        """
        for allocation in self.plan.allocations:
            if allocation.tier == "nvme":
                self.nvme_ledger.reserve(allocation.name, allocation.num_bytes)
        made: Nvme | None = None
        for turn in range(self.comm.size):
            if turn == self.comm.rank:
                made = Nvme(
                    placement.dirs,
                    self.plan.layout.num_bytes(self.regions),
                    rings=self.plan.rings,
                    lanes=self.lanes,
                    counters=counters,
                    ledger=self.nvme_ledger,
                    host=self.host,
                    pinning=self.device.pinning,
                )
            self.comm.barrier(f"making of the files of rank {turn}")
        assert made is not None
        return made

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        return self.stream.is_weight(tensor)

    def _take(self, fill: Fill | None) -> None:
        """Move the weights into the store, unit by unit; what was a parameter becomes one NaN."""
        # A parent that keeps only its own parameters comes last: to fill it is to fill what is below it, which by then
        # was taken. The ranks take turns at it, so that what is read is read once, and each hands its unit out.
        given: dict[nn.Parameter, Source] = {}
        taken: set[int] = set()
        for number, unit in enumerate(sorted(self.units, key=lambda unit: not unit.whole)):
            source = number % self.comm.size if fill is not None else 0
            if fill is not None and source == self.comm.rank:
                given.update(fill(unit.name, unit.module) or {})  # also of what is below, which may come later
            for place in unit.places:
                parameter = place.module._parameters[place.key]
                assert parameter is not None
                if place.parameter not in taken:
                    read = given.pop(parameter).read if parameter in given else reader(parameter)
                    self.store.write(place.parameter, read, parameter.dtype, source)
                    taken.add(place.parameter)
                unit.resting[place.parameter] = self.hold.resting[place.parameter]
            unit.install(unit.resting)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Hang one NaN in the model for every parameter, also for those that stay on the device; its names and shapes
        may be read.
        """
        resident = [unit for unit in self.units if unit.resident]

        def restore() -> None:
            for unit in resident:
                unit.install(unit.live())

        with self.stream.undo.afterwards(restore), self.hold.reading(self.stream.undo):
            for unit in resident:
                unit.install(unit.resting)
            yield

    def make_resident(self, names: set[str]) -> None:
        """Units that are read from outside stay on the device, if it has room."""
        for unit in self.units:
            if unit.name in names:
                size = sum(r.weight_bytes for r in unit.regions if not self.slots.is_resident(r))
                warnings.warn(
                    f"unit {unit.name} is read from outside itself: its weights stay on the device "
                    f"({format_bytes(size)}).",
                    stacklevel=2,
                )
                self._settle(unit)
                unit.resident = True

    def _settle(self, unit: Unit) -> None:
        """Give a unit its weights on the device for good; its module runs as it is."""
        unit.unroute()
        self.slots.keep(unit.regions)
        self.slots.settle()
        self.executor.reset()
        for other in self.units:
            if any(region in unit.regions for region in other.regions):
                other.forget_live()
        for region in unit.regions:
            self.gradients.make_lasting(region)
        unit.install(unit.live())

    def _forget_places(self) -> None:
        """The device's memory for weights is about to become another."""
        self.executor.reset(keep_orders=True)
        for unit in self.units:
            if not unit.resident:
                unit.forget_live()

    def accumulate(self, accumulates: bool = True) -> None:
        """Make room for gradients that are summed over several backward passes; or between two steps go back to those
        of one, so that a step is what it would be had there been none of the others.
        """
        if self._has_room_for_sums is accumulates:
            return
        self._has_room_for_sums = None
        if accumulates and any("gradients" in self.plan.layout.of(region) for region in self.regions):
            warnings.warn(
                "gradients that are summed over several backward passes wait in host memory, in fp32, although "
                "offload.gradients is nvme.",
                stacklevel=2,
            )
        self.lanes.drain_updates()  # they read what goes
        self.store.hold_gradients(accumulates, waits=self._keeps_gradients)
        self.gradients.accumulate(
            accumulates, self._stage(self.regions if accumulates else self._staged, accumulates=accumulates)
        )
        self._has_room_for_sums = accumulates

    def _stage(self, regions: Sequence[Region], accumulates: bool = False) -> torch.Tensor:
        """Return memory beside the states for the gradients of these regions on their way."""
        neighbours = 2 if self.lanes.overlap else 1
        num_bytes = staging_bytes(regions, neighbours, self.plan.layout.sharding, accumulates)
        ledger = self.device.ledger if self.store.tier == "device" else self.host
        ledger.drop("gradient staging")
        if self.store.tier == "device":
            return self.device.allocate("gradient staging", num_bytes)
        self.host.reserve("gradient staging", num_bytes)
        return Arena(num_bytes, self.device.pinning).take(num_bytes, torch.uint8)

    def update_seconds(self) -> float:
        """Estimate what AdamW over all states takes."""
        ranges = self.plan.layout.sharding.num_ranges
        num_bytes = sum(region.update_bytes(region.numel // ranges) for region in self.regions if region.trainable)
        throttle = self._throttle.get("update", Throttle())
        return max(num_bytes / update_bytes_per_second(), throttle.seconds(num_bytes))

    def forward_seconds(self, tokens: int) -> float:
        """Estimate what a forward pass over so many tokens takes: its products, or its fetches."""
        numel = sum(info.numel for info in self.infos)
        dtype = torch.bfloat16 if any(info.compute == "bf16" for info in self.infos) else torch.float32
        products = 2 * numel * tokens / flops_per_second(self.device.torch_device, dtype)
        products += _DISPATCH_S * len(self.units)
        fetched = sum(self.plan.layout.sharding.share("weights", region.weight_bytes) for region in self.regions)
        return max(products, self._throttle.get("h2d", Throttle()).seconds(fetched))

    @contextmanager
    def unchanged_config(self) -> Iterator[None]:
        """Show the model's configuration as it was given."""
        now = [(config, config.use_cache) for config, _ in self._configs]

        def restore() -> None:
            for config, value in now:
                config.use_cache = value

        with self.stream.undo.afterwards(restore):
            for config, value in self._configs:
                config.use_cache = value
            yield

    def _restore_configs(self) -> None:
        for config, used in self._configs:
            config.use_cache = used

    def _end_lanes(self) -> None:
        self.lanes.close()
        self._dropped.detach()  # what is raised in a finalizer is lost, a Ctrl-C too: none runs where none is needed

    def close(self, restore: bool) -> None:
        """Undo the rerouting; put real parameters back with `restore`; free the tiers."""
        made: dict[int, nn.Parameter] = {}
        for unit in self.units:
            unit.unroute()
            for place in unit.places:
                index, now = place.parameter, place.module._parameters.get(place.key)
                if restore and index not in made:
                    value = self.store.read(index).to(self.device.torch_device, self.dtypes[index])
                    trainable = self.infos[index].trainable if now is None else now.requires_grad
                    made[index] = nn.Parameter(value, requires_grad=trainable)
                put_parameter(place.module, place.key, made[index] if restore else unit.resting[index])
            unit.forget_live()
        self._restore_configs()
        if restore:
            self.hold.release()
        else:
            self.hold.spend()
        self._end_lanes()
        self.stream.close()
        self.slots.free()
        self.gradients.free()
        self.store.close()
        self.device.ledger.clear()
        self.host.clear()
        self.nvme_ledger.clear()
        self.closed = True


def assemble(
    model: nn.Module,
    settings: Settings,
    counters: Counters,
    fill: Fill | None,
    comm: Comm,
) -> Assembly:
    """Find the units, plan, check the budgets, and only then allocate. Collective."""
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        # Units recompute already; the second name is what transformers called it before 5.23.
        disable: Any = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
        disable()
    infos = describe_parameters(model, settings.optimizer, settings.precision)
    candidates = find_units(model, infos)
    regions = build_regions(infos, {unit.name: unit.parameters for unit in candidates}, comm.size)
    units = [UnitPlan(c.name, tuple(r for r in regions if c.name in r.units), c.resident) for c in candidates]
    comm.agree("the engine's settings", _shown(settings, ignored=("throttle", "debug")))
    comm.agree("the model", {info.name: _shown(info) for info in infos} | {u.name: _shown(u) for u in units})
    plan = make_plan(settings, units, regions, comm)
    comm.agree("the plan", _shown(plan, ignored=("layout",)) | {"layout": repr(plan.layout.planes)})
    _share_buffers(model, comm)
    assembly = Assembly(model, settings, infos, candidates, regions, plan, counters, comm)
    assembly.begin(fill)
    return assembly


def _shown(value: Any, ignored: Sequence[str] = ()) -> dict[str, str]:
    """Return the fields of a dataclass as text that is the same wherever they are the same."""
    shown = {f.name: getattr(value, f.name) for f in fields(value) if f.name not in ignored}
    placement = shown.get("placement")
    if isinstance(placement, Placement):
        # Folders may have other names, and machines other numbers of ranks; the plans are compared as well.
        folder = None if placement.nvme_dir is None else "given"
        shown["placement"] = replace(placement, nvme_dir=folder, host_memory=None, nvme_memory=None)
    return {name: repr(found) for name, found in shown.items()}


def _share_buffers(model: nn.Module, comm: Comm) -> None:
    """Give all ranks the buffers of rank 0, as they get its weights."""
    for name, buffer in model.named_buffers() if comm.size > 1 else ():
        if buffer.numel():
            value = buffer.detach().cpu().contiguous().reshape(-1)
            comm.broadcast(value, 0, f"buffer {name}")
            buffer.copy_(value.view(buffer.shape))


def _put_buffers(model: nn.Module, device: torch.device) -> None:
    """Buffers live on the device, in their own dtype."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)


def _freeze_cache(model: nn.Module) -> list[tuple[Any, bool]]:
    """Turn key-value caches off (a recompute would append to them); return the configurations and what they said."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and getattr(config, "use_cache", None) is not None:
            configs[id(config)] = config
    found = [(config, config.use_cache) for config in configs.values()]
    for config, _ in found:
        config.use_cache = False
    return found
