"""This machine, measured: what a plan asks of it, in a few seconds, and kept for the next time.

Memory is looked at anew each time. Only rates are kept, in one file for the machine and one for each set of folders, by
what they depend on.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import psutil
import torch

from offload.accelerators import Accelerator, accelerators, device_of, own_accelerator
from offload.files.directories import check_dirs, check_space, file_system, free_bytes
from offload.files.scratch import open_nameless
from offload.files.user_cache import code_hash, default_cache_dir, keep_json, read_json
from offload.machine.environment import describe_environment
from offload.machine.hardware import Hardware, Rates
from offload.machine.limits import least, memory_limits
from offload.machine.rates import (
    copy_bytes_per_second,
    device_bytes_per_second,
    flops_per_second,
    host_bytes_per_second,
    launch_seconds,
    link_bytes_per_second,
)
from offload.native.io import File, IoEngine, wait_for_all
from offload.tiers.host import Arena

LEFT_OUT: Mapping[str, str] = {"memory": "Free memory changes all the time; the total is in the key."}
"""Items of the environment that are not in the key of kept rates, each with the reason."""
_PAGE_BYTES = 4096
LEAST_BYTES = 4 << 20
"""Of a disk, that are moved to measure it."""
_OF_DISKS = ("nvme_read_bytes_per_s", "nvme_write_bytes_per_s")
_OF_MACHINE = tuple(each.name for each in fields(Rates) if each.default is MISSING)
_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Sizes:
    """How much is moved to measure.

    link_bytes: by a copy within the host's memory, which stands for a link where there is no device.
    core_bytes: of the host's memory for each core, so that caches do not hold it; an eighth of what is free at most.
    device_bytes: of the device's memory.
    disk_bytes: of each folder's disk, less where that would take long.
    disk_s: how long each pass over the disk may take, about.
    """

    link_bytes: int = 32 << 20
    core_bytes: int = 64 << 20
    device_bytes: int = 256 << 20
    disk_bytes: int = 256 << 20
    disk_s: float = 0.3


def probe(
    device: str | None = None,
    dirs: Sequence[str | Path] = (),
    *,
    reads: Path | None = None,
    refresh: bool = False,
    measures: bool = True,
    sizes: Sizes = Sizes(),
    cache_dir: Path | None = None,
) -> Hardware:
    """Measure this machine, or take what was measured before: in two to four seconds, or at once.

    device: as torch names it; None for the accelerator that there is, else the CPU, whose links are copies in memory.
    dirs: the folders of the nvme tier, over which files are striped. reads: without these, a file that a run will read
    again and again, of at least `LEAST_BYTES`: how fast its disk is read is measured by it, and nothing is written.
    refresh: measure again. measures: else LookupError is raised where nothing was kept. cache_dir: where rates are
    kept, by default the user's. Raises ConfigError for a folder that is no use, DoesNotFitError for one that is full,
    DiskError.
    """
    accelerator, places = own_accelerator(device), check_dirs(dirs) if dirs else []
    folder, about = _user_cache() if cache_dir is None else cache_dir, _about_machine(accelerator)

    def rates_of(about: Mapping[str, Any], names: Collection[str], measure: Callable[[], dict[str, Any]]) -> Any:
        about = json.loads(json.dumps({"code": code_hash("machine"), "sizes": asdict(sizes), **about}))
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        path = None if folder is None else folder / f"rates-{digest[:16]}.json"
        kept = None if path is None or refresh else read_json(path)
        # A folder that cannot be used, and a file that is damaged, are as if there were none.
        if isinstance(kept, dict) and kept.get("about") == about and _are_sound(kept.get("rates"), names):
            return {**kept["rates"], "day": str(kept.get("day"))}
        if not measures:
            raise LookupError("the rates of this machine were not measured yet")
        rates, day = measure(), time.strftime("%Y-%m-%d")
        if path is not None:
            keep_json(path, {"about": about, "day": day, "rates": rates})
        return {**rates, "day": day}

    found = rates_of(about, _OF_MACHINE, lambda: _machine_rates(accelerator, sizes))
    if places:
        found |= rates_of(_about_disks(places), _OF_DISKS, lambda: _disk_rates(places, sizes))
    elif reads is not None:
        about_file = {"reads": True, **_about_disks([reads])}
        found |= rates_of(about_file, _OF_DISKS[:1], lambda: _read_rate(reads, sizes))
    free = least(memory_limits()).free_bytes
    disks = {place.stat().st_dev: free_bytes(place) for place in places}
    said = f"measured on {found.pop('day')}"
    told = about["cpu"] if accelerator is None else accelerator.describe()
    return Hardware(
        name=told.get("name") or told["machine"],
        device=device_of(accelerator).type,
        num_devices=max(1, len(accelerators())) if accelerator is not None else 1,
        device_bytes=None if accelerator is None else accelerator.free_bytes,
        host_bytes=free,
        disk_bytes=sum(disks.values()) if places else None,
        endurance_bytes=None,
        shares_memory=accelerator is not None and accelerator.is_integrated,
        rates=Rates(**found),
        sources=dict.fromkeys(found, said),
    )


def _are_sound(rates: Any, names: Collection[str]) -> bool:
    """Tell whether what was kept is a table of these rates, each a number above 0."""
    if not isinstance(rates, dict) or set(rates) != set(names):
        return False
    return all(
        _are_sound(rate, _PRECISIONS)
        if name == "flops_per_s"
        else type(rate) in (int, float) and math.isfinite(rate) and rate > 0
        for name, rate in rates.items()
    )


def _user_cache() -> Path | None:
    try:
        return default_cache_dir()
    except RuntimeError:  # a user without a home
        return None


def _about_machine(accelerator: Accelerator | None) -> dict[str, Any]:
    """Return everything known that rates of memory and compute may depend on."""
    return {
        **{key: value for key, value in describe_environment().items() if key not in LEFT_OUT},
        "total_bytes": psutil.virtual_memory().total,
        "node": platform.node(),
        "device": str(device_of(accelerator)),
    }


def _about_disks(places: Sequence[Path]) -> dict[str, Any]:
    """Return what tells disks from others. The number of a device alone may be that of another one after a restart."""
    status = [os.statvfs(place) for place in places]
    sizes = [(each.f_blocks * each.f_frsize, each.f_fsid) for each in status]
    numbers, kinds = [place.stat().st_dev for place in places], [file_system(place.resolve()) for place in places]
    return {"disks": [numbers, sizes, kinds], "node": platform.node(), "platform": platform.platform()}


def _machine_rates(accelerator: Accelerator | None, sizes: Sizes) -> dict[str, Any]:
    """Return the rates of `Rates` that are not a disk's."""
    device = device_of(accelerator)
    room = least(memory_limits()).free_bytes // 8
    host = host_bytes_per_second(min(room, sizes.core_bytes * (psutil.cpu_count() or 1)))
    if accelerator is None:
        up = down = copy_bytes_per_second(1, min(room // 2, sizes.link_bytes))
        both, memory = copy_bytes_per_second(2, min(room // 4, sizes.link_bytes)), host
    else:
        up, down, both = (link_bytes_per_second(accelerator, *ways) for ways in (("h2d",), ("d2h",), ("h2d", "d2h")))
        memory = device_bytes_per_second(device, min(accelerator.free_bytes // 8, sizes.device_bytes))
    return {
        "h2d_bytes_per_s": up,
        "d2h_bytes_per_s": down,
        "both_ways_bytes_per_s": max(up, down, both),
        "flops_per_s": {name: flops_per_second(device, dtype) for name, dtype in _PRECISIONS.items()},
        "device_bytes_per_s": memory,
        "host_bytes_per_s": host,
        "launch_s": launch_seconds(device),
    }


def _disk_rates(places: Sequence[Path], sizes: Sizes) -> dict[str, Any]:
    """Return what the disks of folders read and write in a second, all at once, past the page cache."""
    room = min(free_bytes(place) for place in places) // (8 * len(places))
    num_bytes = max(LEAST_BYTES, min(room, sizes.disk_bytes) // _PAGE_BYTES * _PAGE_BYTES)
    check_space(places, num_bytes * len(places))
    arena = Arena(num_bytes)
    # Disks are quick with zeros. Whoever measures before training draws nothing from torch's own generator.
    block = arena.take(num_bytes // 8, torch.int64).random_(generator=torch.Generator())
    with IoEngine() as engine:
        files = [engine.open(place, num_bytes=num_bytes, opener=open_nameless) for place in places]

        def seconds(is_write: bool, stop: int) -> float:
            begin = time.perf_counter()
            move = engine.write if is_write else engine.read
            wait_for_all([move(file, 0, block[: stop // 8]) for file in files])
            for file in files if is_write else ():
                file.sync()
            return time.perf_counter() - begin

        most = _within(sizes.disk_s, seconds(True, LEAST_BYTES), num_bytes)
        seconds(True, most)  # what is only reserved is slower than what is written over, as in every step but the first
        written = seconds(True, most)
        for file in files:
            _drop_cached(file)
        read = seconds(False, most)
    rates = {"nvme_read_bytes_per_s": read, "nvme_write_bytes_per_s": written}
    return {name: len(places) * most / max(spent, 1e-6) for name, spent in rates.items()}


def _read_rate(path: Path, sizes: Sizes) -> dict[str, Any]:
    """Return what the disk of a file of at least `LEAST_BYTES` reads in a second, past the page cache."""
    num_bytes = min(path.stat().st_size, sizes.disk_bytes) // _PAGE_BYTES * _PAGE_BYTES
    block = Arena(num_bytes).take(num_bytes, torch.uint8)
    with IoEngine() as engine:
        file = engine.open(path, writable=False)

        def seconds(stop: int) -> float:
            _drop_cached(file)
            begin = time.perf_counter()
            engine.read(file, 0, block[:stop]).wait()
            return time.perf_counter() - begin

        most = _within(sizes.disk_s, seconds(LEAST_BYTES), num_bytes)
        return {_OF_DISKS[0]: most / max(seconds(most), 1e-6)}


def _within(seconds: float, for_the_least: float, num_bytes: int) -> int:
    """Return how many bytes are moved in so many seconds, by those that the least take: that, or up to `num_bytes`."""
    most = int(LEAST_BYTES * seconds / max(for_the_least, 1e-6)) // _PAGE_BYTES * _PAGE_BYTES
    return min(num_bytes, max(LEAST_BYTES, most))


def _drop_cached(file: File) -> None:
    """Let what is read next come from the disk, also where the file system refuses O_DIRECT."""
    if not file.is_direct and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
