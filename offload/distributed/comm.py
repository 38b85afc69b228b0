"""What ranks exchange: one interface over gloo on a CPU and NCCL on CUDA, and over nothing where there is one rank.

Sums are made in rank order, ((x0 + x1) + x2) + ..., in fp32, by the rank that gets them: it receives the others' pieces
and adds them itself. So a result depends neither on an algorithm nor on timing, at the volume of a ring: each rank
sends (N - 1) / N of what it has (ZeRO, arXiv:1910.02054, section 7).
"""

from __future__ import annotations

import atexit
import copy
import ctypes
import itertools
import pickle
import socket
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from offload.accelerators import open_accelerator
from offload.distributed.agreement import difference, digest
from offload.distributed.reach import LOOPBACK, Door, gloo_over
from offload.distributed.watchdog import Position, Times, Watchdog, connect
from offload.errors import ConfigError, RankLostError, common
from offload.interrupts import interrupts

LOOK_S = 0.2
"""How often a rank that waits on gloo, which cannot be interrupted, looks whether another was lost."""
_CHUNK_MULTIPLE = 256  # elements
_FLOATS = (torch.float32, torch.bfloat16, torch.float64)
_Value = TypeVar("_Value")


class Coding(Protocol):
    """How the terms of a sum travel that are sent in codes: in records, uint8 [`record_bytes`], of `block` elements."""

    block: int
    record_bytes: int

    def encode(self, values: torch.Tensor, begin: int, records: torch.Tensor) -> None:
        """Make the records, flat, of values [n], the elements from `begin` on of what is summed."""

    def decode(self, records: torch.Tensor, out: torch.Tensor) -> None:
        """Make what records, flat, stand for: `out` [n], in any float dtype."""


class Comm:
    """The exchanges of a step. All ranks make the same calls in the same order: of those that exchange tensors, and,
    apart from these, of those that exchange values of the host (numbers, objects, flags).

    Tensors are flat and contiguous, on the device. On gloo a call returns when it is done; on CUDA it is enqueued on
    the current stream, but for those that return values of the host. `what` names unit and operation ("all-gather of
    unit head"), alike on all ranks, for the message when a rank is lost. Every call raises RankLostError then.

    This one is of an only rank: nothing is sent or waited for, and nothing is copied where shard and full are one.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    device = torch.device("cpu")
    """Where tensors of several ranks are exchanged, and computed."""
    machines: Sequence[int] = (0,)
    """The machine of each rank, as the lowest rank that is there."""
    local_gpus: Sequence[str | None] = (None,)
    """The place on the PCI bus of each GPU that ranks of this machine compute on, where it is known."""
    _user: weakref.ref[object] | None = None

    def claim(self, user: object) -> None:
        """Note whose exchanges these are until `release`: those of two would meet in whatever order.

        Raises:
            ConfigError: another user lives, and has not released it.
        """
        if self.size > 1 and self._user is not None and self._user() is not None:
            raise ConfigError(
                "this comm is in use by an engine that was not closed, and the exchanges of two would be mixed up: "
                "close that one first, or give this one a comm of its own, by open_comm()."
            )
        self._user = weakref.ref(user)

    def release(self) -> None:
        """The user makes no more exchanges."""
        self._user = None

    @property
    def num_machines(self) -> int:
        """How many machines the ranks are on, each with as many of them; 1 where some have more than others."""
        counts = Counter(self.machines)
        return len(counts) if len(set(counts.values())) == 1 else 1

    @property
    def num_far(self) -> int:
        """How many of the ranks are on other machines than this one."""
        return sum(machine != self.machines[self.rank] for machine in self.machines)

    def split(self, num_replicas: int) -> tuple[Comm, Comm]:
        """Return the exchanges among the ranks of this one's replica, and among those that stand in its place in each
        of `num_replicas`. Ranks of one machine, and then neighbours, are in one replica. Both end with this comm. Of
        each kind there is an order of its own, which all ranks that take part keep. Collective, the first time.
        """
        if self.size % num_replicas:
            fitting = ", ".join(str(n) for n in range(1, self.size + 1) if self.size % n == 0)
            raise ConfigError(
                f"offload.replicas is {num_replicas}, and {self.size} ranks do not make that many of equal size: set "
                f"--offload.replicas to one of {fitting}, or to auto."
            )
        return (self, Comm()) if num_replicas == 1 else self._split(num_replicas)

    def _split(self, num_replicas: int) -> tuple[Comm, Comm]:  # noqa: ARG002
        return self, self

    def neighbours(self, num: int) -> Comm:
        """Return the exchanges among this rank and those with which it makes a group of `num`: neighbours on one
        machine. They have an order of their own, which the ranks of a group keep, whatever else they exchange, and end
        with this comm. Collective, the first time. Raises ConfigError where machines have no whole number of groups.
        """
        self.group_of(num)
        return Comm() if num == 1 else self._neighbours(num)

    def _neighbours(self, num: int) -> Comm:  # noqa: ARG002
        return self

    def group_of(self, num: int) -> tuple[int, int]:
        """Return the number of this rank's group of `num` neighbours, and this rank's number in the group. Raises as
        `neighbours`.
        """
        counts = set(Counter(self.machines).values())
        if any(count % num for count in counts):
            here = min(counts)
            fitting = ", ".join(str(n) for n in range(1, here + 1) if all(count % n == 0 for count in counts))
            raise ConfigError(
                f"train.sequence_parallel is {num}, and a machine has {here} ranks, which make no whole number of "
                f"groups of {num}: set --train.sequence_parallel to one of {fitting}, or start other ranks, by --gpus "
                "or --nproc-per-node."
            )
        groups, _ = self._places(self.size // num)
        return next((number, its.index(self.rank)) for number, its in enumerate(groups) if self.rank in its)

    def _places(self, num_replicas: int) -> tuple[list[list[int]], list[list[int]]]:
        """Return the ranks of each replica, and those of each place in all replicas."""
        order = sorted(range(self.size), key=lambda rank: (self.machines[rank], rank))
        num = self.size // num_replicas
        replicas = [order[begin : begin + num] for begin in range(0, self.size, num)]
        return replicas, [list(peers) for peers in zip(*replicas, strict=True)]

    @property
    def stands(self) -> bool:
        """False where the caller has destroyed all groups of processes, perhaps to make others."""
        return True

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, what: str) -> None:
        """Fill full [size * n] with every rank's shard [n], in rank order. shard may be its own place in full."""
        _check(full, shard, 1, what)
        _place(full, shard)

    def reduce_scatter(
        self,
        shard: torch.Tensor,
        full: torch.Tensor,
        what: str,
        scratch: torch.Tensor,  # noqa: ARG002
        coding: Coding | None = None,  # noqa: ARG002
    ) -> None:
        """Fill shard [n] with the sum over ranks of their full [size * n] at this rank's place.

        Summed in rank order in fp32 (fp64 if full is), then rounded to shard's dtype, once. shard may be its own place
        in full. scratch: uint8, flat, of the device; a larger one makes fewer pieces. coding: of the terms that come
        from other ranks; n is a multiple of its block.
        """
        _check(full, shard, 1, what)
        _place(shard, full)

    def all_to_all(self, received: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor], what: str) -> None:  # noqa: ARG002
        """Give every rank its piece of this one's, and fill received[r] with that of rank r for this one: as many flat
        tensors [n] as there are ranks, all of one length and dtype.
        """
        for to, piece in zip(received, pieces, strict=True):
            _place(to, piece)

    def sum_in_order(self, values: Any, what: str) -> Any:  # noqa: ARG002
        """Return the sum over ranks, in rank order, in float64: of a list of numbers a list, the same on all ranks; of
        a flat float64 tensor of the device a new one.
        """
        return values.clone() if isinstance(values, torch.Tensor) else [float(value) for value in values]

    def broadcast(self, flat: torch.Tensor, source: int, what: str) -> None:
        """Fill a flat tensor, of the host or the device, of any dtype, with that of rank `source`."""

    def gather_objects(self, value: _Value, what: str) -> list[_Value]:  # noqa: ARG002
        """Return what every rank gave, in rank order. Pickled: small things of the host."""
        return [value]

    def agree(self, name: str, value: Any) -> None:
        """Compare `value` (dicts, lists, numbers, strings, bytes) over the ranks.

        Raises:
            ConfigError: on all ranks, where one differs; it says which, and of dicts in which keys.
        """

    def any(self, flag: bool, what: str) -> bool:  # noqa: ARG002
        """True on all ranks where `flag` is true on one."""
        return flag

    def barrier(self, what: str) -> None:
        """Return when all ranks have come."""

    def on_lost(self, listener: Callable[[RankLostError], None]) -> None:
        """Call `listener` from a thread of the watch when a rank is lost: it wakes whoever waits for an exchange. The
        process ends soon afterwards, whatever it does.
        """

    def close(self, error: BaseException | None = None) -> None:
        """This rank takes no further part. With an error the other ranks end, too, and name it."""

    def __enter__(self) -> Comm:
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        self.close(error)


Groups = Sequence[Sequence[int]] | None
"""Ranks that exchange among themselves; None for all at once."""


def make_group(groups: Groups, backend: str | None, timeout: timedelta) -> Any:
    """Return a process group of all ranks, or that of `groups` which this rank is in. Collective."""
    if groups is None:
        return dist.new_group(backend=backend, timeout=timeout)
    own, _ = dist.new_subgroups_by_enumeration([list(its) for its in groups], timeout=timeout, backend=backend)
    return own


class Row:
    """A row of exchanges: over groups of gloo of its own, one at a time, in the order of all ranks that take part."""

    def __init__(self, timeout: timedelta, groups: Groups = None) -> None:
        self.group, self.back = (make_group(groups, "gloo", timeout) for _ in range(2))
        self.lock = threading.Lock()
        self.now = Position(among=None if groups is None else frozenset(dist.get_process_group_ranks(self.group)))


def _scatter(comm: Comm, received: Sequence[torch.Tensor], pieces: list[torch.Tensor], row: Row) -> list[Any]:
    """Give every rank its piece; received[r] gets rank r's for this one. Scatters go from and to where the data is, and
    straight to who wants it: gloo's all-to-all wants pieces side by side, and its broadcasts go by way of other ranks,
    to other machines and back. Ranks of machines take turns, so that a link is used both ways, and so do groups: over
    a connection on which a piece is sent, the word that there is room for another comes when that is through.
    """
    turns = zip(_turns(tuple(comm.machines)), itertools.cycle((row.group, row.back)))
    return [
        dist.scatter(received[rank], pieces if rank == comm.rank else None, group=group, async_op=True, group_src=rank)
        for rank, group in turns
    ]


@lru_cache
def _turns(machines: tuple[int, ...]) -> list[int]:
    """Return the ranks in turns of their machines: the first of each, then the second."""
    return sorted(range(len(machines)), key=lambda rank: machines[:rank].count(machines[rank]))


class Ranks(Comm):
    """Several ranks over gloo.

    Tensors are exchanged in one row, values of the host in another: whoever tells the others something does not wait
    for tensors that are on their way.
    """

    def __init__(
        self,
        device: torch.device,
        times: Times,
        owns_default: bool,
        address: str = LOOPBACK,
        local: tuple[int, int] | None = None,
    ) -> None:
        """`address`: by which other machines reach this rank. `local`: this rank's number among those of its machine,
        and how many they are, where the launcher says so.
        """
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.machines = (0,) * self.size  # until they are known
        self.device, self._owns_default, self._address = device, owns_default, address
        # The watch ends what hangs; gloo and NCCL are not to do it before.
        self._timeout = timedelta(days=7) if times.stall_s is None else timedelta(seconds=times.stall_s + 600)
        deadline = time.monotonic() + times.start_s
        self._check = lambda: _be_patient(deadline, times.start_s)
        self._explain: Callable[[Exception], Exception] = lambda error: RankLostError(f"No start: {error}", None)
        self._parts: dict[str, tuple[Ranks, ...]] = {}
        self._left_by: list[BaseException] = []  # one for all parts
        self._open_rows(None)
        try:
            connections = connect(self.rank, self._locate(address), self.gather_objects, times.start_s)
        except OSError as error:
            raise RankLostError(f"Rank {self.rank} could not connect to the other ranks: {error}", None) from error
        self._watch = Watchdog(self.rank, connections, self.look, times, self._enter)
        self._check, self._explain = self._watch.check, self._watch.explain
        if local:
            self.local_rank, self.local_size = local
            if len(self.local_gpus) != self.local_size:  # two launchers on one network
                self.local_gpus = (None,) * self.local_size
            # Torchrun numbers the ranks of a machine one after the other.
            self.machines = self.gather_objects(self.rank - self.local_rank, "the machines of ranks")
        self.on_lost(self._abandon)
        # Not left to the interpreter's end, when threads of gloo that ask for Python's lock abort the process.
        atexit.register(self._at_exit)
        self.barrier("start")

    def _open_rows(self, groups: Groups) -> None:
        self._tensors, self._values = Row(self._timeout, groups), Row(self._timeout, groups)

    def _split(self, num_replicas: int) -> tuple[Comm, Comm]:
        within, between = self._made(f"{num_replicas} replicas", *self._places(num_replicas))
        return within, between

    def _neighbours(self, num: int) -> Comm:
        return self._made(f"{num} neighbours", self._places(self.size // num)[0])[0]

    def _made(self, key: str, *kinds: Sequence[Sequence[int]]) -> tuple[Ranks, ...]:
        """Return the parts under this key, one for each kind of groups: made, where there are none yet."""
        if key not in self._parts:
            self._parts[key] = tuple(map(self._part, kinds))
        return self._parts[key]

    def _part(self, groups: Sequence[Sequence[int]]) -> Ranks:
        """Return the exchanges of this rank with the others of its group, under the same watch."""
        own, part = next(its for its in groups if self.rank in its), copy.copy(self)
        part._parts, part.rank, part.size = {}, own.index(self.rank), len(own)
        part.machines = [self.machines[rank] for rank in own]
        with gloo_over(self._address):
            part._open_rows(groups)
        return part

    def _all_parts(self) -> Iterator[Ranks]:
        """Yield these exchanges, and those of each part."""
        yield self
        yield from [part for parts in list(self._parts.values()) for part in parts]

    def _enter(self) -> None:
        """Called by every thread of the watch before it looks."""

    def _locate(self, address: str) -> list[str]:
        """Find which ranks share this machine, each with hardware of its own; return the address of each rank. A rank
        may see all GPUs of its machine, or its own alone. Raises ConfigError, on all ranks, where two have one GPU.
        """
        own: Any = (None, None) if self.device.type == "cpu" else open_accelerator(self.device).hardware
        door = Door(self.size)
        try:
            told = self.gather_objects((door.name, address, own, socket.gethostname()), "exchange of addresses")
            reached = [door.reaches(name) for name, *_ in told]
            self.machines = self.gather_objects(reached.index(True), "exchange of machines")  # all have knocked by now
        finally:
            door.close()
        users: dict[Any, int] = {}
        for rank, (machine, (_, _, (gpu, _pci), host)) in enumerate(zip(self.machines, told, strict=True)):
            if gpu is not None and (other := users.setdefault((machine, gpu), rank)) != rank:
                raise common(
                    ConfigError(
                        f"ranks {other} and {rank} both compute on the GPU {gpu} of {host}: each rank needs "
                        "its own. Start as many as there are GPUs, by --gpus or --nproc-per-node."
                    )
                )
        here = [rank for rank, is_here in enumerate(reached) if is_here]
        self.local_rank, self.local_size = here.index(self.rank), len(here)
        self.local_gpus = [told[rank][2][1] for rank in here]
        return [LOOPBACK] * self.size if self.local_size == self.size else [address for _, address, *_ in told]

    # -- exchanges -------------------------------------------------------------------------------------------

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, what: str) -> None:
        _check(full, shard, self.size, what)
        with self._exchange(what, full.numel()):
            _place(pieces_of(full, self.size)[self.rank], shard)
            self._gather(full, self._tensors)

    def reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, what: str, scratch: torch.Tensor, coding: Coding | None = None
    ) -> None:
        _check(full, shard, self.size, what)
        if full.dtype not in _FLOATS or shard.dtype not in _FLOATS:
            raise ValueError(f"{what}: from {full.dtype} to {shard.dtype}; float32, bfloat16 or float64 are summed.")
        with self._exchange(what, full.numel()):
            self._reduce(shard, _open_chunks(scratch, pieces_of(full, self.size), self.rank, coding))

    def _gather(self, full: torch.Tensor, row: Row) -> None:
        """Every rank sends its piece into its place. (gloo's own all-gather goes through a second buffer as large as
        full, and takes thrice the time.)
        """
        pieces = pieces_of(full, self.size)
        self._wait(_scatter(self, pieces, [pieces[self.rank]] * self.size, row))

    def _reduce(self, shard: torch.Tensor, chunks: _Chunks) -> None:
        """Sum one chunk while the next one travels (on CUDA, in the order of the stream)."""
        travelling: tuple[list[Any], torch.Tensor, list[torch.Tensor]] | None = None
        for number, begin in enumerate(range(0, shard.numel(), chunks.numel)):
            part = slice(begin, min(begin + chunks.numel, shard.numel()))
            received, sent = chunks.open(number % 2, part)
            works = self._swap(received, sent)
            self._arrive(chunks, travelling)
            travelling = works, shard[part], chunks.terms(received, part)
        self._arrive(chunks, travelling)

    def _arrive(self, chunks: _Chunks, travelling: tuple[list[Any], torch.Tensor, list[torch.Tensor]] | None) -> None:
        if travelling:
            self._wait(travelling[0])
            chunks.add_up(*travelling[1:])

    def _swap(self, received: list[torch.Tensor], pieces: list[torch.Tensor]) -> list[Any]:
        """As `_scatter`, in the row of tensors."""
        return _scatter(self, received, pieces, self._tensors)

    def all_to_all(self, received: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor], what: str) -> None:
        with self._exchange(what, self.size * pieces[0].numel()):
            self._wait(self._swap(list(received), list(pieces)))

    def sum_in_order(self, values: Any, what: str) -> Any:
        of_device = isinstance(values, torch.Tensor)
        own = values if of_device else torch.tensor([float(value) for value in values], dtype=torch.float64)
        if own.dtype != torch.float64:
            raise ValueError(f"{what}: {own.dtype}; float64 is summed.")
        first, *others = self._collect(own, what, of_device)
        total = first.clone()
        for other in others:
            total += other
        return total if of_device else total.tolist()

    def _collect(self, own: torch.Tensor, what: str, of_device: bool = False) -> torch.Tensor:
        """Return every rank's `own` [n] as [size, n]; of the host, when it is there."""
        row = None if of_device else self._values
        full = own.new_empty(self.size * own.numel())
        with self._exchange(what, full.numel(), row):
            pieces_of(full, self.size)[self.rank].copy_(own)
            self._gather(full, row or self._tensors)
        return full.view(self.size, -1)

    def broadcast(self, flat: torch.Tensor, source: int, what: str) -> None:
        with self._exchange(what, flat.numel()):
            self._send(flat.view(torch.uint8), source)

    def _send(self, data: torch.Tensor, source: int) -> None:
        self._wait([dist.broadcast(data, group=self._tensors.group, async_op=True, group_src=source)])

    def gather_objects(self, value: _Value, what: str) -> list[_Value]:
        data = pickle.dumps(value)
        lengths = [int(length) for length in self._collect(torch.tensor([len(data)]), f"{what}: lengths")]
        padded = torch.frombuffer(bytearray(data.ljust(max(lengths))), dtype=torch.uint8)
        rows = self._collect(padded, what)
        return [pickle.loads(row[:length].numpy().tobytes()) for row, length in zip(rows, lengths, strict=True)]

    def agree(self, name: str, value: Any) -> None:
        own = torch.tensor([digest(value)])
        digests = self._collect(own, f"comparison of {name}").flatten().tolist()
        if len(set(digests)) > 1:
            values = self.gather_objects(value, f"values of {name}")
            raise common(ConfigError(difference(name, digests, values)))

    def any(self, flag: bool, what: str) -> bool:
        return bool(self._collect(torch.tensor([flag]), what).any())

    def barrier(self, what: str) -> None:
        self._collect(torch.zeros(1, dtype=torch.uint8), what)

    # -- waiting, and the end --------------------------------------------------------------------------------

    def look(self) -> Sequence[Position]:
        """Return where this rank is in all rows; any thread may ask."""
        return [place for part in self._all_parts() for place in part._own_places()]

    def _own_places(self) -> tuple[Position, Position]:
        return self._tensors.now, self._values.now

    def on_lost(self, listener: Callable[[RankLostError], None]) -> None:
        self._watch.listeners.append(listener)
        if self._watch.error is not None:
            listener(self._watch.error)

    @contextmanager
    def _exchange(self, what: str, numel: int, row: Row | None = None) -> Iterator[None]:
        """This rank is in an exchange, of tensors unless another row is given; where it raises it stays there, for the
        message. From then on no two ranks may mean the same exchange, and would wait for each other for ever: whatever
        still wants one on the way out raises as that did.
        """
        row = row or self._tensors
        with row.lock:
            self._check()
            if self._left_by:
                raise self._left_by[0]
            if not self.stands:
                raise ConfigError(
                    "The process group was destroyed (torch.distributed.destroy_process_group) while an engine still "
                    "used it: close the engine first."
                )
            try:
                row.now = Position(row.now.number + 1, what, numel, inside=True, among=row.now.among)
                yield
            except BaseException as error:
                self._left_by.append(error)
                raise
            row.now = replace(row.now, inside=False, since=time.monotonic())

    def _wait(self, works: Iterable[Any]) -> None:
        """Block until work of gloo is done, or until a rank is lost: a rank that is stopped blocks gloo for ever. A
        wait that ends early (it raises) does not end the work.
        """
        for work in works:
            while not work.is_completed():
                with suppress(RuntimeError):
                    work.wait(timedelta(seconds=LOOK_S))
                self._check()
                interrupts.look()
            try:
                work.wait()  # raises what went wrong
            except RuntimeError as error:
                explained = self._explain(error)
            else:
                continue
            raise explained

    @property
    def stands(self) -> bool:
        with suppress(KeyError, ValueError):
            return bool(dist.get_process_group_ranks(self._tensors.group))
        return False

    def _abandon(self, _error: RankLostError | None) -> None:
        """A thread of gloo may be blocked for ever, and destroying its group would wait for it: never do."""
        groups = self._groups()
        for group in [*groups, dist.group.WORLD] if self._owns_default else groups:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    def close(self, error: BaseException | None = None) -> None:
        self._watch.ends_with(error)
        if self._watch.is_over:
            return
        atexit.unregister(self._at_exit)
        self._watch.end(error if self.stands else None)  # who destroys the groups destroys them everywhere
        if any(place.inside for place in self.look()):
            self._abandon(None)
        else:  # with an error, too: a process that leaves a group of gloo to the interpreter's end may abort there
            self._destroy()

    def _rows(self) -> list[Row]:
        """Return the rows of all parts."""
        return [row for part in self._all_parts() for row in (part._tensors, part._values)]

    def _groups(self) -> list[Any]:
        """Return the groups of gloo of all parts."""
        return [group for row in self._rows() for group in (row.group, row.back)]

    def _at_exit(self) -> None:
        self.close(getattr(sys, "last_value", None))

    def _destroy(self) -> None:
        rows = self._rows()
        if self.stands:
            for group in (None,) if self._owns_default else self._groups():
                dist.destroy_process_group(group)
        for row in rows:  # with the last reference go gloo's threads, which may still let go of tensors: Python's lock
            row.group = row.back = None  # must not be gone by then, or they abort the process (seen with torch 2.13)


class _Chunks:
    """Scratch for sums: two sets of a slot per rank, and room for a sum and a term in the dtype of the sum."""

    _num_sets = 2

    def __init__(self, scratch: torch.Tensor, pieces: Sequence[torch.Tensor], rank: int) -> None:
        """`pieces`: what this rank has for the sum of each rank."""
        self._pieces, self._rank, size, dtype = pieces, rank, len(pieces), pieces[0].dtype
        self._dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self._block, self._record_bytes = self._unit(dtype)
        sum_bytes, slot_bytes = self._dtype.itemsize * self._block, self._num_sets * size * self._record_bytes
        width = 2 * sum_bytes + slot_bytes
        multiple = _CHUNK_MULTIPLE // self._block
        count = scratch.numel() // width // multiple * multiple
        self.numel = count * self._block
        """How many elements of a piece are summed at once."""
        if not count:
            raise ValueError(f"{scratch.numel()} bytes of scratch; {size} ranks need {width * multiple}.")
        sums, slots = scratch[: count * width].split([2 * sum_bytes * count, slot_bytes * count])
        self._total, self._term = sums.view(self._dtype).view(2, self.numel)
        self._slots = slots.view(self._num_sets, size, -1)

    def _unit(self, dtype: torch.dtype) -> tuple[int, int]:
        """Return of how many elements a record is on its way, and its bytes."""
        return 1, dtype.itemsize

    def open(self, turn: int, part: slice) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return where each rank's term of a part of this one's piece is to arrive, and what each rank is sent of its
        piece. `turn`: 0 or 1, in turns, as the memory of the part before is still in use.
        """
        sent = [piece[part] for piece in self._pieces]
        return [slot.view(sent[0].dtype)[: part.stop - part.start] for slot in self._slots[turn]], sent

    def terms(self, received: list[torch.Tensor], part: slice) -> list[torch.Tensor]:  # noqa: ARG002
        """Return the terms of a part, in rank order, as `add_up` takes them, once all is received."""
        return received

    def _as_term(self, term: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        """Return a term in the dtype of the sum: itself, or in `room`."""
        return term if term.dtype == self._dtype else room.copy_(term)

    def add_up(self, out: torch.Tensor, terms: Sequence[torch.Tensor]) -> None:
        """out = ((x0 + x1) + x2) + ..."""
        first, *others = terms
        total = out if out.dtype == self._dtype else self._total[: len(out)]
        _place(total, self._as_term(first, total))
        for other in others:
            total += self._as_term(other, self._term[: len(out)])
        _place(out, total)


class _CodedChunks(_Chunks):
    """Scratch for sums of terms that come in codes, but for this rank's own; with two more sets, for what is sent."""

    _num_sets = 4

    def __init__(self, scratch: torch.Tensor, pieces: Sequence[torch.Tensor], rank: int, coding: Coding) -> None:
        self._coding = coding
        super().__init__(scratch, pieces, rank)

    def _unit(self, dtype: torch.dtype) -> tuple[int, int]:  # noqa: ARG002
        return self._coding.block, self._coding.record_bytes

    def open(self, turn: int, part: slice) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        num_bytes = (part.stop - part.start) // self._block * self._record_bytes
        received, sent = ([slot[:num_bytes] for slot in self._slots[place]] for place in (turn, 2 + turn))
        for rank, (piece, records) in enumerate(zip(self._pieces, sent, strict=True)):
            if rank != self._rank:
                self._coding.encode(piece[part], rank * len(piece) + part.start, records)
        return received, sent

    def terms(self, received: list[torch.Tensor], part: slice) -> list[torch.Tensor]:
        own = self._pieces[self._rank][part]
        return [own if rank == self._rank else records for rank, records in enumerate(received)]

    def _as_term(self, term: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        if term.dtype != torch.uint8:
            return super()._as_term(term, room)
        self._coding.decode(term, room)
        return room

    def add_up(self, out: torch.Tensor, terms: Sequence[torch.Tensor]) -> None:
        total = self._total[: len(out)]
        super().add_up(total, terms)  # not in `out`, where this rank's own term may be
        out.copy_(total)


def _open_chunks(scratch: torch.Tensor, pieces: Sequence[torch.Tensor], rank: int, coding: Coding | None) -> _Chunks:
    return _Chunks(scratch, pieces, rank) if coding is None else _CodedChunks(scratch, pieces, rank, coding)


def _be_patient(deadline: float, start_s: float) -> None:
    if time.monotonic() > deadline:
        raise RankLostError(f"Not all ranks came within {start_s:g} s of the start.", None)


def pieces_of(full: torch.Tensor, size: int) -> list[torch.Tensor]:
    return list(full.view(size, -1))


def _place(to: torch.Tensor, source: torch.Tensor) -> None:
    """Copy, unless it is there."""
    if to.data_ptr() != source.data_ptr() or to.dtype != source.dtype:
        to.copy_(source)


def _check(full: torch.Tensor, shard: torch.Tensor, size: int, what: str) -> None:
    if full.dim() != 1 or shard.dim() != 1 or full.numel() != size * shard.numel():
        shapes = f"full {tuple(full.shape)}, shard {tuple(shard.shape)}"
        raise ValueError(f"{what}: {shapes}; both are flat, and full has {size} times the elements.")
    if not full.is_contiguous() or not shard.is_contiguous() or full.device != shard.device:
        raise ValueError(f"{what}: full and shard are to be contiguous, on one device.")


class ImaginedRanks(Comm):
    """Rank 0 of so many on one machine, or on several alike, none of which runs: each would give what this one gives,
    and nobody has tensors to exchange.
    """

    def __init__(self, size: int, num_machines: int = 1) -> None:
        self.size, self.local_size = size, size // num_machines
        self.machines = [rank // self.local_size * self.local_size for rank in range(size)]

    def _split(self, num_replicas: int) -> tuple[Comm, Comm]:
        parts = []
        for groups in self._places(num_replicas):
            part = ImaginedRanks(len(groups[0]))
            part.machines = [self.machines[rank] for rank in groups[0]]
            parts.append(part)
        return parts[0], parts[1]

    def _neighbours(self, num: int) -> Comm:
        return self._split(self.size // num)[0]

    def gather_objects(self, value: _Value, what: str) -> list[_Value]:  # noqa: ARG002
        return [value] * self.size
