"""Small file systems of their own, that can be filled."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


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
