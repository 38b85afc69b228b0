"""Weights stored in model files: read directly or through the page cache, and checked for changes."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from offload.errors import DiskError, errno_text, warn
from offload.lanes.lanes import Lanes
from offload.lanes.ticket import Fence
from offload.layout.planes import Plane
from offload.layout.regions import Region
from offload.native import kernels
from offload.native.io import ALIGNMENT_BYTES, File, IoEngine, Ticket, wait_for_all
from offload.tiers.counters import Counters, Ledger
from offload.tiers.host import Arena, Pinning, copy_in_one_thread
from offload.tiers.lease import Lease, Ring

READ_STAGING = "read staging"
"""Ledger name for the staging memory: direct reads at any offset go through this memory."""
_NUM_PIECES = 8
"""Pieces in flight, so that the disk has a queue."""
_MOST_PIECE_BYTES = 1 << 20
"""Maximum bytes per piece."""


def master_planes(region: Region, weights: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return weights in any float dtype as the planes of exact master weights, by name."""
    if not region.has_low:
        return {"weights": weights}
    high, low = kernels.split(weights.float(), high=str(region.dtype).removeprefix("torch."))
    return {"weights": high, "low": low}


def staging_bytes(ring_bytes: int) -> int:
    """Return the staging bytes for a ring of `ring_bytes`: at most as much, but at least one page per piece."""
    pages = min(ring_bytes // _NUM_PIECES, _MOST_PIECE_BYTES) // ALIGNMENT_BYTES
    return _NUM_PIECES * max(1, pages) * ALIGNMENT_BYTES


class WatchedFiles:
    """Open model files in one engine. For one reading thread at a time."""

    def __init__(self, num_staging_bytes: int, host: Ledger) -> None:
        """`num_staging_bytes`: staging size; 0: read through the page cache."""
        if num_staging_bytes:
            host.reserve(READ_STAGING, num_staging_bytes)
        self._io = IoEngine()
        """Separate from the nvme tier, because the end of an IoEngine closes the files."""
        self._arena = Arena(num_staging_bytes)
        self._pieces: Sequence[torch.Tensor] = ()
        if num_staging_bytes:
            staging = self._arena.take(num_staging_bytes, torch.uint8)
            self._io.register(staging)
            self._pieces = staging.split(num_staging_bytes // _NUM_PIECES)
        self._files: dict[Path, WatchedFile] = {}

    def open(self, path: Path) -> WatchedFile:
        """Open a file, or return the open one. `close` on this object closes all files. Raises DiskError."""
        path = path.absolute()
        if path not in self._files:
            file = WatchedFile(self._io, path, self._pieces)
            if file.why_buffered and not any(each.why_buffered for each in self._files.values()):
                warn(f"offload.parameters is files: {file.why_buffered}.")
            self._files[path] = file
        return self._files[path]

    def close(self) -> None:
        """Close the files. Read errors were already raised."""
        with contextlib.suppress(DiskError):
            self._io.close()
        self._arena.close()


class WatchedFile:
    """Read-only file with change detection. A read raises DiskError if the file has changed since `open`. The check
    follows the read, so returned bytes are valid.
    """

    def __init__(self, io: IoEngine, path: Path, pieces: Sequence[torch.Tensor]) -> None:
        """`pieces`: aligned, equally large buffers for direct reads (empty: page cache). Raises DiskError."""
        self._io = io
        self._path = path
        self._pieces = pieces
        self._cached = io.open(path, writable=False, direct=False)
        """For a partial last block, and for all reads without `pieces`."""
        self._direct: File | None = None
        self.why_buffered = ""
        """Reason for the page cache despite `pieces`, or ""."""
        if pieces:
            direct = io.open(path, writable=False)
            self.why_buffered = direct.why_buffered
            if not self.why_buffered:  # otherwise both descriptors would use the page cache
                self._direct = direct
        self._mark = _mark(os.fstat(self._cached.fd))  # of the open file: the name may already mean another

    def read(self, target: memoryview, offset: int) -> None:
        """Fill memory from `offset`. Raises DiskError."""
        if not target:
            return
        memory = torch.frombuffer(target, dtype=torch.uint8)
        num_whole = 0
        if self._direct is not None:  # a partial last block cannot be read directly
            num_whole = self._mark[2] // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        border = min(max(num_whole - offset, 0), len(memory))
        try:
            if border:
                self._read_direct(memory[:border], offset)
            if border < len(memory):
                self._io.read(self._cached, offset + border, memory[border:]).wait()
        except DiskError:
            self._check()  # gives the better reason, if the file has changed
            raise
        self._check()

    def close(self) -> None:
        """No effect: `WatchedFiles` closes the file."""

    def _read_direct(self, target: torch.Tensor, offset: int) -> None:
        """Read whole blocks piece by piece, and copy the requested bytes."""
        assert self._direct is not None
        end = offset + len(target)
        size = len(self._pieces[0])
        # Tensors begin anywhere in a file, direct reads only at whole blocks.
        first = offset // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        stop = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        pending: deque[tuple[int, torch.Tensor, Ticket]] = deque()

        def take() -> None:
            begin, piece, ticket = pending[0]
            ticket.wait()
            low = max(begin, offset)
            high = min(begin + len(piece), end)
            copy_in_one_thread(target[low - offset : high - offset], piece[low - begin : high - begin])
            pending.popleft()

        try:
            for number, begin in enumerate(range(first, stop, size)):
                if len(pending) == _NUM_PIECES:  # the next read needs the memory of the oldest
                    take()
                piece = self._pieces[number % _NUM_PIECES][: stop - begin]
                pending.append((begin, piece, self._io.read(self._direct, begin, piece)))
            while pending:
                take()
        finally:  # after an error: pending reads still fill the staging memory
            with contextlib.suppress(DiskError):
                wait_for_all(ticket for *_, ticket in pending)

    def _check(self) -> None:
        """Raise DiskError if the file has changed since `open`."""
        before = self._mark
        code = 0
        try:
            now = _mark(self._path.stat())
        except OSError as error:
            code = error.errno or 0
            change = f"cannot be accessed any more ({errno_text(code)})"
        else:
            if now == before:
                return
            if now[:2] != before[:2]:  # device and inode
                change = "was replaced by another file"
            elif now[2] != before[2]:
                change = f"had {before[2]} bytes and now has {now[2]}"
            else:
                change = "was written to"
        raise DiskError(
            f"{self._path} {change}, but weights are read from it in every step (offload.parameters files). Data read "
            "since then is not used. Restore the file and resume from the last checkpoint, or set "
            "--offload.parameters cpu, which reads the files once.",
            code,
            self._path,
        )


def _mark(stat: os.stat_result) -> tuple[int, int, int, int]:
    """Return the file identity and modification state."""
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


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
        """Add planes to a lease, and start their read into the ring."""
        files = self.files
        numel = self.end - self.begin
        sizes = [self.planes[name].num_bytes(numel) for name in names]
        ring_slice = files.ring.take_planned(sum(sizes))
        parts = zip(names, ring_slice.flat.split(sizes), strict=True)
        planes = {name: part.view(self.planes[name].dtype) for name, part in parts}
        reading = files.lanes.fetch_read.submit(
            lambda: self._fill(planes), users=ring_slice.users, name=self.region.name, num_bytes=sum(sizes)
        )
        ring_slice.fence.record_writer(reading)
        files.counters.count("nvme_read_bytes", sum(sizes), is_ahead)
        return lease.staged(ring_slice, planes, lambda _: self.land((), lease), reads=(reading,))

    def land(self, names: Sequence[str], lease: Lease, *, travels: bool = False) -> Lease:  # noqa: ARG002
        """Raise AssertionError: model files are never written."""
        raise AssertionError(f"the files of {self.region.name} were to be written")

    def _fill(self, planes: Mapping[str, torch.Tensor]) -> None:
        """Read each piece's part in the tile. fp32 weights are split if the region has a low half."""
        region = self.region
        for piece, offset in zip(region.pieces, region.offsets, strict=True):
            begin = max(offset, self.begin)
            end = min(offset + piece.numel, self.end)
            if begin < end:
                first = piece.begin - offset  # from positions in the region to elements of the parameter
                value = self.files.reads[piece.parameter](first + begin, first + end)
                in_tile = slice(begin - self.begin, end - self.begin)
                self.files.bytes_read += value.nbytes
                halves = master_planes(region, value)
                for name, plane in planes.items():
                    copy_in_one_thread(plane[self.planes[name].cut(in_tile)], halves[name])


class ModelFiles:
    """Host ring, lane and read functions of `FileRecord`: tiles are read before their H2D copies."""

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
        self.reads: dict[int, Read] = {}
        """Read functions by parameter index."""
        self.lanes = lanes
        self.counters = counters
        self._arena = Arena(ring_bytes, pinning)
        self.ring = Ring(self._arena.take(ring_bytes, torch.uint8), READ_RING)
        self.bytes_read = 0
        """Bytes read so far."""

    def open(self, path: Path) -> WatchedFile:
        """Open a model file. Raises DiskError."""
        assert self._watched is not None
        return self._watched.open(path)

    def give(self, parameter: int, read: Read) -> None:
        """Set a parameter's read function, by parameter index."""
        self.reads[parameter] = read

    def record(self, region: Region, begin: int, end: int, planes: Sequence[Plane]) -> FileRecord:
        """Return the record for region elements `begin` to `end`."""
        return FileRecord(region, begin, end, {plane.name: plane for plane in planes}, self)

    def reset(self) -> None:
        """End all leases after an interrupted step."""
        self.ring.reset()

    @property
    def pinned_bytes(self) -> int:
        """Pinned bytes of the ring buffer for reads of model files. The device copies from there directly."""
        return self._arena.pinned_bytes

    def close(self) -> None:
        """Free the ring and close the files. All lanes must have ended."""
        self._arena.close()
        if self._watched is not None:
            self._watched.close()
