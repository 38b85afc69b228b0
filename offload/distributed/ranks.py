"""Several ranks of a process group: exchanges, agreement, failures."""

from __future__ import annotations

import atexit
import copy
import ctypes
import ipaddress
import itertools
import os
import pickle
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache
from typing import Any

import psutil
import torch
import torch.distributed as dist

from offload.accelerators import open_accelerator
from offload.distributed.comm import (
    _CHUNK_MULTIPLE,
    _FLOATS,
    LOOK_S,
    Coding,
    Comm,
    Groups,
    _check,
    _place,
    _Value,
    digest,
    pieces_of,
)
from offload.distributed.outcomes import difference
from offload.distributed.watchdog import Position, Watchdog, WatchdogLimits, connect
from offload.errors import ConfigError, RankLostError, common
from offload.interrupts import interrupts

LOOPBACK = "127.0.0.1"
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


class NamespaceSocket:
    """Abstract Unix socket, reachable only for processes with the same kernel and network namespace: Linux keeps names
    with a leading zero byte per network namespace (unix(7)). These processes also share the loopback address.
    """

    def __init__(self, num_ranks: int) -> None:
        self.name = f"\0offload-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.name)
        self._socket.listen(num_ranks)  # no connection is accepted: a successful connect is the answer

    def reaches(self, name: str) -> bool:
        """Return True if the open door `name` is on this machine."""
        with socket.socket(socket.AF_UNIX) as visitor, suppress(OSError):
            visitor.connect(name)
            return True
        return False

    def close(self) -> None:
        self._socket.close()


def address_toward(host: str) -> str:
    """Return the address of this machine in the network toward `host`."""
    with suppress(OSError):
        addresses = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        with socket.socket(addresses[0][0], socket.SOCK_DGRAM) as probe:
            probe.connect(addresses[0][4])  # sends no packet
            return str(probe.getsockname()[0])
    return LOOPBACK


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def own_address(store: Any, rank: int, size: int, host: str) -> str:
    """Return the address of this rank for other ranks, after all ranks have registered in the torch store on `host`. On
    `host`, the host name may resolve to the loopback; the address toward another rank is used then. Collective.
    """
    address = address_toward(host)
    store.set(f"address-{rank}", address)
    addresses = [str(entry, "ascii") for entry in store.multi_get([f"address-{other}" for other in range(size)])]
    remote = next((other for other in addresses if not is_loopback(other)), None)
    if remote and is_loopback(address):
        return address_toward(remote)
    return address


@contextmanager
def gloo_over(address: str) -> Iterator[None]:
    """Create gloo groups inside this context on the interface with `address`, unless `address` is the loopback or the
    user has set GLOO_SOCKET_IFNAME. By default gloo resolves the host name, possibly to the loopback.
    """
    name = None
    if not is_loopback(address) and _GLOO_INTERFACE not in os.environ:
        has = ((name, each.address.partition("%")[0]) for name, its in psutil.net_if_addrs().items() for each in its)
        name = next((name for name, its in has if its == address.partition("%")[0]), None)
    if name:
        os.environ[_GLOO_INTERFACE] = name
    try:
        yield
    finally:
        if name:
            del os.environ[_GLOO_INTERFACE]


def make_group(groups: Groups, backend: str | None, timeout: timedelta) -> Any:
    """Return a process group with all ranks, or this rank's group in `groups`. Collective."""
    if groups is None:
        return dist.new_group(backend=backend, timeout=timeout)
    own, _ = dist.new_subgroups_by_enumeration([list(its) for its in groups], timeout=timeout, backend=backend)
    return own


class CollectiveQueue:
    """Sequence of collectives over two dedicated gloo groups: one at a time, in the same order on all participants."""

    def __init__(self, timeout: timedelta, groups: Groups = None) -> None:
        self.group, self.back_group = (make_group(groups, "gloo", timeout) for _ in range(2))
        """Two groups have two connections: exchanges in both directions do not wait for each other."""
        self.lock = threading.Lock()
        among = None  # all ranks
        if groups is not None:
            among = frozenset(dist.get_process_group_ranks(self.group))
        self.position = Position(among=among)


def _scatter(
    comm: Comm, received: Sequence[torch.Tensor], pieces: list[torch.Tensor], queue: CollectiveQueue
) -> list[Any]:
    """Start an all-to-all exchange: send pieces[r] to rank r, and receive from rank r in received[r].

    Scatters need no staging copy and go straight to the receiver. The gloo all-to-all needs adjacent pieces, and gloo
    broadcasts pass through other ranks, even on other machines. Ranks on different machines take turns, to use links in
    both directions. The two groups alternate: on a busy connection, the permission for the next piece waits behind the
    present piece.
    """
    turns = zip(_turns(tuple(comm.machines)), itertools.cycle((queue.group, queue.back_group)))
    return [
        dist.scatter(received[rank], pieces if rank == comm.rank else None, group=group, async_op=True, group_src=rank)
        for rank, group in turns
    ]


@lru_cache
def _turns(machines: tuple[int, ...]) -> list[int]:
    """Return the ranks interleaved over machines: first ranks, then second ranks."""
    return sorted(range(len(machines)), key=lambda rank: machines[:rank].count(machines[rank]))


class Ranks(Comm):
    """Several ranks over gloo.

    Tensors and host values use separate queues, so that a message to other ranks does not wait for tensors in transit.
    """

    def __init__(
        self,
        device: torch.device,
        times: WatchdogLimits,
        owns_default: bool,
        address: str = LOOPBACK,
        local: tuple[int, int] | None = None,
    ) -> None:
        """`address`: this rank's address for other machines. `local`: (local rank, local size) from the launcher (None:
        unknown).
        """
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.machines = (0,) * self.size  # until `_locate` or the launcher gives the machines
        self.device = device
        self._owns_default = owns_default  # the default process group, to be destroyed at the end
        self._address = address
        # The watchdog ends a hang; gloo and NCCL must not time out earlier.
        self._timeout = timedelta(days=7)
        if times.stall_s is not None:
            self._timeout = timedelta(seconds=times.stall_s + 600)

        # Until there is a watchdog.
        deadline = time.monotonic() + times.start_s
        self._check = lambda: _be_patient(deadline, times.start_s)
        self._explain: Callable[[Exception], Exception]
        self._explain = lambda error: RankLostError(f"The ranks could not start: {error}", None)

        self._parts: dict[str, tuple[Ranks, ...]] = {}
        """Communicators of groups, by purpose. Each owns process groups, created by all ranks in one order."""
        self._subgroups: dict[tuple[int, ...], Any] = {}  # by ranks
        self._errors: list[BaseException] = []  # shared by all parts
        self._open_queues(None)
        try:
            connections = connect(self.rank, self._locate(address), self.gather_objects, times.start_s)
        except OSError as error:
            raise RankLostError(f"Rank {self.rank} could not connect to the other ranks: {error}", None) from error
        self._watch = Watchdog(self.rank, connections, self.look, times, self._enter)
        self._check = self._watch.check
        self._explain = self._watch.explain
        if local:  # as the launcher sees the machine
            self.local_rank, self.local_size = local
            if len(self.local_gpus) != self.local_size:  # two launchers in one network
                self.local_gpus = (None,) * self.local_size
            # torchrun numbers ranks on a machine consecutively
            self.machines = self.gather_objects(self.rank - self.local_rank, "the machines of ranks")
        self.on_lost(self._abandon)
        # Do not leave the shutdown to the interpreter exit: gloo threads that then request the GIL abort the process.
        atexit.register(self._at_exit)
        self.barrier("start")

    def _open_queues(self, groups: Groups) -> None:
        self._tensors = CollectiveQueue(self._timeout, groups)
        self._values = CollectiveQueue(self._timeout, groups)

    def _split(self, num_replicas: int) -> tuple[Comm, Comm]:
        within, between = self._parts_for(f"{num_replicas} replicas", *self._places(num_replicas))
        return within, between

    def _neighbours(self, num: int) -> Comm:
        return self._parts_for(f"{num} neighbours", self._places(self.size // num)[0])[0]

    def _parts_for(self, key: str, *groupings: Sequence[Sequence[int]]) -> tuple[Ranks, ...]:
        """Return the cached communicators for `key`, one per grouping, created on first use."""
        if key not in self._parts:
            self._parts[key] = tuple(map(self._part, groupings))
        return self._parts[key]

    def _part(self, groups: Sequence[Sequence[int]]) -> Ranks:
        """Return a communicator for this rank's group, with the same watchdog."""
        own = next(group for group in groups if self.rank in group)
        part = copy.copy(self)
        part._parts = {}
        part._subgroups = {}
        part.rank = own.index(self.rank)
        part.size = len(own)
        part.machines = [self.machines[rank] for rank in own]
        with gloo_over(self._address):
            part._open_queues(groups)
        return part

    def _all_parts(self) -> Iterator[Ranks]:
        """Yield this communicator and all parts."""
        yield self
        yield from [part for parts in list(self._parts.values()) for part in parts]

    def _enter(self) -> None:
        """Prepare a watchdog thread before its first check."""

    def _locate(self, address: str) -> list[str]:
        """Find the ranks on this machine, and return all ranks' addresses.

        A rank may see all GPUs on the machine or only one. Raises ConfigError on all ranks if two ranks use one GPU.
        """
        own: Any = (None, None)  # identity and PCI address of the GPU
        if self.device.type != "cpu":
            own = open_accelerator(self.device).hardware
        probe = NamespaceSocket(self.size)
        try:
            addresses = self.gather_objects((probe.name, address, own, socket.gethostname()), "exchange of addresses")
            reached = [probe.reaches(name) for name, *_ in addresses]
            # all ranks have connected by now
            self.machines = self.gather_objects(reached.index(True), "exchange of machines")
        finally:
            probe.close()
        users: dict[Any, int] = {}
        for rank, (machine, (_, _, (gpu, _pci), host)) in enumerate(zip(self.machines, addresses, strict=True)):
            if gpu is not None and (other := users.setdefault((machine, gpu), rank)) != rank:
                raise common(
                    ConfigError(
                        f"ranks {other} and {rank} both compute on GPU {gpu} of {host}, but each rank needs its own "
                        "GPU. Start one rank per GPU, with --gpus or --nproc-per-node."
                    )
                )
        local_ranks = [rank for rank, is_here in enumerate(reached) if is_here]
        self.local_rank = local_ranks.index(self.rank)
        self.local_size = len(local_ranks)
        self.local_gpus = [addresses[rank][2][1] for rank in local_ranks]
        if self.local_size == self.size:
            return [LOOPBACK] * self.size
        return [address for _, address, *_ in addresses]

    # -- exchanges -------------------------------------------------------------------------------------------

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, operation: str) -> None:
        _check(full, shard, self.size, operation)
        with self._exchange(operation, full.numel()):
            _place(pieces_of(full, self.size)[self.rank], shard)
            self._gather(full, self._tensors)

    def reduce_scatter(
        self,
        shard: torch.Tensor,
        full: torch.Tensor,
        operation: str,
        scratch: torch.Tensor,
        coding: Coding | None = None,
    ) -> None:
        _check(full, shard, self.size, operation)
        if full.dtype not in _FLOATS or shard.dtype not in _FLOATS:
            raise ValueError(
                f"{operation}: from {full.dtype} to {shard.dtype}; only float64, float32, bfloat16 and float16 can be "
                "summed."
            )
        with self._exchange(operation, full.numel()):
            pieces = pieces_of(full, self.size)
            if coding is None:
                chunks = _Chunks(scratch, pieces, self.rank)
            else:
                chunks = _CodedChunks(scratch, pieces, self.rank, coding)
            self._reduce(shard, chunks)

    def _gather(self, full: torch.Tensor, queue: CollectiveQueue) -> None:
        """Send this rank's piece to all ranks. The gloo all-gather needs a second buffer as large as full and takes
        three times as long.
        """
        pieces = pieces_of(full, self.size)
        self._wait(_scatter(self, pieces, [pieces[self.rank]] * self.size, queue))

    def _reduce(self, shard: torch.Tensor, chunks: _Chunks) -> None:
        """Reduce one chunk while the next one is in transit (on CUDA, in stream order)."""
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
        """Start an all-to-all exchange in the tensor queue."""
        return _scatter(self, received, pieces, self._tensors)

    def all_to_all(self, received: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor], operation: str) -> None:
        with self._exchange(operation, self.size * pieces[0].numel()):
            self._wait(self._swap(list(received), list(pieces)))

    def sum_in_order(self, values: Any, operation: str) -> Any:
        of_device = isinstance(values, torch.Tensor)
        own = values
        if not of_device:
            own = torch.tensor([float(value) for value in values], dtype=torch.float64)
        if own.dtype != torch.float64:
            raise ValueError(f"{operation}: {own.dtype}; only float64 can be summed.")
        first, *others = self._collect(own, operation, of_device)
        total = first.clone()
        for other in others:
            total += other
        if of_device:
            return total
        return total.tolist()

    def _collect(self, own: torch.Tensor, operation: str, of_device: bool = False) -> torch.Tensor:
        """Return `own` [n] from every rank as [size, n]. Waits for the result unless it is a device tensor."""
        queue = self._values
        if of_device:
            queue = self._tensors
        full = own.new_empty(self.size * own.numel())
        with self._exchange(operation, full.numel(), queue):
            pieces_of(full, self.size)[self.rank].copy_(own)
            self._gather(full, queue)
        return full.view(self.size, -1)

    def broadcast(self, flat: torch.Tensor, source: int, operation: str) -> None:
        with self._exchange(operation, flat.numel()):
            self._send(flat.view(torch.uint8), source)

    def _send(self, data: torch.Tensor, source: int) -> None:
        self._wait([dist.broadcast(data, group=self._tensors.group, async_op=True, group_src=source)])

    def gather_objects(self, value: _Value, operation: str) -> list[_Value]:
        data = pickle.dumps(value)
        # Lengths first: a gather takes pieces of one length.
        lengths = [int(length) for length in self._collect(torch.tensor([len(data)]), f"{operation}: lengths")]
        padded = torch.frombuffer(bytearray(data.ljust(max(lengths))), dtype=torch.uint8)
        padded_values = self._collect(padded, operation)
        return [
            pickle.loads(padded_value[:length].numpy().tobytes())
            for padded_value, length in zip(padded_values, lengths, strict=True)
        ]

    def agree(self, name: str, value: Any) -> None:
        own = torch.tensor([digest(value)])
        digests = self._collect(own, f"comparison of {name}").flatten().tolist()
        if len(set(digests)) > 1:  # the values travel only for the message
            values = self.gather_objects(value, f"values of {name}")
            raise common(ConfigError(difference(name, digests, values)))

    def any(self, flag: bool, operation: str) -> bool:
        return bool(self._collect(torch.tensor([flag]), operation).any())

    def barrier(self, operation: str) -> None:
        self._collect(torch.zeros(1, dtype=torch.uint8), operation)

    # -- waits and shutdown -------------------------------------------------------------------------------------

    def look(self) -> Sequence[Position]:
        """Return this rank's positions in all queues. Safe in any thread."""
        return [position for part in self._all_parts() for position in part._own_positions()]

    def _own_positions(self) -> tuple[Position, Position]:
        return self._tensors.position, self._values.position

    def on_lost(self, listener: Callable[[RankLostError], None]) -> None:
        self._watch.listeners.append(listener)
        if self._watch.error is not None:
            listener(self._watch.error)

    @contextmanager
    def _exchange(self, operation: str, numel: int, queue: CollectiveQueue | None = None) -> Iterator[None]:
        """Mark this rank as inside a collective in `queue` (None: the tensor queue).

        After an exception the queue stays marked inside, for the error message, and every later collective raises the
        same exception: ranks may now disagree about the next collective, and would wait for each other forever.
        """
        queue = queue or self._tensors
        with queue.lock:  # one at a time, or ranks would disagree on the order
            self._check()
            if self._errors:
                raise self._errors[0]
            if not self.is_alive:
                raise ConfigError(
                    "The process group was destroyed (torch.distributed.destroy_process_group) while an engine still "
                    "used it: close the engine first."
                )
            try:
                queue.position = Position(
                    queue.position.number + 1, operation, numel, inside=True, among=queue.position.among
                )
                yield
            except BaseException as error:
                self._errors.append(error)
                raise
            queue.position = replace(queue.position, inside=False, since=time.monotonic())

    @contextmanager
    def exchange(self, operation: str) -> Iterator[Callable[[Iterable[Any]], None]]:
        """Context for a collective from outside this class. Yields the function that waits for gloo work in it."""
        with self._exchange(operation, 0):
            yield self._wait

    def subgroup(self, ranks: tuple[int, ...]) -> Any:
        """Return a gloo group of some ranks, for `exchange`. It closes with this communicator. The first call for these
        ranks is collective over all ranks of the run.
        """
        if ranks not in self._subgroups:
            members = [dist.get_process_group_ranks(self._tensors.group)[rank] for rank in ranks]
            self._subgroups[ranks] = dist.new_group(members, backend="gloo", timeout=self._timeout)
        return self._subgroups[ranks]

    def _wait(self, works: Iterable[Any]) -> None:
        """Block until gloo work is done, or raise after the loss of a rank: a stopped rank blocks gloo forever. An
        early exit does not end the work.
        """
        for work in works:
            while not work.is_completed():
                with suppress(RuntimeError):
                    work.wait(timedelta(seconds=LOOK_S))
                self._check()
                interrupts.check()
            try:
                work.wait()  # raises the error of the work
            except RuntimeError as error:
                explained = self._explain(error)
            else:
                continue
            raise explained

    @property
    def is_alive(self) -> bool:
        with suppress(KeyError, ValueError):
            return bool(dist.get_process_group_ranks(self._tensors.group))
        return False

    def _abandon(self, _error: RankLostError | None) -> None:
        """Keep all groups alive forever. A gloo thread may be blocked, and the destructor of a group would wait for the
        thread.
        """
        groups = self._groups()
        if self._owns_default:
            groups.append(dist.group.WORLD)
        for group in groups:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    def close(self, error: BaseException | None = None) -> None:
        self._watch.ends_with(error)
        if self._watch.is_over:
            return
        atexit.unregister(self._at_exit)
        if not self.is_alive:  # destroyed groups are destroyed on all ranks, so there is no error to report
            error = None
        self._watch.end(error)
        if any(place.inside for place in self.look()):
            self._abandon(None)
        else:  # after an error too: a gloo group alive at interpreter exit may abort the process
            self._destroy()

    def _groups(self) -> list[Any]:
        """Return the gloo groups in all parts."""
        parts = list(self._all_parts())
        queues = (queue for part in parts for queue in (part._tensors, part._values))
        own = [group for part in parts for ranks, group in part._subgroups.items() if part.rank in ranks]
        return [group for queue in queues for group in (queue.group, queue.back_group)] + own

    def _at_exit(self) -> None:
        self.close(getattr(sys, "last_value", None))

    def _destroy(self) -> None:
        if self.is_alive:
            groups = self._groups()
            if self._owns_default:
                groups = [None]  # the default group, and all others with it
            for group in groups:
                dist.destroy_process_group(group)
        # The last references end the gloo threads. These may still free tensors and need the GIL, so drop the
        # references before interpreter exit; otherwise the process aborts (seen with torch 2.13).
        for part in self._all_parts():
            part._subgroups.clear()
            for queue in (part._tensors, part._values):
                queue.group = queue.back_group = None


class _Chunks:
    """Scratch for a reduction: two sets with one slot per rank, plus one sum and one term in the sum dtype."""

    _num_sets = 2

    def __init__(self, scratch: torch.Tensor, pieces: Sequence[torch.Tensor], rank: int) -> None:
        """`pieces`: this rank's term for each receiving rank."""
        self._pieces = pieces
        self._rank = rank
        size = len(pieces)
        dtype = pieces[0].dtype
        self._dtype = torch.float32  # of sums: terms in bf16 would lose bits
        if dtype == torch.float64:
            self._dtype = dtype
        self._block, self._record_bytes = self._unit(dtype)

        # As many elements as fit, with all slots and sums.
        sum_bytes = self._dtype.itemsize * self._block
        slot_bytes = self._num_sets * size * self._record_bytes
        width = 2 * sum_bytes + slot_bytes
        multiple = _CHUNK_MULTIPLE // self._block
        count = scratch.numel() // width // multiple * multiple
        self.numel = count * self._block
        """Elements reduced at once."""
        if not count:
            raise ValueError(f"{scratch.numel()} bytes of scratch; {size} ranks need {width * multiple}.")
        sums, slots = scratch[: count * width].split([2 * sum_bytes * count, slot_bytes * count])
        self._total, self._term = sums.view(self._dtype).view(2, self.numel)
        self._slots = slots.view(self._num_sets, size, -1)

    def _unit(self, dtype: torch.dtype) -> tuple[int, int]:
        """Return the elements and bytes per transported record."""
        return 1, dtype.itemsize

    def open(self, turn: int, part: slice) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return (receive buffers, send buffers) for `part`, one per rank. `turn` alternates between 0 and 1, because
        the previous part's buffers are still in use.
        """
        sent = [piece[part] for piece in self._pieces]
        return [slot.view(sent[0].dtype)[: part.stop - part.start] for slot in self._slots[turn]], sent

    def terms(self, received: list[torch.Tensor], part: slice) -> list[torch.Tensor]:  # noqa: ARG002
        """Return the received terms in rank order, as input for `add_up`."""
        return received

    def _as_term(self, term: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        """Return a term in the sum dtype: the same tensor, or a copy in `room`."""
        if term.dtype == self._dtype:
            return term
        return room.copy_(term)

    def add_up(self, out: torch.Tensor, terms: Sequence[torch.Tensor]) -> None:
        first, *others = terms
        total = out
        if out.dtype != self._dtype:  # rounded once, at the end
            total = self._total[: len(out)]
        _place(total, self._as_term(first, total))
        for other in others:
            total += self._as_term(other, self._term[: len(out)])
        _place(out, total)


class _CodedChunks(_Chunks):
    """Scratch for reductions with quantized terms from other ranks. Two more sets hold the records to send."""

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
        terms = [*received]
        terms[self._rank] = self._pieces[self._rank][part]  # exact: only terms from other ranks are quantized
        return terms

    def _as_term(self, term: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        if term.dtype != torch.uint8:
            return super()._as_term(term, room)
        self._coding.decode(term, room)
        return room

    def add_up(self, out: torch.Tensor, terms: Sequence[torch.Tensor]) -> None:
        total = self._total[: len(out)]
        super().add_up(total, terms)  # not in `out`: it may hold this rank's term
        out.copy_(total)


def _be_patient(deadline: float, start_s: float) -> None:
    if time.monotonic() > deadline:
        raise RankLostError(f"Not all ranks connected within {start_s:g} s of the start.", None)
