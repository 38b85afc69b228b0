"""Byte sources: local files, URLs, and data sets from the `datasets` library, with decompressing streams."""

from __future__ import annotations

import codecs
import gzip
import importlib
import io
import os
import typing
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, BinaryIO, ClassVar

from offload.errors import ConfigError, MissingLibraryError, describe, errno_text

PACKINGS = {".gz": "gunzip", ".zst": "zstd -d"}
"""Compressed file endings that can be read, with the command to decompress."""
Mark = tuple[int, int] | str
"""Content identity: (device, inode) for a local file, or a name for remote data."""
_BUFFER_BYTES = 1 << 18


def library(name: str, purpose: str, extra: str = "data", package: str = "") -> Any:
    """Import a module from an optional dependency. Raises MissingLibraryError.

    `purpose`: subject of the error message. `extra`: the pip extra. `package`: pip name, if different from the module
    name.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = package or name.partition(".")[0]
        raise MissingLibraryError(
            f"{purpose} is read by {package}, which is not installed: pip install '.[{extra}]' in a clone of offload, "
            f"or pip install {package}."
        ) from error


@dataclass(frozen=True)
class LocalFile:
    """A local file."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> PurePath:
        """Path, for name and ending."""
        return self.path

    @property
    def num_bytes(self) -> int:
        return self.path.stat().st_size

    @property
    def files(self) -> tuple[Path, ...]:
        """Local files with the contents."""
        return (self.path,)

    @property
    def marks(self) -> frozenset[Mark]:
        """Device and inode: places with a common mark hold the same bytes, under any spelling or link."""
        status = self.path.stat()
        return frozenset({(status.st_dev, status.st_ino)})

    @property
    def stamp(self) -> str:
        """A text that changes with the contents, without reading them: path, size and times.

        Includes the change time, because a copy can keep the old modification time but not the old change time.
        """
        status = self.path.stat()
        return f"{self.path.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ctime_ns}"

    def open(self) -> BinaryIO:
        return self.path.open("rb")


@dataclass(frozen=True)
class RemoteFile:
    """A file behind a URL, via fsspec."""

    url: str
    num_bytes: int
    system: Any = field(compare=False, repr=False)
    path: ClassVar[Path | None] = None

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> PurePath:
        return PurePosixPath(self.url)

    @property
    def files(self) -> tuple[Path, ...]:
        return ()

    @property
    def marks(self) -> frozenset[Mark]:
        protocol, _, path = self.url.partition("://")
        # Another source may name the file of a file:// URL by path.
        if protocol in ("file", "local"):
            return LocalFile(Path(path)).marks
        return frozenset({self.url})

    @property
    def stamp(self) -> str:
        """URL and server metadata (size, time, ETag), without the redirect target, which may change each time."""
        metadata = {key: value for key, value in self.system.info(self.url).items() if key != "url"}
        return f"{self.url}\0{sorted(metadata.items())}"

    def open(self) -> BinaryIO:
        return self.system.open(self.url, "rb")


@dataclass(frozen=True)
class DataSet:
    """A data set split from `datasets`, in a `save_to_disk` folder or under a hub name."""

    where: str
    num_bytes: int
    files: tuple[Path, ...]
    """Files in the `save_to_disk` folder. Empty for a hub name."""
    stamp: str
    rows: Any = field(compare=False, repr=False)
    """datasets.Dataset."""
    path: ClassVar[Path | None] = None

    def __str__(self) -> str:
        return self.where

    @property
    def name(self) -> PurePath:
        return PurePosixPath(self.where)

    @property
    def marks(self) -> frozenset[Mark]:
        marks = frozenset[Mark]().union(*(LocalFile(path).marks for path in self.files))
        return marks or frozenset({str(self.rows._fingerprint)})

    def open(self) -> BinaryIO:
        raise NotImplementedError(f"{self.where} is no file")


Place = LocalFile | RemoteFile | DataSet


def decompressed_name(path: PurePath) -> PurePath:
    """Return the file name after decompression: a.jsonl for a.jsonl.gz."""
    if path.suffix.lower() in PACKINGS:
        return path.with_suffix("")
    return path


def with_split(where: str, split: str | None) -> str:
    """Return the name of data with the split in brackets, such as `rows[train]`. Without a split: the name."""
    if not split:
        return where
    return f"{where}[{split}]"


@contextmanager
def open_decompressed(place: Place) -> Iterator[io.BufferedReader]:
    """Open a file for reading, decompressed. Read errors inside the context become ConfigError."""
    try:
        with place.open() as stream, _decompressing_reader(place, stream) as reader:
            yield reader
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{place} is a damaged or truncated .gz file: {error}. Compress it again.") from error
    except OSError as error:
        # Errors of the system have a number, those of pyarrow have none.
        is_zst = error.errno is None and place.name.suffix.lower() == ".zst"
        if is_zst and "too much memory" in str(error):
            raise ConfigError(
                f"{place} is a .zst file with a window above 128 MiB (zstd --long=28 or more), which pyarrow does not "
                f"read: unpack it by `zstd -d --long=31 {place}`, and give the unpacked file."
            ) from error
        if is_zst:
            raise ConfigError(f"{place} is a damaged or truncated .zst file: {error}. Compress it again.") from error
        reason = str(error)
        # pyarrow's text is all there is. The text of the system repeats the path, which begins the message.
        if error.errno:
            reason = errno_text(error.errno)
        raise ConfigError(f"{place} cannot be read: {reason}.") from error


def first_bad_byte(place: Place) -> str:
    """Return the position of the first invalid UTF-8 byte.

    Decoder errors count from the last block, not from the file start.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    num_bytes = 0
    num_lines = 1
    with open_decompressed(place) as stream:
        while True:
            # Bytes of a character cut by the block before: the error counts them too.
            block, pending = stream.read(_BUFFER_BYTES), len(decoder.getstate()[0])
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                num_lines += block.count(b"\n", 0, max(error.start - pending, 0))
                return f"byte {num_bytes - pending + error.start}, line {num_lines}"
            num_bytes += len(block)
            num_lines += block.count(b"\n")


def _decompressing_reader(place: Place, stream: BinaryIO) -> io.BufferedReader:
    suffix, decompressing = place.name.suffix.lower(), typing.cast("io.RawIOBase", stream)
    if suffix == ".gz":
        decompressing = typing.cast("io.RawIOBase", gzip.GzipFile(fileobj=stream))
    elif suffix == ".zst":
        arrow = library("pyarrow", f"{place}, a .zst file,")
        # pyarrow is there for parquet anyway, so .zst needs no further library.
        decompressing = arrow.CompressedInputStream(arrow.PythonFile(stream, "r"), "zstd")
    elif isinstance(stream, io.BufferedReader):
        return stream
    return io.BufferedReader(decompressing, _BUFFER_BYTES)


def remote_files(url: str, setting: str) -> tuple[list[RemoteFile], str]:
    """Return the sorted files under a URL (file, folder or glob), and the folder that relative names begin at.

    The list is empty if nothing matches. Raises ConfigError and MissingLibraryError.
    """
    fsspec = library("fsspec", f"{setting}={url!r}, a URL,")
    try:
        system, path = fsspec.core.url_to_fs(url)
        # A `?` may begin the query of an http address: fsspec's glob over http takes this sign literally.
        if any(sign in path for sign in "*?["):
            base = path[: min(path.index(sign) for sign in "*?[" if sign in path)].rpartition("/")[0]
            paths = [each for each in system.glob(path) if system.isfile(each)]
        elif system.isdir(path):
            base, paths = path, system.find(path)
        else:
            base, paths = path.rpartition("/")[0], [path]
        # The size is None from a server without Content-Length.
        files = [
            RemoteFile(system.unstrip_protocol(each), int(system.size(each) or 0), system) for each in sorted(paths)
        ]
        return files, system.unstrip_protocol(base).rstrip("/")
    except ImportError as error:
        raise MissingLibraryError(f"{setting}={url!r}: {error}") from error
    except Exception as error:  # each protocol raises different exception types
        raise ConfigError(
            f"{setting}={url!r} cannot be reached: {describe(error)}. Check the name, the network and "
            "the credentials for its protocol."
        ) from error


_HUB_TIMEOUT_S = 10.0


def from_folder(folder: Path, split: str | None, setting: str) -> DataSet:
    """Return one split from a `save_to_disk` folder. Raises ConfigError and MissingLibraryError."""
    datasets = library("datasets", f"{folder}, a data set that save_to_disk has written,")
    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # a damaged folder raises any exception
        raise ConfigError(
            f"{setting}: {folder} was written by save_to_disk, but cannot be loaded: {describe(error)}. Save it again."
        ) from error
    rows, split_name = _split_of(loaded, split, str(folder), setting)
    inside = folder
    # Only the files of this split: a change of another one does not prepare the data anew.
    if isinstance(loaded, dict):
        inside = folder / split_name
    files = [LocalFile(path) for path in sorted(inside.rglob("*")) if path.is_file()]
    stamp, num_bytes = "\0".join(file.stamp for file in files), sum(file.num_bytes for file in files)
    return DataSet(with_split(str(folder), split_name), num_bytes, tuple(file.path for file in files), stamp, rows)


def from_hub(path: str, name: str | None, revision: str | None, split: str | None, setting: str) -> DataSet:
    """Return one split from a hub data set, downloaded by `datasets` now or earlier.

    Raises ConfigError and MissingLibraryError.
    """
    datasets = library("datasets", f"{setting}={path!r}, which is no file here, as the name of a data set on the hub,")
    label = f"{setting}={path!r}"
    if revision:
        label += f" at revision {revision!r}"
    try:
        if not os.environ.get("HF_HUB_OFFLINE"):
            hub = library("huggingface_hub", label)
            hub.HfApi().dataset_info(path, revision=revision, timeout=_HUB_TIMEOUT_S)  # fail early if not reachable
        loaded = datasets.load_dataset(path, name, revision=revision, split=split)
    except Exception as error:  # from the network, the hub or the library
        raise ConfigError(
            f"{label} does not exist here (looked for {Path(path).absolute()}), and cannot be loaded from the hub: "
            f"{describe(error)[:300]}. Give a file, a folder or a glob; or check the name, the revision, the split and "
            "the network. With HF_HUB_OFFLINE=1 only earlier downloads are used."
        ) from error
    rows, split_name = _split_of(loaded, split, path, setting)
    num_bytes = int(rows.data.nbytes)
    return DataSet(
        with_split(path, split_name),
        num_bytes,
        (),
        f"{path} {name} {revision} {split_name} {rows._fingerprint}",
        rows,
    )


def _split_of(loaded: Any, split: str | None, where: str, setting: str) -> tuple[Any, str]:
    """Return the rows and the name of one split. Raises ConfigError for an ambiguous or absent split."""
    if not isinstance(loaded, dict):
        loaded_split = str(loaded.split or "")
        # A slice, for example train[:10%], has another name in the loaded data.
        if split is not None and loaded_split not in ("", split) and "[" not in split:
            raise ConfigError(
                f"{setting}: {where} holds the split {loaded_split!r}, but the split {split!r} is requested."
            )
        return loaded, split or ""
    splits = list(loaded)
    if split is None and len(splits) == 1:
        split = splits[0]
    if split is None or split not in loaded:
        problem = "has several splits, and none is named"
        if split is not None:
            problem = f"has no split {split!r}"
        raise ConfigError(
            f"{setting}: {where} {problem}; it has {', '.join(splits)}. Name one, as data.sources: "
            f"[{{path: {where}, split: {splits[0]}}}]."
        )
    return loaded[split], split
