"""Memory of an engine on all tiers, and the lanes between the tiers."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from offload.accelerators import own_accelerator
from offload.distributed.comm import Comm
from offload.engine.prepare import EnginePlan
from offload.lanes.streams import open_lanes
from offload.layout.regions import Region
from offload.layout.residence import DEVICE, DISK, HOST
from offload.planning.memory import BUDGETS, SLOT
from offload.tiers.counters import Counters, Ledger
from offload.tiers.device import open_device
from offload.tiers.model_files import READ_RING, READ_STAGING, ModelFiles, WatchedFiles
from offload.tiers.nvme import Nvme
from offload.tiers.placement import Placement
from offload.tiers.slots import Slots
from offload.tiers.store import Store
from offload.tiers.tile import DeferredUpdates


class Memory:
    """Holds the states on their tiers and the weights in device slots, as planned, with the lanes for all copies."""

    def __init__(self, prepared: EnginePlan, counters: Counters, comm: Comm) -> None:
        settings, structure = prepared.settings, prepared.structure
        self.plan = plan = prepared.plan
        self.counters = counters
        self.comm = comm

        # Each allocation is entered in the ledger of its tier, so these come first.
        placement = settings.placement
        self.host = Ledger(HOST, placement.budget(HOST), BUDGETS[HOST])
        self.disk = Ledger(DISK, placement.budget(DISK), BUDGETS[DISK])
        ledger = Ledger(DEVICE, plan.device_bytes, BUDGETS[DEVICE])

        # The device, and the lanes to it.
        accelerator = own_accelerator(settings.device)
        most_bytes = placement.budget(DEVICE)
        self.device = open_device(accelerator, ledger, copies_aside=plan.overlap, most_bytes=most_bytes)
        abort = None
        if comm.size > 1:  # other ranks wait for the exchanges of this one
            abort = comm.close
        self.lanes = open_lanes(accelerator, settings.throttles, settings.delay_seed(comm.rank), plan.overlap, abort)
        # Before the first allocation, which may fail: the threads end with this object, also without `close`.
        self._finalizer = weakref.finalize(self, self.lanes.abandon)

        # The states. Those on disk and in model files lend their memory to the store.
        self.nvme: Nvme | None = None
        if plan.rings:
            self.nvme = self._open_nvme(placement, structure.regions)
        self.files = self._open_files()
        self.store = Store(
            structure.regions,
            structure.infos,
            device=self.device,
            host=self.host,
            lanes=self.lanes,
            residence=plan.residence,
            nvme=self.nvme,
            files=self.files,
            comm=comm,
            counters=counters,
        )
        if settings.keeps_gradients:
            self.store.hold_gradients()
        counters.read_peaks_from(self)

        # The weights of the present units, copied from the states.
        slot = plan.of(DEVICE, SLOT)
        self.deferred_updates = DeferredUpdates()
        self.slots = Slots(
            self.store,
            self.deferred_updates,
            slot_bytes=slot.num_bytes,
            slot_name=slot.name,
            debug=bool(settings.debug),
        )

    def _open_nvme(self, placement: Placement, regions: Sequence[Region]) -> Nvme:
        """Create the files for states on disk, and the rings for their transfers.

        The ranks take turns: each one sees the disk space left by the previous ones.
        """
        for allocation in self.plan.allocations:
            if allocation.tier == DISK:
                self.disk.reserve(allocation.name, allocation.num_bytes)
        with self.comm.turn("creation of the files"):
            return Nvme(
                placement.dirs,
                self.plan.residence.num_bytes(regions),
                rings=self.plan.rings,
                lanes=self.lanes,
                counters=self.counters,
                ledger=self.disk,
                host=self.host,
                pinning=self.device.pinning,
            )

    def _open_files(self) -> ModelFiles | None:
        """Open the model files with frozen weights. None: all weights are in the store."""
        ring = self.plan.of(HOST, READ_RING).num_bytes
        if not ring:
            return None
        watched = WatchedFiles(self.plan.of(HOST, READ_STAGING).num_bytes, self.host)
        return ModelFiles(ring, self.host, self.lanes, self.counters, self.device.pinning, watched)

    def end_lanes(self) -> None:
        self.lanes.close()
        self._finalizer.detach()  # errors in a finalizer are lost, even a Ctrl-C: none runs here

    def free(self) -> None:
        """Release everything. The lanes have ended, and all others have given their memory back."""
        self.slots.free()
        self.store.close()
        self.device.close()
        for ledger in (self.device.ledger, self.host, self.disk):
            ledger.clear()
