"""How weights come to lie in a slot: copied as they are, or decoded there from what rests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from offload.lanes.lanes import Lanes
from offload.layout.codecs import Coded
from offload.layout.regions import Region
from offload.tiers.device import Device, copy_planes

DECODING = "decoding"
"""The memory of the device in which weights in codes are decoded, a piece at a time."""


def decoding_bytes(regions: Iterable[Region]) -> int:
    """Return the bytes of the device with which weights of these regions are decoded."""
    return max((region.codec.workspace_bytes(region.numel) for region in regions), default=0)


class Decoder:
    """Fills slots. What comes from the host in codes is copied to the end of where its weights are to be, and decoded
    from there: it takes no memory of its own. One lane at a time uses it.
    """

    def __init__(self, regions: Iterable[Region], device: Device, lanes: Lanes) -> None:
        regions = list(regions)
        self._device, num_bytes = device, decoding_bytes(regions)
        self._workspace = device.allocate(DECODING, num_bytes) if num_bytes else torch.empty(0, dtype=torch.uint8)
        tables = next((region.codec.tables for region in regions if isinstance(region.codec, Coded)), None)
        if tables is not None and len(tables):
            device.copy(self._workspace[: len(tables)], tables)
            lanes.wait(lanes.mark())  # another stream reads them

    def fill(self, region: Region, targets: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor]) -> None:
        """Copy planes of a region's tile to a slot, each from the source of its name, and decode its weights."""
        if not isinstance(region.codec, Coded):
            copy_planes(self._device, targets, sources)
            return
        weights, records = targets["weights"].data, sources["weights"]  # see Device.copy
        if records.device != weights.device:
            end = weights.view(torch.uint8)[-records.nbytes :]
            self._device.copy(end, records)
            records = end
        region.codec.decode(records, weights, self._workspace)
        for used in (weights, self._workspace):
            self._device.lend(used)

    def close(self) -> None:
        """Let go of the memory."""
        self._workspace = torch.empty(0, dtype=torch.uint8)
