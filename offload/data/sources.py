"""Where the data lies: built-in sources, files, folders and globs, resolved to one sorted list of files.

Names, not paths, decide the order and the train/eval split, so that a run means the same data wherever the folder is
mounted.
"""

from __future__ import annotations

import glob
import itertools
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

import xxhash

from offload.data.kinds import (
    RECORD_SUFFIXES,
    TEXT_SUFFIXES,
    TOKEN_SUFFIXES,
    UNREAD_SUFFIXES,
    check_choice,
    check_file,
    left_out,
)
from offload.errors import ConfigError, nearest

STDLIB = "builtin:stdlib"
STDLIB_CHAT = "builtin:stdlib-chat"
FORMATS = ("auto", "text", "jsonl", "messages", "sharegpt", "alpaca", "prompt-completion", "tokens")

# Tests and tables say little per byte; the last three are not the standard library's own.
_STDLIB_LEFT_OUT = frozenset(
    {"test", "tests", "idle_test", "encodings", "__pycache__", "site-packages", "dist-packages", "_bundled"}
)
_HASH_WHOLE_BYTES = 1 << 30  # above this much data a file is known by its size and time instead of its content


@dataclass(frozen=True)
class SourceFile:
    """One file to read. `name` is relative to its source; `format` is one of FORMATS, or STDLIB_CHAT for docstring
    chats."""

    path: Path
    name: str
    format: str
    num_bytes: int


def find_files(
    source: str | Sequence[str], data_format: str = "auto", notes: list[str] | None = None
) -> list[SourceFile]:
    """Return the files of one or more sources, sorted within each source; a file that is named twice is read once.

    A source is `builtin:stdlib`, `builtin:stdlib-chat`, a file, a folder (searched recursively, hidden names left out)
    or a glob in which `**` crosses folders. What a folder holds besides is put into `notes`. Raises ConfigError when a
    source matches nothing, cannot be read, or leaves open which of its files are meant.
    """
    if data_format not in FORMATS:
        allowed = ", ".join(FORMATS)
        raise ConfigError(
            f"data.format={data_format!r} is unknown{nearest(data_format, FORMATS)}; the formats are {allowed}."
        )
    sources = [source] if isinstance(source, str) else list(source)
    if not sources or not all(sources):
        raise ConfigError(f"data.source={source!r} names nothing to read. Give {STDLIB}, a file, a folder or a glob.")
    found: dict[Path, SourceFile] = {}
    for one in sources:
        for file in _find(one, data_format, [] if notes is None else notes):
            found.setdefault(file.path, file)
    return list(found.values())


def _find(source: str, data_format: str, notes: list[str]) -> list[SourceFile]:
    if source.startswith("builtin:"):
        return _find_builtin(source, data_format)
    path = Path(source).expanduser()
    if path.is_file():
        return [_file(path, PurePath(path.name), data_format)]
    if path.is_dir():
        inside, meant = _walk(path), _suffixes(data_format)
        if data_format == "auto":
            check_choice(source, inside, is_folder=True)
            meant |= UNREAD_SUFFIXES  # each is refused by name, below
        paths = [each for each in inside if each.suffix.lower() in meant]
        if not paths:
            suffixes = " ".join(sorted(_suffixes(data_format)))
            raise ConfigError(
                f"data.source={source!r} is a folder without a file to read: for data.format={data_format} the endings "
                f"looked for are {suffixes}. Name the files by a glob such as '{path / '*.log'}' to read other endings."
            )
        if note := left_out(source, inside, meant):
            notes.append(note)
        return [_file(p, p.relative_to(path), data_format) for p in paths]
    if glob.has_magic(source):
        base = _fixed_part(path)
        matches = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())  # noqa: PTH207 - absolute patterns
        if not matches:
            raise ConfigError(f"data.source={source!r} matches no file (looked from {base.absolute()}).")
        if data_format == "auto":
            check_choice(source, matches, is_folder=False)
        return [_file(p, p.relative_to(base), data_format) for p in matches]
    raise ConfigError(
        f"data.source={source!r} does not exist (looked for {path.absolute()}). Give a file, a folder or a glob."
    )


def _find_builtin(source: str, data_format: str) -> list[SourceFile]:
    accepted = {STDLIB: ("auto", "text"), STDLIB_CHAT: ("auto", "messages")}
    if source not in accepted:
        raise ConfigError(
            f"data.source={source!r} is unknown{nearest(source, accepted)}; built in are {', '.join(accepted)}."
        )
    if data_format not in accepted[source]:
        raise ConfigError(f"data.format={data_format} cannot read {source}; use {' or '.join(accepted[source])}.")
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [p for p in _walk(root, _STDLIB_LEFT_OUT) if p.suffix.lower() == ".py" and "_sysconfigdata" not in p.name]
    paths = [p for p in paths if p.stat().st_size]
    if not paths:
        raise ConfigError(
            f"data.source={source}: this Python keeps no .py sources under {root}. Give files of your own as "
            "data.source."
        )
    resolved = "text" if source == STDLIB else STDLIB_CHAT
    return [_file(p, p.relative_to(root), resolved) for p in paths]


def _walk(root: Path, left_out: frozenset[str] = frozenset()) -> list[Path]:
    """Return all files of a folder but the hidden ones, sorted."""
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in left_out and not name.startswith("."))
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(found)


def _suffixes(data_format: str) -> frozenset[str]:
    if data_format == "auto":
        return TEXT_SUFFIXES | RECORD_SUFFIXES | TOKEN_SUFFIXES
    return TEXT_SUFFIXES if data_format == "text" else TOKEN_SUFFIXES if data_format == "tokens" else RECORD_SUFFIXES


def _fixed_part(pattern: Path) -> Path:
    """Return the folder before the first part with a wildcard."""
    return Path(*itertools.takewhile(lambda part: not glob.has_magic(part), pattern.parts))


def _file(path: Path, name: PurePath, data_format: str) -> SourceFile:
    if not os.access(path, os.R_OK):
        raise ConfigError(f"data.source: {path} cannot be read (permission denied).")
    check_file(path, data_format)
    return SourceFile(path, name.as_posix(), data_format, path.stat().st_size)


def hash_text(text: str) -> str:
    """Return 32 hex digits that name `text`."""
    return xxhash.xxh3_128_hexdigest(text.encode())


def split_hash(name: str) -> float:
    """Return a number in [0, 1) that depends on nothing but `name`."""
    return xxhash.xxh3_64_intdigest(name.encode()) / 2**64


def held_out_files(files: Sequence[SourceFile], eval_fraction: float) -> frozenset[str]:
    """Choose the files whose whole content is for evaluation: `eval_fraction` of the bytes, taken in the order of
    `split_hash`.

    Files that would overshoot are passed over. When the files are too few or too uneven to come near (less than half of
    what was asked), none is held out by file and `dataset` holds out rows instead.
    """
    wanted = eval_fraction * sum(file.num_bytes for file in files)
    taken, taken_bytes = set(), 0
    for file in sorted(files, key=lambda file: (split_hash(file.name), file.name)):
        if taken_bytes + file.num_bytes <= wanted:
            taken.add(file.name)
            taken_bytes += file.num_bytes
    return frozenset(taken) if 2 * taken_bytes >= wanted > 0 else frozenset()


def hash_files(files: Sequence[SourceFile]) -> str:
    """Return a hash of the files' names, formats and contents; of sizes and times instead of contents above 1 GiB of
    data."""
    whole = sum(file.num_bytes for file in files) <= _HASH_WHOLE_BYTES
    digest = xxhash.xxh3_128()
    for file in files:
        digest.update(f"{file.name}\0{file.format}\0{file.num_bytes}\0".encode())
        if whole:
            digest.update(file.path.read_bytes())
        else:
            digest.update(f"{file.path.absolute()}\0{file.path.stat().st_mtime_ns}\0".encode())
    return digest.hexdigest()
