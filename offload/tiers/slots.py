"""Device memory for weights: one slot through which units stream, and the regions that stay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from offload.partition.layout import ParameterInfo, Region
from offload.telemetry.counters import Counters
from offload.tiers.device import Device
from offload.tiers.store import Store

_SLOT_ALIGNMENT_BYTES = 512


class Slots:
    """Where the weights of a unit are while it computes.

    `fetch` brings a unit's regions into the slot, one copy a region; `parameters` are Parameters that view the slot,
    made once a unit. The slot belongs to the unit that was fetched last: there is one, sized for the largest unit.
    """

    def __init__(
        self,
        store: Store,
        infos: Sequence[ParameterInfo],
        device: Device,
        counters: Counters,
        *,
        slot_bytes: int,
        slot_name: str,
    ) -> None:
        self._store, self._infos, self._device, self._counters = store, infos, device, counters
        self._resident: dict[int, torch.Tensor] = {}
        self._on_device = store.tier == "device"
        self._holds: Sequence[Region] | None = None
        self._storages: set[int] = set()
        if self._on_device:
            self._storages.update(state.weights.untyped_storage().data_ptr() for state in store.states)
        self.slot = (
            device.allocate(slot_name, slot_bytes)
            if slot_bytes and not self._on_device
            else torch.empty(0, dtype=torch.uint8)
        )

    def keep(self, regions: Iterable[Region]) -> None:
        """Give regions a place of their own on the device and bring them up."""
        for region in regions:
            if region.index in self._resident or self._on_device:
                continue
            flat = self._device.allocate("resident weights", region.weight_bytes).view(
                self._store[region].weights.dtype
            )
            self._resident[region.index] = flat
            self._storages.add(flat.untyped_storage().data_ptr())
            self._bring_up(region, flat)

    def refresh(self) -> None:
        """Bring the resident regions up again, after an update; counted for the next step."""
        self.invalidate()
        for index, flat in self._resident.items():
            region = self._store.states[index].region
            if region.trainable:
                self._bring_up(region, flat)

    def invalidate(self) -> None:
        """What the slot holds is no longer what the store holds."""
        self._holds = None

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """True where a tensor views weights that are on the device for good."""
        return tensor.untyped_storage().data_ptr() in self._storages

    def is_resident(self, region: Region) -> bool:
        """True where a region is on the device for good."""
        return self._on_device or region.index in self._resident

    def fetch(self, regions: Sequence[Region]) -> None:
        """Bring a unit's regions into the slot, unless they are still there from its last use."""
        if regions is self._holds:
            return
        self._holds = regions
        for region, flat in self.place(regions).items():
            if not self.is_resident(region):
                self._device.copy(flat, self._store[region].weights)
                self._counters.h2d_bytes += region.weight_bytes

    def place(self, regions: Sequence[Region]) -> Mapping[Region, torch.Tensor]:
        """Return each region's flat weights on the device, as they are after `fetch`."""
        placed, end = {}, 0
        for region in regions:
            if self._on_device:
                placed[region] = self._store[region].weights
            elif region.index in self._resident:
                placed[region] = self._resident[region.index]
            else:
                placed[region] = self.slot[end : end + region.weight_bytes].view(self._store[region].weights.dtype)
                end += region.weight_bytes
                assert end % _SLOT_ALIGNMENT_BYTES == 0
        return placed

    def parameters(self, regions: Sequence[Region]) -> dict[int, nn.Parameter]:
        """Return Parameters, by index, that view the weights of `regions` on the device."""
        made = {}
        for region, flat in self.place(regions).items():
            for index, offset, size in zip(region.parameters, region.offsets, region.sizes, strict=True):
                view = flat[offset : offset + size].view(self._infos[index].shape)
                made[index] = nn.Parameter(view, requires_grad=region.trainable)
        return made

    def poison(self) -> None:
        """Overwrite the slot with NaN (in bf16 and in fp32), so that a late reader is found out."""
        self.slot.view(torch.int32).fill_(0x7FC07FC0)
        self._holds = None

    def free(self) -> None:
        """Let go of the device's memory."""
        self.slot = torch.empty(0, dtype=torch.uint8)
        self._resident.clear()

    def _bring_up(self, region: Region, flat: torch.Tensor) -> None:
        self._device.copy(flat, self._store[region].weights)
        self._counters.next_h2d_bytes += region.weight_bytes
