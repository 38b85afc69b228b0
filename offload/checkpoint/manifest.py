"""The checkpoint manifest, `manifest.json`: a location for every slice and a checksum for every byte.

    {"checksum": "<xxh3_64 over everything after these 16 digits>",
    "format": "offload checkpoint", "version": 1,
    "meta": {...},                                             data from the caller, returned on load
    "attached": {"config.json": {"num_bytes": n, "checksum": "<xxh3_64>"}, ...},    small files, unchanged
    "files": {"rank-0.bin": {"num_bytes": n, "chunk_bytes": 4194304, "checksums": ["<xxh3_64 per chunk>", ...]}},
    "parameters": {NAME: {"shape": [...], "planes": {PLANE: {"dtype": "float32", "block": 1, "slices": [
        [begin, end, file, offset], ...]}}}}}                  elements in the flat parameter; bytes in the file

A plane has one element per weight or per block ("block": adjacent weights per element, default 1), or a fixed number
of elements per parameter ("numel", null if unused).

A slice is identified by parameter name and element range, never by rank, region or tile, so any other layout can read
the checkpoint. Numbers in data files are little-endian. xxh3 has 64 bits here: a damaged chunk passes with probability
2**-64. There is no protection against a deliberately forged checkpoint.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
import torch
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from offload.errors import CheckpointError

MANIFEST = "manifest.json"
CHUNK_BYTES = 4 << 20
"""Unit for checksums and disk writes, in bytes. Large enough for full disk speed, with 5 MB of manifest per TiB for
checksums; small enough to hold several in memory.
"""
_MOST_CHUNK_BYTES = 64 << 20  # a reader holds several chunks
_FORMAT = "offload checkpoint"
_VERSION = 1
# The checksum comes first, at a fixed place, and covers all bytes behind.
_HEAD = b'{"checksum": "'
_DIGITS = 16
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\.bin")  # no separator, no "..", not hidden: stays inside
_ATTACHED_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
DTYPE_OF = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}

_V = TypeVar("_V")


@dataclass(frozen=True)
class Entry:
    """Stored data for one parameter.

    planes: dtype per plane (`weights`, `exp_avg`, ...). blocks: weights per element, for planes with one element per
    block. counts: element count, for planes with a fixed count.
    """

    shape: tuple[int, ...]
    planes: Mapping[str, torch.dtype]
    blocks: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)

    def count(self, plane: str) -> int:
        """Return the element count for a plane."""
        if plane in self.counts:
            return self.counts[plane]
        return -(-math.prod(self.shape) // self.blocks.get(plane, 1))

    def with_planes(self, keeps: Callable[[str], bool]) -> Entry:
        """Return a copy with only the planes accepted by `keeps`."""

        def select(values: Mapping[str, _V]) -> dict[str, _V]:
            return {plane: value for plane, value in values.items() if keeps(plane)}

        return Entry(self.shape, select(self.planes), select(self.blocks), select(self.counts))


Contents = Mapping[str, Entry]
"""Entries by parameter name."""
MOVED = "moved-"
"""Plane-name prefix for a buffer with different values per rank (`moved-0`); not part of the model weights."""
ERROR = "error-"
"""Plane-name prefix for the gradient quantization error stored per replica (`error-0`)."""

_Count = Annotated[int, Field(strict=True, ge=0)]
_STRICT = ConfigDict(extra="forbid", frozen=True)


class Slice(NamedTuple):
    """Elements `begin` to `end` in a flat plane, and the byte offset in a file."""

    begin: _Count
    end: _Count
    file: str
    offset: _Count


class DataFile(BaseModel):
    """A data file: size, and one checksum per chunk."""

    model_config = _STRICT
    num_bytes: _Count
    chunk_bytes: Annotated[int, Field(strict=True, gt=0, le=_MOST_CHUNK_BYTES)]
    checksums: list[str]

    def chunk_size(self, index: int) -> int:
        """Return the bytes in a chunk; the last may be shorter."""
        return min(self.chunk_bytes, self.num_bytes - index * self.chunk_bytes)


class AttachedFile(BaseModel):
    """A small file stored with the states, for example the model configuration: size and checksum."""

    model_config = _STRICT
    num_bytes: _Count
    checksum: str


class StoredPlane(BaseModel):
    """A parameter plane, with one element per weight or per block, or with `numel` elements. The slices are
    ordered and cover the plane exactly once.
    """

    model_config = _STRICT
    dtype: str
    block: Annotated[int, Field(strict=True, gt=0)] = 1
    numel: _Count | None = None
    slices: list[Slice]


class Parameter(BaseModel):
    """Parameter shape and planes."""

    model_config = _STRICT
    shape: list[_Count]
    planes: dict[str, StoredPlane]


class Manifest(BaseModel):
    """The complete manifest, without the checksum."""

    model_config = _STRICT
    format: str = _FORMAT
    version: _Count = _VERSION
    meta: dict[str, Any]
    attached: dict[str, AttachedFile]
    files: dict[str, DataFile]
    parameters: dict[str, Parameter]

    def contents(self) -> dict[str, Entry]:
        """Return the checkpoint contents as entries."""
        return {
            name: Entry(
                tuple(each.shape),
                {plane: DTYPE_OF[it.dtype] for plane, it in each.planes.items()},
                {plane: it.block for plane, it in each.planes.items() if it.block > 1},
                {plane: it.numel for plane, it in each.planes.items() if it.numel is not None},
            )
            for name, each in self.parameters.items()
        }

    def encode(self) -> bytes:
        """Return the content for `manifest.json`. Raises TypeError or ValueError if meta is not JSON-serializable."""
        fields = self.model_dump()
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in fields.items())
        rest = f'",\n{lines}}}\n'.encode()
        return _HEAD + checksum(rest).encode() + rest

    @classmethod
    def decode(cls, data: bytes, path: Path) -> Manifest:
        """Parse and check the output of `encode`. Raises CheckpointError with `path`."""
        if not data:
            raise CheckpointError(f"{path} is empty.", path)
        rest = data[len(_HEAD) + _DIGITS :]
        if data != _HEAD + checksum(rest).encode() + rest:
            raise CheckpointError(f"{path} is damaged or was edited: its checksum does not match.", path)
        try:
            fields = json.loads(data)
            del fields["checksum"]
            format_name = fields["format"]
            version = fields["version"]
            # Before the fields are checked: a later version may have others.
            if format_name != _FORMAT or version != _VERSION:
                newer = isinstance(version, int) and version > _VERSION
                advice = "; use the newer program that wrote it" if newer else ""
                raise CheckpointError(
                    f"{path} has the format {format_name} version {version}, but this program reads {_FORMAT} version "
                    f"{_VERSION}{advice}.",
                    path,
                )
            manifest = cls.model_validate(fields)
            manifest._check()
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise CheckpointError(f"{path} is not a valid manifest: {place}: {first['msg']}.", path) from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:  # any JSON at all, deeply nested too
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path} is not a valid manifest: {error}.", path) from None
        return manifest

    def _check(self) -> None:
        """Raise ValueError if the manifest contradicts itself or names files outside the folder."""
        for name in self.attached:
            if not _ATTACHED_NAME.fullmatch(name) or name == MANIFEST or name in self.files:
                raise ValueError(f"{name!r} is not a valid name of an attached file")
        for name, file in self.files.items():
            if not _FILE_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not a valid name of a data file")
            if len(file.checksums) != -(-file.num_bytes // file.chunk_bytes):
                raise ValueError(f"{name} has {file.num_bytes} bytes and {len(file.checksums)} checksums")
        # Slices must fill each file exactly: a byte outside would be neither state nor checked.
        covered = dict.fromkeys(self.files, 0)
        for name, parameter in self.parameters.items():
            for plane, stored in parameter.planes.items():
                label = f"{plane} of {name}"
                if stored.dtype not in DTYPE_OF:
                    raise ValueError(f"{label} has the unknown dtype {stored.dtype!r}")
                width = DTYPE_OF[stored.dtype].itemsize
                numel = stored.numel
                if numel is None:
                    numel = -(-math.prod(parameter.shape) // stored.block)
                _check_cover(label, stored.slices, numel)
                for begin, end, file_name, offset in stored.slices:
                    num_bytes = (end - begin) * width
                    if file_name not in self.files or offset + num_bytes > self.files[file_name].num_bytes:
                        raise ValueError(f"elements {begin} to {end} of {label} lie beyond the end of {file_name}")
                    covered[file_name] += num_bytes
        for name, num_bytes in covered.items():
            if num_bytes != self.files[name].num_bytes:
                raise ValueError(f"the slices in {name} cover {num_bytes} of its {self.files[name].num_bytes} bytes")


class RankManifest(BaseModel):
    """Manifest part from one rank: the data files, and (name, plane, slice) for each written slice."""

    model_config = _STRICT
    files: dict[str, DataFile]
    slices: list[tuple[str, str, Slice]]


def gather(
    contents: Contents,
    parts: Iterable[Mapping[str, Any]],
    meta: Mapping[str, Any],
    attached: Mapping[str, AttachedFile],
) -> Manifest:
    """Merge the parts from all ranks. Raises ValueError unless they contain each plane in `contents` exactly once."""
    files: dict[str, DataFile] = {}
    slices: dict[tuple[str, str], list[Slice]] = {
        (name, plane): [] for name, entry in contents.items() for plane in entry.planes
    }
    for part in map(RankManifest.model_validate, parts):
        if twice := files.keys() & part.files.keys():
            raise ValueError(f"two ranks wrote {', '.join(sorted(twice))}")
        files.update(part.files)
        for name, plane, part_slice in part.slices:
            if (name, plane) not in slices:
                raise ValueError(f"a rank wrote {plane} of {name}, which does not belong into the checkpoint")
            slices[name, plane].append(part_slice)
    parameters = {
        name: Parameter(
            shape=list(entry.shape),
            planes={
                plane: StoredPlane(
                    dtype=name_of(dtype),
                    block=entry.blocks.get(plane, 1),
                    numel=entry.counts.get(plane),
                    slices=sorted(slices[name, plane]),
                )
                for plane, dtype in entry.planes.items()
            },
        )
        for name, entry in contents.items()
    }
    manifest = Manifest(meta=dict(meta), attached=dict(attached), files=files, parameters=parameters)
    manifest._check()  # finds elements that no rank has written, or two
    return manifest


def without_moved(contents: Contents) -> dict[str, Entry]:
    """Return the contents without per-rank buffers and quantization errors: only the model state."""
    entries = {
        name: entry.with_planes(lambda plane: not plane.startswith((MOVED, ERROR))) for name, entry in contents.items()
    }
    return {name: entry for name, entry in entries.items() if entry.planes}


def checksum(data: Any) -> str:
    """Return the checksum for bytes: 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def name_of(dtype: torch.dtype) -> str:
    """Return the manifest name for a dtype. Raises ValueError for an unsupported one."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_OF:
        raise ValueError(f"a checkpoint cannot hold {name}; supported are {', '.join(DTYPE_OF)}")
    return name


def check_span(contents: Contents, name: str, plane: str, begin: int, tensor: torch.Tensor) -> None:
    """Raise ValueError unless the tensor fits the plane elements from `begin` on."""
    entry = contents.get(name)
    dtype = entry.planes.get(plane) if entry else None
    if entry is None or dtype is None:
        raise ValueError(f"there is no {plane} of {name} in the checkpoint")
    if tensor.dtype != dtype or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"{plane} of {name} needs a contiguous {dtype} tensor on the cpu, not {tensor.dtype} on {tensor.device}"
        )
    if not 0 <= begin <= begin + tensor.numel() <= entry.count(plane):
        raise ValueError(
            f"elements {begin} to {begin + tensor.numel()} of {plane} of {name} were requested; it has "
            f"{entry.count(plane)}"
        )


def raw(tensor: torch.Tensor) -> np.ndarray:
    """Return the bytes of a contiguous CPU tensor, uint8 [bytes], in place."""
    flat = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    assert isinstance(flat, np.ndarray)
    return flat


def _check_cover(label: str, slices: Sequence[Slice], numel: int) -> None:
    """Raise ValueError unless ordered slices cover `numel` elements exactly once."""
    at = 0
    for each in slices:
        if each.end <= each.begin:
            raise ValueError(f"{label} has an empty slice at {each.begin}")
        if each.begin > at:
            raise ValueError(f"elements {at} to {each.begin} of {label} are missing")
        if each.begin < at:
            raise ValueError(f"elements {each.begin} to {min(at, each.end)} of {label} are stored twice")
        at = each.end
    if at != numel:
        raise ValueError(f"{label} has {numel} elements, but its slices have {at}")
