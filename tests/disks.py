"""Small file systems for full-disk tests, a slow disk, and unnamed files."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from offload.checkpoint import writer as writing
from tests.forks import PATIENCE_S


@contextmanager
def mounted(folder: Path, num_bytes: int, *options: str) -> Iterator[Path]:
    """Mount an ext4 file system with `num_bytes` at folder/disk, made with these options of mkfs. Skip the test if
    mounts are not permitted.
    """
    image, point = folder / "image", folder / "disk"
    with image.open("wb") as stream:
        stream.truncate(num_bytes)
    point.mkdir()
    for command in (["mkfs.ext4", "-q", "-m", "0", *options, image], ["mount", "-o", "loop", image, point]):
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no file system can be mounted here: {error}")
    try:
        yield point
    finally:
        until = time.monotonic() + PATIENCE_S  # the kernel releases io_uring files shortly after the process
        while subprocess.run(["umount", point], check=False, capture_output=True).returncode:
            if time.monotonic() > until:
                subprocess.run(["umount", "--lazy", point], check=True)
                raise AssertionError("somebody still uses the disk")
            time.sleep(0.02)


def nameless(folder: Path, pid: int | str = "self") -> list[Path]:
    """Return paths to the unnamed files below a folder, held open by a process."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed in the meantime
            target = str(link.readlink())
            if target.startswith(f"{folder.resolve()}/") and target.endswith(" (deleted)"):
                found.append(link)
    return found


def held_back(monkeypatch: pytest.MonkeyPatch, gate: threading.Event, error: OSError | None = None) -> None:
    """Block checkpoint chunk writes until the gate opens, and raise `error` then, if given."""
    write = writing._write

    async def late(fd: int, offset: int, data: Any) -> str:
        while not gate.is_set():
            await writing.asyncio.sleep(0.001)
        if error is not None:
            raise error
        return await write(fd, offset, data)

    monkeypatch.setattr(writing, "_write", late)
