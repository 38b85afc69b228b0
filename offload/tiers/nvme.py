"""NVMe tier: state records in preallocated files, transferred in tiles through pinned ring buffers with fixed size."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path

import torch

from offload.errors import DiskError, warn
from offload.files.directories import check_dirs, check_space, open_nameless
from offload.lanes.lanes import Lanes
from offload.lanes.ticket import Fence, Lane, Ticket
from offload.layout.planes import Plane
from offload.layout.regions import Region
from offload.native.io import File, IoEngine, wait_for_all
from offload.tiers.counters import Counters, Ledger
from offload.tiers.host import Arena, Pinning
from offload.tiers.lease import Lease, Ring, RingSlice

CHUNK_BYTES = 1 << 19
"""Stripe size: bytes in one file before the next file gets its turn. Small beside a tile, so each disk gets a share."""
# Ledger names. A ring for each purpose, so a late update does not hold up a fetch.
FETCH_RING = "nvme fetch ring"
UPDATE_RING = "nvme update ring"
ACTIVATION_RING = "nvme activation ring"
RING_TILES = 4
"""Tiles per ring: one in read, one in update, one in write, one spare."""


class Stripes:
    """Byte range striped over unnamed files, one per directory, in chunks. Every transfer uses all disks.

    Space is reserved before use.
    """

    def __init__(self, io: IoEngine, directories: Sequence[Path]) -> None:
        self._io = io
        self._files = [io.open(directory, opener=open_nameless) for directory in directories]
        self.why_buffered = self._files[0].why_buffered
        self.num_bytes = 0

    def reserve(self, num_bytes: int) -> int:
        """Append space and return the start offset. Raises DiskError if the disk is full."""
        begin = self.num_bytes
        end = begin + num_bytes
        sizes = (stripe_bytes(size, len(self._files)) for size in (begin, end))
        for file, before, after in zip(self._files, *sizes, strict=True):
            if before < after:  # a short range does not reach every file
                file.reserve(before, after - before)
        self.num_bytes = end
        return begin

    def read(self, offset: int, memory: torch.Tensor) -> None:
        """Fill `memory` from `offset`. Raises DiskError."""
        wait_for_all([self._io.read(*piece) for piece in self._cut(offset, memory)])

    def write(self, offset: int, memory: torch.Tensor) -> None:
        """Write `memory` to `offset`. Raises DiskError."""
        wait_for_all([self._io.write(*piece) for piece in self._cut(offset, memory)])

    def _cut(self, offset: int, memory: torch.Tensor) -> list[tuple[File, int, torch.Tensor]]:
        """Return (file, offset in the file, part) for each part in `memory`."""
        pieces, end = [], 0
        for number, place, size in stripe(offset, memory.nbytes, len(self._files)):
            pieces.append((self._files[number], place, memory[end : end + size]))
            end += size
        return pieces


class Channel:
    """Disk path for one purpose: a ring buffer, with a read lane and a write lane."""

    def __init__(self, ring: Ring, reads: Lane, writes: Lane, counters: Counters) -> None:
        self.ring = ring
        self._reads = reads
        self._writes = writes
        self._counters = counters

    @property
    def num_bytes(self) -> int:
        """Ring bytes."""
        return self.ring.memory.nbytes

    def read(
        self, file: Stripes, offset: int, ring_slice: RingSlice, *, reads: Sequence[Ticket], name: str, is_ahead: bool
    ) -> Ticket:
        """Fill a slice from a file."""
        num_bytes = ring_slice.flat.nbytes
        ticket = self._reads.submit(
            lambda: file.read(offset, ring_slice.flat),
            reads=reads,
            users=ring_slice.users,
            name=name,
            num_bytes=num_bytes,
        )
        ring_slice.fence.record_writer(ticket)
        self._counters.count("nvme_read_bytes", num_bytes, is_ahead)
        return ticket

    def write(
        self,
        file: Stripes,
        offset: int,
        ring_slice: RingSlice,
        num_bytes: int,
        *,
        reads: Sequence[Ticket],
        users: Sequence[Ticket],
        name: str,
    ) -> Ticket:
        """Write the first `num_bytes` in a slice to a file."""
        ticket = self._writes.submit(
            lambda: file.write(offset, ring_slice.flat[:num_bytes]),
            reads=reads,
            users=users,
            name=name,
            num_bytes=num_bytes,
        )
        ring_slice.fence.record_reader(ticket)
        self._counters.count("nvme_write_bytes", num_bytes)
        return ticket


@dataclass(eq=False)
class Record:
    """Tile planes on disk, one after the other.

    Gradients have a separate fence. Gradients from a cancelled step may stay unwritten without harm, but a failed state
    write loses states.
    """

    name: str
    """Region name, for errors and timelines."""
    numel: int
    """Elements in the tile."""
    planes: Mapping[str, Plane]
    """Planes on disk by name."""
    file: Stripes
    """Striped file."""
    offset: int
    """First record byte in the file."""
    fetches: Channel
    """Channel for weight reads before H2D copies."""
    updates: Channel
    """Channel for state reads and writes in updates."""
    fence: Fence = field(default_factory=lambda: Fence("record"))
    """State readers and writers."""
    landing: Fence = field(default_factory=lambda: Fence("waiting gradients"))
    """Readers and writers for stored gradients."""
    _recent: tuple[Sequence[str], RingSlice] | None = None
    """Planes from the last read into the update ring, and their slice."""

    def has_room(self, names: Sequence[str]) -> bool:
        """Return True if the update ring has room for neighbouring planes beside all leases."""
        first, last = self._span(names)
        return self.updates.ring.has_room(last - first)

    def lend(self, names: Sequence[str], lease: Lease, *, fetches: bool = False, is_ahead: bool = False) -> Lease:
        """Add neighbouring planes to a lease and start their read. Changed planes are written back,
        except `gradients`.
        """
        if fetches and (cached_lease := self._at_hand(names, lease)) is not None:
            return cached_lease
        channel, name = self.updates, f"update {self.name}"
        if fetches:
            channel, name = self.fetches, self.name
        first, last = self._span(names)
        reads = [ticket for fence in self._fences(names) for ticket in fence.before_read()]
        ring_slice = channel.ring.take_planned(last - first)
        reading = channel.read(self.file, self.offset + first, ring_slice, reads=reads, name=name, is_ahead=is_ahead)
        for fence in self._fences(names):
            fence.record_reader(reading)
        if not fetches:  # the next forward may copy these weights from the ring, without another read
            self._recent = names, ring_slice
        changing = [name for name in names if name != "gradients"]  # gradients are spent by the update
        return lease.staged(
            ring_slice,
            self._views(names, ring_slice),
            lambda ticket: self._write_back(changing, channel, ring_slice, ticket),
            reads=(reading,),
        )

    def land(self, names: Sequence[str], lease: Lease, *, travels: bool = False) -> Lease:
        """Add memory for neighbouring planes to a lease, to be written after the fill.

        A plane for H2D copies (`travels`) uses the fetch ring, not the update ring: another rank's plane arrives while
        the own updated plane still waits in the update ring for transfer to other ranks.
        """
        channel = self.updates
        if travels:
            channel = self.fetches
        first, last = self._span(names)
        ring_slice = channel.ring.take_planned(last - first)
        self._recent = None  # the record gets other values
        return lease.staged(
            ring_slice,
            self._views(names, ring_slice),
            lambda ticket: self._write_back(names, channel, ring_slice, ticket),
            users=ring_slice.users,
        )

    def _at_hand(self, names: Sequence[str], lease: Lease) -> Lease | None:
        """Return a lease on planes still in the update ring, or None. Their content equals the disk, now or after
        pending writes.
        """
        if self._recent is None:
            return None
        lent_names, ring_slice = self._recent
        if not ring_slice.is_whole or ring_slice.fence.has_failed or not set(names) <= set(lent_names):
            return None
        views = self._views(lent_names, ring_slice)
        return lease.beside(ring_slice.fence, {name: views[name] for name in names})

    def _write_back(self, names: Sequence[str], channel: Channel, ring_slice: RingSlice, changed: Ticket) -> None:
        """Write neighbouring planes in a slice to disk, after the work `changed`."""
        if not names:
            return
        first, last = self._span(names)
        (fence,) = self._fences(names)  # states and gradients are never written together
        purpose = "update"
        if fence is self.landing:
            purpose = "gradients of"
        writing = channel.write(
            self.file,
            self.offset + first,
            ring_slice,
            last - first,
            reads=(changed,),
            users=fence.before_fill(),
            name=f"{purpose} {self.name}",
        )
        fence.record_writer(writing)

    def _fences(self, names: Sequence[str]) -> list[Fence]:
        """Return the fences for the planes: states, gradients or both."""
        return list(dict.fromkeys(self.landing if name == "gradients" else self.fence for name in names))

    def _span(self, names: Sequence[str]) -> tuple[int, int]:
        """Return the byte range of neighbouring planes in the record."""
        return self._spans[names[0]][0], self._spans[names[-1]][1]

    @cached_property
    def _spans(self) -> dict[str, tuple[int, int]]:
        ends = accumulate((plane.disk_bytes(self.numel) for plane in self.planes.values()), initial=0)
        return dict(zip(self.planes, pairwise(ends), strict=True))

    def _views(self, names: Sequence[str], ring_slice: RingSlice) -> dict[str, torch.Tensor]:
        views = {}
        first = self._spans[names[0]][0]
        for plane in map(self.planes.__getitem__, names):
            begin = self._spans[plane.name][0] - first
            views[plane.name] = ring_slice.flat[begin : begin + plane.num_bytes(self.numel)].view(plane.dtype)
        return views


class Nvme:
    """Files and rings for a run. The files have no names, so the kernel frees them however the program ends."""

    def __init__(
        self,
        dirs: Sequence[str],
        num_bytes: int,
        *,
        rings: Mapping[str, int],
        lanes: Lanes,
        counters: Counters,
        ledger: Ledger,
        host: Ledger,
        pinning: Pinning | None,
    ) -> None:
        """`num_bytes`: total size of all records. `rings`: bytes by ring name. Raises ConfigError for an unusable
        directory, DoesNotFitError for too little space, DiskError.
        """
        self._ledger = ledger
        directories = check_dirs(dirs)
        check_space(directories, num_bytes)
        self._io = IoEngine()
        try:
            self._states = Stripes(self._io, directories)
            self._states.reserve(num_bytes)  # all of it now: a full disk is no surprise within a step

            self._activations = self._states
            if ACTIVATION_RING in rings:
                self._activations = Stripes(self._io, directories)
            self._arena = Arena(sum(rings.values()), pinning)
            memory = {name: self._arena.take(size, torch.uint8) for name, size in rings.items()}
            for name, flat in memory.items():
                host.reserve(name, flat.nbytes)
                self._io.register(flat)
        except BaseException:
            self._io.close()  # closes the files too, even if a traceback keeps the engine alive
            raise
        reasons = [*filter(None, (self._io.why, self._io.why_unregistered, self._states.why_buffered))]
        if reasons:
            warn(f"the nvme tier works with {self._io.name}, but slower than possible: {'; '.join(reasons)}.")
        self._open_channels(memory, lanes, counters)

    def _open_channels(self, memory: Mapping[str, torch.Tensor], lanes: Lanes, counters: Counters) -> None:
        """Create one channel per purpose over the ring memory."""
        self._next = 0  # offset of the next record
        fetch, update, activation = (
            Ring(memory.get(name, _NOTHING), name) for name in (FETCH_RING, UPDATE_RING, ACTIVATION_RING)
        )
        # Fetched weights are not written, but weights received from other ranks pass through the same ring.
        self.fetches = Channel(fetch, lanes.fetch_read, lanes.update_write, counters)
        self.updates = Channel(update, lanes.update_read, lanes.update_write, counters)
        self.activations = Channel(activation, lanes.activation_read, lanes.activation_write, counters)

    def record(self, region: Region, begin: int, end: int, planes: Sequence[Plane]) -> Record:
        """Return the next record, with `planes` for region elements `begin` to `end`."""
        by_name = {plane.name: plane for plane in planes}
        numel = end - begin
        record = Record(region.name, numel, by_name, self._states, self._next, self.fetches, self.updates)
        self._next += sum(plane.disk_bytes(numel) for plane in planes)
        return record

    @property
    def room_bytes(self) -> int:
        """Bytes left in the disk budget."""
        budget = self._ledger.budget_bytes
        if budget is None:
            return sys.maxsize
        return budget - self._ledger.current_bytes

    def extent(self, num_bytes: int) -> tuple[Stripes, int]:
        """Reserve disk space for an activation checkpoint. Returns (file, offset). Raises DoesNotFitError
        or DiskError.
        """
        self._ledger.reserve("activation checkpoints", num_bytes)
        file = self._activations
        try:
            return file, file.reserve(num_bytes)
        except DiskError:  # nothing was reserved on the disk
            self._ledger.release("activation checkpoints", num_bytes)
            raise

    def reset(self) -> None:
        """Reclaim memory left open by an interrupted step. Pending transfers end under their tickets."""
        for channel in (self.fetches, self.updates, self.activations):
            channel.ring.reset()

    @property
    def pinned_bytes(self) -> int:
        """Pinned bytes in the rings, available for copies without staging."""
        return self._arena.pinned_bytes

    def close(self) -> None:
        """Close the files. All lanes must have ended."""
        with contextlib.suppress(DiskError):  # already raised for the transfer's users
            self._io.close()
        self._arena.close()


_NOTHING = torch.empty(0, dtype=torch.uint8)


def stripe(offset: int, num_bytes: int, num_files: int) -> list[tuple[int, int, int]]:
    """Return (file, offset in the file, bytes) for each stretch in a byte range striped over `num_files` files, in
    order. Chunks have `CHUNK_BYTES`.
    """
    if num_files == 1:
        return [(0, offset, num_bytes)]
    pieces, end = [], offset + num_bytes
    while offset < end:
        chunk, within = divmod(offset, CHUNK_BYTES)
        size = min(CHUNK_BYTES - within, end - offset)
        pieces.append((chunk % num_files, chunk // num_files * CHUNK_BYTES + within, size))
        offset += size
    return pieces


def stripe_bytes(num_bytes: int, num_files: int) -> list[int]:
    """Return the bytes per file for `num_bytes` striped over `num_files` files."""
    chunks, rest = divmod(num_bytes, CHUNK_BYTES)
    rounds, extra = divmod(chunks, num_files)
    sizes = [CHUNK_BYTES * (rounds + (number < extra)) for number in range(num_files)]
    sizes[extra] += rest  # the last chunk, a part of one, is the next file's
    return sizes
