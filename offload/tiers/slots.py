"""Device memory for weights: the stretch through which cargoes stream, and the regions that stay for good."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from offload.lanes.lanes import Lanes
from offload.lanes.ticket import Fence, Ticket
from offload.layout.regions import ParameterInfo, Region
from offload.telemetry.counters import Counters
from offload.tiers.device import Device
from offload.tiers.store import Store

_SLOT_ALIGNMENT_BYTES = 512
_POISON = 0x7FC07FC0  # NaN in bf16 and in fp32


@dataclass(eq=False)
class Slot:
    """What lies, or lay, in a stretch of the device's memory."""

    cargo: int
    begin: int
    end: int
    is_whole: bool = False  # the master weights have come up, as far as they are updated there
    fence: Fence = field(default_factory=lambda: Fence("slot"))


class Slots:
    """Where the weights of a unit are while it computes.

    The regions of a unit that stream together are its cargo (by number, 0 for none). `fetch` brings a cargo to an
    offset, on the h2d lane; where the weights are cut over ranks each brings its own range up over its own link, and
    the collective lane puts them together. `wait` lets compute come after it; `used` notes compute as a reader.
    `parameters` are Parameters that view the weights where they lie now.
    """

    def __init__(
        self,
        store: Store,
        infos: Sequence[ParameterInfo],
        device: Device,
        lanes: Lanes,
        counters: Counters,
        *,
        slot_bytes: int,
        slot_name: str,
        debug: bool = False,
    ) -> None:
        self._store, self._infos, self._device, self._lanes, self._counters = store, infos, device, lanes, counters
        self._debug, self._name = debug, slot_name
        self._resident: dict[int, tuple[torch.Tensor, Fence]] = {}
        self._gathers = store.sharding.gathers
        self._on_device = store.tier == "device" and not self._gathers
        self._storages: set[int] = set()
        if self._on_device:
            self._storages.update(state.planes["weights"].untyped_storage().data_ptr() for state in store.states)
        self.cargoes: list[tuple[Region, ...]] = [()]
        self._numbers: dict[tuple[Region, ...], int] = {}  # by a unit's regions
        self._slots: list[Slot] = []
        self._lying: dict[int, Slot] = {}  # by cargo: what is good until its weights are updated on the host
        self.needs: Callable[[Region], None] = lambda _: None
        """Called before a region's weights are fetched."""
        self.brings_masters: Callable[[Region], bool] = lambda _: False
        """Asked then whether all of the master weights are to come up, for an update in the slot."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.beside = torch.empty(0, dtype=torch.uint8)
        """Memory of the device in which units have weights for a while that are near those in a slot."""
        self.resize(slot_bytes)

    # -- cargoes ---------------------------------------------------------------------------------------------

    def cargo_of(self, regions: Sequence[Region]) -> int:
        """Return the number of the cargo that a unit with these regions needs."""
        regions = tuple(regions)
        found = self._numbers.get(regions)
        if found is None:
            streaming = tuple(region for region in regions if not self.is_resident(region))
            if streaming not in self.cargoes:
                self.cargoes.append(streaming)
            found = self._numbers[regions] = self.cargoes.index(streaming)
        return found

    def cargo_bytes(self, cargo: int) -> int:
        """Return the bytes that a cargo takes in a slot."""
        return sum([self._slot_bytes(region) for region in self.cargoes[cargo]])

    def _slot_bytes(self, region: Region) -> int:
        return region.weight_bytes + sum([plane.num_bytes(region.numel) for plane in self._store.rides(region)])

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the device's memory through which cargoes stream."""
        return self._memory.nbytes

    def held(self) -> dict[int, int]:
        """Return where every cargo lies that is on the device, or on its way there, and still good."""
        return {cargo: slot.begin for cargo, slot in self._lying.items()}

    def offset(self, cargo: int) -> int:
        """Return where a cargo lies; -1 where it has nothing that streams."""
        slot = self._lying.get(cargo)
        return -1 if slot is None else slot.begin

    # -- a use -----------------------------------------------------------------------------------------------

    def fetch(self, cargo: int, offset: int, evicts: Collection[int] = (), is_ahead: bool = False) -> None:
        """Bring a cargo up, once all that it overwrites has had its last reader. `is_ahead`: for the next step."""
        end = offset + self.cargo_bytes(cargo)
        evicted = [self._lying[other] for other in evicts if other in self._lying]
        gone = [s for s in self._slots if s in evicted or (s.begin < end and offset < s.end)]
        self._lying = {other: s for other, s in self._lying.items() if s not in gone}
        slot = Slot(cargo, offset, end, is_whole=any(map(self.brings_masters, self.cargoes[cargo])))
        rest = [  # who comes where nothing was overwritten yet has to wait for the same
            Slot(other.cargo, *part, fence=other.fence)
            for other in gone
            for part in ((other.begin, min(offset, other.end)), (max(end, other.begin), other.end))
            if part[0] < part[1]
        ]
        self._slots = [other for other in self._slots if other not in gone] + [*rest, slot]
        fills = [ticket for other in gone for ticket in other.fence.before_fill()]
        if self._debug:
            fills = [*fills, self._poison(gone, fills)]
        tickets: list[Ticket] = []
        for region in self.cargoes[cargo]:
            planes = self._planes_at(region, offset)
            flat = planes.pop("weights")
            offset += self._slot_bytes(region)
            tickets += self._bring_up(region, flat, fills, is_ahead, planes if slot.is_whole else {})
        slot.fence.fill(*tickets)
        self._lying[cargo] = slot  # now that all of it is on its way

    def wait(self, cargo: int, regions: Sequence[Region]) -> None:
        """Let compute come after the fetch of a unit's cargo, and of its regions that stay."""
        slot = self._lying.get(cargo)
        tickets = list(slot.fence.before_read()) if slot is not None else []
        for region in regions:
            if region.index in self._resident:
                tickets += self._resident[region.index][1].before_read()
        if tickets:
            self._lanes.compute_after(tickets)

    def used(self, cargo: int, regions: Sequence[Region], marks: Sequence[Ticket]) -> None:
        """Note that compute has read a unit's weights up to these marks."""
        slot = self._lying.get(cargo)
        if slot is not None:
            slot.fence.read(*marks)
        for region in regions:
            if region.index in self._resident:
                self._resident[region.index][1].read(*marks)

    def invalidate(self, regions: Collection[Region]) -> None:
        """Regions are about to be updated on the host: what lies of them on the device is stale."""
        stale = set(regions)
        slots = [slot for slot in self._lying.values() if not stale.isdisjoint(self.cargoes[slot.cargo])]
        self._retire(slots)
        if self._debug:
            for slot in slots:
                self._poison([slot], slot.fence.before_fill())

    def need_masters(self, regions: Collection[Region]) -> None:
        """Regions are to be updated in their slots: those that lie there without their master weights come up anew."""
        needed, lacking = set(regions), []
        for slot in self._lying.values():
            its = needed.intersection(self.cargoes[slot.cargo])
            if its and not slot.is_whole and any(map(self._store.rides, its)):
                lacking.append(slot)
            elif its:
                slot.is_whole = True
        self._retire(lacking)

    def forget(self) -> None:
        """Nothing that streams is on the device any more (the step was given up)."""
        self._retire(list(self._lying.values()))

    # -- where weights are -----------------------------------------------------------------------------------

    def place(self, regions: Sequence[Region]) -> dict[Region, torch.Tensor]:
        """Return each region's flat weights on the device, as they are while the unit is in use."""
        cargo = self.cargo_of(regions)
        placed, end = {}, self.offset(cargo)
        for region in regions:
            if self._on_device:
                placed[region] = self._store[region].planes["weights"]
            elif region.index in self._resident:
                placed[region] = self._resident[region.index][0]
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
        found = {}
        for plane in (region.plane("weights"), *self._store.rides(region)):
            num_bytes = plane.num_bytes(region.numel)
            found[plane.name] = self._memory[begin : begin + num_bytes].view(plane.dtype)
            begin += num_bytes
        return found

    def parameters(self, regions: Sequence[Region]) -> dict[int, nn.Parameter]:
        """Return Parameters, by index, that view the weights of `regions` where they are now."""
        made = {}
        for region, flat in self.place(regions).items():
            for index, offset, size in zip(region.parameters, region.offsets, region.sizes, strict=True):
                view = flat[offset : offset + size].view(self._infos[index].shape)
                made[index] = nn.Parameter(view, requires_grad=region.trainable)
        return made

    def holds(self, tensor: torch.Tensor) -> bool:
        """True where a tensor lies in memory for weights, be it that of cargoes or of regions that stay."""
        return self.streams(tensor.data_ptr()) or tensor.untyped_storage().data_ptr() in self._storages

    def streams(self, address: int) -> bool:
        """True where an address lies in memory through which weights of several units pass."""
        one, other = self._memory, self.beside  # asked for every tensor that a graph saves
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

    def is_resident(self, region: Region) -> bool:
        """True where a region is on the device for good."""
        return self._on_device or region.index in self._resident

    # -- what stays ------------------------------------------------------------------------------------------

    def keep(self, regions: Iterable[Region]) -> None:
        """Give regions a place of their own on the device and bring them up; cargoes are to be asked for anew."""
        for region in regions:
            if self.is_resident(region):
                continue
            flat = self._device.allocate("resident weights", region.weight_bytes)
            flat = flat.view(region.plane("weights").dtype)
            self._resident[region.index] = flat, self._new_fence("resident weights")
            self._storages.add(flat.untyped_storage().data_ptr())
        self.refresh(regions, always=True)
        self.forget()
        self._numbers.clear()
        self.cargoes = [()]

    def refresh(self, regions: Iterable[Region] | None = None, always: bool = False) -> None:
        """Bring the resident regions up again, after an update; counted for the next step."""
        chosen = None if regions is None else {region.index for region in regions}
        for index, (flat, fence) in self._resident.items():
            region = self._store.states[index].region
            if (chosen is None or index in chosen) and (always or region.trainable or fence.has_failed):
                fence.fill(*self._bring_up(region, flat, fence.before_fill(), is_ahead=True))

    def versions(self) -> dict[int, int]:
        """Return how often each resident region has been written to, by the number of the region."""
        self.settle()
        return {index: flat._version for index, (flat, _) in self._resident.items()}

    def restore(self, versions: Mapping[int, int]) -> None:
        """Bring up again what of the resident regions was written to since then, or is resident since then."""
        now = self.versions()
        changed = [self._store.states[index].region for index in now if now[index] != versions.get(index)]
        if changed:
            self._lanes.wait(self._lanes.mark())
            self.refresh(changed, always=True)

    def settle(self) -> None:
        """Let compute come after every fetch of what stays: its modules run without asking."""
        tickets = [ticket for _, fence in self._resident.values() for ticket in fence.before_read()]
        if tickets:
            self._lanes.compute_after(tickets)

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
        self._memory = self.beside = torch.empty(0, dtype=torch.uint8)
        self._slots.clear()
        self._lying.clear()
        self._resident.clear()

    # -- copies ----------------------------------------------------------------------------------------------

    def _new_fence(self, kind: str) -> Fence:
        """Return the fence of new memory: compute has cleared it, and may still be reading what lay there before."""
        fence = Fence(kind)
        fence.read(*self._lanes.mark())
        return fence

    def _retire(self, slots: Collection[Slot]) -> None:
        """What lies in slots is good for nobody; compute may still be reading it."""
        marks = self._lanes.mark() if slots else ()
        for slot in slots:
            slot.fence.read(*marks)
            del self._lying[slot.cargo]

    def _bring_up(
        self,
        region: Region,
        flat: torch.Tensor,
        fills: Sequence[Ticket],
        is_ahead: bool,
        rides: Mapping[str, torch.Tensor] = {},
    ) -> list[Ticket]:
        """Bring a region's weights to `flat`, tile by tile, and what other ranks hold of them; `rides`: where what
        comes up beside them goes.
        """
        self.needs(region)
        if self._store.tier == "device":
            return self._put_together(region, flat, fills, is_ahead)
        tickets = []
        for tile in self._store[region].held:
            lease = tile.fetch(is_ahead, *rides)
            targets = {name: to[tile.begin : tile.end] for name, to in {"weights": flat, **rides}.items()}
            num_bytes = sum([target.nbytes for target in targets.values()])
            ticket = self._lanes.h2d.submit(
                partial(self._copy, targets, lease.planes),
                reads=lease.reads,
                fills=fills,
                name=region.name,
                num_bytes=num_bytes,
            )
            lease.done_reading(ticket)
            tickets.append(ticket)
            self._counters.count("h2d_bytes", num_bytes, is_ahead)
        return self._put_together(region, flat, tickets, is_ahead) if self._gathers else tickets

    def _copy(self, targets: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor]) -> None:
        for name, target in targets.items():
            self._device.copy(target, sources[name])

    def _put_together(
        self, region: Region, flat: torch.Tensor, reads: Sequence[Ticket], is_ahead: bool
    ) -> list[Ticket]:
        """All-gather `flat` from the ranks' ranges: this one's has come up, or rests on the device."""
        store, full = self._store, flat.data  # see Device.copy
        own = store[region].planes["weights"] if store.tier == "device" else full[store.sharding.own(region)]
        what = f"all-gather of {region.name}"
        self._counters.count("all_gather_elements", region.numel, is_ahead)
        return [
            store.exchanges.submit(
                partial(store.comm.all_gather, full, own, what), reads=reads, name=what, num_bytes=own.nbytes
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
