"""How weights in codes come to lie in a slot: they are decoded there from what rests."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from offload.lanes.lanes import Lanes
from offload.layout.codecs import EXACT, Coded
from offload.layout.regions import Region
from offload.tiers.device import Device

DECODING = "decoding"
"""The memory of the device in which weights in codes are decoded, a piece at a time."""


def decoding_bytes(regions: Iterable[Region]) -> int:
    """Return the bytes of the device with which weights of these regions are decoded."""
    needs = [
        (codec.tables.nbytes, codec.workspace_bytes(region.numel))
        for region in regions
        if isinstance(codec := region.travels, Coded)
    ]
    table_bytes = max((tables for tables, _ in needs), default=0)
    return table_bytes + max((num_bytes - tables for tables, num_bytes in needs), default=0)


def resting(region: Region, weights: torch.Tensor) -> torch.Tensor:
    """Return where what rests of a region comes up: where the weights are to be, or, of weights in codes, at the end of
    that, so that the codes take no memory of their own.
    """
    if region.travels is EXACT:
        return weights
    return weights.view(torch.uint8)[-region.travelling_bytes :]


class Decoder:
    """Makes weights of the codes that lie where `resting` says. One lane at a time uses it."""

    def __init__(self, regions: Iterable[Region], device: Device, lanes: Lanes) -> None:
        regions = list(regions)
        self._device, num_bytes = device, decoding_bytes(regions)
        self._workspace = device.allocate(DECODING, num_bytes) if num_bytes else torch.empty(0, dtype=torch.uint8)
        found = (region.travels.tables for region in regions if isinstance(region.travels, Coded))
        tables = max(found, key=len, default=self._workspace[:0])  # int8 has none, and may be beside another
        self._table_bytes = len(tables)
        if len(tables):
            device.copy(self._workspace[: len(tables)], tables)
            lanes.wait(lanes.mark())  # another stream reads them

    def decode(self, region: Region, weights: torch.Tensor) -> None:
        """Decode the weights of a region, flat."""
        assert isinstance(region.travels, Coded)
        begin = 0 if len(region.travels.tables) else self._table_bytes  # another codec's tables stay as they are
        region.travels.decode(resting(region, weights), weights, self._workspace[begin:])
        for used in (weights, self._workspace):
            self._device.lend(used)

    def moved_bytes(self, region: Region) -> int:
        """Return the bytes of the device's memory that are read and written for it."""
        assert isinstance(region.travels, Coded)
        between = 0 if self._device.decodes_at_once else region.travels.between_bytes * region.numel
        return region.travelling_bytes + region.weight_bytes + between

    def close(self) -> None:
        """Let go of the memory."""
        self._workspace = torch.empty(0, dtype=torch.uint8)
