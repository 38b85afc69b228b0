"""Decoding of quantized weights on the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from offload.lanes.lanes import Lanes
from offload.layout.codecs import QuantizedCodec
from offload.layout.regions import Region
from offload.tiers.device import Device

DECODING = "decoding"
"""Ledger name for the workspace: device memory for decoding one piece at a time."""


def decoding_bytes(regions: Iterable[Region]) -> int:
    """Return the decoding workspace bytes for these regions."""
    kinds = {(id(region.travels), region.numel): region for region in regions}  # experts are many and equal
    needs = [(each.travels.tables.nbytes, each.travels.workspace_bytes(each.numel)) for each in kinds.values()]
    table_bytes = max((tables for tables, _ in needs), default=0)
    return table_bytes + max((num_bytes - tables for tables, num_bytes in needs), default=0)


class Decoder:
    """Decodes records at the position from `Region.stored_view`. For one lane at a time."""

    def __init__(self, regions: Iterable[Region], device: Device, lanes: Lanes) -> None:
        regions = list(regions)
        self._device = device
        self._lanes = lanes
        num_bytes = decoding_bytes(regions)
        self._workspace = torch.empty(0, dtype=torch.uint8, device=device.torch_device)
        if num_bytes:
            self._workspace = device.allocate(DECODING, num_bytes)
        # codecs without tables may share the workspace with another codec
        self._tables = max((region.travels.tables for region in regions), key=len, default=self._workspace[:0])
        self._table_bytes = len(self._tables)
        self.load_tables()

    def load_tables(self) -> None:
        """Copy the decoding tables into new memory of the workspace."""
        if self._table_bytes:
            self._device.copy(self._workspace[: self._table_bytes], self._tables)
            self._lanes.wait(self._lanes.mark())  # another stream reads the tables

    def decode(self, region: Region, weights: torch.Tensor) -> None:
        """Decode a region's flat weights."""
        assert isinstance(region.travels, QuantizedCodec)
        begin = self._table_bytes  # keep another codec's tables
        if len(region.travels.tables):
            begin = 0
        region.travels.decode(region.stored_view(weights), weights, self._workspace[begin:])
        for used in (weights, self._workspace):
            self._device.lend(used)

    def moved_bytes(self, region: Region) -> int:
        """Return the device memory traffic during decoding, in bytes."""
        assert isinstance(region.travels, QuantizedCodec)
        num_bytes = region.travelling_bytes + region.weight_bytes
        if not self._device.decodes_at_once:  # torch operations write and read results between
            num_bytes += region.travels.between_bytes * region.numel
        return num_bytes

    def close(self) -> None:
        """Free the workspace."""
        self._workspace = torch.empty(0, dtype=torch.uint8)
