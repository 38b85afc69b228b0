"""Git LFS pointers: small text files in a clone in place of large files not yet downloaded."""

from __future__ import annotations

from pathlib import Path

from offload.errors import ConfigError

FIRST_BYTES = b"version https://git-lfs.github.com/spec/"
"""First bytes in every pointer file."""


def pointer_error(place: object, folder: object) -> ConfigError:
    """Return the error for a pointer at `place` in `folder`."""
    return ConfigError(
        f"{place} is a pointer of git-lfs, and the file behind the pointer was not downloaded: run `git lfs pull` in "
        f"{folder}, or download the file again."
    )


def refuse_pointers(*paths: Path) -> None:
    """Raise ConfigError if a path is a pointer. Unreadable paths pass."""
    for path in paths:
        try:
            with path.open("rb") as file:
                start = file.read(len(FIRST_BYTES))
        except OSError:  # the caller reports an unreadable file better
            continue
        if start == FIRST_BYTES:
            raise pointer_error(path, path.parent)
