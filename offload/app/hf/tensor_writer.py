"""Writer for the safetensors container: tensors in any order, each in pieces."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from offload.errors import DiskError, format_bytes
from offload.files.safetensors_file import DTYPES, PIECE_BYTES, ReadRange, TensorEntry, as_bytes
from offload.native.io import because

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_ORDER = {dtype: rank for rank, dtype in enumerate(DTYPES.values())}


@dataclass(frozen=True)
class WrittenFile:
    """A written file: total bytes, tensors, and an XXH3-128 per tensor."""

    path: Path
    num_bytes: int
    entries: dict[str, TensorEntry]
    hashes: dict[str, str]


class TensorFileWriter:
    """Writer for tensors with known dtypes and shapes. Values may come in any order."""

    def __init__(self, path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        """Create the file in full size. Raises DiskError, also for too little disk space."""
        self.path = path
        self._hashes: dict[str, str] = {}
        header, self.entries = _layout(tensors)
        self._num_bytes = max((entry.end for entry in self.entries.values()), default=len(header))
        self._file = path.open("wb+", buffering=0)
        try:
            try:  # all the disk space at once, so a full disk fails before anything is read
                if self._num_bytes and hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(self._file.fileno(), 0, self._num_bytes)
                else:
                    os.ftruncate(self._file.fileno(), self._num_bytes)
            except OSError as error:
                raise self._failed(error) from None
            self._write(memoryview(header), 0)
        except BaseException:
            self._file.close()
            raise

    def write(self, name: str, read: ReadRange) -> None:
        """Write a whole tensor, piece by piece from `read`, converted to the entry dtype. Raises DiskError."""
        entry = self.entries[name]
        # Hashed on the way: the check at the end compares the disk with what was meant, without a second read of the
        # states.
        digest, step = xxhash.xxh3_128(), max(1, PIECE_BYTES // entry.dtype.itemsize)
        numel = math.prod(entry.shape)
        for begin in range(0, numel, step):
            piece = as_bytes(read(begin, min(begin + step, numel)).to("cpu", entry.dtype))
            digest.update(piece)
            self._write(piece, entry.begin + begin * entry.dtype.itemsize)
        self._hashes[name] = digest.hexdigest()

    def finish(self) -> WrittenFile:
        """Sync the file to disk and close. Raises DiskError."""
        missing = self.entries.keys() - self._hashes.keys()
        assert not missing, f"{self.path}: never written: {sorted(missing)}"
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._failed(error) from None
        self._file.close()
        return WrittenFile(self.path, self._num_bytes, self.entries, self._hashes)

    def __enter__(self) -> TensorFileWriter:
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()

    def _write(self, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            try:
                done += os.pwrite(self._file.fileno(), data[done:], offset + done)
            except OSError as error:
                raise self._failed(error) from None

    def _failed(self, error: OSError) -> DiskError:
        code = error.errno or errno.EIO
        size = format_bytes(self._num_bytes)
        return DiskError(f"{self.path} ({size}) cannot be written{because(code, self.path)}", code, self.path)


def _layout(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> tuple[bytes, dict[str, TensorEntry]]:
    """Return the first file bytes and the entries, in the order used by the safetensors writer."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    order = sorted(tensors.items(), key=lambda item: (-_ORDER[item[1][0]], item[0].encode()))
    end = 0
    for name, (dtype, shape) in order:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # Aligned, as the format asks: readers map tensors in place.
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    entries = {
        name: TensorEntry(dtype, tuple(shape), *(start + offset for offset in header[name]["data_offsets"]))
        for name, (dtype, shape) in order
    }
    return len(text).to_bytes(8, "little") + text, entries
