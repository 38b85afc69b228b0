"""A made-up tree of what the kernel shows of control groups, and the real one where it may be written to."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from offload.machine import limits


def write(root: Path, files: dict[str, object]) -> Path:
    """Make the files of a tree, by their paths in it."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def second_version(root: Path, groups: dict[str, tuple[object, int, int]]) -> Path:
    """Make a tree with a unified hierarchy, whose deepest group is this process's: limit, what is taken, and what of
    that is page cache, by the path of each group.
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
def real_group(num_bytes: int) -> Iterator[Path | None]:
    """Make a control group below this process's own, limited to so many bytes; None where that is not allowed. Whoever
    is put into it has to end before the context does.
    """
    version = limits._VERSIONS
    for kind, own in limits._groups(Path("/")):
        folder = own / f"offload-test-{secrets.token_hex(4)}"
        name = version[kind].limits[0]
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if not os.access(folder / name, os.W_OK):  # no controller of memory here
                continue
            (folder / name).write_text(str(num_bytes))
            yield folder
            return
        finally:
            folder.rmdir()
    yield None
