"""Limits of host memory (machine, NUMA nodes, control groups, process limits), and cores and threads for the ranks of
one machine.

A process over a control group limit is killed by the kernel (SIGKILL, without a message), so the limits are checked in
advance. A rank uses cores on the NUMA node near the GPU: remote memory has about half the bandwidth, and memory
bandwidth limits copies and updates.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from offload import system
from offload.errors import format_bytes, plural

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
        if self.is_own:
            return self.free_bytes
        return self.free_bytes // num_sharing

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
"""By file system name."""


def memory_limits(root: Path | None = None) -> list[Limit]:
    """Return all host memory limits, machine memory first. `root`: replaces / in tests."""
    root = root or system.ROOT
    machine = psutil.virtual_memory()
    whole = Limit("the memory of this machine", "/proc/meminfo", machine.total, machine.available)
    return [whole, *_node_limits(root), *_group_limits(root), *_process_limits(root)]


def tightest_limit(limits: Sequence[Limit], num_sharing: int = 1) -> Limit:
    """Return the tightest limit for `num_sharing` ranks."""
    return min(limits, key=lambda limit: limit.share(num_sharing))


def memory() -> dict[str, int]:
    """Return total and available host memory in bytes, and the smallest control group limit if there is one."""
    limits = memory_limits()
    sizes = {"total_bytes": limits[0].most_bytes, "available_bytes": tightest_limit(limits).free_bytes}
    if groups := [limit.most_bytes for limit in limits if limit.is_group]:
        sizes["cgroup_bytes"] = min(groups)
    return sizes


def node_bytes(root: Path | None = None) -> dict[int, int]:
    """Return the memory of each NUMA node in bytes; empty: unknown."""
    return {node: table["MemTotal"] for node, table in _nodes(root or system.ROOT).items()}


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
    # All nodes together are the machine, with a limit above.
    if not own_nodes or len(own_nodes) == len(nodes):
        return
    tables = [nodes[node] for node in own_nodes]
    free = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")  # with caches, given back on demand
    yield Limit(
        f"the memory of the NUMA {plural('node', len(own_nodes))} {', '.join(map(str, own_nodes))}, of {len(nodes)}",
        "Mems_allowed_list in /proc/self/status",
        sum(table["MemTotal"] for table in tables),
        sum(table.get(name, 0) for table in tables for name in free),
    )


def _group_limits(root: Path) -> Iterator[Limit]:
    """Yield the limits of the process control groups and all ancestors. The smallest is effective."""
    for version, folder in system.groups(root, "memory"):
        files = _VERSIONS[version]
        for name in files.limits:
            most = system.read_number(folder / name)
            used = system.read_number(folder / files.usage)
            if most is None or used is None or most >= _UNLIMITED_BYTES:
                continue
            # The page cache counts as used, though the kernel takes it back: a job that has read its data looks full.
            table = _table(folder / "memory.stat", unit=1)
            cached = sum(int(table.get(key, 0)) for key in files.cached)
            where = "/" + str((folder / name).relative_to(root))
            yield Limit(
                "the limit of a control group", where, most, max(0, most - max(0, used - cached)), is_group=True
            )


def _process_limits(root: Path) -> Iterator[Limit]:
    """Yield the ulimits on allocated memory, touched or not."""
    status = _table(root / "proc/self/status")
    for number, flag, counted in ((resource.RLIMIT_AS, "-v", "VmSize"), (resource.RLIMIT_DATA, "-d", "VmData")):
        most = resource.getrlimit(number)[0]  # the soft limit: an allocation meets this one
        used = status.get(counted, "0 kB")
        if most != resource.RLIM_INFINITY:
            free = max(0, most - 1024 * int(used.split()[0]))
            yield Limit("a limit of this process", f"`ulimit {flag}`", most, free, is_own=True)


def _nodes(root: Path) -> dict[int, dict[str, int]]:
    nodes: dict[int, dict[str, int]] = {}
    for path in root.glob("sys/devices/system/node/node[0-9]*/meminfo"):
        # Lines begin with the node: "Node 0 MemTotal: 1024 kB".
        lines = [line.split(None, 2)[2] for line in system.read_text(path).splitlines() if line.count(" ") > 2]
        table = {name: 1024 * int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
        if table.get("MemTotal"):
            nodes[int(path.parent.name.removeprefix("node"))] = table
    return nodes


def _table(path: Path, unit: int | None = None) -> dict[str, str]:
    """Return the "NAME: VALUE" lines of a kernel file as a dict, or "NAME VALUE" lines if `unit` is set."""
    parts = (line.partition(":" if unit is None else " ") for line in system.read_text(path).splitlines())
    return {name.strip(): value.strip() for name, _, value in parts}


_NODES = Path("/sys/devices/system/node")
_PCI = Path("/sys/bus/pci/devices")


@dataclass(frozen=True)
class CoreShare:
    """Cores for the threads in a rank (system numbering), and the rank count on these cores.

    The cores are shared, not divided: a rank can use cores left idle by another rank.
    """

    cores: frozenset[int]
    num_ranks: int

    @property
    def num_threads(self) -> int:
        """Compute thread count for this rank."""
        return max(1, len(self.cores) // self.num_ranks)


def use_share_of_cores(local_rank: int, gpus: Sequence[str | None]) -> None:
    """Limit this process to a share of the cores and of the CPU quota. No effect with one rank and no quota.

    Sets thread counts for kernels, torch and its compiler; with several ranks and NUMA nodes, also the core affinity.
    Torch threads are only reduced, never increased, because OMP_NUM_THREADS and torch.set_num_threads belong to the
    user.

    gpus: GPU PCI address for each local rank, or None.
    """
    import torch

    num_threads = len(usable_cores())
    if len(gpus) > 1:
        num_threads = _take_share(local_rank, gpus)
    num_threads = system.threads_within_quota(num_threads, len(gpus))
    if num_threads < len(usable_cores()):  # torch's compiler starts a process for each of these
        system.bound_compile_threads(num_threads)
    if num_threads < torch.get_num_threads():
        torch.set_num_threads(num_threads)


def _take_share(local_rank: int, gpus: Sequence[str | None]) -> int:
    """Limit kernels to the cores and threads of one rank of several. Return the number of cores for its threads."""
    from offload.native import kernels

    usable = usable_cores()
    nodes = read_nodes()
    near = [read_pci_node(gpu) if gpu else None for gpu in gpus]
    own_share = assign_cores(usable, nodes, near)[local_rank]
    if len(own_share.cores) < len(usable):  # with several NUMA nodes
        _pin(own_share.cores)
    kernels.set_threads(None)  # physical cores among the allowed ones
    # The cores are shared, and the threads divided: more of them would only wait for each other.
    threads = max(1, kernels.num_threads() // own_share.num_ranks)
    kernels.set_threads(system.threads_within_quota(threads, len(gpus)))
    return own_share.num_threads


def assign_cores(
    usable: Iterable[int], nodes: Mapping[int, frozenset[int]], near: Sequence[int | None]
) -> list[CoreShare]:
    """Return the share for every local rank. Pure function.

    usable: cores this process may use, at least one.
    nodes: cores per NUMA node; empty: unknown.
    near: NUMA node near each rank's GPU, or None. Ranks with None are spread over the nodes in turn.
    """
    allowed = frozenset(usable)
    usable_nodes = {node: cores & allowed for node, cores in sorted(nodes.items()) if cores & allowed}
    if len(usable_nodes) < 2:
        return [CoreShare(allowed, len(near))] * len(near)
    names = list(usable_nodes)
    # The node near the GPU, unless a cpuset excludes it.
    chosen = [node if node in usable_nodes else names[rank % len(names)] for rank, node in enumerate(near)]
    return [CoreShare(usable_nodes[node], chosen.count(node)) for node in chosen]


def usable_cores() -> frozenset[int]:
    """Return the cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def read_nodes(folder: Path = _NODES) -> dict[int, frozenset[int]]:
    """Return the cores per NUMA node from sysfs; empty: unknown."""
    nodes: dict[int, frozenset[int]] = {}
    for path in folder.glob("node[0-9]*/cpulist"):
        try:
            nodes[int(path.parent.name.removeprefix("node"))] = parse_cpulist(path.read_text(encoding="ascii"))
        except (OSError, ValueError):
            return {}  # a partial answer would leave cores unused
    return nodes


def parse_cpulist(text: str) -> frozenset[int]:
    """Parse a kernel core list like "0-3,8,10-11". Raises ValueError."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def read_pci_node(address: str, folder: Path = _PCI) -> int | None:
    """Return the NUMA node for a PCI address like "0000:3b:00.0". None: unknown."""
    node = system.read_number(folder / address / "numa_node")  # -1: the system does not know
    if node is not None and node >= 0:
        return node
    return None


def _pin(cores: frozenset[int]) -> None:
    """Set the core affinity for all existing threads. New threads inherit the affinity."""
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cores)
        except OSError:  # thread ended or no permission: slower but correct
            continue
