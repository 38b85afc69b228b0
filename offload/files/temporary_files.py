"""Files that a library can write to a folder alone, as bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from offload.errors import DiskError, OffloadError, system_code
from offload.native.io import because


def files_written(write: Callable[[Path], object]) -> dict[str, bytes]:
    """Return the files that `write` puts into a folder, by name. The folder is a temporary one. Raises DiskError."""
    place = Path(tempfile.gettempdir())
    try:
        with tempfile.TemporaryDirectory(dir=place) as folder:
            write(Path(folder))
            return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}
    except Exception as error:
        code = system_code(error)
        if code is None or isinstance(error, OffloadError):
            raise
        text = f"temporary files cannot be written to {place}{because(code, place)} Set TMPDIR to another folder."
        raise DiskError(text, code, place) from error
