"""Memory limits for a process: both cgroup versions as shown by the kernel, NUMA nodes and ulimits."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil
import pytest

from offload import system
from offload.machine import limits
from offload.machine.limits import Limit, memory_limits, node_bytes, tightest_limit
from tests import forks
from tests.machine.groups import entering, real_group, second_version, write

MIB = 1 << 20


def found(root: Path) -> list[tuple[str, int, int]]:
    """Return (place, limit, free bytes) for each group limit."""
    return [(limit.where, limit.most_bytes, limit.free_bytes) for limit in memory_limits(root) if limit.is_group]


def test_the_machine_s_own_memory_is_psutil_s() -> None:
    whole = memory_limits(Path("/nowhere"))
    assert whole[0].most_bytes == psutil.virtual_memory().total
    assert 0 < whole[0].free_bytes <= whole[0].most_bytes
    assert "/proc/meminfo" in str(whole[0])


def test_every_group_up_to_the_mount_counts_and_page_cache_is_left(tmp_path: Path) -> None:
    groups = {"/": (1000, 300, 0), "/slurm": (500, 400, 250), "/slurm/job": ("max", 100, 0)}
    assert found(second_version(tmp_path, groups)) == [
        ("/sys/fs/cgroup/slurm/memory.max", 500, 350),
        ("/sys/fs/cgroup/memory.max", 1000, 700),
    ]
    (tmp_path / "sys/fs/cgroup/slurm/job/memory.high").write_text("80\n")
    assert found(tmp_path)[0] == ("/sys/fs/cgroup/slurm/job/memory.high", 80, 0), "taken beyond it already"


def first_version(root: Path, own: str, shown: str) -> Path:
    """Return a tree with the memory controller in a v1 hierarchy, beside a v2 hierarchy without it."""
    controller = "sys/fs/cgroup/memory dir"
    return write(
        root,
        {
            "proc/self/cgroup": f"5:devices:/x\n4:cpu,memory:{own}\n1:name=systemd:/a:b\n0::/",
            "proc/self/mountinfo": "\n".join(
                (
                    "34 31 0:31 / /sys/fs/cgroup/devices rw - cgroup cgroup rw,devices",
                    f"35 31 0:32 {shown} /sys/fs/cgroup/memory\\040dir rw - cgroup cgroup rw,cpu,memory",
                    "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
                    "50 31 0:50 / /home rw - ext4 /dev/sda rw",
                )
            ),
            f"{controller}/memory.limit_in_bytes": 9223372036854771712,
            f"{controller}/memory.usage_in_bytes": 10,
            f"{controller}/a/b/memory.limit_in_bytes": 5000,
            f"{controller}/a/b/memory.usage_in_bytes": 4000,
            f"{controller}/a/b/memory.stat": "active_file 1\ntotal_active_file 700\ntotal_inactive_file 300",
        },
    )


@pytest.mark.parametrize(("own", "shown"), [("/a/b", "/"), ("/docker/7/a/b", "/docker/7"), ("/a/b/gone", "/")])
def test_the_first_version_as_a_machine_and_as_a_container_shows_it(tmp_path: Path, own: str, shown: str) -> None:
    tree = first_version(tmp_path, own, shown)
    assert found(tree) == [("/sys/fs/cgroup/memory dir/a/b/memory.limit_in_bytes", 5000, 2000)]


@pytest.mark.parametrize("own", ["/../../elsewhere", "/elsewhere"])
def test_a_namespace_that_does_not_show_where_it_is_has_the_limits_of_its_top(tmp_path: Path, own: str) -> None:
    tree = second_version(tmp_path / "tree", {"/": (1000, 300, 100)})
    for other in (tmp_path / "elsewhere", tree / "sys/elsewhere"):  # wrong path: not relative to the mount
        write(other, {"memory.max": 5, "memory.current": 5})
    (tree / "proc/self/cgroup").write_text(f"0::{own}\n")
    line = (tree / "proc/self/mountinfo").read_text().replace(" / /sys", " /kubepods/x /sys")
    (tree / "proc/self/mountinfo").write_text(line)
    assert found(tree) == [("/sys/fs/cgroup/memory.max", 1000, 800)]


def test_nothing_that_can_be_read_is_no_limit(tmp_path: Path) -> None:
    assert found(tmp_path) == []
    write(
        tmp_path,
        {"proc/self/cgroup": "1:memory:/x\n0::/x\n:\n0", "proc/self/mountinfo": "31 23\n - \n - cgroup2 a b\n"},
    )
    assert found(tmp_path) == []
    tree = second_version(tmp_path, {"/": ("?", 1, 0), "/x": (100, 1, 0)})
    (tree / "sys/fs/cgroup/x/memory.current").unlink()
    assert found(tree) == []


@pytest.mark.parametrize(("allowed", "is_kept"), [("1", True), ("0-1", False), ("", False)])
def test_nodes_that_a_process_is_kept_from_are_not_its_memory(tmp_path: Path, allowed: str, is_kept: bool) -> None:
    for node in range(2):
        cached = {"Active(file)": 1, "Inactive(file)": 2, "SReclaimable": 3}  # reclaimable by the kernel
        table = {"MemTotal": 9, "MemFree": 1, "MemUsed": 8, **cached}
        lines = [f"Node {node} {name}:   {value} kB" for name, value in table.items()]
        write(tmp_path, {f"sys/devices/system/node/node{node}/meminfo": "\n".join(lines)})
    write(tmp_path, {"proc/self/status": f"Name:\tx\nMems_allowed_list:\t{allowed}"})
    nodes = [limit for limit in memory_limits(tmp_path) if "NUMA" in limit.what]
    assert node_bytes(tmp_path) == {0: 9 * 1024, 1: 9 * 1024}
    assert [(limit.most_bytes, limit.free_bytes) for limit in nodes] == ([(9 * 1024, 7 * 1024)] if is_kept else [])
    assert all("node 1, of 2" in limit.what for limit in nodes)


def test_the_least_is_of_a_rank_where_ranks_share_it() -> None:
    shared, own = Limit("a", "x", 100, 60), Limit("b", "y", 100, 40, is_own=True)
    assert tightest_limit([shared, own]) == own
    assert tightest_limit([shared, own], 2) == shared
    assert [limit.share(3) for limit in (shared, own)] == [20, 40]


def test_env_json_has_the_least_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "ROOT", second_version(tmp_path, {"/": (90 * MIB, 0, 0), "/a": (100 * MIB, MIB, 0)}))
    assert limits.memory() == {
        "total_bytes": psutil.virtual_memory().total,
        "available_bytes": 90 * MIB,
        "cgroup_bytes": 90 * MIB,
    }


SAY = """
import mmap, resource, sys
from pathlib import Path
from offload.machine.limits import tightest_limit, memory_limits
print(tightest_limit(memory_limits()))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "flag"), [("RLIMIT_AS", "-v"), ("RLIMIT_DATA", "-d")])
def test_a_ulimit_counts_what_is_asked_for(number: str, flag: str) -> None:
    most = resource.getrlimit(getattr(resource, number))[1]
    if most != resource.RLIM_INFINITY:
        pytest.skip(f"there is a limit of {most} bytes already")
    code = SAY.replace(
        "print",
        f"resource.setrlimit(resource.{number}, (1 << 36,) * 2)\n"
        "held = mmap.mmap(-1, 1 << 30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\nprint",
    )
    code = code.replace("tightest_limit(memory_limits())", "*(l for l in memory_limits() if l.is_own)")
    said = forks.run(["-c", code])
    assert said.returncode == 0, said.stderr
    assert f"`ulimit {flag}`: 64 GiB, of which" in said.stdout
    free = float(said.stdout.partition("of which ")[2].split()[0])
    assert 40 < free < 63, "a GiB of zeros that was never touched is gone from it"


def test_a_real_group_is_found() -> None:
    with real_group("memory", {"memory.limit_in_bytes": 3 << 30, "memory.max": 3 << 30}) as group:
        if group is None:
            pytest.skip("this user may make no control group of memory")
        said = forks.run(["-c", entering(group) + SAY])
        assert said.returncode == 0, said.stderr
        assert str(group) in said.stdout
        assert ": 3 GiB, of which" in said.stdout
