"""The nvme tier: records of states in preallocated files, moved in tiles through bounded rings of pinned memory."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from offload.errors import DiskError, warn
from offload.files.directories import check_dirs, check_space
from offload.files.scratch import open_nameless
from offload.lanes.lane import Lane
from offload.lanes.lanes import Lanes
from offload.lanes.ticket import Fence, Ticket
from offload.layout.planes import Plane
from offload.layout.regions import Region, stripe, stripe_bytes
from offload.native.io import File, IoEngine, wait_for_all
from offload.telemetry.counters import Counters
from offload.tiers.host import Arena
from offload.tiers.lease import Lease
from offload.tiers.ledger import Ledger
from offload.tiers.pinning import Pinning
from offload.tiers.ring import Ring, RingSlice

FETCH_RING, UPDATE_RING, ACTIVATION_RING = "nvme fetch ring", "nvme update ring", "nvme activation ring"
RING_TILES = 4
"""One is read, one updated, one written, and one is on hand."""


class Stripes:
    """One range of bytes over a file without a name on the file system of each directory, in chunks by turns, so that
    every transfer is shared by the disks.

    Space is reserved before it is used.
    """

    def __init__(self, io: IoEngine, directories: Sequence[Path]) -> None:
        self._io = io
        self._files = [io.open(directory, opener=open_nameless) for directory in directories]
        self.why_buffered = self._files[0].why_buffered
        self.num_bytes = 0

    def reserve(self, num_bytes: int) -> int:
        """Add space at the end; return where it begins. DiskError where there is none."""
        begin, end = self.num_bytes, self.num_bytes + num_bytes
        sizes = (stripe_bytes(size, len(self._files)) for size in (begin, end))
        for file, before, after in zip(self._files, *sizes, strict=True):
            if before < after:
                file.reserve(before, after - before)
        self.num_bytes = end
        return begin

    def read(self, offset: int, memory: torch.Tensor) -> None:
        """Fill `memory` from `offset`; DiskError where that fails."""
        wait_for_all([self._io.read(*piece) for piece in self._cut(offset, memory)])

    def write(self, offset: int, memory: torch.Tensor) -> None:
        """Write `memory` to `offset`; DiskError where that fails."""
        wait_for_all([self._io.write(*piece) for piece in self._cut(offset, memory)])

    def _cut(self, offset: int, memory: torch.Tensor) -> list[tuple[File, int, torch.Tensor]]:
        """Return where each part of `memory` lies: (file, offset there, part)."""
        pieces, end = [], 0
        for number, place, size in stripe(offset, memory.nbytes, len(self._files)):
            pieces.append((self._files[number], place, memory[end : end + size]))
            end += size
        return pieces


class Channel:
    """One purpose's way to the disk: a ring of memory, and the lanes that fill it from files and empty it into them."""

    def __init__(self, ring: Ring, reads: Lane, writes: Lane, counters: Counters) -> None:
        self._ring, self._reads, self._writes, self._counters = ring, reads, writes, counters

    @property
    def num_bytes(self) -> int:
        """Bytes of the ring."""
        return self._ring.memory.nbytes

    def reset(self) -> None:
        """Whoever took memory and did not give it back was interrupted."""
        self._ring.reset()

    def has_room(self, num_bytes: int) -> bool:
        """True where `take` has so much to give."""
        return self._ring.has_room(num_bytes)

    def take(self, num_bytes: int) -> RingSlice:
        """Return memory, which stays this taker's until it says that it is no longer open."""
        stretch = self._ring.take(num_bytes)
        assert stretch is not None, "the ring was planned for one lease at a time"
        return stretch

    def read(
        self, file: Stripes, offset: int, stretch: RingSlice, *, reads: Sequence[Ticket], name: str, is_ahead: bool
    ) -> Ticket:
        """Fill a stretch from a file."""
        num_bytes = stretch.flat.nbytes
        ticket = self._reads.submit(
            lambda: file.read(offset, stretch.flat), reads=reads, fills=stretch.fills, name=name, num_bytes=num_bytes
        )
        stretch.fence.fill(ticket)
        self._counters.count("nvme_read_bytes", num_bytes, is_ahead)
        return ticket

    def write(
        self,
        file: Stripes,
        offset: int,
        stretch: RingSlice,
        num_bytes: int,
        *,
        reads: Sequence[Ticket],
        fills: Sequence[Ticket],
        name: str,
    ) -> Ticket:
        """Write the beginning of a stretch to a file."""
        ticket = self._writes.submit(
            lambda: file.write(offset, stretch.flat[:num_bytes]),
            reads=reads,
            fills=fills,
            name=name,
            num_bytes=num_bytes,
        )
        stretch.fence.read(ticket)
        self._counters.count("nvme_write_bytes", num_bytes)
        return ticket


@dataclass(eq=False)
class Record:
    """The planes of a tile that are on disk, one behind the other.

    The gradients have a fence of their own: those of a step that is given up may never be written, and nobody minds,
    while states whose write failed are lost.
    """

    name: str
    """The name of the region, for errors and timelines."""
    numel: int
    """The elements of the tile."""
    planes: Mapping[str, Plane]
    """The planes on disk, by name."""
    file: Stripes
    """The file, striped over the disks."""
    offset: int
    """The byte of the file at which the first plane begins."""
    fetches: Channel
    """The channel by which weights are read for the device."""
    updates: Channel
    """The channel by which states are read for an update, and written back."""
    fence: Fence = field(default_factory=lambda: Fence("record"))
    """Who reads and writes the states."""
    landing: Fence = field(default_factory=lambda: Fence("waiting gradients"))
    """Who reads and writes the gradients that wait."""
    _recent: tuple[Sequence[str], RingSlice] | None = None
    """Planes that were last read into the ring of updates, and where."""

    def has_room(self, names: Sequence[str]) -> bool:
        """True where the ring of updates has room for neighbouring planes beside all that is lent."""
        first, last = self._span(names)
        return self.updates.has_room(last - first)

    def lend(self, names: Sequence[str], lease: Lease, *, fetches: bool = False, is_ahead: bool = False) -> Lease:
        """Lend neighbouring planes beside what a lease has already; `gradients` among them are not written back."""
        if fetches and (found := self._at_hand(names, lease)) is not None:
            return found
        channel = self.fetches if fetches else self.updates
        first, last = self._span(names)
        reads = [ticket for fence in self._fences(names) for ticket in fence.before_read()]
        stretch = channel.take(last - first)
        name = self.name if fetches else f"update {self.name}"
        reading = channel.read(self.file, self.offset + first, stretch, reads=reads, name=name, is_ahead=is_ahead)
        for fence in self._fences(names):
            fence.read(reading)
        if not fetches:
            self._recent = names, stretch
        kept = [name for name in names if name != "gradients"]
        return self._leased(names, kept, lease, channel, stretch, (*lease.reads, reading), lease.fills)

    def land(self, names: Sequence[str], lease: Lease, *, travels: bool = False) -> Lease:
        """Lend memory for neighbouring planes beside what a lease has already, to be written once it is filled. A plane
        that `travels` to the device does not take memory of updates: it comes while the own one, which was updated
        there, is still to be sent.
        """
        channel = self.fetches if travels else self.updates
        first, last = self._span(names)
        stretch = channel.take(last - first)
        self._recent = None
        fills = (*lease.fills, *stretch.fills)
        return self._leased(names, names, lease, channel, stretch, lease.reads, fills)

    def _leased(
        self,
        names: Sequence[str],
        kept: Sequence[str],
        lease: Lease,
        channel: Channel,
        stretch: RingSlice,
        reads: Sequence[Ticket],
        fills: Sequence[Ticket],
    ) -> Lease:
        """Add planes in a stretch to a lease; those of them that are `kept` are written where they were changed."""

        def read(ticket: Ticket) -> None:
            stretch.fence.read(ticket)
            stretch.close()
            lease.done_reading(ticket)

        def changed(ticket: Ticket) -> None:
            stretch.fence.fill(ticket)
            self._write_back(kept, channel, stretch, ticket)
            lease.done_writing(ticket)

        return Lease(lease.planes | self._views(names, stretch), reads, fills, read, changed)

    def _at_hand(self, names: Sequence[str], lease: Lease) -> Lease | None:
        """Lend planes as they lie in the ring of updates still: as they are on disk, or will be."""
        if self._recent is None:
            return None
        lent, place = self._recent
        if not place.is_whole or place.fence.has_failed or not set(names) <= set(lent):
            return None

        def read(ticket: Ticket) -> None:
            place.fence.read(ticket)
            lease.done_reading(ticket)

        views = self._views(lent, place)
        planes = lease.planes | {name: views[name] for name in names}
        return replace(lease, planes=planes, reads=(*lease.reads, *place.fence.before_read()), done_reading=read)

    def _write_back(self, names: Sequence[str], channel: Channel, stretch: RingSlice, changed: Ticket) -> None:
        if names:
            first, last = self._span(names)
            (fence,) = self._fences(names)
            writing = channel.write(
                self.file,
                self.offset + first,
                stretch,
                last - first,
                reads=(changed,),
                fills=fence.before_fill(),
                name=f"{'gradients of' if fence is self.landing else 'update'} {self.name}",
            )
            fence.fill(writing)
        stretch.close()

    def _fences(self, names: Sequence[str]) -> list[Fence]:
        """Return the fences of planes: of states, of gradients, or of both."""
        return list(dict.fromkeys(self.landing if name == "gradients" else self.fence for name in names))

    def _span(self, names: Sequence[str]) -> tuple[int, int]:
        """Return the bytes of the record from which to which these planes lie."""
        first, end, spans = 0, 0, {}
        for name, plane in self.planes.items():
            first, end = end, end + plane.disk_bytes(self.numel)
            spans[name] = first, end
        return spans[names[0]][0], spans[names[-1]][1]

    def _views(self, names: Sequence[str], stretch: RingSlice) -> dict[str, torch.Tensor]:
        views, end = {}, 0
        for plane in map(self.planes.__getitem__, names):
            views[plane.name] = stretch.flat[end : end + plane.num_bytes(self.numel)].view(plane.dtype)
            end += plane.disk_bytes(self.numel)
        return views


class Nvme:
    """The files and rings of one run. The files have no names: the kernel takes them back however the program ends."""

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
        """`num_bytes`: of all records that there will be. `rings`: the bytes of each channel's. Raises ConfigError for
        a directory that cannot be used, DoesNotFitError where there is too little space, DiskError.
        """
        self._ledger = ledger
        directories = check_dirs(dirs)
        check_space(directories, num_bytes)
        self._io = IoEngine()
        try:
            self._states = Stripes(self._io, directories)
            self._states.reserve(num_bytes)
            self._activations = Stripes(self._io, directories) if ACTIVATION_RING in rings else self._states
            self._arena = Arena(sum(rings.values()), pinning)
            memory = {name: self._arena.take(size, torch.uint8) for name, size in rings.items()}
            for name, flat in memory.items():
                host.reserve(name, flat.nbytes)
                self._io.register(flat)
        except BaseException:
            self._io.close()  # and with it the files, though a traceback may keep the engine
            raise
        self._warn()
        self._open_channels(memory, lanes, counters)

    def _open_channels(self, memory: Mapping[str, torch.Tensor], lanes: Lanes, counters: Counters) -> None:
        """Make the way of each purpose through its ring's memory."""
        self._next = 0
        fetch, update, activation = (
            Ring(memory.get(name, _NOTHING), name) for name in (FETCH_RING, UPDATE_RING, ACTIVATION_RING)
        )
        self.fetches = Channel(fetch, lanes.fetch_read, lanes.update_write, counters)
        self.updates = Channel(update, lanes.update_read, lanes.update_write, counters)
        self.activations = Channel(activation, lanes.activation_read, lanes.activation_write, counters)

    def record(self, region: Region, begin: int, end: int, planes: Sequence[Plane]) -> Record:
        """Return the next record, of these planes of elements `begin` to `end` of a region."""
        by_name, numel = {plane.name: plane for plane in planes}, end - begin
        record = Record(region.name, numel, by_name, self._states, self._next, self.fetches, self.updates)
        self._next += sum(plane.disk_bytes(numel) for plane in planes)
        return record

    @property
    def room_bytes(self) -> int:
        """The bytes that the budget has room for beside what is on disk."""
        budget = self._ledger.budget_bytes
        return sys.maxsize if budget is None else budget - self._ledger.current_bytes

    def extent(self, num_bytes: int) -> tuple[Stripes, int]:
        """Return new room for an activation checkpoint: its file, and where it begins there. Raises DoesNotFitError or
        DiskError.
        """
        self._ledger.reserve("activation checkpoints", num_bytes)
        file = self._activations
        try:
            return file, file.reserve(num_bytes)
        except DiskError:
            self._ledger.release("activation checkpoints", num_bytes)
            raise

    def reset(self) -> None:
        """Take back what an interrupted step has left open. What was on its way is over, or goes on by its tickets."""
        for channel in (self.fetches, self.updates, self.activations):
            channel.reset()

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the rings that the device can copy from without staging."""
        return self._arena.pinned_bytes

    def close(self) -> None:
        """Let go of the files. The lanes must have ended."""
        with contextlib.suppress(DiskError):  # whoever needed that transfer was told
            self._io.close()
        self._arena.close()

    def _warn(self) -> None:
        """Say once what makes this slower than it could be."""
        reasons = (self._io.why, self._io.why_unregistered, self._states.why_buffered)
        found = [reason for reason in reasons if reason]
        if found:
            warn(f"the nvme tier works, by {self._io.name}, and is slower than it could be: {'; '.join(found)}.")


_NOTHING = torch.empty(0, dtype=torch.uint8)
