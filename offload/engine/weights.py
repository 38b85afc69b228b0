"""The parameters of an engine as regions, with their gradients and updates."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from offload.engine.gradients.device_updates import DeviceUpdates
from offload.engine.gradients.flow import GradientFlow
from offload.engine.gradients.norms import Measures
from offload.engine.gradients.tile_updates import InPlaceUpdates, UpdatePlace
from offload.engine.gradients.updates import Updates
from offload.engine.memory import Memory
from offload.engine.prepare import EnginePlan
from offload.errors import warn
from offload.layout.residence import DEVICE
from offload.planning.device_updates import UPDATE_RING
from offload.planning.memory import (
    BUFFER,
    EXPERT_BUFFER,
    SCRATCH,
    SHARDS,
    WORKSPACE,
    staging_bytes,
    waits_on_disk,
)
from offload.planning.settings import Settings


class Weights:
    """Holds what is trained: the parameters, in regions, their gradients on the way to the host, and their updates."""

    def __init__(self, prepared: EnginePlan, memory: Memory) -> None:
        settings, structure = prepared.settings, prepared.structure
        self.regions = structure.regions
        self.infos = structure.infos
        self.own_infos = [info for info in structure.infos if not info.companion]
        """Parameters of the trained model, without those of companions."""
        self.dtypes = structure.dtypes
        self.rules = settings.optimizer.parts
        self.frozen_weights = settings.frozen_weights
        self.changed = set[str]()
        """Names of the frozen parameters changed since the start."""

        # Room on the tier of the states, for gradients on their way to the sums or to the update.
        self._memory = memory
        self._splits = settings.splits
        self._keeps_gradients = settings.keeps_gradients
        has_staging = settings.optimizer.has_gradients and not settings.keeps_gradients
        self._staged = [r for r in self.regions if has_staging and not waits_on_disk(r, memory.plan.residence)]
        self._summed: frozenset[int] | None = frozenset()
        """Indices of the regions with room for gradient sums. None: an interrupt came during the change."""

        # An update reads the gradients, so they come first.
        sizes = {name: memory.plan.of(DEVICE, name).num_bytes for name in (BUFFER, EXPERT_BUFFER, SHARDS, SCRATCH)}
        staging = self._stage(frozenset())
        self.gradients = GradientFlow(memory.store, settings, staging, sizes, Measures(memory.store))
        self.updates = self._open_updates(settings)

    def _open_updates(self, settings: Settings) -> Updates:
        memory = self._memory
        workspace: torch.Tensor | None = None
        if num_bytes := memory.plan.of(DEVICE, WORKSPACE).num_bytes:  # for updates computed on the device
            workspace = memory.device.allocate(WORKSPACE, num_bytes)
            memory.lanes.wait(memory.lanes.mark())  # until cleared: the users run in another stream
        place = self._open_update_place(has_workspace=workspace is not None)
        return Updates(memory.store, self.gradients, memory.slots, memory.deferred_updates, settings, place, workspace)

    def _open_update_place(self, has_workspace: bool) -> UpdatePlace:
        """Return the place of the updates: in place, or for streamed regions on the device, through a ring."""
        store, device = self._memory.store, self._memory.device
        update_lane = self._memory.lanes.update
        # Device work from a host lane needs a separate stream, beside compute.
        has_stream = has_workspace and store.update_lane is update_lane
        in_place = InPlaceUpdates(
            store.update_lane, update_lane, device, device.side_context if has_stream else nullcontext
        )
        ring = self._memory.plan.of(DEVICE, UPDATE_RING)
        if not ring.num_bytes:
            return in_place
        ring_memory = device.allocate(ring.name, ring.num_bytes)
        return DeviceUpdates(in_place, store.residence.updated_on_device, ring_memory, store)

    def make_room(self, indices: frozenset[int] | None = None) -> None:
        """Make room for gradient sums of the regions with these indices, and of no others, between two steps.

        None: of all trainable regions, for several backward passes. The room of an earlier step is given back, so a
        step does not depend on earlier steps.
        """
        if indices is None:
            indices = frozenset(region.index for region in self.regions if region.trainable)
        if indices == self._summed:
            return
        self._summed = None
        residence, store = self._memory.plan.residence, self._memory.store
        if any(region.index in indices and waits_on_disk(region, residence) for region in self.regions):
            warn("gradients with several contributions are summed in host memory, in fp32: offload.gradients is nvme.")
        self._memory.lanes.drain_updates()  # they read memory about to be freed
        store.hold_gradients(indices, keeps_gradients=self._keeps_gradients)
        self.gradients.accumulate(indices, self._stage(indices))
        self._summed = indices

    def _stage(self, summed: frozenset[int]) -> torch.Tensor:
        """Return memory on the tier of the states, for gradients on their way to the sums or to the update."""
        plan = self._memory.plan
        neighbours = 2 if self._memory.lanes.overlap else 1  # one fills while the other is consumed
        sharding = plan.residence.sharding
        if summed:
            regions = [region for region in self.regions if region.index in summed]
            is_wide = self._splits or bool(plan.summed)
            num_bytes = staging_bytes(regions, neighbours, sharding, accumulates=True, splits=is_wide)
        else:
            num_bytes = staging_bytes(self._staged, neighbours, sharding, splits=self._splits)
        return self._memory.store.stage("gradient staging", num_bytes)

    def free(self) -> None:
        """Release the device memory of gradients and updates."""
        self.gradients.free()
        self.updates.tiles.place.free()
