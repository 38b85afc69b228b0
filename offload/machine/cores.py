"""Assign CPU cores to ranks sharing a machine: the NUMA node near the GPU, with threads divided between local ranks.

Remote memory has about half the bandwidth, and memory bandwidth limits copies and updates.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
    """Limit this process to cores on one NUMA node and to a share of threads. No effect with one rank.

    Sets thread counts for kernels and torch; with several NUMA nodes, also sets the core affinity. Torch threads are
    only reduced, never increased, because OMP_NUM_THREADS and torch.set_num_threads belong to the user.

    gpus: GPU PCI address for each local rank, or None.
    """
    if len(gpus) == 1:
        return
    import torch

    from offload.native import kernels

    usable = usable_cores()
    nodes = read_nodes()
    near = [read_pci_node(gpu) if gpu else None for gpu in gpus]
    own_share = assign_cores(usable, nodes, near)[local_rank]
    if len(own_share.cores) < len(usable):
        _pin(own_share.cores)
    kernels.set_threads(None)  # physical cores among the allowed ones
    kernels.set_threads(max(1, kernels.num_threads() // own_share.num_ranks))
    torch.set_num_threads(min(torch.get_num_threads(), own_share.num_threads))


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
    try:
        node = int((folder / address / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _pin(cores: frozenset[int]) -> None:
    """Set the core affinity for all existing threads. New threads inherit the affinity."""
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cores)
        except OSError:  # thread ended or no permission: slower but correct
            continue
