"""A simulated tree of kernel files for control groups, and a real group if permitted."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

from offload import system


def write(root: Path, files: dict[str, object]) -> Path:
    """Write the files in a tree, by relative path."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def second_version(root: Path, groups: dict[str, tuple[object, int, int]]) -> Path:
    """Write a tree with a unified hierarchy (cgroup v2). The process is in the deepest group.

    `groups`: (limit, used bytes, page-cache bytes) by group path.
    """
    files: dict[str, object] = {
        "proc/self/cgroup": f"0::{max(groups, key=len)}",
        "proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate",
    }
    for path, (most, taken, cached) in groups.items():
        folder = f"sys/fs/cgroup{path}".rstrip("/")
        files[f"{folder}/memory.max"] = most
        files[f"{folder}/memory.current"] = taken
        files[f"{folder}/memory.stat"] = f"anon {taken - cached}\nactive_file 0\ninactive_file {cached}"
    return write(root, files)


@contextlib.contextmanager
def real_group(controller: str, values: Mapping[str, object]) -> Iterator[Path | None]:
    """Make a limited control group below the own group of this process. None: not permitted.

    values: the limit by name of its file in each version; the group has the first file that the system has. Processes
    in the group must end before the context does.
    """
    for _, own in system.groups(Path("/"), controller):
        folder = own / f"offload-test-{secrets.token_hex(4)}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            # No file: the controller is elsewhere.
            names = [name for name in values if os.access(folder / name, os.W_OK)]
            if not names:
                continue
            (folder / names[0]).write_text(str(values[names[0]]))
            yield folder
            return
        finally:
            folder.rmdir()
    yield None


def entering(group: Path) -> str:
    """Return the lines with which a process enters a group."""
    return f"import os\nfrom pathlib import Path\nPath({str(group)!r}, 'cgroup.procs').write_text(str(os.getpid()))\n"
