"""Weights stored in model files, only read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from offload.lanes.lanes import Lanes
from offload.lanes.ticket import Fence
from offload.layout.planes import Plane
from offload.layout.regions import Region
from offload.native import kernels
from offload.tiers.counters import Counters
from offload.tiers.host import Arena, copy_in_one_thread
from offload.tiers.lease import Lease
from offload.tiers.ledger import Ledger
from offload.tiers.pinning import Pinning
from offload.tiers.ring import Ring
from offload.tiers.watched_files import WatchedFile, WatchedFiles

READ_RING = "read ring"
"""Ledger name for the host ring with weights from files."""
Read = Callable[[int, int], torch.Tensor]
"""Returns parameter elements from begin to end, flat, in any float dtype; records for a quantized parameter."""


@dataclass(eq=False)
class FileRecord:
    """Tile weights in model files."""

    region: Region
    """Region with this tile."""
    begin: int
    """First element."""
    end: int
    """End element (exclusive)."""
    planes: Mapping[str, Plane]
    """Weight planes by name."""
    files: ModelFiles
    """Model files for all regions."""
    fence: Fence = field(default_factory=lambda: Fence("files"))
    """Weight readers."""

    def has_room(self, names: Sequence[str]) -> bool:  # noqa: ARG002
        """Return False: file records do not support early leases."""
        return False

    def lend(self, names: Sequence[str], lease: Lease, *, fetches: bool = False, is_ahead: bool = False) -> Lease:  # noqa: ARG002
        """Add planes to a lease."""
        return self.files.lend(self, names, lease, is_ahead)

    def land(self, names: Sequence[str], lease: Lease, *, travels: bool = False) -> Lease:  # noqa: ARG002
        """Raise AssertionError: model files are never written."""
        raise AssertionError(f"the files of {self.region.name} were to be written")


class ModelFiles:
    """Reads tiles before their H2D copies, in a separate lane, into a host ring."""

    def __init__(
        self,
        ring_bytes: int,
        host: Ledger,
        lanes: Lanes,
        counters: Counters,
        pinning: Pinning | None,
        watched: WatchedFiles | None = None,
    ) -> None:
        """`watched`: files opened here and closed by `close` (None: opened elsewhere)."""
        host.reserve(READ_RING, ring_bytes)
        self._watched = watched
        self._reads: dict[int, Read] = {}
        self._lanes, self._counters = lanes, counters
        self._arena = Arena(ring_bytes, pinning)
        self._ring = Ring(self._arena.take(ring_bytes, torch.uint8), READ_RING)
        self.bytes_read = 0
        """Bytes read so far."""

    def open(self, path: Path) -> WatchedFile:
        """Open a model file. Raises DiskError."""
        assert self._watched is not None
        return self._watched.open(path)

    def give(self, parameter: int, read: Read) -> None:
        """Set a parameter's read function, by parameter index."""
        self._reads[parameter] = read

    def record(self, region: Region, begin: int, end: int, planes: Sequence[Plane]) -> FileRecord:
        """Return the record for region elements `begin` to `end`."""
        return FileRecord(region, begin, end, {plane.name: plane for plane in planes}, self)

    def lend(self, record: FileRecord, names: Sequence[str], lease: Lease, is_ahead: bool) -> Lease:
        """Add tile planes to a lease, and start their read into the ring."""
        numel = record.end - record.begin
        sizes = [record.planes[name].num_bytes(numel) for name in names]
        ring_slice = self._ring.take(sum(sizes))
        assert ring_slice is not None, "the ring has room for the largest tile"
        parts = zip(names, ring_slice.flat.split(sizes), strict=True)
        planes = {name: part.view(record.planes[name].dtype) for name, part in parts}
        reading = self._lanes.fetch_read.submit(
            lambda: self._fill(record, planes), fills=ring_slice.fills, name=record.region.name, num_bytes=sum(sizes)
        )
        ring_slice.fence.record_writer(reading)
        self._counters.count("nvme_read_bytes", sum(sizes), is_ahead)
        return lease.staged(ring_slice, planes, lambda _: record.land((), lease), reads=(reading,))

    def _fill(self, record: FileRecord, planes: Mapping[str, torch.Tensor]) -> None:
        """Read each piece's part in the tile. fp32 weights are split if the region has a low half."""
        region = record.region
        for piece, offset in zip(region.pieces, region.offsets, strict=True):
            begin, end = max(offset, record.begin), min(offset + piece.numel, record.end)
            if begin < end:
                first = piece.begin - offset
                value = self._reads[piece.parameter](first + begin, first + end)
                in_tile = slice(begin - record.begin, end - record.begin)
                self.bytes_read += value.nbytes
                halves = {"weights": value}
                if region.has_low and value.dtype != torch.bfloat16:
                    halves["weights"], halves["low"] = kernels.split(value.float())
                for name, plane in planes.items():
                    part = plane[record.planes[name].cut(in_tile)]
                    if name in halves:
                        copy_in_one_thread(part, halves[name])
                    else:
                        part.zero_()

    def reset(self) -> None:
        """End all leases after an interrupted step."""
        self._ring.reset()

    @property
    def pinned_bytes(self) -> int:
        """Pinned bytes of the ring buffer for reads of model files. The device copies from there directly."""
        return self._arena.pinned_bytes

    def close(self) -> None:
        """Free the ring and close the files. All lanes must have ended."""
        self._arena.close()
        if self._watched is not None:
            self._watched.close()
