"""Components of an engine: units, tiers and lanes, built in dependency order and released by `close`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from offload.accelerators import own_accelerator
from offload.amounts import Amount, Tell, tell_nobody
from offload.distributed.comm import Comm
from offload.engine.caches import Caches
from offload.engine.gradients.device_updates import DeviceUpdates
from offload.engine.gradients.flow import GradientFlow
from offload.engine.gradients.norms import Measures
from offload.engine.gradients.tile_updates import InPlaceUpdates, UpdatePlace
from offload.engine.gradients.updates import Updates
from offload.engine.moved_buffers import MovedBuffers
from offload.engine.recovery import Recovery
from offload.engine.spare_memory import SpareMemory
from offload.engine.units.activation_offload import (
    CHECKPOINTS,
    GRAPHS,
    ActivationOffload,
    DiskActivationOffload,
    HostActivationOffload,
)
from offload.engine.units.attention import attention_for
from offload.engine.units.call import Router
from offload.engine.units.execution_mode import ExecutionMode
from offload.engine.units.find import Splitting, UnitCandidate
from offload.engine.units.model_structure import ModelStructure
from offload.engine.units.recompute_policy import RecomputePolicy
from offload.engine.units.residency import ModelOwnership
from offload.engine.units.runner import UnitRunner
from offload.engine.units.saved_inputs import SavedInputs
from offload.engine.units.stages import open_stages
from offload.engine.units.unit import Unit, open_units, put_parameters
from offload.errors import warn
from offload.lanes.streams import open_lanes
from offload.layout.regions import ParameterInfo, Region
from offload.layout.residence import DEVICE, DISK, HOST
from offload.planning.device_updates import UPDATE_RING
from offload.planning.memory import (
    BUDGETS,
    BUFFER,
    EXPERT_BUFFER,
    SCRATCH,
    SHARDS,
    SLOT,
    WORKSPACE,
    staging_bytes,
    waits_on_disk,
)
from offload.planning.plan import Plan, budget_bytes
from offload.planning.settings import Settings
from offload.schedule.execute import Executor
from offload.tiers.counters import Counters, Ledger
from offload.tiers.device import open_device
from offload.tiers.model_files import READ_RING, READ_STAGING, ModelFiles, WatchedFiles
from offload.tiers.nvme import Nvme
from offload.tiers.placement import Placement
from offload.tiers.slots import Slots
from offload.tiers.store import Store
from offload.tiers.tile import DeferredUpdates


class EngineState:
    """A model with streamed parameters."""

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        infos: list[ParameterInfo],
        candidates: Sequence[UnitCandidate],
        regions: Sequence[Region],
        splitting: Splitting,
        plan: Plan,
        counters: Counters,
        comm: Comm,
    ) -> None:
        # The model, and the decisions about it.
        self.model = model
        self.infos = infos
        self.regions = regions
        self.splitting = splitting
        self.plan = plan
        self.comm = comm
        self.counters = counters
        self.rules = settings.optimizer.parts
        self.throttles = settings.throttles
        self.compiles = settings.compile == "always"
        self.frozen_weights = settings.frozen_weights
        self.dtypes = [parameter.dtype for _, parameter in model.named_parameters()]
        """Dtypes of the original model."""
        self.execution_mode = ExecutionMode()
        self.tell: Tell = tell_nobody
        self.changed = set[str]()
        """Names of the frozen parameters changed since the start."""
        self.read_outside = set[str]()
        """Names of the units with weights read from outside."""

        # Room for gradients on the host.
        self._keeps_gradients = settings.keeps_gradients
        self._splits = settings.splits
        has_staging = settings.optimizer.has_gradients and not self._keeps_gradients
        self._staged_regions = [r for r in regions if has_staging and not waits_on_disk(r, plan.residence)]
        self.accumulated: frozenset[int] | None = frozenset()
        """Indices of the regions with room for gradient sums. None: an interrupt came during the change."""

        # Memory of the tiers, and the lanes between them.
        placement = settings.placement
        self.host = Ledger(HOST, placement.budget(HOST), BUDGETS[HOST])
        self.nvme_ledger = Ledger(DISK, placement.budget(DISK), BUDGETS[DISK])
        ledger = Ledger(DEVICE, plan.device_bytes, BUDGETS[DEVICE])
        accelerator = own_accelerator(settings.device)
        most_bytes = placement.budget(DEVICE)
        self.device = open_device(accelerator, ledger, copies_aside=plan.overlap, most_bytes=most_bytes)
        delay_seed = settings.delay_seed(comm.rank)
        abort = comm.close if comm.size > 1 else None
        self.lanes = open_lanes(accelerator, settings.throttles, delay_seed, plan.overlap, abort)
        self._finalizer = weakref.finalize(self, self.lanes.abandon)  # without close(): ends the threads
        counters.read_peaks_from(self)
        self.caches = Caches(model)
        _move_buffers(model, self.device.torch_device)
        self.moved_buffers = MovedBuffers(model, self.device.to_host)

        # States, and the weights of the present units on the device.
        self._nvme = self._open_nvme(placement) if plan.rings else None
        self.files = self._open_files()
        self.store = Store(
            regions,
            infos,
            device=self.device,
            host=self.host,
            lanes=self.lanes,
            residence=plan.residence,
            nvme=self._nvme,
            files=self.files,
            comm=comm,
            counters=counters,
        )
        if self._keeps_gradients:
            self.store.hold_gradients()
        slot = plan.of(DEVICE, SLOT)
        self.deferred_updates = DeferredUpdates()
        self.slots = Slots(
            self.store,
            self.deferred_updates,
            slot_bytes=slot.num_bytes,
            slot_name=slot.name,
            debug=bool(settings.debug),
        )

        # Gradients, and updates from them.
        self.gradients = GradientFlow(
            self.store,
            settings,
            self._stage(frozenset()),
            {name: plan.of(DEVICE, name).num_bytes for name in (BUFFER, EXPERT_BUFFER, SHARDS, SCRATCH)},
            Measures(self.store),
        )
        self.updates = self._open_updates(settings)
        self.spare_memory = SpareMemory(comm, self.device, self.slots, self.gradients, plan, self._forget_addresses)

        # Uses of units: fetches in their order, the runner, and the calls of the model.
        lookahead = plan.lookahead(settings.prefetch, len(regions))
        self.executor = Executor(self.slots, *lookahead, updates_at_end=self.gradients.lasts)
        self.units: list[Unit] = []
        self.runner = UnitRunner(
            self.device,
            self.lanes,
            self.slots,
            self.executor,
            self.gradients,
            self._open_saved_inputs(settings),
            self.units,
            seed=settings.seed,
            comm=comm,
        )
        self.recovery = Recovery(self.store, self.slots, self.executor, self.updates, self.runner, self.units)
        self.router = Router(self.runner, self.recovery.recover)
        self.units += open_units(candidates, regions, self.slots, self.runner.make_live)
        self.users = [[unit for unit in self.units if region in unit.regions] for region in regions]
        """Units with each region."""
        self.stages = open_stages(self, settings)
        self.runner.stages = self.stages
        size = settings.sequence_parallel
        self.attention = attention_for(size).open(model, size, comm, counters)
        self.ownership = ModelOwnership(model, infos, self.units, self.device.torch_device, splitting.functions)
        self.snapshot = ModelStructure(model, infos, self.units, self.ownership)

    def _open_files(self) -> ModelFiles | None:
        """Open the model files with frozen weights. None: all weights are in the store."""
        ring = self.plan.of(HOST, READ_RING).num_bytes
        if not ring:
            return None
        watched = WatchedFiles(self.plan.of(HOST, READ_STAGING).num_bytes, self.host)
        return ModelFiles(ring, self.host, self.lanes, self.counters, self.device.pinning, watched)

    def _open_updates(self, settings: Settings) -> Updates:
        workspace: torch.Tensor | None = None
        if num_bytes := self.plan.of(DEVICE, WORKSPACE).num_bytes:  # for updates computed on the device
            workspace = self.device.allocate(WORKSPACE, num_bytes)
            self.lanes.wait(self.lanes.mark())  # until cleared: the users run in another stream
        place = self._open_update_place(has_workspace=workspace is not None)
        return Updates(self.store, self.gradients, self.slots, self.deferred_updates, settings, place, workspace)

    def _open_saved_inputs(self, settings: Settings) -> SavedInputs:
        placement = settings.placement
        most_bytes = budget_bytes(placement.graphs_memory)
        graphs = self._activation_offload(placement.graphs, GRAPHS, most_bytes)
        policy = RecomputePolicy(settings.recompute, self.device, self.slots.holds, self.execution_mode, graphs)
        inputs = self._activation_offload(placement.activations, CHECKPOINTS)
        return SavedInputs(self.device, self.lanes, policy, inputs)

    def _activation_offload(self, tier: str, name: str, most_bytes: int | None = None) -> ActivationOffload | None:
        """Return the store for unit inputs or saved graphs until the backward; None: they stay on the device."""
        if tier == DISK:
            assert self._nvme is not None
            return DiskActivationOffload(self.device, self.lanes, self.counters, self._nvme, most_bytes)
        if tier == HOST:
            return HostActivationOffload(self.device, self.lanes, self.counters, self.host, name, most_bytes)
        return None

    def _open_update_place(self, has_workspace: bool) -> UpdatePlace:
        """Return the place of the updates: in place, or for streamed regions on the device, through a ring."""
        # Device work from a host lane needs a separate stream, beside compute.
        has_stream = has_workspace and self.store.update_lane is self.lanes.update
        in_place = InPlaceUpdates(
            self.store.update_lane,
            self.lanes.update,
            self.device,
            self.device.side_context if has_stream else nullcontext,
        )
        ring = self.plan.of(DEVICE, UPDATE_RING)
        if not ring.num_bytes:
            return in_place
        memory = self.device.allocate(ring.name, ring.num_bytes)
        streamed = self.plan.residence.updated_on_device
        return DeviceUpdates(in_place, streamed, memory, self.store)

    def _open_nvme(self, placement: Placement) -> Nvme:
        """Create the files for states on disk, and the rings for their transfers.

        The ranks take turns: each one sees the disk space left by the previous ones.
        """
        for allocation in self.plan.allocations:
            if allocation.tier == DISK:
                self.nvme_ledger.reserve(allocation.name, allocation.num_bytes)
        with self.comm.turn("creation of the files"):
            return Nvme(
                placement.dirs,
                self.plan.residence.num_bytes(self.regions),
                rings=self.plan.rings,
                lanes=self.lanes,
                counters=self.counters,
                ledger=self.nvme_ledger,
                host=self.host,
                pinning=self.device.pinning,
            )

    def begin_stage(self, text: str) -> None:
        """Tell of a long stage. The amount is the current place in a pass, and the bytes moved since now."""
        begin = self.counters.total

        def amount() -> Amount:
            total = self.counters.total  # counts from zero again when a step begins
            return Amount(total - begin if total >= begin else total, place=self.runner.place)

        self.tell(text, amount)

    def amount(self) -> Amount:
        """Return the current place in a pass, and the bytes moved between tiers in this step."""
        return Amount(self.counters.total, place=self.runner.place)

    @contextmanager
    def with_placeholders(self) -> Iterator[None]:
        """Context with the stand-ins in all modules, also for resident units. Reads no weights."""
        stand_ins = dict(enumerate(self.ownership.placeholders))
        for unit in self.units:
            unit.install(stand_ins)
        try:
            yield
        finally:
            for unit in self.units:
                unit.install(unit.live() if unit.resident else unit.placeholders)

    def make_resident(self, names: set[str]) -> None:
        """Keep units with weights read from outside on the device, as far as memory allows."""
        self.read_outside |= names
        for unit in self.units:
            if unit.name in names:
                unit.warn_of_residency(sum(r.weight_bytes for r in unit.regions if not self.slots.is_resident(r)))
                self.keep(unit)

    def keep(self, unit: Unit) -> None:
        """Keep a unit's weights on the device for good and run the module unmodified.

        Raises DoesNotFitError; the unit then streams as before.
        """
        regions = set(unit.regions)
        self.slots.keep(unit.regions)
        self.slots.compute_after_resident()
        self.executor.reset()
        others = [other for other in self.units if other is not unit and not regions.isdisjoint(other.regions)]
        unit.forget_live()
        for other in others:
            if not other.resident:  # these weights were in a slot
                other.forget_live()
        for region in unit.regions:
            self.gradients.make_lasting(region)
        unit.keep_on_device()
        unit.install(unit.live())
        for other in others:
            other.tie(unit)

    def settle(self) -> None:
        """Restore the forwards of units kept on the device, after a snapshot from before has put back others."""
        for unit in self.units:
            unit.settle()

    def _forget_addresses(self) -> None:
        """Forget device addresses of weights before the slot memory is replaced."""
        self.executor.reset(keep_orders=True)
        for unit in self.units:
            if not unit.resident:
                unit.forget_live()

    def accumulate(self, indices: frozenset[int]) -> None:
        """Make room for gradient sums of the regions with these indices, and of no others, between two steps.

        The room of an earlier step is given back, so a step does not depend on earlier steps.
        """
        self.accumulated = None
        if any(region.index in indices and waits_on_disk(region, self.plan.residence) for region in self.regions):
            warn("gradients with several contributions are summed in host memory, in fp32: offload.gradients is nvme.")
        self.lanes.drain_updates()  # they read memory about to be freed
        self.store.hold_gradients(indices, keeps_gradients=self._keeps_gradients)
        self.gradients.accumulate(indices, self._stage(indices))
        self.accumulated = indices

    def _stage(self, accumulated: frozenset[int]) -> torch.Tensor:
        """Return memory on the tier of the states, for gradients on their way to the sums or to the update."""
        neighbours = 2 if self.lanes.overlap else 1  # one fills while the other is consumed
        sharding = self.plan.residence.sharding
        if accumulated:
            regions = [region for region in self.regions if region.index in accumulated]
            is_wide = self._splits or bool(self.plan.summed)
            num_bytes = staging_bytes(regions, neighbours, sharding, accumulates=True, splits=is_wide)
        else:
            num_bytes = staging_bytes(self._staged_regions, neighbours, sharding, splits=self._splits)
        return self.store.stage("gradient staging", num_bytes)

    def end_lanes(self) -> None:
        self.lanes.close()
        self._finalizer.detach()  # errors in a finalizer are lost, even a Ctrl-C: none runs here

    def close(self, restore: bool) -> None:
        """Undo the rerouting, restore real parameters with `restore`, and free the tiers."""
        parameters: dict[int, nn.Parameter] = {}
        stand_ins = dict(enumerate(self.ownership.placeholders))
        for unit in self.units:
            unit.unroute()
            for place in unit.places:
                index, current = place.parameter, place.module._parameters.get(place.key)
                if restore and index not in parameters:
                    value = self.store.values.read(index).to(self.device.torch_device, self.dtypes[index])
                    trainable = self.infos[index].trainable if current is None else current.requires_grad
                    parameters[index] = nn.Parameter(value, requires_grad=trainable)
                put_parameters([place], parameters if restore else stand_ins)
            unit.forget_live()
        self.caches.turn(on=True)
        self.stages.undo()
        self.attention.undo()
        if restore:
            self.ownership.release()
        else:
            self.ownership.invalidate()
        self.end_lanes()
        self.runner.close()
        self.slots.free()
        self.gradients.free()
        self.updates.tiles.place.free()
        self.store.close()
        self.device.close()
        self.device.ledger.clear()
        self.host.clear()
        self.nvme_ledger.clear()
        self.recovery.is_closed = True


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move all buffers to the compute device: forwards of units find them there."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)
