"""Small file systems of their own, that can be filled; and a disk that takes its time."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from offload.checkpoint import writer as writing


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
    yield point
    subprocess.run(["umount", point], check=True)


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
