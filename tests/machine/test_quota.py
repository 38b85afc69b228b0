"""A quota of CPU time, as both cgroup versions show it, bounds the threads of the kernels and of torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config

from offload import system
from offload.app.environment import describe_cores, describe_environment
from offload.machine import limits
from offload.native import kernels
from offload.system import Quota, cpu_quota, threads_within_quota
from tests.machine.groups import entering, real_group, write

COMPILER = "TORCHINDUCTOR_COMPILE_THREADS"
UNIFIED = "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate"


def second_version(root: Path, **quotas: object) -> Path:
    """Write cgroup v2 with the process in /pod/box. quotas: of "top", "pod" and "box"."""
    folders = {"top": "sys/fs/cgroup", "pod": "sys/fs/cgroup/pod", "box": "sys/fs/cgroup/pod/box"}
    files: dict[str, object] = {"proc/self/cgroup": "0::/pod/box", "proc/self/mountinfo": UNIFIED}
    return write(root, files | {f"{folders[name]}/cpu.max": quota for name, quota in quotas.items()})


def first_version(root: Path, quota_us: int, period_us: int = 100_000) -> Path:
    """Write cgroup v1 with "cpu" beside "cpuacct", and a v2 hierarchy without the controller."""
    folder = "sys/fs/cgroup/cpu,cpuacct"
    mounts = (
        "33 31 0:30 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset",
        f"32 31 0:29 /docker/7 /{folder} rw - cgroup cgroup rw,cpu,cpuacct",
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
    )
    return write(
        root,
        {
            "proc/self/cgroup": "4:cpuset:/\n3:cpu,cpuacct:/docker/7\n0::/",
            "proc/self/mountinfo": "\n".join(mounts),
            f"{folder}/cpu.cfs_quota_us": quota_us,
            f"{folder}/cpu.cfs_period_us": period_us,
        },
    )


@pytest.mark.parametrize(
    ("quotas", "wanted"),
    [
        ({"box": "200000 100000"}, Quota(2.0, "/sys/fs/cgroup/pod/box/cpu.max")),
        ({"top": "765000 100000"}, Quota(7.65, "/sys/fs/cgroup/cpu.max")),
        ({"box": "max 100000", "pod": "50000 20000"}, Quota(2.5, "/sys/fs/cgroup/pod/cpu.max")),
        ({"box": "400000 100000", "pod": "300000 100000"}, Quota(3.0, "/sys/fs/cgroup/pod/cpu.max")),
        ({"box": "200000 100000", "pod": "300000 100000"}, Quota(2.0, "/sys/fs/cgroup/pod/box/cpu.max")),
        ({"box": "max 100000", "pod": "max 100000"}, None),
        ({"box": "", "pod": "x y", "top": "1 0"}, None),
        ({}, None),
    ],
)
def test_the_smallest_quota_of_all_ancestors_counts(
    tmp_path: Path, quotas: dict[str, str], wanted: Quota | None
) -> None:
    assert cpu_quota(second_version(tmp_path, **quotas)) == wanted


def test_the_first_version_in_a_container(tmp_path: Path) -> None:
    assert cpu_quota(first_version(tmp_path, 150_000)) == Quota(1.5, "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us")
    assert cpu_quota(first_version(tmp_path, -1)) is None


@pytest.mark.parametrize(("quota", "sharing", "threads"), [(7.65, 1, 7), (7.65, 2, 3), (0.5, 1, 1), (99.0, 1, 48)])
def test_threads_are_what_the_quota_runs_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: float, sharing: int, threads: int
) -> None:
    assert threads_within_quota(48, sharing) == 48
    monkeypatch.setattr(system, "ROOT", second_version(tmp_path, box=f"{quota * 100_000:.0f} 100000"))
    assert threads_within_quota(48, sharing) == threads


@pytest.fixture
def restored() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    kernels.set_threads(None)


@pytest.mark.usefixtures("restored")
@pytest.mark.skipif(not kernels.is_native(), reason="the C++ kernels were not built: there is no pool")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_pool_torch_and_its_compiler_have_the_threads_of_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    monkeypatch.setattr(kernels._core, "physical_cores", lambda: 48)
    monkeypatch.setattr(limits, "usable_cores", lambda: frozenset(range(96)))
    monkeypatch.setattr(limits, "read_nodes", dict)
    monkeypatch.setattr(system, "ROOT", second_version(tmp_path, pod="400000 100000"))
    kernels.set_threads(None)
    assert kernels.num_threads() == kernels.describe()["threads"] == 4
    torch.set_num_threads(6)
    monkeypatch.setenv(COMPILER, "")  # put back afterwards
    monkeypatch.delenv(COMPILER)
    with torch._inductor.config.patch(compile_threads=32):
        limits.use_share_of_cores(0, [None] * num_ranks)
        assert torch.get_num_threads() == kernels.num_threads() == 4 // num_ranks
        assert int(os.environ[COMPILER]) == torch._inductor.config.compile_threads == 4 // num_ranks
    torch.set_num_threads(1)
    limits.use_share_of_cores(0, [None] * num_ranks)
    assert torch.get_num_threads() == 1, "never more than the user has set"
    monkeypatch.setenv(COMPILER, "9")
    limits.use_share_of_cores(0, [None] * num_ranks)
    assert os.environ[COMPILER] == "9", "the user's"
    monkeypatch.delenv(COMPILER)
    monkeypatch.setattr(system, "ROOT", second_version(tmp_path / "free"))
    limits.use_share_of_cores(0, [None])
    assert COMPILER not in os.environ, "without a quota"


def test_the_environment_has_quota_and_visible_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "ROOT", second_version(tmp_path))
    assert "quota" not in describe_environment()["cpu"]
    monkeypatch.setattr(system, "ROOT", second_version(tmp_path, box="765000 100000"))
    cpu = describe_environment()["cpu"] | {"num_cores": 96, "num_usable_cores": 96}
    assert describe_cores(cpu) == "96 cores, a quota of 7.65 (/sys/fs/cgroup/pod/box/cpu.max)"
    assert describe_cores({"num_cores": 96, "num_usable_cores": 48}) == "96 cores, 48 of them visible"


SPEND = """
import json, numpy, time
from offload.native import kernels
def throttled():
    words = Path({group!r}, "cpu.stat").read_text().split()
    return int(dict(zip(words[::2], words[1::2]))["nr_throttled"])
x = numpy.ones(1 << 24, dtype="f4")
counts = []
for threads in (2, None):
    before, end = throttled(), time.process_time() + 0.5
    while time.process_time() < end:
        kernels.sum_squares(x, threads=threads)
    counts.append(throttled() - before)
print(json.dumps([kernels.num_threads(), *counts]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not kernels.is_native(), reason="the C++ kernels were not built: there is no pool")
def test_a_real_quota_bounds_the_pool() -> None:
    """One core on at least two: two threads are stopped in nearly every period, and one thread in none or few."""
    if len(limits.usable_cores()) < 2:
        pytest.skip("this process has one core")
    with real_group("cpu", {"cpu.cfs_quota_us": 100_000, "cpu.max": "100000 100000"}) as group:
        if group is None:
            pytest.skip("this user may make no control group of CPU time")
        for name, most in (("cpu.shares", 262_144), ("cpu.weight", 10_000)):  # other work would leave it no whole core
            if (group / name).exists():
                (group / name).write_text(str(most))
        code = entering(group) + SPEND.format(group=str(group))
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    threads, many, bounded = json.loads(said.stdout)
    assert threads == 1
    assert many > 2 * bounded
