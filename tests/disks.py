"""Small file systems of their own, that can be filled; a disk that takes its time; and files that have no names."""

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
def mounted(folder: Path, num_bytes: int) -> Iterator[Path]:
    """Within, an ext4 file system of so many bytes is mounted at folder/disk; skips the test where that cannot be."""
    image, point = folder / "image", folder / "disk"
    with image.open("wb") as stream:
        stream.truncate(num_bytes)
    point.mkdir()
    for command in (["mkfs.ext4", "-q", "-m", "0", image], ["mount", "-o", "loop", image, point]):
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no file system can be mounted here: {error}")
    try:
        yield point
    finally:
        until = time.monotonic() + PATIENCE_S  # the kernel lets go of an io_uring's files a little after its process
        while subprocess.run(["umount", point], check=False, capture_output=True).returncode:
            if time.monotonic() > until:
                subprocess.run(["umount", "--lazy", point], check=True)
                raise AssertionError("somebody still uses the disk")
            time.sleep(0.02)


def nameless(folder: Path, pid: int | str = "self") -> list[Path]:
    """Return the files below a folder that a process has open and that are in no directory: paths to open them."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # it is closed just now
            target = str(link.readlink())
            if target.startswith(f"{folder.resolve()}/") and target.endswith(" (deleted)"):
                found.append(link)
    return found


def held_back(monkeypatch: pytest.MonkeyPatch, gate: threading.Event, error: OSError | None = None) -> None:
    """Let no chunk of a checkpoint be written before a gate is open."""
    write = writing._write

    async def late(fd: int, offset: int, data: Any) -> str:
        while not gate.is_set():
            await writing.asyncio.sleep(0.001)
        if error is not None:
            raise error
        return await write(fd, offset, data)

    monkeypatch.setattr(writing, "_write", late)
