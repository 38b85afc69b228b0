"""The model of an engine as units: fetches in their order, the runner, and the calls of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from offload.amounts import Amount, Tell, tell_nobody
from offload.engine.caches import Caches
from offload.engine.memory import Memory
from offload.engine.moved_buffers import MovedBuffers
from offload.engine.prepare import EnginePlan
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
from offload.engine.units.model_structure import ModelStructure
from offload.engine.units.recompute_policy import RecomputePolicy
from offload.engine.units.residency import ModelOwnership
from offload.engine.units.runner import UnitRunner
from offload.engine.units.saved_inputs import SavedInputs
from offload.engine.units.stages import open_stages
from offload.engine.units.unit import Unit, open_units, put_parameters
from offload.engine.weights import Weights
from offload.layout.residence import DISK, HOST
from offload.modules import move_buffers
from offload.planning.plan import budget_bytes
from offload.planning.settings import Settings
from offload.schedule.execute import Executor


class Flow:
    """Runs the model as units, each fetched in its turn. It is the `Host` of stages, and the `StepHost` of methods."""

    def __init__(self, model: nn.Module, prepared: EnginePlan, memory: Memory, weights: Weights) -> None:
        settings, structure = prepared.settings, prepared.structure

        # What was planned.
        self.plan = prepared.plan
        self.infos = structure.infos
        self.regions = structure.regions
        self.splitting = structure.splitting
        self._dtypes = structure.dtypes

        # What a host shows of the owners before this one.
        self.counters = memory.counters
        self.comm = memory.comm
        self.device = memory.device
        self.lanes = memory.lanes
        self.store = memory.store
        self.deferred_updates = memory.deferred_updates
        self.slots = memory.slots
        self.gradients = weights.gradients
        self.updates = weights.updates
        self.make_room = weights.make_room

        # The model above the units. Its buffers stay on the device, where the forwards of units find them.
        self.model = model
        self.execution_mode = ExecutionMode()
        self.caches = Caches(model)
        self.move_buffers(self.device.torch_device)
        self.moved_buffers = MovedBuffers(model, self.device.to_host)
        self.compiles = settings.compile == "always"
        self.tell: Tell = tell_nobody
        self.read_outside = set[str]()
        """Names of the units with weights read from outside."""

        # Fetches in the order of uses.
        lookahead = self.plan.lookahead(settings.prefetch, len(self.regions))
        self.executor = Executor(self.slots, *lookahead, updates_at_end=self.gradients.lasts)
        self.spare_memory = SpareMemory(
            self.comm, self.device, self.slots, self.gradients, self.plan, self._forget_addresses
        )

        # The runner and the units know each other: the list of units is filled once the runner exists.
        self.units: list[Unit] = []
        saved = _open_saved_inputs(memory, settings, self.execution_mode)
        self.runner = UnitRunner(
            self.device,
            self.lanes,
            self.slots,
            self.executor,
            self.gradients,
            saved,
            self.units,
            loss_scale=self.updates.loss_scale,
            seed=settings.seed,
            comm=self.comm,
        )
        self.units += open_units(structure.candidates, self.regions, self.slots, self.runner.make_live)
        self.recovery = Recovery(self.store, self.slots, self.executor, self.updates, self.runner, self.units)
        self.router = Router(self.runner, self.recovery.recover)

        # What surrounds the units. Stages and attention may ask this host for all of the above.
        self.stages = open_stages(self, settings)
        self.runner.stages = self.stages
        size = settings.sequence_parallel
        self.attention = attention_for(size).open(model, size, self.comm, self.counters)
        self.ownership = ModelOwnership(
            model, self.infos, self.units, self.device.torch_device, self.splitting.functions
        )
        self.snapshot = ModelStructure(model, self.infos, self.units, self.ownership)

    # -- progress --------------------------------------------------------------------------------------------

    def begin_stage(self, text: str) -> None:
        """Tell of a long stage. The amount is the current place in a pass, and the bytes moved since now."""
        begin = self.counters.total

        def amount() -> Amount:
            total = self.counters.total
            if total >= begin:
                total -= begin
            # Otherwise a step has begun since, and the counters count from zero again.
            return Amount(total, place=self.runner.place)

        self.tell(text, amount)

    def amount(self) -> Amount:
        """Return the current place in a pass, and the bytes moved between tiers in this step."""
        return Amount(self.counters.total, place=self.runner.place)

    # -- parameters in the modules ---------------------------------------------------------------------------

    @contextmanager
    def with_placeholders(self) -> Iterator[None]:
        """Context with the stand-ins in all modules, also for resident units. Reads no weights."""
        self.show_placeholders()
        try:
            yield
        finally:
            if not self.recovery.is_parked:
                self.show_weights()

    def show_placeholders(self) -> None:
        """Put the stand-ins into all modules, also of resident units, until `show_weights`."""
        stand_ins = dict(enumerate(self.ownership.placeholders))
        for unit in self.units:
            unit.install(stand_ins)

    def show_weights(self) -> None:
        """Put the weights on the device into the modules of resident units, and what they tie into the others."""
        for unit in self.units:
            if unit.resident:
                unit.install(unit.live())
            else:
                unit.install(unit.placeholders)

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

    def move_buffers(self, device: torch.device) -> None:
        """Move all buffers of the model."""
        move_buffers(self.model, device)

    def _forget_addresses(self) -> None:
        """Forget device addresses of weights before the slot memory is replaced."""
        self.executor.reset(keep_orders=True)
        for unit in self.units:
            if not unit.resident:
                unit.forget_live()

    def leave_model(self, restore: bool) -> None:
        """Undo the rerouting, and with `restore` put the real parameters back."""
        parameters: dict[int, nn.Parameter] = {}
        given: Mapping[int, nn.Parameter] = dict(enumerate(self.ownership.placeholders))
        if restore:
            given = parameters
        for unit in self.units:
            unit.unroute()
            for place in unit.places:
                index, current = place.parameter, place.module._parameters.get(place.key)
                if restore and index not in parameters:
                    value = self.store.values.read(index, self._dtypes[index]).to(self.device.torch_device)
                    trainable = self.infos[index].trainable
                    if current is not None:  # the script may have changed it
                        trainable = current.requires_grad
                    parameters[index] = nn.Parameter(value, requires_grad=trainable)
                put_parameters([place], given)
            unit.forget_live()
        self.caches.turn(on=True)
        self.stages.undo()
        self.attention.undo()
        if restore:
            self.move_buffers(self.device.torch_device)  # of a parked engine
            self.ownership.release()
        else:
            self.ownership.invalidate()


def _open_saved_inputs(memory: Memory, settings: Settings, mode: ExecutionMode) -> SavedInputs:
    placement = settings.placement
    graphs = _activation_offload(memory, placement.graphs, GRAPHS, budget_bytes(placement.graphs_memory))
    policy = RecomputePolicy(settings.recompute, memory.device, memory.slots.holds, mode, graphs)
    inputs = _activation_offload(memory, placement.activations, CHECKPOINTS)
    return SavedInputs(memory.device, memory.lanes, policy, inputs)


def _activation_offload(
    memory: Memory, tier: str, name: str, most_bytes: int | None = None
) -> ActivationOffload | None:
    """Return the store for unit inputs or saved graphs until the backward; None: they stay on the device."""
    if tier == DISK:
        assert memory.nvme is not None
        return DiskActivationOffload(memory.device, memory.lanes, memory.counters, memory.nvme, most_bytes)
    if tier == HOST:
        return HostActivationOffload(memory.device, memory.lanes, memory.counters, memory.host, name, most_bytes)
    return None
