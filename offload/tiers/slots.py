"""Device memory for weights: streaming slots with copies, and resident regions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from offload.lanes.ticket import Fence, Ticket
from offload.layout.regions import Piece, Region
from offload.layout.residence import SLOT
from offload.tiers.decoder import Decoder
from offload.tiers.device import copy_planes
from offload.tiers.store import Store
from offload.tiers.tile import DeferredUpdates

_SLOT_ALIGNMENT_BYTES = 512
"""As in torch's allocator."""
_POISON = 0x7FC07FC0  # NaN in bf16 and in fp32


@dataclass(eq=False)
class Slot:
    """Device memory range with a present or past cargo."""

    cargo: int
    """Cargo index."""
    begin: int
    """First byte."""
    end: int
    """End byte (exclusive)."""
    is_whole: bool = False
    """True if the slot also has the co-fetched master planes, for updates in the slot."""
    fence: Fence = field(default_factory=partial(Fence, "slot"))
    """Slot writers and readers."""


class Slots:
    """Device weights for units during compute: streaming slots, and resident regions.

    A cargo is a unit's set of streaming regions, by index (0: empty). `fetch` copies a cargo to an offset; `use`
    orders compute after the copy; `release` records compute as a reader.

    The h2d lane copies cargoes. With partitioned weights each rank copies one range over its own link, and the
    collective lane gathers the ranges. Quantized weights are decoded afterwards. `parameters` returns Parameters as
    views of the present weights.
    """

    def __init__(
        self,
        store: Store,
        deferred: DeferredUpdates,
        *,
        slot_bytes: int,
        slot_name: str,
        decoder: Decoder | None = None,
        debug: bool = False,
    ) -> None:
        """`decoder`: shared with other slots in the store (None: create one)."""
        regions = list(store.states)
        self._store = store
        self._device = store.device
        self.torch_device = store.device.torch_device
        self._counters = store.counters
        self._residence = store.residence
        self._deferred = deferred
        self._debug = debug
        self._name = slot_name

        # Streaming cargoes.
        self._slots: list[Slot] = []
        """Without overlap, valid and stale: the next cargo on a place waits for the readers of the last one."""
        self._valid_slots: dict[int, Slot] = {}  # by cargo; valid until another update changes the weights
        self._forget_cargoes()

        # Resident regions.
        self._resident_fences: dict[Region, Fence] = {}
        self._parked_fences: dict[Region, Fence] = {}
        self._flats: dict[Region, torch.Tensor] = {}

        # Copies.
        lanes = store.lanes
        self._lanes = lanes
        self.gathers = store.sharding.gathers
        """True if ranks gather weights at every fetch."""
        self.weight_decoder = decoder or Decoder(regions, store.device, store.lanes)
        """Decoder for quantized weights."""
        # States on the device cross no link: their copies run in the order of compute.
        self._copy_lane = lanes.on_compute
        self._decoding_lane = lanes.on_compute
        if store.is_below_device:
            self._copy_lane = lanes.h2d
            self._decoding_lane = lanes.decoding

        # By region, computed once: a fetch asks for them each time.
        self._in_place = set(filter(self._residence.is_used_in_place, regions))
        self._pages: dict[Region, torch.Tensor] = {}
        """Weights in host memory, as the device computes over them. The fences of their tiles order the two."""
        if store.is_below_device:
            weights = {region: store.states[region].planes["weights"] for region in self._in_place}
            self._pages = {region: self._device.over(flat) for region, flat in weights.items()}
        self._kept_pages: set[Region] = set()
        """Those among them that modules read without a use."""
        self._co_fetched = {region: self._residence.co_fetched(region) for region in regions}
        self._slot_sizes = {region: self._residence.slot_bytes(region) for region in regions}

        self._memory = self._extra = torch.empty(0, dtype=torch.uint8)
        """Memory of the slots, and further memory with copies of unit weights, see `extend`."""
        self._locate()
        self.resize(slot_bytes)

    # -- cargoes ---------------------------------------------------------------------------------------------

    def _forget_cargoes(self) -> None:
        self.cargoes: list[tuple[Region, ...]] = [()]
        self._sizes = [0]  # by cargo, in bytes
        self._numbers: dict[tuple[Region, ...], int] = {}  # by a unit's regions

    def cargo_of(self, regions: Sequence[Region]) -> int:
        """Return the cargo index for a unit with these regions."""
        regions = tuple(regions)
        cargo = self._numbers.get(regions)
        if cargo is None:
            streaming = tuple(region for region in regions if not self.is_resident(region))
            if streaming not in self.cargoes:
                self.cargoes.append(streaming)
                self._sizes.append(sum(self._slot_sizes[region] for region in streaming))
            cargo = self._numbers[regions] = self.cargoes.index(streaming)
        return cargo

    def cargo_bytes(self, cargo: int) -> int:
        """Return the bytes a cargo takes in a slot."""
        return self._sizes[cargo]

    def valid_offsets(self) -> dict[int, int]:
        """Return offsets for all valid cargoes, fetched or in transit."""
        return {cargo: slot.begin for cargo, slot in self._valid_slots.items()}

    def offset(self, cargo: int) -> int:
        """Return the cargo offset; -1 for an empty or absent cargo."""
        slot = self._valid_slots.get(cargo)
        if slot is None:
            return -1
        return slot.begin

    # -- fetch and use ------------------------------------------------------------------------------------------

    def fetch(self, cargo: int, offset: int, evicts: Collection[int] = (), is_ahead: bool = False) -> None:
        """Copy a cargo to `offset`, after the last readers in all overwritten slots. `is_ahead`: for the next step.

        Each region's pending update starts right before the copy: with several regions on disk, a later update would
        take the ring memory from which the first region is copied without another read.
        """
        end = offset + self._sizes[cargo]
        evicted = set(map(self._valid_slots.get, evicts))
        slots = []
        overwritten = []
        users: list[Ticket] = []
        slot = Slot(cargo, offset, end, is_whole=not self._deferred.in_slot.keys().isdisjoint(self.cargoes[cargo]))
        for other in self._slots:
            if other not in evicted and not (other.begin < end and offset < other.end):
                slots.append(other)
                continue
            overwritten.append(other)
            users += other.fence.before_fill()
            if self._valid_slots.get(other.cargo) is other:
                del self._valid_slots[other.cargo]
            # The rest of an evicted slot keeps the same fence: the next cargo there waits for the same readers.
            for part in ((other.begin, min(offset, other.end)), (max(end, other.begin), other.end)):
                if part[0] < part[1]:
                    slots.append(Slot(other.cargo, *part, fence=other.fence))  # noqa: PERF401
        self._slots = [*slots, slot]
        if self._debug:
            users.append(self._poison(overwritten, users))
        tickets = []
        begin = offset
        for region in self.cargoes[cargo]:
            planes = self._planes_at(region, begin)
            flat = planes.pop("weights")
            begin += self._slot_sizes[region]
            self._deferred.start(region)
            if not slot.is_whole:
                planes.clear()  # co-fetched ones, for updates in the slot
            tickets += self._copy_to_device(region, flat, users, is_ahead, planes)
        slot.fence.record_writer(*tickets)
        self._valid_slots[cargo] = slot  # only now: all copies are submitted

    def use(self, cargo: int, regions: Sequence[Region]) -> None:
        """Order compute after a cargo fetch, and after copies of resident regions."""
        tickets: list[Ticket] = []
        for fence in self._fences(cargo, regions):
            tickets += fence.before_read()
        if tickets:
            self._lanes.compute_after(tickets)

    def release(self, cargo: int, regions: Sequence[Region], marks: Sequence[Ticket]) -> None:
        """Record compute, up to `marks`, as a weight reader. No marks: the work is done, as on a CPU."""
        if marks:
            for fence in self._fences(cargo, regions):
                fence.record_reader(*marks)

    def _fences(self, cargo: int, regions: Sequence[Region]) -> list[Fence]:
        """Return the fences of the weights in use by a unit: in a slot, and resident."""
        slot = self._valid_slots.get(cargo)
        fences = []
        if slot is not None:
            fences.append(slot.fence)
        for region in regions:
            if region in self._resident_fences:
                fences.append(self._resident_fences[region])
            elif region in self._pages:
                fences += self._page_fences(region)
        return fences

    def _page_fences(self, region: Region) -> list[Fence]:
        return [tile.fence for tile in self._store.states[region].held_tiles]

    def compute_after_resident(self) -> None:
        """Order compute after all copies of resident regions, because modules read them without a fetch."""
        fences = [*self._resident_fences.values()]
        for region in self._kept_pages:
            fences += self._page_fences(region)
        tickets = [ticket for fence in fences for ticket in fence.before_read()]
        if tickets:
            self._lanes.compute_after(tickets)

    # -- invalidation -------------------------------------------------------------------------------------------

    def invalidate(self, regions: Iterable[Region]) -> list[Slot]:
        """Invalidate cargoes with these regions before an update elsewhere. Returns their slots."""
        stale = set(regions)
        slots = [slot for slot in self._valid_slots.values() if not stale.isdisjoint(self.cargoes[slot.cargo])]
        self._retire(slots)
        if self._debug:
            for slot in slots:
                self._poison([slot], slot.fence.before_fill())
        return slots

    def need_masters(self, regions: Iterable[Region]) -> None:
        """Prepare updates in slots: invalidate slots with these regions but without master planes."""
        needed = set(regions)
        lacking = []
        for slot in self._valid_slots.values():
            masters_needed = needed.intersection(self.cargoes[slot.cargo])
            if masters_needed and not slot.is_whole and any(self._co_fetched[each] for each in masters_needed):
                lacking.append(slot)
            elif masters_needed:
                slot.is_whole = True
        self._retire(lacking)

    def forget(self) -> None:
        """Invalidate all streaming cargoes (after a cancelled step)."""
        self._retire(list(self._valid_slots.values()))

    def _retire(self, slots: Collection[Slot]) -> None:
        """Remove slots from the valid ones. Compute may still read them."""
        if not slots:  # a mark is for nobody then
            return
        marks = self._lanes.mark()
        for slot in slots:
            slot.fence.record_reader(*marks)
            del self._valid_slots[slot.cargo]

    # -- memory ----------------------------------------------------------------------------------------------

    @property
    def capacity_bytes(self) -> int:
        """Device memory for streaming, in bytes."""
        return self._memory.nbytes

    def is_resident(self, region: Region) -> bool:
        """Return True if the region stays on the device."""
        return region in self._in_place or region in self._resident_fences

    # -- positions of weights -----------------------------------------------------------------------------------

    def place(self, regions: Sequence[Region]) -> dict[Region, torch.Tensor]:
        """Return flat device weights by region, valid while the unit is in use."""
        cargo = self.cargo_of(regions)
        weights = {}
        end = self.offset(cargo)
        for region in regions:
            if region in self._pages:
                weights[region] = self._pages[region]
            elif region in self._in_place:
                weights[region] = self._store.states[region].planes["weights"]
            elif region in self._resident_fences:
                weights[region] = self._flats[region]
            else:
                weights[region] = self._planes_at(region, end)["weights"]
                end += self._slot_sizes[region]
                assert end % _SLOT_ALIGNMENT_BYTES == 0
        return weights

    def masters(self, regions: Sequence[Region]) -> dict[Region, dict[str, torch.Tensor]]:
        """Return the master planes in the slot, for regions updated there. Empty if the slot has weights only."""
        slot = self._valid_slots.get(self.cargo_of(regions))
        masters = {}
        if slot is not None and slot.is_whole:
            begin = slot.begin
            for region in self.cargoes[slot.cargo]:
                if self._residence.row(region).update == SLOT:
                    masters[region] = self._planes_at(region, begin)
                begin += self._slot_sizes[region]
        return masters

    def _planes_at(self, region: Region, begin: int) -> dict[str, torch.Tensor]:
        """Return a region's planes in a slot, from byte `begin` on."""
        planes = {"weights": self._memory[begin : begin + region.weight_bytes].view(region.dtype)}
        begin += region.weight_bytes
        for plane in self._co_fetched[region]:
            num_bytes = plane.num_bytes(region.numel)
            planes[plane.name] = self._memory[begin : begin + num_bytes].view(plane.dtype)
            begin += num_bytes
        return planes

    def parameters(self, regions: Sequence[Region]) -> dict[Piece, nn.Parameter]:
        """Return Parameters by piece, as views of the present weights."""
        parameters = {}
        for region, flat in self.place(regions).items():
            for piece, offset in zip(region.pieces, region.offsets, strict=True):
                view = flat[offset : offset + piece.numel].view(piece.shape)
                # `data` gives the view a separate version counter, like a Parameter with its own memory.
                parameters[piece] = nn.Parameter(view.data, requires_grad=region.trainable)
        return parameters

    def extend(self, memory: torch.Tensor) -> None:
        """Register further device memory with copies of unit weights."""
        self._extra = memory
        self._locate()

    def _locate(self) -> None:
        """Look up the addresses of all weight memory, after some has come or moved."""
        self._addresses = self._addresses_of(self._memory)
        self._extra_addresses = self._addresses_of(self._extra)
        flats = [*self._flats.values(), *self._pages.values()]
        if not self._residence.copies_weights:
            flats += [state.planes["weights"] for state in self._store.states.values()]
        self._storages = {self._device.address(flat.untyped_storage()) for flat in flats}
        """Addresses of storages with weights outside the slots: resident, or used where they are stored."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor is in weight memory, streaming or resident."""
        if tensor.layout is not torch.strided:
            return False
        # 0 for a tensor without elements; past subclasses that note a use of the address
        return self.holds_storage(self._device.address(torch.Tensor.untyped_storage(tensor)))

    def holds_storage(self, address: int) -> bool:
        """Return True if the storage with this address is weight memory. Runs for every tensor saved by a graph."""
        return address in self._storages or address in self._addresses or address in self._extra_addresses

    def streams(self, address: int) -> bool:
        """Return True if the address is in memory shared by several units over time."""
        return address in self._addresses or address in self._extra_addresses

    def _addresses_of(self, memory: torch.Tensor) -> range:
        begin = self._device.address(memory)
        return range(begin, begin + memory.nbytes)

    def addresses(self, cargo: int) -> range:
        """Return the device addresses for a cargo in use."""
        slot = self._valid_slots.get(cargo)
        begin = self._addresses.start
        if slot is None:
            return range(0)
        return range(begin + slot.begin, begin + slot.end)

    def view(
        self, cargo: int, dtype: torch.dtype, distance: int, shape: torch.Size, stride: tuple[int, ...]
    ) -> torch.Tensor:
        """Return a tensor over a cargo's present weights, at byte `distance`."""
        slot = self._valid_slots.get(cargo)
        assert slot is not None
        flat = self._memory[slot.begin : slot.end].view(dtype)
        return torch.as_strided(flat, shape, stride, flat.storage_offset() + distance // dtype.itemsize)

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor is a view of resident weights."""
        return self._device.address(tensor.untyped_storage()) in self._storages

    # -- resident regions ---------------------------------------------------------------------------------------

    def keep(self, regions: Iterable[Region]) -> None:
        """Make regions resident and copy them to the device. Get new cargo indices afterwards.

        Raises DoesNotFitError without room for all of them; then no region becomes resident.
        """
        regions = [*regions]
        self._kept_pages.update(self._pages.keys() & set(regions))
        coming: list[tuple[Region, torch.Tensor]] = []
        try:
            coming.extend(
                (region, self._device.allocate("resident weights", region.weight_bytes))
                for region in regions
                if not self.is_resident(region)
            )
        except BaseException:  # all or none
            self._device.ledger.release("resident weights", sum(flat.nbytes for _, flat in coming))
            raise
        for region, memory in coming:
            self._flats[region] = memory.view(region.dtype)
            self._resident_fences[region] = self._new_fence("resident weights")
        self._locate()
        self.refresh(regions, always=True)
        self.forget()
        self._forget_cargoes()

    def refresh(self, regions: Iterable[Region] | None = None, always: bool = False) -> None:
        """Copy resident regions again after an update. Counts for the next step."""
        chosen: Collection[Region] = self._resident_fences
        if regions is not None:
            chosen = set(regions)
        for region in self._kept_pages:
            self._deferred.start(region)
        for region, fence in self._resident_fences.items():
            if region in chosen and (always or region.trainable or fence.has_failed):
                self._deferred.start(region)
                fence.record_writer(
                    *self._copy_to_device(region, self._flats[region], fence.before_fill(), is_ahead=True)
                )

    def retry(self) -> None:
        """Copy resident regions again after a failed copy. No reader has used them since."""
        self.refresh([region for region, fence in self._resident_fences.items() if fence.has_failed])

    def versions(self) -> dict[Region, int]:
        """Return version counters for all resident regions."""
        self.compute_after_resident()
        return {region: flat._version for region, flat in self._flats.items()}

    def restore(self, versions: Mapping[Region, int]) -> None:
        """Copy resident regions again if written, or made resident, since `versions`."""
        now = self.versions()
        changed = [region for region in now if now[region] != versions.get(region)]
        if changed:
            self._lanes.wait(self._lanes.mark())
            self.refresh(changed, always=True)

    def resize(self, num_bytes: int) -> None:
        """Replace the streaming memory by `num_bytes`, without cargoes. Pending users keep the old memory alive."""
        self._device.ledger.drop(self._name)
        self._slots.clear()
        self._valid_slots.clear()
        self._memory = torch.empty(0, dtype=torch.uint8)  # free the old memory before the new allocation
        self._addresses = range(0)  # also after a failed allocation
        if num_bytes:
            self._memory = self._device.allocate(self._name, num_bytes)
            self._slots.append(Slot(0, 0, num_bytes, fence=self._new_fence("slot")))
        self._addresses = self._addresses_of(self._memory)

    def park(self) -> None:
        """Forget all weights on the device. The device takes the memory away until `resume`."""
        self.forget()
        self._parked_fences = self._resident_fences
        self._resident_fences = {}  # no refresh copies to a region without memory

    def resume(self) -> None:
        """Copy the resident regions to the device again, after `park` and new memory."""
        self._resident_fences = self._parked_fences
        self._locate()
        self.weight_decoder.load_tables()
        self.refresh(always=True)

    def free(self) -> None:
        """Free all device memory."""
        self.resize(0)
        self.extend(self._memory)
        self._resident_fences.clear()
        self._flats.clear()
        self._pages.clear()
        self.weight_decoder.close()

    # -- copies ----------------------------------------------------------------------------------------------

    def _new_fence(self, buffer_type: str) -> Fence:
        """Return a fence for new memory. The fence waits for compute: clearing, or earlier readers, may be pending."""
        fence = Fence(buffer_type)
        fence.record_reader(*self._lanes.mark())
        return fence

    def _copy_to_device(
        self,
        region: Region,
        flat: torch.Tensor,
        users: Sequence[Ticket],
        is_ahead: bool,
        co_fetched: Mapping[str, torch.Tensor] = {},
    ) -> list[Ticket]:
        """Copy a region's weights to `flat`, with gather and decoding if necessary. Returns the last tickets.

        All held tiles are copied one by one, in storage format. `co_fetched`: targets for further planes.
        """
        gathering = f"all-gather of {region.name}"
        if not self._store.is_below_device and region.is_stored_as_used:
            own_range = self._store.states[region].planes["weights"]
            return [self._store.gather(region, flat.data, own_range, gathering, users, is_ahead)]
        tickets = []
        is_link = self._copy_lane is self._lanes.h2d
        stored = region.stored_view(flat)
        name = region.travelling.name
        for tile in self._store.states[region].held_tiles:
            lease = tile.fetch(name, *co_fetched, is_ahead=is_ahead)
            targets = {name: stored[tile.stored]}
            for other, target in co_fetched.items():
                targets[other] = target[tile.begin : tile.end]
            num_bytes = 0
            if is_link:  # only bytes over the link count as copied
                for each in targets:
                    num_bytes += lease.planes[each].nbytes
            ticket = self._copy_lane.submit(
                partial(copy_planes, self._device, targets, lease.planes),
                reads=lease.reads,
                users=users,
                name=region.name,
                num_bytes=num_bytes,
            )
            lease.done_reading(ticket)
            tickets.append(ticket)
            self._counters.count("h2d_bytes", num_bytes, is_ahead)
        if self.gathers:
            own_elements = region.travelling.cut(self._store.sharding.shard(region))
            own_range = stored[own_elements].data  # `data`: see AcceleratorDevice.copy
            tickets = [self._store.gather(region, stored.data, own_range, gathering, tickets, is_ahead)]
        if region.is_stored_as_used:
            return tickets
        decoder = self.weight_decoder
        work = partial(decoder.decode, region, flat.data)
        moved = 0
        if self._decoding_lane is not self._copy_lane:  # a throttled link does not move these bytes
            moved = decoder.moved_bytes(region)
        return [self._decoding_lane.submit(work, reads=tickets, name=f"decoding of {region.name}", num_bytes=moved)]

    def _poison(self, overwritten: Sequence[Slot], users: Sequence[Ticket]) -> Ticket:
        """Fill slots with NaN."""
        stretches = [self._memory[slot.begin : slot.end].data.view(torch.int32) for slot in overwritten]

        def poison() -> None:
            for stretch in stretches:
                stretch.fill_(_POISON)
                self._device.lend(stretch)

        ticket = self._lanes.h2d.submit(poison, users=users, name="poison")
        for slot in overwritten:
            slot.fence.record_writer(ticket)
        return ticket
