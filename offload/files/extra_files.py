"""Further files of a caller in a folder with a model: checks before anything is written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from offload.errors import ConfigError, shorten

_MOST_NAME_BYTES = 255  # limit of Linux file systems


def write_extra_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Write files by name. Raises OSError."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)


def check_extra_files(files: Any, kind: str, own: Collection[str] = (), *, may_nest: bool = False) -> None:
    """Raise ConfigError unless `files` is a mapping of plain new file names to bytes. None is a mapping without files.

    kind: of the folder, in words. own: names of files that the folder gets itself. may_nest: names may have a folder
    of their own, as in `1_Pooling/config.json`.
    """
    if files is None:
        return
    if not isinstance(files, Mapping):
        raise ConfigError(f"files is {type(files).__name__}; it must be a mapping of file names to bytes.")
    for name, data in files.items():
        if not isinstance(name, str) or not _is_plain(name, may_nest):
            raise ConfigError(
                f"files has {name!r}, which is no name of a file in the {kind} folder: give a plain name."
            )
        if (size := len(name.encode("utf-8", "surrogateescape"))) > _MOST_NAME_BYTES:
            raise ConfigError(
                f"files has {shorten(name)!r}, a name of {size} bytes, and a file system takes at most "
                f"{_MOST_NAME_BYTES}: give a shorter name."
            )
        if not isinstance(data, bytes | bytearray | memoryview):
            hint = ", such as text.encode()" if isinstance(data, str) else ""
            raise ConfigError(f"files has {type(data).__name__} under {name!r}; give bytes{hint}.")
        if name in own:
            raise ConfigError(f"files has {name!r}, which the {kind} folder gets from the model: give another name.")


def _is_plain(name: str, may_nest: bool) -> bool:
    """Return whether a name stays in its folder: a path could reach into others."""
    parts = name.split("/")
    if "\0" in name or len(parts) > 1 + may_nest:
        return False
    return all(part not in ("", ".", "..") for part in parts)
