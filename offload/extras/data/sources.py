"""Data sources (built-in, files, folders, globs, URLs, data sets), resolved to one sorted list of files.

Names, not absolute paths, decide the order and the train/eval split, so a run sees the same data under any mount point.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path, PurePath, PurePosixPath

import xxhash

from offload.errors import ConfigError, first_names, nearest
from offload.extras.data.file_types import (
    CONTAINERS,
    ROW_SUFFIXES,
    TEXT_SUFFIXES,
    TOKEN_SUFFIXES,
    UNREAD_SUFFIXES,
    check_file,
    check_one_type,
    check_split,
    container_of,
    is_saved_data_set,
    select_split,
    skipped_note,
    suffix_of,
    without_cards,
)
from offload.extras.data.storage import DataSet, LocalFile, Mark, Place, from_folder, from_hub, remote_files, with_split
from offload.user_cache import hash_paths

STDLIB = "builtin:stdlib"
STDLIB_CHAT = "builtin:stdlib-chat"
_BUILTIN = {STDLIB: ("text", "text"), STDLIB_CHAT: ("messages", STDLIB_CHAT)}
"""Accepted `data.format` and the format of the files."""

# Tests and tables carry little information per byte. The last three do not belong to the standard library.
_STDLIB_LEFT_OUT = frozenset(
    {"test", "tests", "idle_test", "encodings", "__pycache__", "site-packages", "dist-packages", "_bundled"}
)
_HASH_WHOLE_BYTES = 1 << 30  # above this size, files are hashed by size and time, not content
LEFT_OUT: Mapping[str, str] = {
    "place": "The contents are hashed in its stead.",
    "setting": "It is for errors alone.",
}
"""Fields of `SourceFile` outside the content hash, each with the reason."""
_MOST_NAMED = 3
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Source:
    """One configured source, in axolotl terms."""

    paths: tuple[str, ...]
    """Each is `builtin:stdlib`, `builtin:stdlib-chat`, a file, a folder, a glob, a URL or a data set name."""
    format: str = "auto"
    """As `data.format`."""
    split: str | None = None
    """Split to read: a data set split, or files by name in a folder with several splits. None: not selected."""
    name: str | None = None
    """Configuration name for a hub data set."""
    revision: str | None = None
    """Commit, branch or tag for a hub data set."""
    weight: float | None = None
    """Share of rows per epoch, relative to the weights of other sources. None: each row once."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """File column for each renamed format key, e.g. {"text": "body"}."""
    setting: str = "data.source"
    """Configuration key for this source, for errors."""

    def __str__(self) -> str:
        return with_split(first_names(self.paths, _MOST_NAMED), self.split)


@dataclass(frozen=True)
class SourceFile:
    """One file, or one data set split, to read."""

    place: Place
    """Byte source."""
    name: str
    """Path relative to the source."""
    format: str
    """As `data.format`, or STDLIB_CHAT for docstring chats."""
    num_bytes: int
    """Stored size in bytes."""
    container: str = "text"
    """Row container: a key in file_types.CONTAINERS, `data set`, `ids` or `text`."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """As `Source.columns`."""
    setting: str = "data.source"
    """As `Source.setting`."""

    @property
    def is_whole(self) -> bool:
        """True if the file is one document or stream, either in train or in eval."""
        return self.container in ("text", "ids")


def find_files(source: Source, notes: list[str]) -> list[SourceFile]:
    """Return the files of a source, sorted within each path.

    A file listed twice (by another path or a link) is read once. Folders are searched recursively without hidden names;
    in globs, `**` crosses folders. `notes` receives messages about skipped and repeated files. Raises ConfigError if a
    path matches nothing, is unreadable or is ambiguous.
    """
    if not source.paths or not all(source.paths):
        raise ConfigError(
            f"{source.setting}={list(source.paths)!r} names nothing to read. Give {STDLIB}, a file, a folder or a glob."
        )
    by_mark, named_again = dict[Mark, SourceFile](), list[str]()
    files: list[SourceFile] = []
    for path in source.paths:
        for file in _find(path, source, notes):
            # The same file by a link or another spelling would be trained on twice.
            known = next((by_mark[mark] for mark in file.place.marks if mark in by_mark), None)
            if known is not None:
                named_again.append(both_names(file, known))
                continue
            by_mark |= dict.fromkeys(file.place.marks, file)
            files.append(file)
    if named_again:
        listed = first_names(named_again, _MOST_NAMED, ", and {} more")
        notes.append(f"{source.setting} {source} names some files twice; each is read once: {listed}.")
    return files


def both_names(file: SourceFile, same: SourceFile) -> str:
    """Return the file name, and the other name in `same` if different."""
    if str(file.place) == str(same.place):
        return str(file.place)
    return f"{file.place} (the file {same.place})"


def _find(path: str, source: Source, notes: list[str]) -> list[SourceFile]:
    if path.startswith("builtin:"):
        return _find_builtin(path, source)
    if "://" in path:
        return _find_remote(path, source, notes)
    local = Path(path).expanduser()
    if local.is_file():
        check_split(path, source.split, source.setting)
        # The name without folders: the order and the split survive a move of the data.
        return [_file(LocalFile(local), local.name, source)]
    if local.is_dir():
        return _find_folder(path, local, source, notes)
    if glob.has_magic(path):
        # Names count from the part without wildcards, so two folders may hold files of one name.
        base = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), local.parts))
        matches = sorted(p for p in map(Path, glob.glob(str(local), recursive=True)) if p.is_file())  # noqa: PTH207 - absolute patterns
        if not matches:
            raise ConfigError(f"{source.setting}={path!r} matches no file (looked from {base.absolute()}).")
        if source.format == "auto":
            check_one_type(path, matches, is_folder=False, setting=source.setting)
        matches = select_split(path, matches, base, source.split, notes, is_glob=True, setting=source.setting)
        return [_file(LocalFile(p), p.relative_to(base).as_posix(), source) for p in matches]
    if _may_be_on_hub(path, source):
        data_set = from_hub(path, source.name, source.revision, source.split, source.setting)
        return [_data_set_file(data_set, path, source)]
    raise _missing_path_error(path, source.setting)


def check_exists(path: str, setting: str) -> None:
    """Raise ConfigError for a path without file or folder. A glob without matches is refused later, on reading."""
    local = Path(path).expanduser()
    is_local = "://" not in path and not path.startswith("builtin:") and not glob.has_magic(path)
    if is_local and not local.is_file() and not local.is_dir() and not _may_be_on_hub(path, Source((path,))):
        raise _missing_path_error(path, setting)


def _missing_path_error(path: str, setting: str) -> ConfigError:
    where = Path(path).expanduser().absolute()
    if where.exists():
        return ConfigError(
            f"{setting}={path!r} is no regular file, and a pipe or device cannot be read again for every pass. Write "
            "the data into a file, or give a folder or a glob."
        )
    return ConfigError(f"{setting}={path!r} does not exist (looked for {where}). Give a file, a folder or a glob.")


def _find_folder(path: str, folder: Path, source: Source, notes: list[str]) -> list[SourceFile]:
    inside, suffixes_read = _walk(folder), _suffixes(source.format)
    if is_saved_data_set(inside, folder):
        return [_data_set_file(from_folder(folder, source.split, source.setting), "", source)]
    if source.format == "auto":
        inside = without_cards(path, inside, notes)
        check_one_type(path, inside, is_folder=True, setting=source.setting)
        suffixes_read |= UNREAD_SUFFIXES  # refused by name, below
    paths = [each for each in inside if suffix_of(each) in suffixes_read]
    if not paths and source.format == "tokens":
        # Tokens may also be rows with `input_ids`.
        suffixes_read = ROW_SUFFIXES
        paths = [each for each in inside if suffix_of(each) in suffixes_read]
    if not paths:
        suffixes = " ".join(sorted(_suffixes(source.format)))
        raise ConfigError(
            f"{source.setting}={path!r} is a folder without a file to read: for data.format={source.format} only files "
            f"ending in {suffixes} are read. Name the files by a glob such as '{folder / '*.log'}' to read other "
            "endings."
        )
    if note := skipped_note(path, inside, suffixes_read):
        notes.append(note)
    paths = select_split(path, paths, folder, source.split, notes, is_glob=False, setting=source.setting)
    return [_file(LocalFile(p), p.relative_to(folder).as_posix(), source) for p in paths]


def _find_remote(url: str, source: Source, notes: list[str]) -> list[SourceFile]:
    files, base = remote_files(url, source.setting)
    suffixes_read = _suffixes(source.format) | UNREAD_SUFFIXES
    is_folder = base == url.rstrip("/")
    if len(files) > 1 or is_folder:
        files = [file for file in files if suffix_of(file.name) in suffixes_read]
        if source.format == "auto":
            check_one_type(url, [file.name for file in files], is_folder=True, setting=source.setting)
    if not files:
        raise ConfigError(f"{source.setting}={url!r} matches no file to read (data.format={source.format}).")
    by_name = {PurePosixPath(file.url.removeprefix(base).lstrip("/")): file for file in files}
    root = PurePosixPath()
    names = select_split(url, list(by_name), root, source.split, notes, is_glob=not is_folder, setting=source.setting)
    return [_file(by_name[name], str(name), source) for name in names]


def _find_builtin(path: str, source: Source) -> list[SourceFile]:
    if path not in _BUILTIN:
        raise ConfigError(
            f"{source.setting}={path!r} is unknown{nearest(path, _BUILTIN)}; built in are {', '.join(_BUILTIN)}."
        )
    accepted, resolved = _BUILTIN[path]
    if source.format not in ("auto", accepted):
        raise ConfigError(f"data.format={source.format} cannot read {path}; use auto or {accepted}.")
    root = Path(sysconfig.get_paths()["stdlib"])
    # _sysconfigdata holds the build options of this machine, not code.
    paths = [p for p in _walk(root, _STDLIB_LEFT_OUT) if p.suffix.lower() == ".py" and "_sysconfigdata" not in p.name]
    paths = [p for p in paths if p.stat().st_size]
    if not paths:
        raise ConfigError(
            f"{source.setting}={path}: this Python installation has no .py sources under {root}. Set data.source to "
            "your own files."
        )
    return [
        SourceFile(LocalFile(p), p.relative_to(root).as_posix(), resolved, p.stat().st_size, setting=source.setting)
        for p in paths
    ]


def _may_be_on_hub(path: str, source: Source) -> bool:
    """Return True if a path that is not a local file may be a hub data set, by form and absent parent folder."""
    if source.revision or source.name:
        return True
    known = suffix_of(PurePath(path)) in TEXT_SUFFIXES | ROW_SUFFIXES | TOKEN_SUFFIXES | UNREAD_SUFFIXES
    # A misspelt file name has a known ending or an existing folder, and should not become a request to the hub.
    return not known and bool(_HUB_NAME.fullmatch(path)) and not Path(path).parent.is_dir()


def _walk(root: Path, excluded: frozenset[str] = frozenset()) -> list[Path]:
    """Return all files in a folder except hidden ones, sorted."""
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        # In place: `os.walk` then skips the removed folders. Sorted, since the order of a disk is any.
        folders[:] = sorted(name for name in folders if name not in excluded and not name.startswith("."))
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(files)


def _suffixes(data_format: str) -> frozenset[str]:
    if data_format == "auto":
        return TEXT_SUFFIXES | ROW_SUFFIXES | TOKEN_SUFFIXES
    return {"text": TEXT_SUFFIXES, "tokens": TOKEN_SUFFIXES}.get(data_format, ROW_SUFFIXES)


def _file(place: Place, name: str, source: Source) -> SourceFile:
    if place.path is not None and not os.access(place.path, os.R_OK):
        raise ConfigError(f"{source.setting}: {place} cannot be read (permission denied).")
    if place.path is not None and not place.path.is_file():
        raise _missing_path_error(str(place.path), source.setting)
    if source.name or source.revision:
        raise ConfigError(f"{source.setting}: {place} is a file, and a file has no name or revision: leave them out.")
    check_file(place, source.format, source.setting)
    container, data_format = container_of(place.name), source.format
    if data_format == "text":
        if container in ("parquet", "arrow"):
            data_format = "jsonl"  # rows with a text
        else:
            container = "text"  # read the table or the records verbatim
    elif data_format not in ("auto", "tokens") and container not in CONTAINERS:
        container = "json"  # a file with another ending
    elif data_format == "tokens" and container == "text":
        container = "ids"
    return SourceFile(place, name, data_format, place.num_bytes, container, source.columns, source.setting)


def _data_set_file(data_set: DataSet, name: str, source: Source) -> SourceFile:
    data_format = source.format
    if data_format == "text":
        data_format = "jsonl"  # rows with a text
    return SourceFile(data_set, name, data_format, data_set.num_bytes, "data set", source.columns, source.setting)


def hash_text(text: str) -> str:
    """Return a 128-bit hash as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(_bytes_of(text))


def split_hash(name: str) -> float:
    """Return a number in [0, 1) that depends only on `name`."""
    return xxhash.xxh3_64_intdigest(_bytes_of(name)) / 2**64


def _bytes_of(text: str) -> bytes:
    # A file name with other bytes than UTF-8 has them as lone surrogates.
    return text.encode(errors="surrogatepass")


def held_out_files(files: Sequence[SourceFile], eval_share: float) -> frozenset[str]:
    """Choose whole files for evaluation: `eval_share` of the bytes, in `split_hash` order.

    Files that would overshoot are skipped. If the result is below half the wanted bytes, no file is held out, and
    `source_rows` holds out rows instead.
    """
    wanted = eval_share * sum(file.num_bytes for file in files)
    # By hash, not by name: neighbouring files are often parts of one text.
    chosen, chosen_bytes = set(), 0
    for file in sorted(files, key=lambda file: (split_hash(file.name), file.name)):
        if chosen_bytes + file.num_bytes <= wanted:
            chosen.add(file.name)
            chosen_bytes += file.num_bytes
    # Far below the wanted bytes, an eval loss would say little.
    if not 2 * chosen_bytes >= wanted > 0:
        return frozenset()
    return frozenset(chosen)


def hash_files(files: Sequence[SourceFile]) -> str:
    """Return a hash over all file fields except `LEFT_OUT`, and over the contents.

    Above 1 GiB, sizes and times replace the contents; for remote data, the server's metadata.
    """
    whole = sum(file.num_bytes for file in files) <= _HASH_WHOLE_BYTES
    field_values = [
        [(each.name, getattr(file, each.name)) for each in fields(file) if each.name not in LEFT_OUT] for file in files
    ]
    return hash_text(repr((field_values, [_identify(file.place, whole) for file in files])))


def _identify(place: Place, whole: bool) -> str:
    """Return a hash of the contents if they are to be read as a whole, else a text that changes with them."""
    # Remote files have no local path: the server's size, time and ETag stand for them.
    if whole and place.files:
        return hash_paths(place.files)
    return place.stamp
