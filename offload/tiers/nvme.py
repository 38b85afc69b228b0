"""The nvme tier: records of states in preallocated files, moved in tiles through bounded rings of pinned memory."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from offload.errors import DiskError
from offload.lanes.lane import Lane
from offload.lanes.lanes import Lanes
from offload.lanes.ticket import Fence, Ticket
from offload.native_io import File, IoEngine
from offload.partition.layout import stripe
from offload.telemetry.counters import Counters
from offload.tiers.folder import RunFolders
from offload.tiers.host import Arena
from offload.tiers.ledger import Ledger
from offload.tiers.loan import Loan
from offload.tiers.ring import Ring, Stretch

FETCH_RING, UPDATE_RING, ACTIVATION_RING = "nvme fetch ring", "nvme update ring", "nvme activation ring"


class DataFile:
    """A file of a run, whose space is reserved before it is used."""

    def __init__(self, io: IoEngine, path: Path) -> None:
        self._io = io
        self._file: File = io.open(path, num_bytes=0)
        self.why_buffered = self._file.why_buffered
        self.num_bytes, self._is_whole = 0, True

    def reserve(self, num_bytes: int) -> int:
        """Add space at the end; return where it begins. DiskError where there is none."""
        begin = self.num_bytes
        self._file.reserve(begin + num_bytes)
        self.num_bytes += num_bytes
        self._is_whole = self._held_bytes() >= self.num_bytes  # not so where the file system compresses
        return begin

    def read(self, offset: int, memory: torch.Tensor) -> None:
        """Fill `memory` from `offset`; DiskError where that fails."""
        self._check()
        self._io.read(self._file, offset, memory).wait()

    def write(self, offset: int, memory: torch.Tensor) -> None:
        """Write `memory` to `offset`; DiskError where that fails."""
        self._check()
        self._io.write(self._file, offset, memory).wait()

    def _check(self) -> None:
        """A file that was cut off would grow again with the next write, and read as zeros before it."""
        size, held = os.fstat(self._file.fd).st_size, self._held_bytes()
        if size < self.num_bytes or (self._is_whole and held < self.num_bytes):
            raise DiskError(
                f"{self._file.path} has {size} bytes, {held} of them on disk, and was made with {self.num_bytes}: "
                "something has truncated it, and the states in it are lost. Go on from the last checkpoint.",
                0,
                self._file.path,
            )

    def _held_bytes(self) -> int:
        """Return the disk space that the file takes; a hole takes none."""
        return os.fstat(self._file.fd).st_blocks * 512


class Channel:
    """One purpose's way to the disk: a ring of memory, and the lanes that fill it from files and empty it into them."""

    def __init__(self, ring: Ring, reads: Lane, writes: Lane, counters: Counters) -> None:
        self._ring, self._reads, self._writes, self._counters = ring, reads, writes, counters

    @property
    def num_bytes(self) -> int:
        """Bytes of the ring."""
        return self._ring.memory.nbytes

    def take(self, num_bytes: int) -> Stretch:
        """Return memory, which stays this taker's until it says that it is no longer open."""
        stretch = self._ring.take(num_bytes)
        assert stretch is not None, "the ring was planned for one loan at a time"
        return stretch

    def read(
        self, file: DataFile, offset: int, stretch: Stretch, *, after: Sequence[Ticket], name: str, is_ahead: bool
    ) -> Ticket:
        """Fill a stretch from a file."""
        num_bytes = stretch.flat.nbytes
        ticket = self._reads.submit(
            lambda: file.read(offset, stretch.flat),
            after=after,
            behind=stretch.after,
            name=name,
            num_bytes=num_bytes,
        )
        stretch.fence.fill(ticket)
        if is_ahead:
            self._counters.next_nvme_read_bytes += num_bytes
        else:
            self._counters.nvme_read_bytes += num_bytes
        return ticket

    def write(
        self,
        file: DataFile,
        offset: int,
        stretch: Stretch,
        num_bytes: int,
        *,
        after: Sequence[Ticket],
        behind: Sequence[Ticket],
        name: str,
    ) -> Ticket:
        """Write the beginning of a stretch to a file."""
        ticket = self._writes.submit(
            lambda: file.write(offset, stretch.flat[:num_bytes]),
            after=after,
            behind=behind,
            name=name,
            num_bytes=num_bytes,
        )
        stretch.fence.read(ticket)
        self._counters.nvme_write_bytes += num_bytes
        return ticket


@dataclass(eq=False)
class Record:
    """The planes of a tile that are on disk, one behind the other from `offset` of a file on."""

    name: str
    numel: int
    planes: dict[str, torch.dtype]
    file: DataFile
    offset: int
    fetches: Channel
    updates: Channel
    fence: Fence = field(default_factory=lambda: Fence("record"))

    def lend(self, names: Sequence[str], loan: Loan, *, fetches: bool = False, is_ahead: bool = False) -> Loan:
        """Lend neighbouring planes beside what a loan has already; `gradients` among them are not written back."""
        channel = self.fetches if fetches else self.updates
        first, last = self._span(names)
        stretch = channel.take(last - first)
        reading = channel.read(
            self.file, self.offset + first, stretch, after=self.fence.before_read(), name=self.name, is_ahead=is_ahead
        )
        self.fence.read(reading)

        def read(ticket: Ticket) -> None:
            stretch.fence.read(ticket)
            stretch.is_open = False
            loan.read(ticket)

        def changed(ticket: Ticket) -> None:
            stretch.fence.read(ticket)
            self._write_back([name for name in names if name != "gradients"], channel, stretch, ticket)
            loan.changed(ticket)

        planes = loan.planes | self._views(names, stretch)
        return Loan(planes, (*loan.after, reading), loan.behind, read, changed)

    def land(self) -> Loan:
        """Lend memory for the gradients, which are written to disk once they are there."""
        first, last = self._span(["gradients"])
        stretch = self.updates.take(last - first)

        def changed(ticket: Ticket) -> None:
            stretch.fence.fill(ticket)
            self._write_back(["gradients"], self.updates, stretch, ticket)

        return Loan(self._views(["gradients"], stretch), (), stretch.after, changed, changed)

    def _write_back(self, names: Sequence[str], channel: Channel, stretch: Stretch, changed: Ticket) -> None:
        if names:
            first, last = self._span(names)
            writing = channel.write(
                self.file,
                self.offset + first,
                stretch,
                last - first,
                after=(changed,),
                behind=self.fence.before_fill(),
                name=self.name,
            )
            self.fence.fill(writing)
        stretch.is_open = False

    def _span(self, names: Sequence[str]) -> tuple[int, int]:
        """Return the bytes of the record from which to which these planes lie."""
        first, end, spans = 0, 0, {}
        for name, dtype in self.planes.items():
            first, end = end, end + self.numel * dtype.itemsize
            spans[name] = first, end
        return spans[names[0]][0], spans[names[-1]][1]

    def _views(self, names: Sequence[str], stretch: Stretch) -> dict[str, torch.Tensor]:
        views, end = {}, 0
        for name in names:
            begin, end = end, end + self.numel * self.planes[name].itemsize
            views[name] = stretch.flat[begin:end].view(self.planes[name])
        return views


class Nvme:
    """The folders, files and rings of one run; everything is removed when it is closed or the program ends."""

    def __init__(
        self,
        dirs: Sequence[str],
        record_bytes: Sequence[int],
        *,
        rings: Mapping[str, int],
        lanes: Lanes,
        counters: Counters,
        ledger: Ledger,
        host: Ledger,
        pin: bool,
    ) -> None:
        """`record_bytes`: of every record there will be, in order. `rings`: the bytes of each channel's."""
        places, sizes = stripe(record_bytes, len(dirs))
        self._ledger = ledger
        self._folders = RunFolders(dirs, sum(sizes))
        try:
            self._io = IoEngine()
            self._states = self._files("states.bin") if record_bytes else []
            for file, size in zip(self._states, sizes, strict=False):
                file.reserve(size)
            self._activations = self._files("activations.bin") if ACTIVATION_RING in rings else []
            self._arena = Arena(sum(rings.values()), pin=pin)
            memory = {name: self._arena.take(size, torch.uint8) for name, size in rings.items()}
            for name, flat in memory.items():
                host.reserve(name, flat.nbytes)
                self._io.register(flat)
        except BaseException:
            self._folders.close()
            raise
        self._warn()
        self._places = iter(places)
        fetch, update, activation = (
            Ring(memory.get(name, _NOTHING), name) for name in (FETCH_RING, UPDATE_RING, ACTIVATION_RING)
        )
        self.fetches = Channel(fetch, lanes.fetch_read, lanes.update_write, counters)
        self.updates = Channel(update, lanes.update_read, lanes.update_write, counters)
        self.activations = Channel(activation, lanes.activation_read, lanes.activation_write, counters)

    def record(self, name: str, numel: int, planes: dict[str, torch.dtype]) -> Record:
        """Return the next record."""
        number, offset = next(self._places)
        return Record(name, numel, planes, self._states[number], offset, self.fetches, self.updates)

    def extent(self, num_bytes: int) -> tuple[DataFile, int]:
        """Return new room for an activation checkpoint: a file, and where it begins there. Raises DoesNotFitError or
        DiskError.
        """
        self._ledger.reserve("activation checkpoints", num_bytes)
        file = min(self._activations, key=lambda file: file.num_bytes)
        return file, file.reserve(num_bytes)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the rings that the device can copy from without staging."""
        return self._arena.pinned_bytes

    def close(self) -> None:
        """Remove the files. The lanes must have ended."""
        with contextlib.suppress(DiskError):  # whoever needed that transfer was told
            self._io.close()
        self._arena.close()
        self._folders.close()

    def _files(self, name: str) -> list[DataFile]:
        return [DataFile(self._io, folder / name) for folder in self._folders.paths]

    def _warn(self) -> None:
        """Say once what makes this slower than it could be."""
        files = {file.why_buffered for file in (*self._states, *self._activations)}
        found = [reason for reason in (self._io.why, self._io.why_unregistered, *sorted(files)) if reason]
        if found:
            warnings.warn(
                f"the nvme tier works, by {self._io.name}, and is slower than it could be: {'; '.join(found)}.",
                stacklevel=2,
            )


_NOTHING = torch.empty(0, dtype=torch.uint8)
