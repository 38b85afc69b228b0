"""Device memory for weights: the stretch through which cargoes stream, and the regions that stay for good."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from offload.lanes.lanes import Lanes
from offload.lanes.ticket import Fence, Ticket
from offload.layout.codecs import EXACT
from offload.layout.regions import Piece, Region
from offload.telemetry.counters import Counters
from offload.tiers.cargoes import Cargoes, Slot
from offload.tiers.decoding import Decoder, resting
from offload.tiers.device import Device, copy_planes
from offload.tiers.due import Due
from offload.tiers.store import Store

_SLOT_ALIGNMENT_BYTES = 512
_POISON = 0x7FC07FC0  # NaN in bf16 and in fp32


class Slots(Cargoes):
    """Where the weights of a unit are while it computes.

    A cargo comes up on the h2d lane; where the weights are cut over ranks each brings its own range up over its own
    link, and the collective lane puts them together; what came up in codes is decoded then. `parameters` are Parameters
    that view the weights where they lie now.
    """

    def __init__(
        self,
        store: Store,
        device: Device,
        due: Due,
        lanes: Lanes,
        counters: Counters,
        *,
        slot_bytes: int,
        slot_name: str,
        decoder: Decoder | None = None,
        debug: bool = False,
    ) -> None:
        """`decoder`: that of other slots of the store; None for a new one."""
        super().__init__(store.co_fetched, due, lanes)
        self._store, self._device, self._counters = store, device, counters
        self._debug, self._name = debug, slot_name
        self._flats: dict[int, torch.Tensor] = {}  # of the regions that stay
        self.gathers = store.sharding.gathers
        """True where ranks put weights together as they come up."""
        self._on_device = store.tier == "device" and not self.gathers
        self.weight_decoder = decoder or Decoder([state.region for state in store.states], device, lanes)
        """What makes weights of codes."""
        self._up, self._decoding = (lanes.h2d, lanes.decoding) if store.tier == "cpu" else (lanes.here, lanes.here)
        self._storages: set[int] = set()
        if self._on_device:
            self._storages.update(state.planes["weights"].untyped_storage().data_ptr() for state in store.states)
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._beside = torch.empty(0, dtype=torch.uint8)
        """Memory of the device in which units have weights for a while that are near those in a slot."""
        self.resize(slot_bytes)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the device's memory through which cargoes stream."""
        return self._memory.nbytes

    def is_resident(self, region: Region) -> bool:
        return self._rests_as_used(region) or region.index in self._staying

    def _rests_as_used(self, region: Region) -> bool:
        """True where a region is used where it rests."""
        return self._on_device and region.travels is EXACT

    def invalidate(self, regions: Iterable[Region]) -> list[Slot]:
        slots = super().invalidate(regions)
        if self._debug:
            for slot in slots:
                self._poison([slot], slot.fence.before_fill())
        return slots

    # -- where weights are -----------------------------------------------------------------------------------

    def place(self, regions: Sequence[Region]) -> dict[Region, torch.Tensor]:
        """Return each region's flat weights on the device, as they are while the unit is in use."""
        cargo = self.cargo_of(regions)
        placed, end = {}, self.offset(cargo)
        for region in regions:
            if self._rests_as_used(region):
                placed[region] = self._store[region].planes["weights"]
            elif region.index in self._staying:
                placed[region] = self._flats[region.index]
            else:
                placed[region] = self._planes_at(region, end)["weights"]
                end += self._slot_bytes(region)
                assert end % _SLOT_ALIGNMENT_BYTES == 0
        return placed

    def masters(self, regions: Sequence[Region]) -> dict[Region, dict[str, torch.Tensor]]:
        """Return the planes of the master weights of those regions of a unit that are updated in their slot, in which
        they are; none where its weights have come up alone.
        """
        slot, found = self._lying.get(self.cargo_of(regions)), {}
        if slot is not None and slot.is_whole:
            begin = slot.begin
            for region in self.cargoes[slot.cargo]:
                if self._store.updates_in_slot(region):
                    found[region] = self._planes_at(region, begin)
                begin += self._slot_bytes(region)
        return found

    def _planes_at(self, region: Region, begin: int) -> dict[str, torch.Tensor]:
        """Return what of a region lies in a slot from `begin` on, in its order."""
        found = {"weights": self._memory[begin : begin + region.weight_bytes].view(region.dtype)}
        begin += region.weight_bytes
        for plane in self._store.co_fetched(region):
            num_bytes = plane.num_bytes(region.numel)
            found[plane.name] = self._memory[begin : begin + num_bytes].view(plane.dtype)
            begin += num_bytes
        return found

    def parameters(self, regions: Sequence[Region]) -> dict[Piece, nn.Parameter]:
        """Return Parameters that view the weights of `regions` where they are now, by the pieces that they are."""
        made = {}
        for region, flat in self.place(regions).items():
            for piece, offset in zip(region.pieces, region.offsets, strict=True):
                view = flat[offset : offset + piece.numel].view(piece.shape)
                # `data`: a version of its own, as a Parameter has that shares its memory with no other.
                made[piece] = nn.Parameter(view.data, requires_grad=region.trainable)
        return made

    def extend(self, memory: torch.Tensor) -> None:
        """Weights of units lie in this memory of the device, too."""
        self._beside = memory

    def holds(self, tensor: torch.Tensor) -> bool:
        """True where a tensor lies in memory for weights, be it that of cargoes or of regions that stay."""
        if tensor.layout is not torch.strided:
            return False
        address = tensor.untyped_storage().data_ptr()  # that of a tensor without elements is 0
        return address in self._storages or self.streams(address)

    def streams(self, address: int) -> bool:
        """True where an address lies in memory through which weights of several units pass."""
        one, other = self._memory, self._beside  # asked for every tensor that a graph saves
        return 0 <= address - one.data_ptr() < one.nbytes or 0 <= address - other.data_ptr() < other.nbytes

    def addresses(self, cargo: int) -> range:
        """Return the addresses at which a cargo lies while it is in use."""
        slot, begin = self._lying.get(cargo), self._memory.data_ptr()
        return range(0) if slot is None else range(begin + slot.begin, begin + slot.end)

    def view(
        self, cargo: int, dtype: torch.dtype, distance: int, shape: torch.Size, stride: tuple[int, ...]
    ) -> torch.Tensor:
        """Return a tensor over a cargo's weights, `distance` bytes into it, wherever it lies now."""
        slot = self._lying.get(cargo)
        assert slot is not None
        flat = self._memory[slot.begin : slot.end].view(dtype)
        return torch.as_strided(flat, shape, stride, flat.storage_offset() + distance // dtype.itemsize)

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """True where a tensor views weights that are on the device for good."""
        return tensor.untyped_storage().data_ptr() in self._storages

    # -- what stays ------------------------------------------------------------------------------------------

    def keep(self, regions: Iterable[Region]) -> None:
        """Give regions a place of their own on the device and bring them up; cargoes are to be asked for anew. Raises
        DoesNotFitError where there is no room for all of them, and then none has a place.
        """
        coming: list[tuple[Region, torch.Tensor]] = []
        try:
            coming.extend(
                (region, self._device.allocate("resident weights", region.weight_bytes))
                for region in regions
                if not self.is_resident(region)
            )
        except BaseException:
            self._device.ledger.release("resident weights", sum(flat.nbytes for _, flat in coming))
            raise
        for region, memory in coming:
            flat = self._flats[region.index] = memory.view(region.dtype)
            self._staying[region.index] = self._new_fence("resident weights")
            self._storages.add(flat.untyped_storage().data_ptr())
        self.refresh(regions, always=True)
        self.forget()
        self._forget_cargoes()

    def refresh(self, regions: Iterable[Region] | None = None, always: bool = False) -> None:
        """Bring the resident regions up again, after an update; counted for the next step."""
        chosen = None if regions is None else {region.index for region in regions}
        for index, fence in self._staying.items():
            region = self._store.region(index)
            if (chosen is None or index in chosen) and (always or region.trainable or fence.has_failed):
                fence.fill(*self._bring_up(region, self._flats[index], fence.before_fill(), is_ahead=True))

    def retry(self) -> None:
        """Bring the resident regions up again whose fetch has failed: nobody has read them since."""
        self.refresh([self._store.region(index) for index, fence in self._staying.items() if fence.has_failed])

    def versions(self) -> dict[int, int]:
        """Return how often each resident region has been written to, by the number of the region."""
        self.settle()
        return {index: flat._version for index, flat in self._flats.items()}

    def restore(self, versions: Mapping[int, int]) -> None:
        """Bring up again what of the resident regions was written to since then, or is resident since then."""
        now = self.versions()
        changed = [self._store.region(index) for index in now if now[index] != versions.get(index)]
        if changed:
            self._lanes.wait(self._lanes.mark())
            self.refresh(changed, always=True)

    def resize(self, num_bytes: int) -> None:
        """Stream through `num_bytes` of the device's memory instead; nothing is held then. Whoever still fills or
        reads the old memory keeps it alive.
        """
        self._device.ledger.drop(self._name)
        self._slots.clear()
        self._lying.clear()
        self._memory = torch.empty(0, dtype=torch.uint8)
        if num_bytes:
            self._memory = self._device.allocate(self._name, num_bytes)
            self._slots.append(Slot(0, 0, num_bytes, fence=self._new_fence("slot")))

    def free(self) -> None:
        """Let go of the device's memory."""
        self.resize(0)
        self._beside = self._memory
        self._staying.clear()
        self._flats.clear()
        self.weight_decoder.close()

    # -- copies ----------------------------------------------------------------------------------------------

    def _new_fence(self, kind: str) -> Fence:
        """Return the fence of new memory: compute has cleared it, and may still be reading what lay there before."""
        fence = Fence(kind)
        fence.read(*self._lanes.mark())
        return fence

    def _fill(self, slot: Slot, gone: Sequence[Slot], fills: Sequence[Ticket], is_ahead: bool) -> list[Ticket]:
        if self._debug:
            fills = [*fills, self._poison(gone, fills)]
        tickets: list[Ticket] = []
        begin = slot.begin
        for region in self.cargoes[slot.cargo]:
            planes = self._planes_at(region, begin)
            flat = planes.pop("weights")
            begin += self._slot_bytes(region)
            tickets += self._bring_up(region, flat, fills, is_ahead, planes if slot.is_whole else {})
        return tickets

    def _bring_up(
        self,
        region: Region,
        flat: torch.Tensor,
        fills: Sequence[Ticket],
        is_ahead: bool,
        co_fetched: Mapping[str, torch.Tensor] = {},
    ) -> list[Ticket]:
        """Bring a region's weights to `flat`, tile by tile, and what other ranks hold of them, as they rest, and decode
        them where they are; `co_fetched`: where what comes up beside them goes.
        """
        self._due.submit(region)
        if self._store.tier == "device" and region.travels is EXACT:
            own = self._store[region].planes["weights"]
            return self._put_together(region, flat, own, fills, is_ahead)
        tickets, is_link = [], self._up is self._lanes.h2d
        rests, plane = resting(region, flat), region.travelling
        for tile in self._store[region].held:
            lease, its = tile.fetch(is_ahead, *co_fetched), slice(tile.begin, tile.end)
            targets = {plane.name: rests[plane.cut(its)], **{name: to[its] for name, to in co_fetched.items()}}
            num_bytes = sum([lease.planes[name].nbytes for name in targets]) if is_link else 0
            ticket = self._up.submit(
                partial(copy_planes, self._device, targets, lease.planes),
                reads=lease.reads,
                fills=fills,
                name=region.name,
                num_bytes=num_bytes,
            )
            lease.done_reading(ticket)
            tickets.append(ticket)
            self._counters.count("h2d_bytes", num_bytes, is_ahead)
        if self.gathers:
            own = rests[plane.cut(self._store.sharding.shard(region))].data  # see Device.copy
            tickets = self._put_together(region, rests, own, tickets, is_ahead)
        if region.travels is EXACT:
            return tickets
        decoder, is_copy = self.weight_decoder, self._decoding is self._up
        work = partial(decoder.decode, region, flat.data)
        moved = 0 if is_copy else decoder.moved_bytes(region)  # which a link that is slowed down does not move
        return [self._decoding.submit(work, reads=tickets, name=f"decoding of {region.name}", num_bytes=moved)]

    def _put_together(
        self, region: Region, flat: torch.Tensor, own: torch.Tensor, reads: Sequence[Ticket], is_ahead: bool
    ) -> list[Ticket]:
        """All-gather `flat` from the ranks' ranges, of which `own` is this one's."""
        store, full = self._store, flat.data
        what = f"all-gather of {region.name}"
        self._counters.count("all_gather_elements", region.numel, is_ahead)
        self._counters.count("network_bytes", own.nbytes * store.within.num_far, is_ahead)
        return [
            store.exchanges.submit(
                partial(store.within.all_gather, full, own, what), reads=reads, name=what, num_bytes=own.nbytes
            )
        ]

    def _poison(self, gone: Sequence[Slot], fills: Sequence[Ticket]) -> Ticket:
        """Fill what lies in slots with NaN."""
        stretches = [self._memory[slot.begin : slot.end].data.view(torch.int32) for slot in gone]

        def poison() -> None:
            for stretch in stretches:
                stretch.fill_(_POISON)
                self._device.lend(stretch)

        ticket = self._lanes.h2d.submit(poison, fills=fills, name="poison")
        for slot in gone:
            slot.fence.fill(ticket)
        return ticket
