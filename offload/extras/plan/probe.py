"""Measure this machine in a few seconds, and cache the rates.

Memory is examined on every call. Only rates are cached: one file for the machine and one per set of folders, with the
properties the rates depend on as key. Each measurement takes milliseconds.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import MISSING, asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from offload.accelerators import (
    Accelerator,
    accelerators,
    device_of,
    has_bf16,
    multiplies_fp8,
    open_accelerator,
    own_accelerator,
)
from offload.app.environment import describe_cores, describe_environment
from offload.errors import ConfigError
from offload.files.directories import check_dirs, check_space, file_system, free_bytes, open_nameless
from offload.layout.planes import DTYPES
from offload.machine.hardware import FP8, FP8_GAINS, Hardware, Rates
from offload.machine.limits import memory_limits, tightest_limit, use_share_of_cores
from offload.native import kernels
from offload.native.io import File, IoEngine, wait_for_all
from offload.tiers.host import Arena
from offload.user_cache import default_cache_dir, hash_paths, read_json, write_json

_SIZES = (512, 4096)
"""Matrix sizes. A GPU needs a large one for full speed; on a CPU a large one takes seconds."""
_LINK_BYTES = 1 << 25
"""Size of a copy over the link to an accelerator."""
_MOST_RANDOM = 1 << 20
"""Random numbers to draw. Longer tensors repeat them."""
_LONG_S = 0.05
"""Time limit in seconds: larger products predicted to exceed the limit are skipped, and slow measurements run twice."""
_ATTENTION_TOKENS = (256, 4096)
"""Sequence lengths for attention. The long one is for a GPU."""
_ATTENTION_HEADS = 16
_ATTENTION_WIDTH = 128
_WAKING_S = 0.3
"""Minimum work for an idle accelerator before the first measurement, in seconds."""
_MOST_WAKING_S = 3.0
"""Maximum, in seconds."""
_SAME_RATE = 0.05
"""Relative difference below which two rates are the same."""
_NUM_LAUNCHES = 256
"""Small enough for the launch queue of a device."""
_ROOFLINE_PLANES = 3
"""Planes written in place (weights, two moments), beside one plane only read (gradients), as in AdamW."""


def link_bytes_per_second(accelerator: Accelerator, *directions: str) -> float:
    """Return the copy rate between pinned memory and accelerator in bytes per second.

    directions: "h2d", "d2h" or both. With both, the copies run concurrently and the rates are summed.
    """
    sides = []
    for direction in directions:
        on_host = accelerator.host_memory(_LINK_BYTES, torch.uint8)
        on_device = torch.empty(_LINK_BYTES, dtype=torch.uint8, device=accelerator.device)
        ends = (on_device, on_host) if direction == "h2d" else (on_host, on_device)
        # A stream for each direction: in one, the copies would run one after the other.
        sides.append((accelerator.module.Stream(accelerator.device), *ends))

    def run() -> None:
        for stream, target, source in sides:
            with accelerator.module.stream(stream):
                target.copy_(source, non_blocking=True)
        accelerator.wait()

    return len(directions) * _LINK_BYTES / _best_seconds(run)


def wake(accelerator: Accelerator) -> None:
    """Let an accelerator copy and compute until two figures in turn are the same, within `_MOST_WAKING_S`.

    An idle card lowers its clocks and the rate of its link, and takes a while to raise them.
    """
    begin = time.perf_counter()
    before = 0.0, 0.0
    while True:
        figures = link_bytes_per_second(accelerator, "h2d"), flops_per_second(accelerator.device, torch.float32)
        spent_s = time.perf_counter() - begin
        is_steady = all(abs(new - old) <= _SAME_RATE * new for new, old in zip(figures, before, strict=True))
        if spent_s >= _MOST_WAKING_S or (is_steady and spent_s >= _WAKING_S):
            return
        before = figures


def copy_bytes_per_second(num_copies: int, num_bytes: int) -> float:
    """Return the total rate of `num_copies` concurrent host memory copies of `num_bytes` each, in bytes per second."""
    pairs = [[torch.ones(num_bytes, dtype=torch.uint8) for _ in range(2)] for _ in range(num_copies)]
    with ThreadPoolExecutor(num_copies) as pool:
        seconds = _best_seconds(lambda: list(pool.map(lambda pair: pair[0].copy_(pair[1]), pairs)))
    return num_copies * num_bytes / seconds


def device_bytes_per_second(device: torch.device, num_bytes: int) -> float:
    """Return the device memory rate in bytes read and written per second, for an in-place operation."""
    flat = _random(num_bytes // 4, device=device)

    def run() -> None:
        flat.add_(1)
        _wait(device)

    return 2 * flat.nbytes / _best_seconds(run)


def fresh_bytes_per_second(num_bytes: int) -> float:
    """Return the rate at which the system hands out memory for large results, beside the time to fill it."""
    kept = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    fresh_s = _best_seconds(lambda: torch.empty(num_bytes, dtype=torch.uint8, device="cpu").fill_(1))
    filling_s = _best_seconds(lambda: kept.fill_(1))
    return num_bytes / max(fresh_s - filling_s, 1e-6)  # a difference of two measurements may be negative


def moved_bytes_per_second(device: torch.device, num_bytes: int) -> float:
    """Return the rate of elementwise kernels in bytes read and written per second.

    The kernels are those of a block: a product, a cast to another width and back, and a product of transposed heads
    with a broadcast, as in rotary embeddings. `num_bytes`: memory to use.
    """
    # The precision in use there, and the other one of a cast.
    dtype, other = (torch.float32, torch.bfloat16) if device.type == "cpu" else (torch.bfloat16, torch.float32)
    tokens = max(1, num_bytes // ((3 * dtype.itemsize + other.itemsize) * _ATTENTION_HEADS * _ATTENTION_WIDTH))
    shape = tokens, _ATTENTION_HEADS, _ATTENTION_WIDTH
    first, second = (_random(*shape, device=device, dtype=dtype) for _ in range(2))
    result, cast = torch.empty_like(first), torch.empty_like(first, dtype=other)
    angles = _random(tokens, _ATTENTION_WIDTH, device=device, dtype=dtype)

    def run() -> None:
        torch.mul(first, second, out=result)
        cast.copy_(first)
        result.copy_(cast)
        torch.mul(first.transpose(0, 1), angles, out=result.transpose(0, 1))
        _wait(device)

    moved = 7 * first.nbytes + 2 * cast.nbytes + angles.nbytes
    return moved / _best_seconds(run)


def host_bytes_per_second(num_bytes: int) -> float:
    """Return the host memory rate in bytes read and written per second, in place with all cores, as in an update.

    num_bytes: memory size, larger than the caches.
    """
    if not kernels.is_native():
        return device_bytes_per_second(torch.device("cpu"), num_bytes)
    numel = num_bytes // (4 * (_ROOFLINE_PLANES + 1))
    arena = Arena((_ROOFLINE_PLANES + 1) * 4 * numel)
    *written, read = [arena.take(numel, torch.float32).fill_(1) for _ in range(_ROOFLINE_PLANES + 1)]
    moved = sum(2 * plane.nbytes for plane in written) + read.nbytes
    variants = [partial(kernels.roofline, written, read, variant=v) for v in range(kernels.NUM_ROOFLINE_VARIANTS)]
    return moved / min(map(_best_seconds, variants))


def launch_seconds(device: torch.device) -> float:
    """Return the seconds Python takes to launch a small torch operation."""
    small = torch.zeros(8, device=device)

    def run() -> None:
        for _ in range(_NUM_LAUNCHES):
            torch.add(small, 1)

    try:
        return _best_seconds(run) / _NUM_LAUNCHES
    finally:
        _wait(device)  # outside of the measured time, and before the next measurement


def flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """Return the matrix product rate in FLOP/s, from the largest size fast enough to measure."""
    rate = 0.0
    for size in _SIZES:
        num_operations = 2 * size**3
        if rate and num_operations / rate > _LONG_S:
            break
        matrix = _random(size, size, device=device, dtype=dtype)
        rate = num_operations / _best_seconds(partial(_multiply, matrix))
    return rate


def attention_flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """Return the rate of causal attention, forward and backward, in FLOP/s. Masked scores count as none."""
    rate = 0.0
    for tokens in _ATTENTION_TOKENS:
        shape = 1, _ATTENTION_HEADS, tokens, _ATTENTION_WIDTH
        num_operations = 7 * _ATTENTION_HEADS * _ATTENTION_WIDTH * tokens**2  # two products forward, five backward
        if rate and num_operations / rate > _LONG_S:
            break
        inputs = [_random(*shape, device=device, dtype=dtype).requires_grad_() for _ in range(3)]
        rate = num_operations / _best_seconds(partial(_attend, *inputs))
    return rate


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    result = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.autograd.grad(result, (query, key, value), torch.ones_like(result))
    _wait(query.device)


def _random(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return random numbers, the same on each call. Constants would draw less power, so that a GPU runs faster."""
    generator = torch.Generator(device="cpu").manual_seed(0)  # not the generator of the run
    few = torch.randn(min(_MOST_RANDOM, math.prod(shape)), generator=generator, device="cpu").to(device, dtype)
    return few.repeat(-(-math.prod(shape) // len(few)))[: math.prod(shape)].view(shape)


def _multiply(matrix: torch.Tensor) -> None:
    torch.mm(matrix, matrix)
    _wait(matrix.device)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        open_accelerator(device).wait()


def _best_seconds(run: Callable[[], object]) -> float:
    """Return the best of four runs, or of two if they are slow."""
    best, start = float("inf"), time.perf_counter()
    for number in range(4):
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
        if number and time.perf_counter() - start > _LONG_S:  # the first run also loads code and memory
            break
    return best


LEFT_OUT: Mapping[str, str] = {"memory": "Free memory changes all the time; the total is in the key."}
"""Environment items left out of the cache key, with the reason."""
_PAGE_BYTES = 4096
LEAST_BYTES = 4 << 20
"""Minimum bytes for a disk measurement."""
_DISK_RATES = ("nvme_read_bytes_per_s", "nvme_write_bytes_per_s", "nvme_both_ways_bytes_per_s")
_FLOPS = {"flops_per_s": flops_per_second, "attention_flops_per_s": attention_flops_per_second}
"""Measurements repeated for each precision."""
_MACHINE_RATES = (
    *(each.name for each in fields(Rates) if each.default is MISSING),
    *list(_FLOPS)[1:],
    "moved_bytes_per_s",
)
_CPU_RATES = (*_MACHINE_RATES, "fresh_bytes_per_s")
_FRESH_BYTES = 64 << 20
"""Size of a result whose memory the C library takes from the system each time."""


@dataclass(frozen=True)
class Sizes:
    """Measurement sizes.

    link_bytes: copy size within host memory, used as the link without a device. Larger than the caches.
    core_bytes: host memory per core, large enough to exceed caches; at most an eighth of free memory in total.
    device_bytes: device memory.
    disk_bytes: bytes per disk folder, reduced for slow disks.
    disk_s: approximate seconds per disk pass.
    """

    link_bytes: int = 128 << 20
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
    """Return this machine, from cached rates or measured in two to four seconds.

    device: device in torch notation; None: the available accelerator, else the CPU, with memory copies as links.
    dirs: folders of the NVMe tier, with files striped over them.
    reads: without `dirs`, a file of at least `LEAST_BYTES` the run reads repeatedly. Measures the read rate only.
    refresh: ignore the cache.
    measures: False raises LookupError instead of measuring.
    cache_dir: cache folder; None: the user cache.

    Raises ConfigError for an unusable folder, DoesNotFitError for a full one, and DiskError.
    """
    accelerator = own_accelerator(device)
    use_share_of_cores(0, [None])  # measured as in a run: within the quota
    places = check_dirs(dirs) if dirs else []
    folder = _user_cache() if cache_dir is None else cache_dir
    key = _machine_key(accelerator)

    def rates_of(key: Mapping[str, Any], names: Collection[str], measure: Callable[[], dict[str, Any]]) -> Any:
        # Rates of other measuring code are other rates. Through JSON, because the key is compared with one from a file.
        key = json.loads(json.dumps({"code": hash_paths([Path(__file__)]), "sizes": asdict(sizes), **key}))
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        path = None if folder is None else folder / f"rates-{digest[:16]}.json"
        cached = None if path is None or refresh else read_json(path)
        # An unusable cache folder or a damaged file counts as a cache miss.
        if isinstance(cached, dict) and cached.get("about") == key and _are_valid_rates(cached.get("rates"), names):
            return {**cached["rates"], "day": str(cached.get("day"))}
        if not measures:
            raise LookupError("the rates of this machine are not measured yet")
        rates, day = measure(), time.strftime("%Y-%m-%d")
        if path is not None:
            write_json(path, {"about": key, "day": day, "rates": rates})
        return {**rates, "day": day}

    names = _CPU_RATES if accelerator is None else _MACHINE_RATES
    rates = rates_of(key, names, lambda: _machine_rates(accelerator, sizes))
    if places:
        rates |= rates_of(_disk_key(places), _DISK_RATES, lambda: _disk_rates(places, sizes))
    elif reads is not None:
        file_key = {"reads": True, **_disk_key([reads])}
        rates |= rates_of(file_key, _DISK_RATES[:1], lambda: _read_rate(reads, sizes))
    free = tightest_limit(memory_limits()).free_bytes
    disks = {place.stat().st_dev: free_bytes(place) for place in places}
    source = f"measured on {rates.pop('day')}"
    if accelerator is not None and multiplies_fp8(accelerator.device.type) and not accelerator.lacks_fp8:
        rates["flops_per_s"] = {**rates["flops_per_s"], FP8: FP8_GAINS["fp8_tensorwise"] * rates["flops_per_s"]["bf16"]}
    properties, num_devices = key["cpu"], 1
    device_bytes: int | None = None
    capability: tuple[int, int] | None = None
    if accelerator is not None:
        capability = accelerator.capability
        properties = accelerator.describe()
        num_devices = max(1, len(accelerators()))
        device_bytes = accelerator.free_bytes
    disk_bytes = sum(disks.values()) if places else None
    notes: tuple[str, ...] = ()
    if "quota" in key["cpu"]:
        users = "torch, its compiler and the kernels"
        notes = (f"this process has {describe_cores(key['cpu'])}: {users} use no more threads.",)
    return Hardware(
        name=properties.get("name") or properties["machine"],
        device=device_of(accelerator).type,
        num_devices=num_devices,
        device_bytes=device_bytes,
        capability=capability,
        host_bytes=free,
        disk_bytes=disk_bytes,
        endurance_bytes=None,
        shares_memory=accelerator is not None and accelerator.is_integrated,
        rates=Rates(**rates),
        sources=dict.fromkeys(rates, source),
        notes=notes,
    )


def _precisions(accelerator: Accelerator | None) -> tuple[str, str]:
    """Return the dtypes of the rates: an emulated bf16 is never used."""
    if has_bf16(accelerator):
        return "fp32", "bf16"
    return "fp32", "fp16"


def _are_valid_rates(rates: Any, names: Collection[str]) -> bool:
    """Return True if the cached value is a dict with exactly these rates, all finite and positive."""
    if not isinstance(rates, dict) or set(rates) != set(names):
        return False
    return all(
        isinstance(rate, dict) and (set(rate) & {"bf16", "fp16"}) and _are_valid_rates(rate, rate)
        if name in _FLOPS
        else type(rate) in (int, float) and math.isfinite(rate) and rate > 0
        for name, rate in rates.items()
    )


def _user_cache() -> Path | None:
    try:
        return default_cache_dir()
    except ConfigError:  # user without a home directory
        return None


def _machine_key(accelerator: Accelerator | None) -> dict[str, Any]:
    """Return every known property memory and compute rates may depend on."""
    return {
        **{key: value for key, value in describe_environment().items() if key not in LEFT_OUT},
        "total_bytes": psutil.virtual_memory().total,
        "node": platform.node(),
        "device": str(device_of(accelerator)),
    }


def _disk_key(places: Sequence[Path]) -> dict[str, Any]:
    """Return properties identifying the disks. Device numbers alone can change owner after a reboot."""
    status = [os.statvfs(place) for place in places]
    sizes = [(each.f_blocks * each.f_frsize, each.f_fsid) for each in status]
    numbers = [place.stat().st_dev for place in places]
    file_systems = [file_system(place.resolve()) for place in places]
    return {"disks": [numbers, sizes, file_systems], "node": platform.node(), "platform": platform.platform()}


def _machine_rates(accelerator: Accelerator | None, sizes: Sizes) -> dict[str, Any]:
    """Return the `Rates` fields except disk rates."""
    device = device_of(accelerator)
    room = tightest_limit(memory_limits()).free_bytes // 8
    host = host_bytes_per_second(min(room, sizes.core_bytes * (psutil.cpu_count() or 1)))
    if accelerator is None:
        # A copy has a source and a target, so two of them take four times the bytes.
        up = down = copy_bytes_per_second(1, min(room // 2, sizes.link_bytes))
        both = copy_bytes_per_second(2, min(room // 4, sizes.link_bytes))
        memory = host
        num_bytes = min(room, sizes.core_bytes)
    else:
        wake(accelerator)
        up, down, both = (
            link_bytes_per_second(accelerator, *directions) for directions in (("h2d",), ("d2h",), ("h2d", "d2h"))
        )
        num_bytes = min(accelerator.free_bytes // 8, sizes.device_bytes)
        memory = device_bytes_per_second(device, num_bytes)
    rates: dict[str, Any] = {
        "h2d_bytes_per_s": up,
        "d2h_bytes_per_s": down,
        "both_ways_bytes_per_s": max(up, down, both),  # two directions are no slower than one
        **{
            rate: {name: measure(device, DTYPES[name]) for name in _precisions(accelerator)}
            for rate, measure in _FLOPS.items()
        },
        "device_bytes_per_s": memory,
        "moved_bytes_per_s": moved_bytes_per_second(device, num_bytes),
        "host_bytes_per_s": host,
        "launch_s": launch_seconds(device),
    }
    if accelerator is None:
        rates["fresh_bytes_per_s"] = fresh_bytes_per_second(min(room, _FRESH_BYTES))
    return rates


def _disk_rates(places: Sequence[Path], sizes: Sizes) -> dict[str, Any]:
    """Return disk read and write rates without the page cache, with all folders in use concurrently."""
    room = min(free_bytes(place) for place in places) // (8 * len(places))
    num_bytes = max(LEAST_BYTES, min(room, sizes.disk_bytes) // _PAGE_BYTES * _PAGE_BYTES)
    check_space(places, num_bytes * len(places))
    arena = Arena(num_bytes)
    # Random data, since disks handle zeros faster. A separate generator keeps the torch RNG state unchanged for
    # training.
    block = arena.take(num_bytes // 8, torch.int64).random_(generator=torch.Generator())
    with IoEngine() as engine:
        files = [engine.open(place, num_bytes=num_bytes, opener=open_nameless) for place in places]

        def seconds(is_write: bool, stop: int) -> float:
            begin = time.perf_counter()
            move = engine.write if is_write else engine.read
            wait_for_all([move(file, 0, block[: stop // 8]) for file in files])
            if is_write:  # without this, the page cache or the disk's own memory may take the data
                for file in files:
                    file.sync()
            return time.perf_counter() - begin

        def seconds_both_ways(stop: int) -> float:
            """Return the seconds to read the first half of `stop` bytes, and to write the second meanwhile."""
            half = stop // 2 // _PAGE_BYTES * _PAGE_BYTES
            begin = time.perf_counter()
            transfers = [engine.read(file, 0, block[: half // 8]) for file in files]
            transfers += [engine.write(file, half, block[half // 8 : 2 * half // 8]) for file in files]
            wait_for_all(transfers)
            for file in files:
                file.sync()
            return time.perf_counter() - begin

        most = _bytes_within(sizes.disk_s, seconds(True, LEAST_BYTES), num_bytes)
        seconds(True, most)  # the first write to reserved space is slower than overwriting, and a run mostly overwrites
        write_seconds = seconds(True, most)
        for file in files:
            _drop_cached(file)
        read_seconds = seconds(False, most)
        for file in files:
            _drop_cached(file)
        taken = read_seconds, write_seconds, seconds_both_ways(most)
    return {name: len(places) * most / max(each, 1e-6) for name, each in zip(_DISK_RATES, taken, strict=True)}


def _read_rate(path: Path, sizes: Sizes) -> dict[str, Any]:
    """Return the disk read rate for a file of at least `LEAST_BYTES`, without the page cache."""
    num_bytes = min(path.stat().st_size, sizes.disk_bytes) // _PAGE_BYTES * _PAGE_BYTES
    block = Arena(num_bytes).take(num_bytes, torch.uint8)
    with IoEngine() as engine:
        file = engine.open(path, writable=False)

        def seconds(stop: int) -> float:
            _drop_cached(file)
            begin = time.perf_counter()
            engine.read(file, 0, block[:stop]).wait()
            return time.perf_counter() - begin

        most = _bytes_within(sizes.disk_s, seconds(LEAST_BYTES), num_bytes)
        return {_DISK_RATES[0]: most / max(seconds(most), 1e-6)}


def _bytes_within(seconds: float, least_seconds: float, num_bytes: int) -> int:
    """Return the bytes to transfer in `seconds`, extrapolated from the time for `LEAST_BYTES`, at most `num_bytes`."""
    most = int(LEAST_BYTES * seconds / max(least_seconds, 1e-6)) // _PAGE_BYTES * _PAGE_BYTES
    return min(num_bytes, max(LEAST_BYTES, most))


def _drop_cached(file: File) -> None:
    """Drop cached pages so that the next read comes from disk, also without O_DIRECT."""
    if not file.is_direct and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
