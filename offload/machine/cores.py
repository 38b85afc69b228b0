"""Which cores a rank uses where several share a machine: those of one NUMA node, near its GPU, and no more threads than
its share of them.

What is far away costs about half of the memory's bandwidth, which is what copies and updates are made of.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_NODES = Path("/sys/devices/system/node")
_PCI = Path("/sys/bus/pci/devices")


@dataclass(frozen=True)
class Share:
    """The cores (numbers as the system counts them) that a rank's threads run on, and how many ranks share them: what
    one of these leaves idle another may use.
    """

    cores: frozenset[int]
    num_ranks: int

    @property
    def num_threads(self) -> int:
        """How many threads of this rank compute at once."""
        return max(1, len(self.cores) // self.num_ranks)


def use_share_of_cores(local_rank: int, gpus: Sequence[str | None]) -> None:
    """Keep this process to its share of this machine's cores: the kernels' threads, torch's threads, and where there
    are several NUMA nodes also the cores that its threads run on. With one rank nothing changes. `gpus`: the place on
    the PCI bus of the GPU of each rank of this machine, or None.

    torch's threads only become fewer: OMP_NUM_THREADS and torch.set_num_threads are the user's.
    """
    if len(gpus) == 1:
        return
    import torch

    from offload.native import kernels

    usable = usable_cores()
    nodes = read_nodes()
    near = [read_pci_node(gpu) if gpu else None for gpu in gpus]
    own = shares(usable, nodes, near)[local_rank]
    if len(own.cores) < len(usable):
        _pin(own.cores)
    kernels.set_threads(None)  # the physical cores among those that are left
    kernels.set_threads(max(1, kernels.num_threads() // own.num_ranks))
    torch.set_num_threads(min(torch.get_num_threads(), own.num_threads))


def shares(usable: Iterable[int], nodes: Mapping[int, frozenset[int]], near: Sequence[int | None]) -> list[Share]:
    """Return the share of every local rank. Pure.

    usable: the cores that this process may run on, one at least. nodes: the cores of each NUMA node, empty where that
    is not known. near: the node of each rank's GPU, or None; ranks without one go round the nodes.
    """
    allowed = frozenset(usable)
    there = {node: cores & allowed for node, cores in sorted(nodes.items()) if cores & allowed}
    if len(there) < 2:
        return [Share(allowed, len(near))] * len(near)
    names = list(there)
    chosen = [node if node in there else names[rank % len(names)] for rank, node in enumerate(near)]
    return [Share(there[node], chosen.count(node)) for node in chosen]


def usable_cores() -> frozenset[int]:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def read_nodes(folder: Path = _NODES) -> dict[int, frozenset[int]]:
    """Return the cores of each NUMA node, as the kernel lists them; {} where it does not."""
    found: dict[int, frozenset[int]] = {}
    for path in folder.glob("node[0-9]*/cpulist"):
        try:
            found[int(path.parent.name.removeprefix("node"))] = parse_cpulist(path.read_text(encoding="ascii"))
        except (OSError, ValueError):
            return {}  # half of an answer would leave cores out
    return found


def parse_cpulist(text: str) -> frozenset[int]:
    """Read "0-3,8,10-11", the kernel's way to list cores. Raises ValueError."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def read_pci_node(address: str, folder: Path = _PCI) -> int | None:
    """Return the NUMA node of the PCI device at an address such as "0000:3b:00.0"; None where it is not known."""
    try:
        node = int((folder / address / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _pin(cores: frozenset[int]) -> None:
    """Keep this process's threads to these cores: those that exist, and by inheritance those to come."""
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cores)
        except OSError:  # it has ended, or the system does not allow it: slower, and right all the same
            continue
