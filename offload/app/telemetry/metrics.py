"""metrics.jsonl: one JSON line per step."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload.errors import errno_text, warn
from offload.native.io import sync_path


class MetricsLog:
    """Appends JSON lines. Each line is passed to the system before `write` returns.

    If the disk is full, lines wait in memory, with a warning, for the next successful write. Non-finite numbers become
    null.
    """

    def __init__(self, path: Path, last_step: int = 0) -> None:
        """Open the log. `last_step`: the resumed step; later lines are removed, since the steps run again."""
        if path.exists():
            _cut(path, last_step)
        # Unbuffered: a killed process has left each line to the system.
        self._file = path.open("ab", buffering=0)
        self._waiting = b""

    def write(self, fields: Mapping[str, Any]) -> None:
        self._waiting += json.dumps(_finite(fields)).encode() + b"\n"
        try:
            while self._waiting:
                # A full disk may take a part of a line.
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            warn(
                f"{self._file.name} cannot be written: {errno_text(error.errno or 0)}. Its lines are kept in memory "
                "until the next try."
            )

    def amend(self, fields: Mapping[str, Any]) -> None:
        """Add fields to the last line, if there is one and the disk has room.

        A single write, so a killed process leaves the old line or the new line.
        """
        more = b", " + json.dumps(_finite(fields)).encode()[1:] + b"\n"
        if self._waiting:  # the last line is not on the disk yet
            self._waiting = self._waiting.removesuffix(b"}\n") + more
            return
        with contextlib.suppress(OSError), Path(self._file.name).open("r+b", buffering=0) as stream:
            end = stream.seek(-len(b"}\n"), os.SEEK_END)
            if stream.write(more) < len(more):  # a full disk: the line ends as before
                stream.seek(end)
                stream.write(b"}\n")
                stream.truncate()

    def sync(self) -> None:
        """Flush the lines to disk as far as possible."""
        with contextlib.suppress(OSError):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _cut(path: Path, last_step: int) -> None:
    """Keep the lines up to a step. A killed process may have left half a line."""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= last_step:
                kept.append(f"{line}\n")
        except (ValueError, TypeError, KeyError):
            continue
    # A killed process leaves the old file or the new one.
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text("".join(kept), encoding="utf-8")
    sync_path(fresh)
    fresh.replace(path)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
