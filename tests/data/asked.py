"""Data sources for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offload.extras.data.sources import Source, SourceFile, find_files


def files_of(source: str | Sequence[str], data_format: str = "auto", **more: Any) -> list[SourceFile]:
    """Return the files in a source."""
    return find_files(source_of(source, data_format), **{"notes": [], **more})


def source_of(source: str | Sequence[str], data_format: str = "auto", **more: Any) -> Source:
    """Return a source with one path or several."""
    return Source((source,) if isinstance(source, str) else tuple(source), data_format, **more)
