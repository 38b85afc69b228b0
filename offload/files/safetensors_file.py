"""The safetensors container: 8 bytes with the JSON header length, the header, then the tensor bytes in sequence.

Read by ranges, so no side holds a file in memory (`offload.app.hf.tensor_writer` writes in any order). Format:
https://huggingface.co/docs/safetensors. The header maps a name to {dtype, shape, data_offsets}. Offsets are bytes from
the header end, without holes. Numbers are little-endian, as on this machine.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash

from offload.errors import ConfigError, DiskError, errno_text
from offload.files.pointers import refuse_pointers

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
"""In the order used by the safetensors writer, which writes the last dtype here first."""
_MAX_HEADER_BYTES = 100_000_000  # limit in safetensors
PIECE_BYTES = 1 << 21  # bytes read back, converted or written at once

ReadRange = Callable[[int, int], torch.Tensor]
"""Returns the flat tensor elements `begin` to `end`."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor in a file. `begin` and `end`: byte range, counted from the file start."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


_WITH_NAN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class ByteReader(Protocol):
    """An open file."""

    def read(self, target: memoryview, offset: int) -> None:
        """Fill `target` from a file offset. Raises DiskError; then the contents are undefined."""

    def close(self) -> None:
        """Close the file."""


class _PlainFile:
    """A file with plain reads.

    A memory mapping would kill the process if the file is truncated, and mapped pages would count as used memory.
    """

    def __init__(self, path: Path) -> None:
        """Raises DiskError."""
        self._path = path
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise DiskError(f"{path} cannot be read: {errno_text(error.errno or 0)}.", error.errno or 0, path) from None

    def read(self, target: memoryview, offset: int) -> None:
        done = 0
        while done < len(target):
            try:
                # Linux moves at most 2 GiB in one call.
                count = os.preadv(self._file.fileno(), [target[done : done + (1 << 30)]], offset + done)
            except OSError as error:
                code = error.errno or errno.EIO
                raise DiskError(f"{self._path} cannot be read: {errno_text(code)}.", code, self._path, offset) from None
            if not count:
                message = f"{self._path} ends at byte {offset + done}: it was truncated after it was opened."
                raise DiskError(message, 0, self._path, offset + done)
            done += count

    def close(self) -> None:
        self._file.close()


class TensorFile:
    """A safetensors file, read by ranges."""

    def __init__(self, path: Path, opened: ByteReader | None = None) -> None:
        """Read and check the header. An already `opened` file becomes owned: this object closes it.

        Raises ConfigError for a damaged file, DiskError for a failed read.
        """
        self.path = path
        self._opened: ByteReader = opened or _PlainFile(path)
        self.metadata: dict[str, str] = {}
        try:
            self._num_bytes = path.stat().st_size
            self.entries = self._parse()
        except BaseException:
            self.close()
            raise

    def read(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Return flat elements `begin` to `end` in the file dtype. Raises DiskError, and ConfigError for NaN."""
        entry = self.entries[name]
        if end is None:
            end = math.prod(entry.shape)
        values = torch.empty(end - begin, dtype=entry.dtype)
        self._opened.read(as_bytes(values), entry.begin + begin * entry.dtype.itemsize)
        # max() propagates NaN in one read, without a mask as large as the values.
        if entry.dtype in _WITH_NAN and values.numel() and values.max().isnan():
            first = begin + int(values.isnan().nonzero()[0])
            raise ConfigError(
                f"{self.path} has NaN in {name} (first at element {first} of {list(entry.shape)}): neither training "
                "nor export works with NaN. Copy or download the folder again, or repair that tensor."
            )
        return values

    def hash(self, name: str) -> str:
        """Return the XXH3-128 of the tensor bytes, hexadecimal. Raises DiskError."""
        digest = xxhash.xxh3_128()
        entry = self.entries[name]
        for begin in range(entry.begin, entry.end, PIECE_BYTES):
            piece = memoryview(bytearray(min(PIECE_BYTES, entry.end - begin)))
            self._opened.read(piece, begin)
            digest.update(piece)
        return digest.hexdigest()

    def reopened_as(self, opened: ByteReader) -> TensorFile:
        """Return the same tensors over a reopened file. Raises ConfigError if the file was replaced, DiskError."""
        reopened = TensorFile(self.path, opened)
        if reopened.entries != self.entries:  # the sources refer to places in the first one
            reopened.close()
            raise ConfigError(
                f"{self.path} was replaced by another file while the model was built from it: begin again."
            )
        return reopened

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _parse(self) -> dict[str, TensorEntry]:
        head = memoryview(bytearray(8))
        if self._num_bytes < 8:
            raise self._damaged(f"it has {self._num_bytes} bytes")
        self._opened.read(head, 0)
        length = int.from_bytes(head, "little")
        # Checked before the read: random bytes would ask for any amount of memory.
        if length > min(_MAX_HEADER_BYTES, self._num_bytes - 8):
            raise self._damaged(f"its header would have {length} bytes, the file has {self._num_bytes}")
        text = memoryview(bytearray(length))
        self._opened.read(text, 8)
        try:
            header = json.loads(bytes(text).decode())
            self.metadata = dict(header.pop("__metadata__", {}))
            entries = {name: _entry(value, 8 + length) for name, value in header.items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise self._damaged(f"its header cannot be read ({type(error).__name__}: {error})") from None
        # Tensors lie one behind the other, without holes: anything else is a damaged or a foreign file.
        end = 8 + length
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin != end or entry.end - entry.begin != math.prod(entry.shape) * entry.dtype.itemsize:
                raise self._damaged(f"the position of {name} contradicts its shape or its neighbours")
            end = entry.end
        if end != self._num_bytes:
            raise self._damaged(f"its header describes {end} bytes, but the file has {self._num_bytes}")
        return entries

    def _damaged(self, reason: str) -> ConfigError:
        refuse_pointers(self.path)
        return ConfigError(f"{self.path} is damaged or not a safetensors file: {reason}. Copy or download it again.")


def _entry(value: Mapping[str, Any], start: int) -> TensorEntry:
    if value["dtype"] not in DTYPES:
        raise ValueError(f"dtype {value['dtype']} is not known")
    shape = tuple(value["shape"])
    begin, end = value["data_offsets"]
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, begin, end)):
        raise ValueError("a shape or an offset is not a whole number of at least 0")
    return TensorEntry(DTYPES[value["dtype"]], shape, start + begin, start + end)


def tensor_reader(value: torch.Tensor) -> ReadRange:
    """Return a reader for a tensor in memory."""
    flat = value.detach().reshape(-1)
    return lambda begin, end: flat[begin:end]


def as_bytes(flat: torch.Tensor) -> memoryview:
    """Return the memory behind a flat CPU tensor, any dtype."""
    array: Any = flat.contiguous().view(torch.uint8).numpy()
    if flat.numel():
        return memoryview(array)
    return memoryview(b"")
