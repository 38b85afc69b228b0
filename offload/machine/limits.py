"""Find the limits on host memory: machine, NUMA nodes, control groups and process limits.

A process over a control group limit is killed by the kernel (SIGKILL, without a message), so the limits are checked in
advance.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from offload.errors import format_bytes
from offload.machine.cores import parse_cpulist

_ROOT = Path("/")
_UNLIMITED_BYTES = 1 << 60
"""cgroup v1 reports "no limit" as a number slightly below 2**63."""


@dataclass(frozen=True)
class Limit:
    """One limit on memory for this process.

    what: name of the limit, for messages.
    where: file or command reporting the limit.
    most_bytes: limit in bytes.
    free_bytes: bytes left, including caches the kernel can reclaim.
    is_own: the limit applies to this process alone; otherwise all ranks share the remainder.
    is_group: the limit belongs to a control group.
    """

    what: str
    where: str
    most_bytes: int
    free_bytes: int
    is_own: bool = False
    is_group: bool = False

    def share(self, num_sharing: int) -> int:
        """Return the bytes available to one of `num_sharing` ranks."""
        return self.free_bytes if self.is_own else self.free_bytes // num_sharing

    def __str__(self) -> str:
        return (
            f"{self.what} ({self.where}: {format_bytes(self.most_bytes)}, of which {format_bytes(self.free_bytes)} "
            f"{'is' if self.free_bytes else 'are'} left)"
        )


@dataclass(frozen=True)
class _CgroupFiles:
    """File names for a cgroup version: limits, usage, and keys for reclaimable cache."""

    limits: tuple[str, ...]
    usage: str
    cached: tuple[str, ...]


_VERSIONS = {
    "cgroup": _CgroupFiles(
        ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")
    ),
    "cgroup2": _CgroupFiles(  # above memory.high processes are throttled to a standstill
        ("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file", "slab_reclaimable")
    ),
}
"""By file system name. A machine can have both versions; one controls memory."""


def memory_limits(root: Path | None = None) -> list[Limit]:
    """Return all host memory limits, machine memory first. `root`: replaces / in tests."""
    root = _ROOT if root is None else root
    machine = psutil.virtual_memory()
    whole = Limit("the memory of this machine", "/proc/meminfo", machine.total, machine.available)
    return [whole, *_node_limits(root), *_group_limits(root), *_process_limits(root)]


def tightest_limit(limits: Sequence[Limit], num_sharing: int = 1) -> Limit:
    """Return the tightest limit for `num_sharing` ranks."""
    return min(limits, key=lambda limit: limit.share(num_sharing))


def integrated_note(name: str) -> str:
    """Return a note about devices using host memory."""
    return (
        f"{name} uses the host's memory: states offloaded to the cpu tier take the same memory, plus copies. "
        "--offload.parameters device --offload.optimizer device is faster; only nvme saves memory."
    )


def lockable_bytes() -> int | None:
    """Return the mlock limit in bytes, relevant for registered io_uring buffers. None: no limit.

    Memory pinned by a GPU driver is not counted here, but counts in control groups.
    """
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY or os.geteuid() == 0 else limit


def node_bytes(root: Path | None = None) -> dict[int, int]:
    """Return the memory of each NUMA node in bytes; empty: unknown."""
    return {node: table["MemTotal"] for node, table in _nodes(_ROOT if root is None else root).items()}


def _node_limits(root: Path) -> Iterator[Limit]:
    """Yield the memory limit from the NUMA nodes this process is bound to by a cpuset.

    numactl policies are not visible.
    """
    nodes = _nodes(root)
    try:
        allowed = parse_cpulist(_table(root / "proc/self/status").get("Mems_allowed_list", ""))
    except ValueError:
        return
    own_nodes = sorted(allowed & set(nodes))
    if not own_nodes or len(own_nodes) == len(nodes):
        return
    tables = [nodes[node] for node in own_nodes]
    free = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
    yield Limit(
        f"the memory of the NUMA node{'s' * (len(own_nodes) > 1)} {', '.join(map(str, own_nodes))}, of {len(nodes)}",
        "Mems_allowed_list in /proc/self/status",
        sum(table["MemTotal"] for table in tables),
        sum(table.get(name, 0) for table in tables for name in free),
    )


def _group_limits(root: Path) -> Iterator[Limit]:
    """Yield the limits of the process control groups and all ancestors. The smallest is effective."""
    for version, folder in _groups(root):
        files = _VERSIONS[version]
        for name in files.limits:
            most, used = _number(folder / name), _number(folder / files.usage)
            if most is None or used is None or most >= _UNLIMITED_BYTES:
                continue
            table = _table(folder / "memory.stat", unit=1)
            cached = sum(int(table.get(key, 0)) for key in files.cached)
            where = "/" + str((folder / name).relative_to(root))
            yield Limit(
                "the limit of a control group", where, most, max(0, most - max(0, used - cached)), is_group=True
            )


def _groups(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield (version, folder) for each control group able to limit memory, from the process group upwards."""
    group_paths: dict[str, str] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if path and (not controllers or "memory" in controllers.split(",")):
            group_paths["cgroup" if controllers else "cgroup2"] = path
    for line in _text(root / "proc/self/mountinfo").splitlines():
        mount, _, system = (part.split() for part in line.partition(" - "))
        version = system[0] if len(system) > 2 and len(mount) > 4 else ""
        if version not in group_paths or (version == "cgroup" and "memory" not in system[2].split(",")):
            continue
        point = root / mount[4].replace("\\040", " ").lstrip("/")
        below = os.path.relpath(group_paths[version], mount[3])
        if below.startswith(".."):  # a namespace or container mount hides the real path
            below = "."
        folder = point / below
        yield version, folder
        while folder != point:
            folder = folder.parent
            yield version, folder


def _process_limits(root: Path) -> Iterator[Limit]:
    """Yield the ulimits on allocated memory, touched or not."""
    status = _table(root / "proc/self/status")
    for number, flag, counted in ((resource.RLIMIT_AS, "-v", "VmSize"), (resource.RLIMIT_DATA, "-d", "VmData")):
        most = resource.getrlimit(number)[0]
        used = status.get(counted, "0 kB")
        if most != resource.RLIM_INFINITY:
            free = max(0, most - 1024 * int(used.split()[0]))
            yield Limit("a limit of this process", f"`ulimit {flag}`", most, free, is_own=True)


def _nodes(root: Path) -> dict[int, dict[str, int]]:
    nodes: dict[int, dict[str, int]] = {}
    for path in root.glob("sys/devices/system/node/node[0-9]*/meminfo"):
        lines = [line.split(None, 2)[2] for line in _text(path).splitlines() if line.count(" ") > 2]
        table = {name: 1024 * int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
        if table.get("MemTotal"):
            nodes[int(path.parent.name.removeprefix("node"))] = table
    return nodes


def _table(path: Path, unit: int | None = None) -> dict[str, str]:
    """Return the "NAME: VALUE" lines of a kernel file as a dict, or "NAME VALUE" lines if `unit` is set."""
    parts = (line.partition(":" if unit is None else " ") for line in _text(path).splitlines())
    return {name.strip(): value.strip() for name, _, value in parts}


def _number(path: Path) -> int | None:
    """Return the number in a file; None: no file, or "max"."""
    try:
        return int(_text(path))
    except ValueError:
        return None


def _text(path: Path) -> str:
    """Return the text of a kernel file; empty: no such file."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
