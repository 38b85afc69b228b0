"""Pointers of git-lfs: small text files that stand in a clone for large files nobody has downloaded."""

from __future__ import annotations

from pathlib import Path

from offload.errors import ConfigError

FIRST_BYTES = b"version https://git-lfs.github.com/spec/"
"""The first bytes of every pointer."""


def pointer_error(place: object, folder: object) -> ConfigError:
    """Return the error for a pointer at `place` in `folder`."""
    return ConfigError(
        f"{place} is a pointer of git-lfs, and the file behind the pointer was not downloaded: run `git lfs pull` in "
        f"{folder}, or download the file again."
    )


def refuse_pointers(*paths: Path) -> None:
    """Raise ConfigError for a path that is a pointer. Others, and those that cannot be read, pass."""
    for path in paths:
        try:
            with path.open("rb") as file:
                start = file.read(len(FIRST_BYTES))
        except OSError:
            continue
        if start == FIRST_BYTES:
            raise pointer_error(path, path.parent)
