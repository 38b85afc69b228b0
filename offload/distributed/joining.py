"""Creates a process's communicator, from an existing process group or from torchrun variables. Communicators for
accelerators: native backend (NCCL for CUDA), or gloo with host copies where torch has no backend.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from offload.accelerators import accelerators, device_of, open_accelerator, own_accelerator
from offload.distributed.comm import Coding, Comm, Groups, pieces_of
from offload.distributed.ranks import CollectiveQueue, Ranks, address_toward, gloo_over, make_group, own_address
from offload.distributed.watchdog import Position, WatchdogLimits
from offload.errors import ConfigError, OffloadError, RankLostError


class _AcceleratorRanks(Ranks):
    """Several ranks with one accelerator each."""

    def _open_queues(self, groups: Groups) -> None:
        super()._open_queues(groups)
        self._accelerator = open_accelerator(self.device)
        self._accelerator.enter()

    def _enter(self) -> None:
        self._accelerator.enter()

    def _finish_copies(self) -> None:
        """Wait on the host for earlier copies, because they may still use host buffers of the collective."""
        copied = self._accelerator.event(sleeps=True)
        copied.record(self._accelerator.current_stream())
        copied.synchronize()


class DeviceRanks(_AcceleratorRanks):
    """Several ranks with one accelerator each. Tensors use the native backend, without host waits; host values use
    gloo.
    """

    def _open_queues(self, groups: Groups) -> None:
        super()._open_queues(groups)
        self._all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # name since torch 2.13
        self._group = make_group(groups, self._accelerator.backend, self._timeout)
        self._enqueued: deque[tuple[Position, torch.Event]] = deque()
        """Collectives in the stream. A hang there must show as a wait, although the host has gone on."""
        self._looking = threading.Lock()

    @contextmanager
    def _exchange(self, operation: str, numel: int, queue: CollectiveQueue | None = None) -> Iterator[None]:
        with super()._exchange(operation, numel, queue):
            yield
            if queue is None:
                event = self._accelerator.event()  # no thread waits for this event
                event.record()
                self._enqueued.append((self._tensors.position, event))

    def _own_positions(self) -> tuple[Position, Position]:
        """Return the oldest collective not yet done on the device as the position of the tensor queue."""
        with self._looking:  # not the queue lock, which is held during a collective
            while self._enqueued:
                position, event = self._enqueued[0]
                if not event.query():
                    return position, self._values.position
                self._enqueued.popleft()
        return super()._own_positions()

    def _send(self, data: torch.Tensor, source: int) -> None:
        if data.is_cpu:  # over gloo, which knows no streams
            self._finish_copies()
            super()._send(data, source)
        else:
            self._hold(data)
            dist.broadcast(data, group=self._group, group_src=source)

    def _gather(self, full: torch.Tensor, queue: CollectiveQueue) -> None:
        if full.is_cpu:
            super()._gather(full, queue)
            return
        self._hold(full)
        self._all_gather(full, pieces_of(full, self.size)[self.rank], group=self._group)

    def _swap(self, received: list[torch.Tensor], pieces: list[torch.Tensor]) -> list[Any]:
        if pieces[0].is_cpu:
            self._finish_copies()
            return super()._swap(received, pieces)
        self._hold(*received, *pieces)
        dist.all_to_all(received, pieces, group=self._group)  # grouped sends and receives without staging copies
        return []

    def _hold(self, *tensors: torch.Tensor) -> None:
        """Mark tensors as used by the current stream, so that the allocator does not reuse freed memory too early."""
        for tensor in tensors:
            tensor.record_stream(self._accelerator.current_stream())

    def _abandon(self, error: RankLostError | None) -> None:
        super()._abandon(error)
        for group in self._device_groups():
            group._get_backend(self.device).abort()  # ends the kernels, and so every wait for the device

    def _destroy(self) -> None:
        if not self._owns_default and self.is_alive:
            for group in self._device_groups():
                dist.destroy_process_group(group)
        super()._destroy()

    def _device_groups(self) -> list[Any]:
        return [part._group for part in self._all_parts() if isinstance(part, DeviceRanks)]


class StagedRanks(_AcceleratorRanks):
    """Several ranks with one accelerator each, over gloo with D2H and H2D copies. The host waits for all copies."""

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, operation: str) -> None:
        host = _on_host(full)
        super().all_gather(host, shard.cpu(), operation)
        _take_up(full, host)

    def reduce_scatter(
        self,
        shard: torch.Tensor,
        full: torch.Tensor,
        operation: str,
        scratch: torch.Tensor,
        coding: Coding | None = None,
    ) -> None:
        host = _on_host(shard)
        super().reduce_scatter(host, full.cpu(), operation, _on_host(scratch), coding)
        _take_up(shard, host)

    def all_to_all(self, received: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor], operation: str) -> None:
        self._finish_copies()
        hosts = [_on_host(tensor) for tensor in received]
        super().all_to_all(hosts, [piece.cpu() for piece in pieces], operation)
        for tensor, host in zip(received, hosts, strict=True):
            _take_up(tensor, host)

    def sum_in_order(self, values: Any, operation: str) -> Any:
        if not isinstance(values, torch.Tensor):
            return super().sum_in_order(values, operation)
        return super().sum_in_order(values.cpu(), operation).to(values.device)

    def broadcast(self, flat: torch.Tensor, source: int, operation: str) -> None:
        self._finish_copies()
        host = flat.cpu()
        super().broadcast(host, source, operation)
        _take_up(flat, host)


def _on_host(flat: torch.Tensor) -> torch.Tensor:
    """Return a host buffer for `flat`: the tensor itself if already on the host."""
    if flat.is_cpu:
        return flat
    return torch.empty_like(flat, device="cpu")


def _take_up(flat: torch.Tensor, host: torch.Tensor) -> None:
    if flat is not host:
        flat.copy_(host)


def open_comm(
    device: str | None = None,
    *,
    times: WatchdogLimits = WatchdogLimits(),  # noqa: B008 (frozen)
    environ: Mapping[str, str] | None = None,
) -> Comm:
    """Return the communicator for this process. Collective.

    Uses the existing process group, or else RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    as set by torchrun. Without both, the communicator has one rank. `device`: compute device for engines, see
    `Settings.device`.

    An existing group is never destroyed, and collectives always use separate groups. An existing group needs no
    LOCAL_RANK: without LOCAL_RANK and without a current device, ranks take the devices in turn.

    Raises:
        ConfigError: variables are missing or wrong, or two ranks use one GPU.
        RankLostError: not all ranks arrived within times.start_s.
    """
    if environ is None:
        environ = os.environ
    exists = dist.is_available() and dist.is_initialized()
    if exists:
        size = dist.get_world_size()
    else:
        size = _read_environment(environ)
    if size == 1:
        return Comm()
    if not dist.is_available():
        raise ConfigError(f"WORLD_SIZE is {size}, and this torch was built without torch.distributed.")
    local = _pair(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    num_devices = len(accelerators())
    if exists and not local and num_devices:
        environ = {**environ, "LOCAL_RANK": str(dist.get_rank() % num_devices)}
    accelerator = own_accelerator(device, environ)
    torch_device = device_of(accelerator)
    comm_class: type[Ranks] = Ranks
    default_backend: str | None = "gloo"  # for the caller's code
    if accelerator is not None:
        comm_class = StagedRanks
        if accelerator.backend:
            comm_class = DeviceRanks
            default_backend = None  # all backends
    start_time = time.monotonic()
    try:
        start = timedelta(seconds=times.start_s)
        host = environ.get("MASTER_ADDR") or socket.gethostname()
        if exists:
            address = address_toward(host)
        else:
            rank, store = _meet(environ, start)
            address = own_address(store, rank, size, host)
        with gloo_over(address):  # gloo reads the interface whenever a group is made
            if not exists:
                dist.init_process_group(default_backend, store=store, rank=rank, world_size=size, timeout=start)
            return comm_class(torch_device, times, not exists, address, local)
    except OffloadError:
        raise
    except (RuntimeError, ValueError) as error:
        place = "over the existing process group"
        if not exists:
            place = f"at {environ['MASTER_ADDR']}:{environ['MASTER_PORT']} (MASTER_ADDR, MASTER_PORT)"
        after = f"after {time.monotonic() - start_time:.1f} s of at most {times.start_s:g}"
        raise RankLostError(f"The {size} ranks did not connect {place}, {after}: {error}", None) from error


def _meet(environ: Mapping[str, str], timeout: timedelta) -> tuple[int, Any]:
    """Meet the other ranks through torchrun variables. Return this rank, and a store for one process group."""
    variables = (environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))
    store, rank, size = _meeting_place(*variables)
    store.set_timeout(timeout)
    # A prefix of its own: the store may keep addresses of earlier process groups.
    return rank, dist.PrefixStore(f"offload-{_meeting(store, rank, size, timeout)}", store)  # type: ignore[attr-defined]


@lru_cache(maxsize=1)
def _meeting_place(*_variables: str) -> tuple[Any, int, int]:
    """Connect to the store, or open it on rank 0. Return (store, rank, number of ranks).

    The store lives as long as the process, or until MASTER_ADDR or another of the variables changes: a late rank must
    still find the store when the next process group begins.
    """
    store, rank, size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    return store, rank, size


def _meeting(store: Any, rank: int, size: int, timeout: timedelta) -> str:
    """Return a unique name for this meeting in a store with a longer life. Collective.

    The torchrun store keeps addresses from earlier groups and from restarted ranks, and restart counts differ between
    machines. So rank 0 counts the meetings and sends the count to each rank, keyed by a new random word per process.
    Raises RuntimeError if a rank does not arrive.
    """
    if rank:
        word = secrets.token_hex(8)
        store.set(f"offload-word-{rank}", word)
        meeting = str(store.get(f"offload-meeting-{word}"), "ascii")
        store.set(f"offload-{meeting}-{rank}", "")
        return meeting
    meeting = str(store.add("offload-meetings", 1))
    deadline = time.monotonic() + timeout.total_seconds()
    absent = set(range(1, size))
    while absent:
        for other in [other for other in absent if store.check([f"offload-word-{other}"])]:
            # The word may be of a process that is gone. A rank is present when it answers.
            store.set(f"offload-meeting-{store.get(f'offload-word-{other}').decode()}", meeting)
            if store.check([f"offload-{meeting}-{other}"]):
                absent.remove(other)
        if absent and time.monotonic() > deadline:
            raise RuntimeError(f"rank {min(absent)} did not connect.")
        time.sleep(0.01)
    return meeting


def _read_environment(environ: Mapping[str, str]) -> int:
    """Check the torchrun variables and return the number of ranks."""
    ranks = _pair(environ, "RANK", "WORLD_SIZE")
    local = _pair(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if ranks is None:
        if local is not None:
            raise ConfigError("LOCAL_RANK is set, and RANK and WORLD_SIZE are not: start with torchrun, or unset it.")
        return 1
    rank, size = ranks
    if local is not None and (local[1] > size or local[0] > rank):
        raise ConfigError(
            f"LOCAL_RANK {local[0]} of LOCAL_WORLD_SIZE {local[1]} contradicts RANK {rank} of WORLD_SIZE {size}: start "
            "with torchrun."
        )
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing and size > 1:
        raise ConfigError(
            f"WORLD_SIZE is {size}, and {' and '.join(missing)} is not set: start with torchrun, or unset RANK and "
            "WORLD_SIZE."
        )
    return size


def _pair(environ: Mapping[str, str], rank: str, size: str) -> tuple[int, int] | None:
    """Return (rank, number of ranks), or None if neither variable is set."""
    present = [name for name in (rank, size) if environ.get(name)]
    if not present:
        return None
    if len(present) == 1:
        other = rank
        if present[0] == rank:
            other = size
        raise ConfigError(
            f"{present[0]} is {environ[present[0]]}, and {other} is not set: start with torchrun, or unset "
            f"{present[0]}."
        )
    try:
        number, count = int(environ[rank]), int(environ[size])
    except ValueError:
        number, count = -1, 0  # refused below
    if not 0 <= number < count:
        raise ConfigError(
            f"{rank} is {environ[rank]!r} and {size} is {environ[size]!r}; both must be whole numbers, with 0 <= rank "
            "< size."
        )
    return number, count
