"""Creates a process's communicator, from an existing process group or from torchrun variables."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch.distributed as dist

from offload.accelerators import accelerators, device_of, own_accelerator
from offload.distributed.comm import Comm
from offload.distributed.device_ranks import DeviceRanks, StagedRanks
from offload.distributed.ranks import Ranks, address_toward, gloo_over, own_address
from offload.distributed.watchdog import WatchdogLimits
from offload.errors import ConfigError, OffloadError, RankLostError


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
    environ = os.environ if environ is None else environ
    exists = dist.is_available() and dist.is_initialized()
    size = dist.get_world_size() if exists else _read_environment(environ)
    if size == 1:
        return Comm()
    if not dist.is_available():
        raise ConfigError(f"WORLD_SIZE is {size}, and this torch was built without torch.distributed.")
    local = _pair(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    num_devices = len(accelerators())
    if exists and not local and num_devices:
        environ = {**environ, "LOCAL_RANK": str(dist.get_rank() % num_devices)}
    accelerator = own_accelerator(device, environ)
    torch_device, backend = device_of(accelerator), None if accelerator is None else accelerator.backend
    comm_class = DeviceRanks if backend else Ranks if accelerator is None else StagedRanks
    start_time = time.monotonic()
    try:
        start = timedelta(seconds=times.start_s)
        rank, store = (dist.get_rank(), None) if exists else _meet(environ, start)
        host = environ.get("MASTER_ADDR") or socket.gethostname()
        address = address_toward(host) if store is None else own_address(store, rank, size, host)
        with gloo_over(address):
            if store is not None:
                default_backend = None if backend else "gloo"  # backend for caller code; None: all backends
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
    meeting, deadline = str(store.add("offload-meetings", 1)), time.monotonic() + timeout.total_seconds()
    absent = set(range(1, size))
    while absent:
        for other in [other for other in absent if store.check([f"offload-word-{other}"])]:
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
        raise ConfigError(f"WORLD_SIZE is {size}, and {' and '.join(missing)} is not set: start with torchrun.")
    return size


def _pair(environ: Mapping[str, str], rank: str, size: str) -> tuple[int, int] | None:
    """Return (rank, number of ranks), or None if neither variable is set."""
    present = [name for name in (rank, size) if environ.get(name)]
    if not present:
        return None
    if len(present) == 1:
        other = size if present[0] == rank else rank
        raise ConfigError(f"{present[0]} is {environ[present[0]]}, and {other} is not set: start with torchrun.")
    try:
        number, count = int(environ[rank]), int(environ[size])
    except ValueError:
        number, count = -1, 0
    if not 0 <= number < count:
        raise ConfigError(
            f"{rank} is {environ[rank]!r} and {size} is {environ[size]!r}; both must be whole numbers, with 0 <= rank "
            "< size."
        )
    return number, count
