"""Weights that rest in a model's own files, which are read and never written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from offload.lanes.lanes import Lanes
from offload.lanes.ticket import Fence, Ticket
from offload.layout.planes import Plane
from offload.layout.regions import Region
from offload.native import kernels
from offload.telemetry.counters import Counters
from offload.tiers.host import Arena, copy_in_one_thread
from offload.tiers.lease import Lease
from offload.tiers.ledger import Ledger
from offload.tiers.pinning import Pinning
from offload.tiers.ring import Ring
from offload.tiers.watched_files import WatchedFile, WatchedFiles

READ_RING = "read ring"
"""The host memory through which weights of files pass."""
Read = Callable[[int, int], torch.Tensor]
"""Returns elements `begin` to `end` of a parameter, flat, in any float dtype; or their records, where it rests so."""


@dataclass(eq=False)
class FileRecord:
    """The weights of a tile, in files."""

    region: Region
    """The region of the tile."""
    begin: int
    """The first element of the tile."""
    end: int
    """The element behind the tile."""
    planes: Mapping[str, Plane]
    """The planes of the weights, by their names."""
    files: ModelFiles
    """The files of all regions."""
    fence: Fence = field(default_factory=lambda: Fence("files"))
    """Who reads the weights."""

    def has_room(self, names: Sequence[str]) -> bool:  # noqa: ARG002
        """Nothing is lent early."""
        return False

    def lend(self, names: Sequence[str], lease: Lease, *, fetches: bool = False, is_ahead: bool = False) -> Lease:  # noqa: ARG002
        """Lend planes of the weights beside what a lease has already."""
        return self.files.lend(self, names, lease, is_ahead)

    def land(self, names: Sequence[str], lease: Lease, *, travels: bool = False) -> Lease:  # noqa: ARG002
        """Raises AssertionError: a model's own files are never written."""
        raise AssertionError(f"the files of {self.region.name} were to be written")


class ModelFiles:
    """Reads tiles ahead of their copies, by a lane of its own, through a ring of host memory."""

    def __init__(
        self,
        ring_bytes: int,
        host: Ledger,
        lanes: Lanes,
        counters: Counters,
        pinning: Pinning | None,
        watched: WatchedFiles | None = None,
    ) -> None:
        """`watched`: the files, which are closed with this object; None where others have opened them."""
        host.reserve(READ_RING, ring_bytes)
        self._watched = watched
        self._reads: dict[int, Read] = {}
        self._lanes, self._counters = lanes, counters
        self._arena = Arena(ring_bytes, pinning)
        self._ring = Ring(self._arena.take(ring_bytes, torch.uint8), READ_RING)
        self.bytes_read = 0
        """Bytes of weights that were read so far."""

    def open(self, path: Path) -> WatchedFile:
        """Open a file of the model. Raises DiskError."""
        assert self._watched is not None
        return self._watched.open(path)

    def give(self, parameter: int, read: Read) -> None:
        """Say how a parameter, by its index, is read."""
        self._reads[parameter] = read

    def record(self, region: Region, begin: int, end: int, planes: Sequence[Plane]) -> FileRecord:
        """Return where these planes of elements `begin` to `end` of a region rest."""
        return FileRecord(region, begin, end, {plane.name: plane for plane in planes}, self)

    def lend(self, record: FileRecord, names: Sequence[str], lease: Lease, is_ahead: bool) -> Lease:
        """Lend planes of a tile: they are read into the ring."""
        numel = record.end - record.begin
        sizes = [record.planes[name].num_bytes(numel) for name in names]
        stretch = self._ring.take(sum(sizes))
        assert stretch is not None, "the ring has room for the largest tile"
        parts = zip(names, stretch.flat.split(sizes), strict=True)
        lent = {name: part.view(record.planes[name].dtype) for name, part in parts}
        reading = self._lanes.fetch_read.submit(
            lambda: self._fill(record, lent), fills=stretch.fills, name=record.region.name, num_bytes=sum(sizes)
        )
        stretch.fence.fill(reading)
        self._counters.count("nvme_read_bytes", sum(sizes), is_ahead)

        def read(ticket: Ticket) -> None:
            stretch.fence.read(ticket)
            stretch.close()
            lease.done_reading(ticket)

        def changed(_ticket: Ticket) -> None:
            raise AssertionError(f"the files of {record.region.name} were to be written")

        return Lease(lease.planes | lent, (*lease.reads, reading), lease.fills, read, changed)

    def _fill(self, record: FileRecord, planes: Mapping[str, torch.Tensor]) -> None:
        """Read what of each piece lies in a tile: its weights, in two halves where a region has a low one."""
        region = record.region
        for piece, offset in zip(region.pieces, region.offsets, strict=True):
            begin, end = max(offset, record.begin), min(offset + piece.numel, record.end)
            if begin < end:
                first = piece.begin - offset
                value = self._reads[piece.parameter](first + begin, first + end)
                its = slice(begin - record.begin, end - record.begin)
                self.bytes_read += value.nbytes
                found = {"weights": value}
                if region.has_low and value.dtype != torch.bfloat16:
                    found["weights"], found["low"] = kernels.split(value.float())
                for name, plane in planes.items():
                    part = plane[record.planes[name].cut(its)]
                    if name in found:
                        copy_in_one_thread(part, found[name])
                    else:
                        part.zero_()

    def reset(self) -> None:
        """A step was interrupted: nothing is lent any more."""
        self._ring.reset()

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the ring that the device can copy from without staging."""
        return self._arena.pinned_bytes

    def close(self) -> None:
        """Let go of the ring and of the files. The lanes must have ended."""
        self._arena.close()
        if self._watched is not None:
            self._watched.close()
