"""What the system says about this process: control groups, a quota of CPU time, WSL."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path("/")
"""Tests replace it with a tree of their own."""
_QUOTA_FILES = {"cgroup": ("cpu.cfs_quota_us", "cpu.cfs_period_us"), "cgroup2": ("cpu.max",)}
"""Files with the quota and the period in microseconds, by cgroup version."""


_COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
"""Environment variable of torch: processes of the compiler."""
_MOST_COMPILE_THREADS = 32
"""Processes of torch's compiler on a machine with many cores."""


@dataclass(frozen=True)
class Quota:
    """A limit on CPU time.

    cores: CPU time for each second, such as 7.65.
    where: file reporting the limit.
    """

    cores: float
    where: str


def cpu_quota(root: Path | None = None) -> Quota | None:
    """Return the smallest quota among the control groups of this process and all ancestors; None: no quota."""
    root = root or ROOT
    quotas: list[Quota] = []
    for version, folder in groups(root, "cpu"):
        files = _QUOTA_FILES[version]
        words = [word for name in files for word in read_text(folder / name).split()]
        numbers = [int(word) for word in words if word.isdecimal()]  # without a quota: "max", or -1
        if len(numbers) == 2 and all(numbers):
            quotas.append(Quota(numbers[0] / numbers[1], "/" + str((folder / files[0]).relative_to(root))))
    return min(quotas, key=lambda quota: quota.cores, default=None)


def threads_within_quota(num_threads: int, num_sharing: int = 1) -> int:
    """Return at most `num_threads`: as many as the quota lets one of `num_sharing` processes run all the time.

    More threads use up the quota early in each period, mostly 0.1 s. Then the system stops all threads of the group
    until the next period, also those that launch GPU work.
    """
    quota = cpu_quota()
    if quota is None:
        return num_threads
    return min(num_threads, whole_cores(quota.cores / num_sharing))


def whole_cores(cores: float) -> int:
    """Return how many threads may run all the time on a part of the cores."""
    return max(1, int(cores))


def bound_compile_threads(num_threads: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Let torch's compiler start at most `num_threads` processes, unless the user has set a number.

    By default torch starts one for each core, at most 32, when the compiler is imported, and knows no quota.
    """
    if _COMPILE_THREADS in environ:
        return
    environ[_COMPILE_THREADS] = str(min(num_threads, _MOST_COMPILE_THREADS))
    config: Any = sys.modules.get("torch._inductor.config")
    if config is not None and config.compile_threads is not None:  # imported before, so it has read the variable
        config.compile_threads = min(config.compile_threads, num_threads)


def groups(root: Path, controller: str) -> Iterator[tuple[str, Path]]:
    """Yield (version, folder) for each control group that may have a controller, from the process group upwards.

    controller: "cpu" or "memory". version: the name of the file system, "cgroup" or "cgroup2". A machine can have both
    versions; one has the controller.
    """
    group_paths: dict[str, str] = {}
    for line in read_text(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")  # version 2 names no controllers
        if path and (not controllers or controller in controllers.split(",")):
            version = "cgroup" if controllers else "cgroup2"
            group_paths[version] = path
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        mount, _, system = (part.split() for part in line.partition(" - "))
        version = system[0] if len(system) > 2 and len(mount) > 4 else ""
        if version not in group_paths or (version == "cgroup" and controller not in system[2].split(",")):
            continue
        point = root / mount[4].replace("\\040", " ").lstrip("/")
        # The mount may begin inside the hierarchy, as in a container.
        below = os.path.relpath(group_paths[version], mount[3])
        if below.startswith(".."):  # a namespace or container mount hides the real path
            below = "."
        folder = point / below
        yield version, folder
        while folder != point:  # every parent may have a tighter limit
            folder = folder.parent
            yield version, folder


def is_wsl(root: Path | None = None) -> bool:
    """True in WSL, Linux under Windows, also for a container there."""
    return "microsoft" in read_text((root or ROOT) / "proc/sys/kernel/osrelease").lower()


def read_number(path: Path) -> int | None:
    """Return the number in a file of the system; None: no file, or "max"."""
    try:
        return int(read_text(path))
    except ValueError:
        return None


def read_text(path: Path) -> str:
    """Return the text of a file of the system; empty: no such file."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
