"""metrics.jsonl: one line of JSON a step."""

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
    """Appends lines; each is on its way to the file when `write` returns. Where the disk is full they wait in memory,
    with a warning, for one that can be written.

    A number that is not finite is written as null.
    """

    def __init__(self, path: Path, last_step: int = 0) -> None:
        """`last_step`: the step at which the run goes on. The lines of later ones go, as they are made again."""
        if path.exists():
            _cut(path, last_step)
        self._file = path.open("ab", buffering=0)
        self._waiting = b""

    def write(self, fields: Mapping[str, Any]) -> None:
        self._waiting += json.dumps(_finite(fields)).encode() + b"\n"
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            warn(f"{self._file.name} cannot be written: {errno_text(error.errno or 0)}. Its lines wait in memory.")

    def amend(self, fields: Mapping[str, Any]) -> None:
        """Put more fields at the end of the last line, where there is one and the disk has room: in one write, so that
        a process that is killed leaves the line as it was or as it is to be.
        """
        more = b", " + json.dumps(_finite(fields)).encode()[1:] + b"\n"
        if self._waiting:
            self._waiting = self._waiting.removesuffix(b"}\n") + more
            return
        with contextlib.suppress(OSError), Path(self._file.name).open("r+b", buffering=0) as stream:
            end = stream.seek(-len(b"}\n"), os.SEEK_END)
            if stream.write(more) < len(more):
                stream.seek(end)
                stream.write(b"}\n")
                stream.truncate()

    def sync(self) -> None:
        """Bring the lines to the disk, as far as they can be written."""
        with contextlib.suppress(OSError):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _cut(path: Path, last_step: int) -> None:
    """Keep the lines up to a step; the last one of a process that was killed may be half a line."""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= last_step:
                kept.append(f"{line}\n")
        except (ValueError, TypeError, KeyError):
            continue
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text("".join(kept), encoding="utf-8")
    sync_path(fresh)
    fresh.replace(path)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
