"""What a checkpoint says of itself: `manifest.json`, by which every slice is found and every byte is guarded.

    {"checksum": "<xxh3_64 of all that follows these 16 digits>",
    "format": "offload checkpoint", "version": 1,
    "meta": {...},                                             what the caller wants to have back
    "attached": {"config.json": {"num_bytes": n, "checksum": "<xxh3_64>"}, ...},    small files, as given
    "files": {"rank-0.bin": {"num_bytes": n, "chunk_bytes": 4194304, "checksums": ["<xxh3_64 of a chunk>", ...]}},
    "parameters": {NAME: {"shape": [...], "planes": {PLANE: {"dtype": "float32", "block": 1, "slices": [
        [begin, end, file, offset], ...]}}}}}                  elements of the flat parameter; bytes in the file

A plane has an element for each weight, or for each block of so many neighbours ("block", 1 where it is not said), or as
many as a rule keeps of the parameter as a whole ("numel", null where it is none of those).

A slice is known by its parameter's name and its elements, never by a rank, a region or a tile, so any other layout can
read it. Numbers in files are little-endian. xxh3 has 64 bits here: a damaged chunk passes with a chance of 2**-64, and
nothing in this guards against somebody who writes a wrong checkpoint on purpose.
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
"""What has a checksum of its own, and the size of a write: large enough that a disk runs at its full speed and that the
checksums of 1 TiB are 5 MB of manifest, small enough to hold several in memory.
"""
_MOST_CHUNK_BYTES = 64 << 20  # a reader holds several
_FORMAT, _VERSION = "offload checkpoint", 1
_HEAD, _DIGITS = b'{"checksum": "', 16
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\.bin")  # no separator, no "..", nothing hidden: it stays inside
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
    """What there is of one parameter: its shape, the dtype of each of its planes (`weights`, `exp_avg`, ...), and of
    those that have one element for a block of weights, how many these are; of those with another number of elements,
    that number.
    """

    shape: tuple[int, ...]
    planes: Mapping[str, torch.dtype]
    blocks: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)

    def count(self, plane: str) -> int:
        """Return the elements of a plane."""
        if plane in self.counts:
            return self.counts[plane]
        return -(-math.prod(self.shape) // self.blocks.get(plane, 1))

    def having(self, keeps: Callable[[str], bool]) -> Entry:
        """Return what there is with those of the planes that are to be kept."""

        def kept(values: Mapping[str, _V]) -> dict[str, _V]:
            return {plane: value for plane, value in values.items() if keeps(plane)}

        return Entry(self.shape, kept(self.planes), kept(self.blocks), kept(self.counts))


Contents = Mapping[str, Entry]
"""By parameter name."""
MOVED = "moved-"
"""What the planes of a buffer begin with that one rank has moved (`moved-0`): none of the model's weights."""
ERROR = "error-"
"""What the planes of a parameter begin with that have what a replica keeps of its coded gradients (`error-0`)."""

_Count = Annotated[int, Field(strict=True, ge=0)]
_STRICT = ConfigDict(extra="forbid", frozen=True)


class Slice(NamedTuple):
    """Elements `begin` to `end` of a flat parameter's plane, and the byte of a file from which on they lie."""

    begin: _Count
    end: _Count
    file: str
    offset: _Count


class DataFile(BaseModel):
    """A data file: its size, and the checksum of each of its chunks."""

    model_config = _STRICT
    num_bytes: _Count
    chunk_bytes: Annotated[int, Field(strict=True, gt=0, le=_MOST_CHUNK_BYTES)]
    checksums: list[str]

    def chunk_size(self, index: int) -> int:
        """Return the bytes of a chunk: the last one may be shorter."""
        return min(self.chunk_bytes, self.num_bytes - index * self.chunk_bytes)


class Attached(BaseModel):
    """A small file that is kept with the states, such as the model's configuration: its size and its checksum."""

    model_config = _STRICT
    num_bytes: _Count
    checksum: str


class Plane(BaseModel):
    """A plane of a parameter, with an element for each weight or each block of so many, or with `numel` of them; its
    slices are in order and cover it exactly once.
    """

    model_config = _STRICT
    dtype: str
    block: Annotated[int, Field(strict=True, gt=0)] = 1
    numel: _Count | None = None
    slices: list[Slice]


class Parameter(BaseModel):
    """A parameter's shape and planes."""

    model_config = _STRICT
    shape: list[_Count]
    planes: dict[str, Plane]


class Manifest(BaseModel):
    """The whole manifest, but for its checksum."""

    model_config = _STRICT
    format: str = _FORMAT
    version: _Count = _VERSION
    meta: dict[str, Any]
    attached: dict[str, Attached]
    files: dict[str, DataFile]
    parameters: dict[str, Parameter]

    def contents(self) -> dict[str, Entry]:
        """Return what is in the checkpoint."""
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
        """Return the bytes of `manifest.json`. Raises TypeError or ValueError where meta is not for JSON."""
        fields = self.model_dump()
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in fields.items())
        rest = f'",\n{lines}}}\n'.encode()
        return _HEAD + checksum(rest).encode() + rest

    @classmethod
    def decode(cls, data: bytes, path: Path) -> Manifest:
        """Return the manifest that `encode` wrote, checked. Raises CheckpointError, which names `path`."""
        if not data:
            raise CheckpointError(f"{path} is empty.", path)
        rest = data[len(_HEAD) + _DIGITS :]
        if data != _HEAD + checksum(rest).encode() + rest:
            raise CheckpointError(f"{path} is damaged or was edited: it does not agree with its own checksum.", path)
        try:
            fields = json.loads(data)
            del fields["checksum"]
            kind, version = fields["format"], fields["version"]
            if kind != _FORMAT or version != _VERSION:
                newer = isinstance(version, int) and version > _VERSION
                raise CheckpointError(
                    f"{path} is of {kind} version {version}, and this program reads {_FORMAT} version {_VERSION}"
                    + ("; a newer program wrote it: use that one." if newer else "."),
                    path,
                )
            manifest = cls.model_validate(fields)
            manifest._check()
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise CheckpointError(f"{path} is not a manifest: {place}: {first['msg']}.", path) from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path} is not a manifest: {error}.", path) from None
        return manifest

    def _check(self) -> None:
        """Raise ValueError where the manifest contradicts itself or reaches out of its folder."""
        for name in self.attached:
            if not _ATTACHED_NAME.fullmatch(name) or name == MANIFEST or name in self.files:
                raise ValueError(f"{name!r} is not the name of an attached file")
        for name, file in self.files.items():
            if not _FILE_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of a data file")
            if len(file.checksums) != -(-file.num_bytes // file.chunk_bytes):
                raise ValueError(f"{name} has {file.num_bytes} bytes and {len(file.checksums)} checksums")
        used = dict.fromkeys(self.files, 0)
        for name, parameter in self.parameters.items():
            for plane, found in parameter.planes.items():
                what = f"{plane} of {name}"
                if found.dtype not in DTYPE_OF:
                    raise ValueError(f"{what} has the unknown dtype {found.dtype!r}")
                width = DTYPE_OF[found.dtype].itemsize
                per_block = -(-math.prod(parameter.shape) // found.block)
                _check_cover(what, found.slices, per_block if found.numel is None else found.numel)
                for begin, end, file_name, offset in found.slices:
                    num_bytes = (end - begin) * width
                    if file_name not in self.files or offset + num_bytes > self.files[file_name].num_bytes:
                        raise ValueError(f"elements {begin} to {end} of {what} are beyond the end of {file_name}")
                    used[file_name] += num_bytes
        for name, num_bytes in used.items():
            if num_bytes != self.files[name].num_bytes:
                raise ValueError(f"the slices in {name} have {num_bytes} bytes of its {self.files[name].num_bytes}")


class RankManifest(BaseModel):
    """One rank's share of a manifest: its files, and (name, plane, slice) of what it wrote."""

    model_config = _STRICT
    files: dict[str, DataFile]
    slices: list[tuple[str, str, Slice]]


def gather(
    contents: Contents, parts: Iterable[Mapping[str, Any]], meta: Mapping[str, Any], attached: Mapping[str, Attached]
) -> Manifest:
    """Put the ranks' parts together. Raises ValueError unless they hold each plane of `contents` exactly once."""
    files: dict[str, DataFile] = {}
    slices: dict[tuple[str, str], list[Slice]] = {
        (name, plane): [] for name, entry in contents.items() for plane in entry.planes
    }
    for part in map(RankManifest.model_validate, parts):
        if twice := files.keys() & part.files.keys():
            raise ValueError(f"two ranks wrote {', '.join(sorted(twice))}")
        files.update(part.files)
        for name, plane, found in part.slices:
            if (name, plane) not in slices:
                raise ValueError(f"a rank wrote {plane} of {name}, which is not to be in the checkpoint")
            slices[name, plane].append(found)
    parameters = {
        name: Parameter(
            shape=list(entry.shape),
            planes={
                plane: Plane(
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
    manifest._check()
    return manifest


def without_moved(contents: Contents) -> dict[str, Entry]:
    """Return what of a checkpoint belongs to the model's own state."""
    found = {name: entry.having(lambda plane: not plane.startswith((MOVED, ERROR))) for name, entry in contents.items()}
    return {name: entry for name, entry in found.items() if entry.planes}


def checksum(data: Any) -> str:
    """Return the checksum of bytes: 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def name_of(dtype: torch.dtype) -> str:
    """Return the name by which a manifest knows a dtype. Raises ValueError for one that it does not know."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_OF:
        raise ValueError(f"a checkpoint holds no {name}; it may be one of {', '.join(DTYPE_OF)}")
    return name


def check_span(contents: Contents, name: str, plane: str, begin: int, tensor: torch.Tensor) -> None:
    """Raise ValueError unless the tensor can hold elements from `begin` on of a plane of `contents`."""
    entry = contents.get(name)
    dtype = entry.planes.get(plane) if entry else None
    if entry is None or dtype is None:
        raise ValueError(f"there is no {plane} of {name} in the checkpoint")
    if tensor.dtype != dtype or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"{plane} of {name} goes by contiguous {dtype} on the cpu, not {tensor.dtype}")
    if not 0 <= begin <= begin + tensor.numel() <= entry.count(plane):
        raise ValueError(
            f"elements {begin} to {begin + tensor.numel()} of {plane} of {name} were asked for; it has "
            f"{entry.count(plane)}"
        )


def raw(tensor: torch.Tensor) -> np.ndarray:
    """Return the bytes of a contiguous CPU tensor, uint8 [bytes], in place."""
    flat = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    assert isinstance(flat, np.ndarray)
    return flat


def _check_cover(what: str, slices: Sequence[Slice], numel: int) -> None:
    """Raise ValueError unless ordered slices cover `numel` elements exactly once."""
    at = 0
    for found in slices:
        if found.end <= found.begin:
            raise ValueError(f"{what} has an empty slice at {found.begin}")
        if found.begin > at:
            raise ValueError(f"elements {at} to {found.begin} of {what} are nowhere")
        if found.begin < at:
            raise ValueError(f"elements {found.begin} to {min(at, found.end)} of {what} are twice")
        at = found.end
    if at != numel:
        raise ValueError(f"{what} has {numel} elements, and {at} of them are in slices")
