"""Core assignment to ranks: at least one core each, balanced nodes, no more threads than cores."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.machine.limits import CoreShare, assign_cores, parse_cpulist, read_nodes, read_pci_node


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}), ("5", {5}), ("\n", set()), ("", set()), ("0-0,2-2", {0, 2})],
)
def test_the_kernels_lists_are_read(text: str, cores: set[int]) -> None:
    assert parse_cpulist(text) == cores


def tree(folder: Path, **nodes: str) -> Path:
    """Write the kernel files for NUMA nodes."""
    for name, cores in nodes.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "cpulist").write_text(f"{cores}\n")
    return folder


def test_nodes_are_read_from_the_system(tmp_path: Path) -> None:
    (tmp_path / "power").mkdir()
    assert read_nodes(tmp_path) == {}
    assert read_nodes(tree(tmp_path, node0="0-3", node1="4-7", node10="")) == {
        0: frozenset(range(4)),
        1: frozenset(range(4, 8)),
        10: frozenset(),
    }
    (tmp_path / "node1/cpulist").write_text("?")
    assert read_nodes(tmp_path) == {}
    assert read_nodes(tmp_path / "nothing") == {}


def test_the_node_of_a_gpu_is_read_from_the_system(tmp_path: Path) -> None:
    for address, node in (("0000:3b:00.0", "1"), ("0000:86:00.0", "-1"), ("0001:00:00.0", "x")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "numa_node").write_text(f"{node}\n")
    found = [read_pci_node(address, tmp_path) for address in ("0000:3b:00.0", "0000:86:00.0", "0001:00:00.0", "none")]
    assert found == [1, None, None, None]


NODES = {0: frozenset(range(8)), 1: frozenset(range(8, 16))}


@pytest.mark.parametrize(
    ("usable", "nodes", "near", "expected"),
    [
        (range(16), {}, [None, None], [CoreShare(frozenset(range(16)), 2)] * 2),
        (range(16), NODES, [None, None], [CoreShare(NODES[0], 1), CoreShare(NODES[1], 1)]),
        (range(16), NODES, [1, 1, 0, 0], [CoreShare(NODES[1], 2)] * 2 + [CoreShare(NODES[0], 2)] * 2),
        (range(16), NODES, [1, None], [CoreShare(NODES[1], 2)] * 2),
        (range(4, 10), NODES, [None, None], [CoreShare(frozenset({4, 5, 6, 7}), 1), CoreShare(frozenset({8, 9}), 1)]),
        (range(8), NODES, [1, 1], [CoreShare(NODES[0], 2)] * 2),  # the cores near the GPU are not permitted
        (range(2), {}, [None] * 3, [CoreShare(frozenset({0, 1}), 3)] * 3),
    ],
)
def test_shares(
    usable: range, nodes: dict[int, frozenset[int]], near: list[int | None], expected: list[CoreShare]
) -> None:
    assert assign_cores(usable, nodes, near) == expected


def test_threads_are_a_part_of_the_cores() -> None:
    cores = frozenset(range(16))
    assert [CoreShare(cores, ranks).num_threads for ranks in (1, 2, 3, 7, 16, 17)] == [16, 8, 5, 2, 1, 1]


@st.composite
def machines(draw: st.DrawFn) -> tuple[set[int], dict[int, frozenset[int]], list[int | None]]:
    owners = draw(st.lists(st.integers(0, 3), min_size=1, max_size=40))
    nodes = {node: frozenset(core for core, owner in enumerate(owners) if owner == node) for node in range(4)}
    usable = draw(st.sets(st.integers(0, len(owners) - 1), min_size=1))
    near = draw(st.lists(st.none() | st.integers(-1, 5), min_size=1, max_size=9))
    return usable, nodes, near


@given(machines())
def test_nobody_is_without_a_core_and_shares_are_disjoint_or_equal(
    machine: tuple[set[int], dict[int, frozenset[int]], list[int | None]],
) -> None:
    usable, nodes, near = machine
    found = assign_cores(usable, nodes, near)
    assert len(found) == len(near)
    for one in found:
        assert one.cores
        assert one.cores <= usable
        assert 1 <= one.num_threads <= len(one.cores)
        for other in found:
            assert one.cores == other.cores or not one.cores & other.cores
        sharing = [other for other in found if other.cores == one.cores]
        assert one.num_ranks == len(sharing)
        assert sum(other.num_threads for other in sharing) <= max(len(one.cores), len(sharing))
    if all(node is None for node in near):  # spread evenly
        counts = [sum(share.cores == cores for share in found) for cores in {share.cores for share in found}]
        assert max(counts) - min(counts) <= 1


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system does not pin threads")
def test_a_process_is_kept_to_its_share() -> None:
    program = """
import os, threading, torch
from offload.native import kernels
from offload.machine import limits
core = min(limits.usable_cores())
torch.set_num_threads(2)
waiting = threading.Event()
before = threading.Thread(target=waiting.wait)
before.start()
limits.use_share_of_cores(0, [None])
assert torch.get_num_threads() == 2 and kernels.num_threads() >= 1, "one rank changes nothing"
all_cores = limits.usable_cores()
limits.use_share_of_cores(1, [None] * len(all_cores))
assert torch.get_num_threads() == 1 and kernels.num_threads() == 1
assert limits.usable_cores() == all_cores, "one node: nobody is pinned"
if len(all_cores) > 1:
    limits.read_nodes = lambda: {0: frozenset({core}), 1: all_cores - {core}}
    torch.set_num_threads(1)
    limits.use_share_of_cores(0, [None] * 2)
    assert limits.usable_cores() == {core}
    assert os.sched_getaffinity(before.native_id) == {core}, "threads that were there already"
    assert torch.get_num_threads() == 1, "never more than it was told"
waiting.set()
print("right")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert result.stdout == "right\n", result.stderr
