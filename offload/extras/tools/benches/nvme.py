"""Measure file reads and writes with the I/O engines, compared to fio with equal block size, depth, O_DIRECT and flush.

Virtual disks are throttled and noisy: the same pass can take twice as long a moment later. So all contenders take turns
on the same files, round after round, and a ratio is the median over rounds of two rates measured shortly one after the
other. CPU time covers the whole process for the engines; for fio, the job thread without startup.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.app.config.command_line import say
from offload.errors import ConfigError, format_bytes
from offload.extras.tools.benches.blocks import rotate
from offload.extras.tools.benches.report import Result, spread
from offload.native.io import ALIGNMENT_BYTES, ENGINES, File, IoEngine, Ticket
from offload.sizes import parse_size

if TYPE_CHECKING:
    import torch

SUMMARY = "files read and written by the I/O engines, against fio"
BLOCKS_PER_TILE = 8
PATTERNS = {
    "read": "one file from begin to end",
    "write": "one file from begin to end, flushed",
    "both": "one file read and another written at once",
    "update": "every tile of a file read, changed and written back, as the optimizer does; fio: mixed reads and writes",
}
GIB = 1 << 30


@dataclass
class PassTiming:
    """One pass. num_bytes: bytes read plus bytes written."""

    num_bytes: int
    seconds: float
    cpu_seconds: float


@dataclass
class IoContender:
    """Runs passes for one pattern. reference: name of the contender to compare with."""

    name: str
    measure: Callable[[], PassTiming]
    reference: str | None = None
    passes: list[PassTiming] = field(default_factory=list)

    def rates(self) -> list[float]:
        return [one.num_bytes / one.seconds / 1e9 for one in self.passes]

    def cpu_per_gib(self) -> list[float]:
        return [one.cpu_seconds / one.num_bytes * GIB for one in self.passes]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    folder = tempfile.gettempdir()
    parser.add_argument("--dir", default=folder, help="folder on the disk (default: the one for temporary files)")
    parser.add_argument("--size", default="2GiB", help="of each of two files, made and removed (default %(default)s)")
    parser.add_argument("--block", default="1MiB", help="size of one transfer (default %(default)s)")
    parser.add_argument("--depth", type=int, default=32, help="transfers under way at once (default %(default)s)")
    parser.add_argument("--pairs", type=int, default=15, help="rounds, after one to warm up (default %(default)s)")
    engines, patterns = f"of {', '.join(ENGINES)} (default: those in C++)", f"of {', '.join(PATTERNS)} (default: all)"
    parser.add_argument("--engine", nargs="+", choices=ENGINES, metavar="NAME", help=engines)
    parser.add_argument("--pattern", nargs="+", choices=PATTERNS, default=list(PATTERNS), metavar="NAME", help=patterns)
    parser.add_argument("--no-fio", action="store_true", help="leave fio out even where it is installed")


def run(arguments: argparse.Namespace) -> list[Result]:
    """Run the benchmark and return the rate and CPU time for every pattern and contender."""
    import torch

    torch.set_num_threads(1)  # the tile computation should not be measured
    size, block = _sizes(arguments)
    folder = Path(arguments.dir)
    with _two_files(folder, size) as paths, contextlib.ExitStack() as stack:
        benches = []
        for name in arguments.engine or _engines_in_cpp():
            engines = stack.enter_context(_engines(name, arguments.depth, block))
            benches.append(Bench(engines, paths, size, arguments.depth * block))
            benches[-1].open()
        say(f"writing two files of {format_bytes(size)} in {folder}")
        benches[0].fill()
        fio = None
        if not arguments.no_fio:
            fio = shutil.which("fio")
            if fio is None:
                say(
                    "fio is not installed: there is nothing to compare with (on Debian and Ubuntu: apt-get install fio)"
                )
        registered = any(bench.is_registered for bench in benches)
        results: list[Result] = []
        for pattern in arguments.pattern:
            contenders = [bench.contender(pattern, compared=fio is not None) for bench in benches]
            if fio is not None:
                command = fio_command(fio, pattern, paths, size, block, arguments.depth, registered)
                contenders.append(IoContender(f"fio: {pattern}", lambda command=command: run_fio(command)))  # type: ignore[misc]
            _measure(contenders, pattern, arguments.pairs)
            results += summarise(contenders, arguments, size, block)
    return results


class Bench:
    """Passes over two files with one engine per direction, like two lanes."""

    def __init__(self, engines: tuple[IoEngine, IoEngine], paths: tuple[Path, Path], size: int, ring_bytes: int):
        self.engines = engines
        self.size = size
        self.paths = paths
        tile_bytes = BLOCKS_PER_TILE * engines[0].block_bytes
        num_tiles = max(4, 2 * ring_bytes // tile_bytes)  # a tile can wait while `depth` blocks are in flight
        # Noise: a disk with compression would look faster.
        memory = [_noise(num_tiles * tile_bytes) for _ in engines]
        self.rings = [list(whole.split(tile_bytes // whole.itemsize)) for whole in memory]
        self.is_registered = all(engine.register(whole) for engine, whole in zip(engines, memory, strict=True))
        self.files: tuple[File, ...] = ()

    def open(self) -> None:
        self.files = tuple(engine.open(path) for engine, path in zip(self.engines, self.paths, strict=True))
        if not all(file.is_direct for file in self.files):
            say(f"warning: {self.files[0].why_buffered}: this measures the page cache")

    def contender(self, pattern: str, compared: bool) -> IoContender:
        name = f"{self.engines[0].name}: {pattern}"
        reference = None
        if compared:
            reference = f"fio: {pattern}"
        num_bytes = self.size
        if pattern in ("both", "update"):  # read and written
            num_bytes *= 2
        do_pass: Callable[[], None] = getattr(self, pattern)

        def measure() -> PassTiming:
            cpu, wall = time.process_time(), time.perf_counter()
            do_pass()
            return PassTiming(num_bytes, time.perf_counter() - wall, time.process_time() - cpu)

        return IoContender(name, measure, reference)

    def fill(self) -> None:
        other = self.engines[0].open(self.paths[1])  # `files[1]` belongs to the other engine
        for file in (self.files[0], other):
            stream(self.engines[0].write, file, self.rings[0], self.size)
        other.close()

    def read(self) -> None:
        stream(self.engines[0].read, self.files[0], self.rings[0], self.size)

    def write(self) -> None:
        stream(self.engines[1].write, self.files[1], self.rings[1], self.size)
        self.files[1].sync()

    def both(self) -> None:
        reader = threading.Thread(target=self.read)
        reader.start()
        self.write()
        reader.join()

    def update(self) -> None:
        """Modify tile k while later tiles are read and earlier tiles are written, in one ring."""
        engine = self.engines[0]
        file = self.files[0]
        ring = self.rings[0]
        num_tiles = -(-self.size // ring[0].nbytes)
        ahead = len(ring) // 2  # the other half of the ring is written meanwhile
        reading: deque[Ticket] = deque()
        writing: deque[Ticket] = deque()
        for k in range(num_tiles + ahead):
            if k < num_tiles:
                if k >= len(ring):
                    # The oldest write is the one from the memory of this read.
                    writing.popleft().wait()
                reading.append(engine.read(file, *_place(ring, k, self.size)))
            if k >= ahead:
                offset, tile = _place(ring, k - ahead, self.size)
                reading.popleft().wait()
                # In place of an update: each tile is in memory, and changes, before the write.
                tile.add_(1)
                writing.append(engine.write(file, offset, tile))
        for ticket in writing:
            ticket.wait()
        file.sync()


def stream(begin: Callable[[File, int, torch.Tensor], Ticket], file: File, ring: list[torch.Tensor], size: int) -> None:
    """Read or write a whole file with all ring tiles in flight."""
    under_way: deque[Ticket] = deque()
    for k in range(-(-size // ring[0].nbytes)):
        if k >= len(ring):
            under_way.popleft().wait()
        under_way.append(begin(file, *_place(ring, k, size)))
    for ticket in under_way:
        ticket.wait()


def fio_command(
    fio: str, pattern: str, paths: tuple[Path, Path], size: int, block: int, depth: int, registered: bool
) -> list[str]:
    """Return the fio command for a pattern, with file and buffer registration and write mode as in the engines."""
    command = [
        *(fio, "--output-format=json", "--ioengine=io_uring", "--direct=1", "--thread", "--fallocate=none"),
        *(f"--bs={block}", f"--iodepth={depth}", f"--size={size}", "--registerfiles=1"),
        *(f"--fixedbufs={int(registered)}", "--scramble_buffers=0"),
    ]
    jobs = {
        "read": [(paths[0], "read")],
        "write": [(paths[1], "write")],
        "both": [(paths[0], "read"), (paths[1], "write")],
        "update": [(paths[0], "rw")],
    }
    for path, direction in jobs[pattern]:
        command += [f"--name={direction}", f"--filename={path}", f"--rw={direction}"]
        if direction != "read":
            # The engines flush too, so both include the time until the data are on the disk.
            command.append("--end_fsync=1")
        if direction == "rw":
            command.append(f"--io_size={2 * size}")
    return command


def run_fio(command: list[str]) -> PassTiming:
    """Run one pass with fio. Buffers are in huge pages, as in the engines (glibc only)."""
    environment = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    try:
        # fio prints notes before the JSON.
        jobs = json.loads(process.stdout[process.stdout.index("{") :])["jobs"]
    except ValueError:
        jobs = []
    if process.returncode or not jobs or any(job["error"] for job in jobs):
        text = " ".join((process.stderr or process.stdout).split())[-300:]
        raise ConfigError(f"fio failed with exit code {process.returncode} ({text}); leave it out with --no-fio.")
    # fio's own clocks, without the start. Both jobs run at once, so the longer one counts.
    seconds = [job["job_runtime"] / 1e3 for job in jobs]
    cpu = [(job["usr_cpu"] + job["sys_cpu"]) / 100 * wall for job, wall in zip(jobs, seconds, strict=True)]
    num_bytes = sum(job[direction]["io_bytes"] for job in jobs for direction in ("read", "write"))
    return PassTiming(num_bytes, max(seconds), sum(cpu))


def summarise(contenders: list[IoContender], arguments: argparse.Namespace, size: int, block: int) -> list[Result]:
    """Return medians and best values, with ratios as medians over rounds."""
    by_name = {contender.name: contender for contender in contenders}
    results = []
    for contender in contenders:
        rates, cpu = contender.rates(), contender.cpu_per_gib()
        details: dict[str, Any] = {"file_bytes": size, "block_bytes": block}
        details |= {"depth": arguments.depth, "pairs": len(rates)}
        rate_ratio = cpu_ratio = None
        cpu_reference = None
        if contender.reference:
            other = by_name[contender.reference]
            ratios = [own / others for own, others in zip(rates, other.rates(), strict=True)]
            cpu_ratios = [others / own for own, others in zip(cpu, other.cpu_per_gib(), strict=True)]
            details |= {"lowest_ratio": round(min(ratios), 4), "highest_ratio": round(max(ratios), 4)}
            rate_ratio, cpu_ratio = (round(statistics.median(each), 4) for each in (ratios, cpu_ratios))
            cpu_reference = f"{contender.reference}, CPU"
        details |= _round_statistics(rates, max(rates), 3)
        cpu_details = _round_statistics(cpu, min(cpu), 4)
        rate, cpu_seconds = round(statistics.median(rates), 3), round(statistics.median(cpu), 4)
        results.append(Result(contender.name, rate, "GB/s", contender.reference, rate_ratio, details))
        results.append(Result(f"{contender.name}, CPU", cpu_seconds, "s/GiB", cpu_reference, cpu_ratio, cpu_details))
    return results


def _round_statistics(values: list[float], best: float, digits: int) -> dict[str, Any]:
    alike = round(spread(values), 4)
    return {"spread": alike, "best": round(best, digits), "all": [round(value, digits) for value in values]}


def _measure(contenders: list[IoContender], pattern: str, num_pairs: int) -> None:
    for round_number in range(num_pairs + 1):
        for contender in rotate(contenders, round_number):
            measured = contender.measure()
            # The first round is for caches and, on a virtual disk, for the first write of each block.
            if round_number > 0:
                contender.passes.append(measured)
        rates = [f"{contender.name} {contender.rates()[-1]:.2f}" for contender in contenders if contender.passes]
        say(f"{pattern}, round {round_number} of {num_pairs}: {', '.join(rates) or 'warm'}")


def _place(ring: list[torch.Tensor], k: int, size: int) -> tuple[int, torch.Tensor]:
    """Return the offset and the ring memory of tile k."""
    tile = ring[k % len(ring)]
    offset = k * tile.nbytes
    return offset, tile[: (size - offset) // tile.itemsize]  # only the last tile of a file is cut


def _noise(num_bytes: int) -> torch.Tensor:
    """Return memory filled with incompressible noise, in huge pages if available."""
    import torch

    from offload.tiers.host import Arena

    memory = Arena(num_bytes).take(num_bytes // 8, torch.int64)
    return memory.random_(generator=torch.Generator().manual_seed(1))


@contextlib.contextmanager
def _engines(engine_name: str, depth: int, block: int) -> Iterator[tuple[IoEngine, IoEngine]]:
    with (
        IoEngine(engine_name, depth=depth, block_bytes=block) as first,
        IoEngine(engine_name, depth=depth, block_bytes=block) as second,
    ):
        yield first, second


def _engines_in_cpp() -> list[str]:
    names = []
    # A container may refuse io_uring, and a build may be without.
    for engine_name in ENGINES[:2]:
        try:
            IoEngine(engine_name).close()
            names.append(engine_name)
        except ConfigError as error:
            say(f"without {engine_name}: {error}")
    return names or ["python"]


@contextlib.contextmanager
def _two_files(folder: Path, size: int) -> Iterator[tuple[Path, Path]]:
    if not folder.is_dir():
        raise ConfigError(f"--dir is {folder}; it must be a folder that exists, on the disk to measure.")
    free = shutil.disk_usage(folder).free
    if free < 2 * size + GIB // 16:
        raise ConfigError(
            f"--size is {format_bytes(size)} for each of two files, but {folder} has {format_bytes(free)} free; use a "
            "smaller --size or another --dir."
        )
    with tempfile.TemporaryDirectory(prefix="offload-bench-", dir=folder) as inside, IoEngine("python") as engine:
        paths = (Path(inside) / "read.bin", Path(inside) / "write.bin")
        for path in paths:
            # All the space at once: a full disk fails here, not within a pass.
            engine.open(path, num_bytes=size).close()
        yield paths


def _sizes(arguments: argparse.Namespace) -> tuple[int, int]:
    size, block = parse_size(arguments.size, "--size"), parse_size(arguments.block, "--block")
    if not size or not block or size % ALIGNMENT_BYTES or size < block:
        raise ConfigError(
            f"--size is {arguments.size} and --block {arguments.block}; both must be multiples of {ALIGNMENT_BYTES} "
            f"bytes, the size at least one block."
        )
    if arguments.pairs < 1:
        raise ConfigError(f"--pairs is {arguments.pairs}; it must be at least 1.")
    return size, block
